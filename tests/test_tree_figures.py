"""Figures of accumulation trees show every term, equal subtrees once, and what no replay confirmed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from detlab.divergence.accumulation_words import leaves_of, lines, parts
from detlab.divergence.trees import AccumulationTree
from detlab.errors import UsageError
from detlab.viz import draw_tree, draw_trees
from detlab.viz.figures import BLUE
from detlab.viz.trees import ORANGE
from tests.planted_sums import random_nodes


def pairs(n: int) -> AccumulationTree:
    """n (a power of two) terms added in pairs of neighbours."""
    level: list = list(range(n))
    while len(level) > 1:
        level = [(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return AccumulationTree.from_nested(level[0])


def strided(num_lanes: int, length: int) -> AccumulationTree:
    """Lanes that are chains, added one after another."""
    n = num_lanes * length
    nodes, lanes = [], []
    for lane in range(num_lanes):
        top = lane
        for step in range(1, length):
            nodes.append((top, lane + num_lanes * step))
            top = n + len(nodes) - 1
        lanes.append(top)
    top = lanes[0]
    for lane in lanes[1:]:
        nodes.append((top, lane))
        top = n + len(nodes) - 1
    return AccumulationTree.from_nodes(n, nodes)


def shapeless(n: int, seed: int = 0, widest: int = 2) -> AccumulationTree:
    return AccumulationTree.from_nodes(n, random_nodes(n, seed, widest))


def is_structure(trace) -> bool:
    return trace.type == "scatter" and trace.mode == "markers+text"


def words(figure) -> list[str]:
    return [text for trace in figure.data if is_structure(trace) for text in trace.text]


def coloured(figure, colour: str) -> np.ndarray:
    found = [t for t in figure.data if t.type == "heatmap" and {c for _, c in t.colorscale} == {colour}]
    return np.any([~np.isnan(np.asarray(t.z, float)) for t in found], axis=0)


@pytest.mark.parametrize("tree", [strided(8, 4), pairs(16), shapeless(16), shapeless(31, 2, 4)])
def test_terms_of_each_line_are_coloured(tree) -> None:
    figure = draw_tree(tree)
    found = lines(tree.n, tree.nodes)
    orange, blue = coloured(figure, ORANGE), coloured(figure, BLUE)
    assert orange.shape == (len(found), tree.n) and orange[0].all()
    for at, line in enumerate(found):
        assert orange[at].nonzero()[0].tolist() == leaves_of(tree.n, tree.nodes, line.members[0])
        others = [leaf for member in line.members[1:] for leaf in leaves_of(tree.n, tree.nodes, member)]
        if others:
            assert blue[at].nonzero()[0].tolist() == sorted(others)


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_of_a_tree_hold_each_of_its_terms_once(seed) -> None:
    tree = shapeless(seed + 1, seed, 2 + seed % 3)
    waiting = [parts(tree.n, tree.nodes)]
    while waiting:
        part = waiting.pop()
        inside = [leaf for run in part.runs for member in run.members for leaf in leaves_of(tree.n, tree.nodes, member)]
        assert part.kind == "term" or sorted(inside) == leaves_of(tree.n, tree.nodes, part.nodes)
        assert part.kind == "term" or sum(run.count * run.part.size for run in part.runs) == part.size
        waiting += [run.part for run in part.runs]


@pytest.mark.parametrize("n", [16, 64, 256, 1024])
def test_a_patterned_tree_takes_few_lines_and_a_shapeless_one_is_cut(n) -> None:
    assert len(words(draw_tree(strided(8, n // 8)))) == 2
    assert len(words(draw_tree(pairs(n)))) == 2
    figure = draw_tree(shapeless(n), most=10)
    assert len(words(figure)) <= 10 and figure.layout.height <= 1300
    if n > 16:
        assert "the first 10 lines" in figure.layout.title.text
    assert len(figure.to_json()) < 1_500_000


def test_kinds_are_told_apart_by_shape_and_by_words() -> None:
    figure = draw_tree(AccumulationTree.from_nested(((0, 1, 2, 3), ((4, 5), (6, 7)), 8)))
    marks = {trace.name: trace.marker.symbol for trace in figure.data if is_structure(trace)}
    assert len(set(marks.values())) == len(marks) >= 3
    shown = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert len(shown) == len(set(shown)) and set(marks) <= set(shown)


def test_a_figure_reads_on_light_and_on_dark() -> None:
    for figure in (draw_tree(strided(4, 4)), draw_trees(strided(4, 4), pairs(16))):
        assert figure.layout.paper_bgcolor == "rgba(0,0,0,0)"
        assert {a.font.color for a in figure.layout.annotations} <= {"#7a7a7a"}
        assert figure.layout.font.color == "#7a7a7a"


def test_two_trees_stand_side_by_side_with_a_verdict() -> None:
    a, b = strided(8, 8), pairs(64)
    figure = draw_trees(a, b, labels=("1 row", "8 rows"))
    assert figure.layout.title.text == "1 row against 8 rows · two trees: the order of additions differs"
    assert {trace.xaxis for trace in figure.data if is_structure(trace)} == {"x", "x2"}
    assert "one tree" in draw_trees(a, strided(8, 8)).layout.title.text
    names = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert len(names) == len(set(names))


def test_an_unconfirmed_tree_says_so() -> None:
    tree = replace(strided(4, 4), op="an op", trials=30, reproduced=29)
    assert draw_tree(tree).layout.title.text.startswith("not confirmed · an op")
    assert "NOT CONFIRMED" in draw_tree(tree).layout.title.text
    said = [a.text for a in draw_trees(tree, replace(tree, reproduced=30)).layout.annotations]
    assert "NOT CONFIRMED, 29 of 30" in said[0] and "replayed 30 of 30" in said[1]


def test_trees_of_no_and_of_one_term_are_drawn() -> None:
    none, one = AccumulationTree.from_nodes(0, []), AccumulationTree.from_nodes(1, [])
    assert "nothing is added" in draw_tree(none).layout.annotations[0].text
    assert [text.strip() for text in words(draw_tree(one))] == ["term 0"]
    assert draw_trees(none, one) is not None


def test_fine_stripes_are_shown_enlarged_and_blocks_whole() -> None:
    assert draw_tree(strided(16, 64)).layout.xaxis2.title.text == "term (the first 128 of 1024; zoom out for all)"
    assert draw_tree(pairs(1024)).layout.xaxis2.title.text == "term"
    long = AccumulationTree.from_nodes(5000, [(0, 1), *((5000 + i, i + 2) for i in range(4998))])
    figure = draw_tree(long)
    assert coloured(figure, ORANGE).shape[1] <= 1024 and "5 together" in json.dumps(figure.to_plotly_json(), default=str)


def test_names_are_harmless() -> None:
    tree = replace(strided(4, 4), op="<img src=x>%{y}")
    assert "<img" not in draw_tree(tree).to_json().replace("\\u003c", "<")
    assert "%{y}" not in draw_tree(tree).layout.title.text
    assert "<b>" not in draw_trees(tree, tree, labels=("<b>", "c")).layout.title.text


def test_bad_arguments_are_refused() -> None:
    for draw in (lambda most: draw_tree(pairs(4), most=most), lambda most: draw_trees(pairs(4), pairs(4), most=most)):
        with pytest.raises(UsageError, match="most of at least 1; got most=0"):
            draw(0)
