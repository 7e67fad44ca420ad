"""Figures show what the comparison holds: cell by cell, origin by origin, and never more than fits."""

import json

import numpy as np
import pytest

from detlab.coverage import Coverage
from detlab.divergence.result import Grid
from detlab.engine.kernels import KernelMap
from detlab.errors import UsageError
from detlab.viz import class_map_figure, heatmap, overview
from detlab.viz.arrange import arrange
from detlab.viz.figures import BLUE, GREY, MAX_MARKS
from detlab.viz.view import View
from detlab.viz.words import Cells, cell_rows, distinct, plotly_text, short_module
from tests.viz_cases import PLANTED, PROMPTS, diverged, identical, large_comparison, large_grid, made, other_path

DIAMOND = "origin: inputs matched, output differs"


def traces(figure, kind, name=None):
    return [t for t in figure.data if t.type == kind and (name is None or t.name == name)]


def cells_of(figure, name):
    """Where the heatmap traces of a name have cells, as one mask."""
    found = traces(figure, "heatmap", name)
    return np.any([~np.isnan(np.asarray(t.z, float)) for t in found], axis=0) if found else np.zeros(0, bool)


def test_every_cell_is_drawn_once_in_its_own_colour() -> None:
    comparison = diverged().comparison
    grid = comparison.grid(0)
    figure = heatmap(comparison, 0)
    heatmaps = traces(figure, "heatmap")
    drawn = np.sum([~np.isnan(np.asarray(t.z, float)) for t in heatmaps], axis=0)
    assert np.array_equal(drawn, (grid.state > 0).astype(int))
    assert np.array_equal(cells_of(figure, "bit-identical"), grid.state == 1)
    (blue,) = traces(figure, "heatmap", "bit-identical")
    assert {colour for _, colour in blue.colorscale} == {BLUE}
    assert BLUE not in [colour for _, colour in figure.layout.coloraxis.colorscale]


def test_sizes_are_on_a_logarithmic_scale_and_exact_in_the_hover_text() -> None:
    comparison = diverged().comparison
    grid = comparison.grid(0)
    figure = heatmap(comparison, 0)
    (carriers,) = traces(figure, "heatmap", "carrier: an input already differed")
    mask = (grid.state == 2) & ~np.isnan(grid.max_abs)
    assert mask.any()
    sizes = np.asarray(carriers.customdata)
    assert np.array_equal(sizes[mask], grid.max_abs[mask].astype(np.float32))
    positive = mask & (grid.max_abs > 0)
    assert np.allclose(np.asarray(carriers.z)[positive], np.log10(grid.max_abs[positive]), atol=1e-5)
    assert figure.layout.coloraxis.cmin <= np.nanmin(np.asarray(carriers.z))


def test_the_planted_origin_is_marked_at_every_position() -> None:
    comparison = diverged().comparison
    assert (comparison.first.module, comparison.first.op) == PLANTED
    figure = heatmap(comparison, 0)
    (marks,) = traces(figure, "scatter", DIAMOND)
    at = {(y, x) for x, y in zip(marks.x, marks.y, strict=True)}
    grid = comparison.grid(0)
    planted = [i for i, names in enumerate(zip(grid.modules, grid.ops, strict=True)) if names == PLANTED]
    assert planted
    for position in range(len(PROMPTS[0])):
        assert (f"{PLANTED[0]} · {PLANTED[1]}", position) in at
    assert marks.marker.symbol == "diamond"
    assert marks.showlegend is not False
    assert len(at) == int((grid.state == 3).sum())


def test_a_prompt_whose_differences_were_not_sized_has_a_colour_for_that() -> None:
    comparison = diverged().comparison
    figure = heatmap(comparison, 1)
    grid = comparison.grid(1)
    mask = (grid.state > 1) & np.isnan(grid.max_abs)
    assert mask.any()
    assert np.array_equal(cells_of(figure, "differs, size not measured"), mask)
    grey = traces(figure, "heatmap", "differs, size not measured")[0]
    assert {colour for _, colour in grey.colorscale} == {GREY}
    legend = [t for t in traces(figure, "scatter", "differs, size not measured") if t.showlegend]
    assert len(legend) == 1


def test_identical_runs_are_one_colour_without_marks() -> None:
    figure = heatmap(identical().comparison)
    assert [t.name for t in traces(figure, "heatmap")] == ["bit-identical"]
    assert not traces(figure, "scatter", DIAMOND)


def test_lines_are_in_execution_order_from_the_top_down() -> None:
    comparison = diverged().comparison
    figure = heatmap(comparison, 0)
    labels = list(figure.layout.yaxis.categoryarray)
    assert labels[0] == "model.embed_tokens · embedding"
    assert labels[-1].startswith("lm_head")
    assert len(set(labels)) == len(labels) == len(comparison.grid(0).ops)
    low, high = figure.layout.yaxis.range
    assert low > high


def test_prompts_are_chosen_by_number_or_id_and_unknown_ones_are_refused() -> None:
    comparison = diverged().comparison
    name = comparison.prompt_ids[1]
    assert name in heatmap(comparison, name).layout.title.text
    assert heatmap(comparison).to_json() == heatmap(comparison, comparison.first.prompt).to_json()
    with pytest.raises(UsageError, match=f"there is no prompt 'nobody'; give a number from 0 to 1, or one of: .*{name}"):
        heatmap(comparison, "nobody")
    with pytest.raises(UsageError, match="there is no prompt 2"):
        heatmap(comparison, 2)
    with pytest.raises(UsageError, match="most of at least 1; got most=0"):
        heatmap(comparison, most=0)


def test_a_figure_is_made_of_the_comparison_alone() -> None:
    comparison = diverged().comparison
    before = comparison.grid(0)
    assert heatmap(comparison, 0).to_json() == heatmap(comparison, 0).to_json()
    after = comparison.grid(0)
    assert np.array_equal(before.state, after.state)
    assert np.array_equal(before.max_abs, after.max_abs, equal_nan=True)


@pytest.mark.parametrize("draw", [heatmap, overview])
def test_backgrounds_are_transparent_for_both_themes(draw) -> None:
    layout = draw(diverged().comparison).layout
    assert layout.paper_bgcolor == "rgba(0,0,0,0)"
    assert "0.1" in layout.plot_bgcolor


# Many ops, many tokens.


def test_a_real_models_size_fits_and_says_what_was_drawn_together() -> None:
    grid = large_grid()
    figure = heatmap(made(grid))
    assert len(figure.layout.yaxis.categoryarray) <= 400
    assert len(figure.to_json()) < 5_000_000
    assert "a line is a module; ops with an origin have their own" in figure.layout.title.text
    assert "tokens" in figure.layout.title.text
    assert "each cell shows its worst" in figure.layout.title.text
    (marks,) = traces(figure, "scatter", DIAMOND)
    assert len(set(marks.y)) == 30


def test_a_panel_sends_little_of_a_large_comparison_and_leads_to_every_cell_of_it() -> None:
    grid = large_grid()
    comparison = large_comparison(grid)
    view = View()
    view.show(comparison)
    (widget,) = view.place.children

    def sent() -> int:
        """What goes to the page: the traces as a message, and once more as the widget's state; and the lists."""
        state = widget.get_state(("_widget_data", "_widget_layout"))
        return 2 * len(json.dumps(state)) + len(json.dumps([c.options for c in (view.op, view.position, view.layer)]))

    assert 100_000 < sent() < 5_000_000
    assert len(view.op.options) == len(grid.ops) == 1200
    assert len(view.layer.options) == 31
    for row, position in ((0, 0), (613, 500), (1199, 999)):
        view.op.value, view.position.value = row, position
        assert view.chosen.state == max(1, grid.state[row, position])
        assert view.chosen.module == grid.modules[row]
    view.layer.value = "12"
    assert len(view.op.options) == 40
    assert sent() < 5_000_000
    assert list(widget.layout.yaxis.categoryarray)[0].startswith("12/")


@pytest.mark.parametrize("most", [1500, 400, 260, 70, 31, 1])
def test_drawing_ops_together_loses_no_origin_and_takes_the_worst(most) -> None:
    grid = large_grid(num_tokens=60)
    plan = arrange(grid, most)
    assert len(plan.labels) <= most or most == 1
    assert len(set(plan.labels)) == len(plan.labels)
    assert sorted(row for rows in plan.members for row in rows) == list(range(len(grid.ops)))
    for rows, states, sizes in zip(plan.members, plan.state, plan.max_abs, strict=True):
        assert np.array_equal(states, grid.state[rows].max(0))
        differing = np.where(grid.state[rows] > 1, grid.max_abs[rows], -1.0)
        assert np.array_equal(np.nan_to_num(sizes, nan=-1.0), np.nan_to_num(differing, nan=-1.0).max(0))
    if 240 < most < 1200:
        alone = [rows[0] for rows in plan.members if len(rows) == 1]
        assert set(range(0, len(grid.ops), 40)) <= set(alone)


def test_a_cell_of_several_ops_and_tokens_leads_to_one_of_its_worst() -> None:
    grid = large_grid(num_layers=4, num_tokens=1000)
    plan = arrange(grid, 20)
    assert plan.width > 1
    for line, column in ((0, 0), (3, 5), (len(plan.labels) - 1, len(plan.positions) - 1)):
        row, position = plan.member(grid, line, column)
        assert row in plan.members[line]
        assert 0 <= position - plan.positions[column] < plan.width
        assert grid.state[row, grid.positions.index(position)] == plan.state[line, column]


def test_very_many_origins_are_marked_once_a_line() -> None:
    grid = large_grid(num_layers=2, num_tokens=MAX_MARKS)
    grid.state[0, :] = 3
    grid.state[5, :] = 3
    figure = heatmap(made(grid))
    (marks,) = traces(figure, "scatter", f"{DIAMOND} (first of each line)")
    assert len(marks.y) == len(set(marks.y)) == 3


# Values without a logarithm, and names that are not harmless.


def test_zero_and_infinite_differences_are_drawn_at_the_ends_of_the_scale() -> None:
    state = np.array([[1, 2, 2, 3]], np.uint8)
    size = np.array([[0.0, 0.0, np.inf, 1e-3]])
    figure = heatmap(made(Grid(0, ["m"], ["mm"], [0, 1, 2, 3], state, size)))
    (carriers,) = traces(figure, "heatmap", "carrier: an input already differed")
    axis = figure.layout.coloraxis
    assert np.asarray(carriers.z)[0, 1] == axis.cmin
    assert np.asarray(carriers.z)[0, 2] == axis.cmax
    assert np.asarray(carriers.customdata)[0, 1:3].tolist() == [0.0, np.inf]


def test_sizes_beyond_float32_are_drawn_without_a_warning() -> None:
    figure = heatmap(made(Grid(0, ["m"], ["mm"], [0], np.array([[2]], np.uint8), np.array([[1e300]]))))
    assert np.asarray(traces(figure, "heatmap")[0].customdata)[0, 0] == np.inf


def test_a_prompt_without_rows_says_so() -> None:
    empty = Grid(0, [], [], [], np.zeros((0, 0), np.uint8), np.zeros((0, 0)))
    figure = heatmap(made(empty))
    assert figure.layout.annotations[0].text == "no row of this prompt was computed in both runs"


def test_names_are_shown_as_they_are_and_never_obeyed() -> None:
    grid = large_grid(num_layers=1, ops_per_layer=8, num_tokens=3)
    grid.modules[0] = "<b>bold</b>%{x}"
    comparison = made(grid)
    comparison.prompt_ids = ["<a href='https://example.org'>x</a>"]
    comparison.label_b = "<img src=x>"
    text = json.dumps(heatmap(comparison).to_plotly_json(), default=str)
    assert "<b>" not in text
    assert "<a " not in text
    assert "<img" not in text
    assert "&lt;b&gt;bold&lt;/b&gt;%&#123;x}" in text


def test_long_names_stay_distinct() -> None:
    assert plotly_text("x" * 200).endswith("…")
    grid = large_grid(num_layers=1, ops_per_layer=2, num_tokens=2)
    grid.modules[:] = ["y" * 200 + "a", "y" * 200 + "b"]
    labels = heatmap(made(grid)).layout.yaxis.categoryarray
    assert len(set(labels)) == 2


def test_names_are_short_and_distinct() -> None:
    assert short_module("transformer.h.11.attn.c_attn") == "11/attn.c_attn"
    assert short_module("model.layers.3") == "3/(layer)"
    assert distinct(["add", "mul", "add", "add"]) == ["add", "mul", "add #2", "add #3"]


# Layer by layer.


def test_the_overview_counts_rows_and_follows_the_difference() -> None:
    comparison = diverged().comparison
    figure = overview(comparison)
    (bars,) = traces(figure, "bar")
    total = sum(int((op.state > 1).sum()) for op in comparison.detail.ops)
    assert sum(bad for bad, _ in bars.customdata) == total > 0
    assert list(bars.x)[:1] == ["embed_tokens"]
    assert {"0", "1"} <= set(bars.x)
    (line,) = traces(figure, "scatter")
    assert set(line.x) <= set(bars.x)
    assert all(size > 0 for size in line.y)
    assert figure.layout.yaxis2.type == "log"


def test_the_overview_says_where_there_is_nothing_to_follow() -> None:
    assert "nothing differs" in [a.text for a in overview(identical().comparison).layout.annotations]
    comparison = diverged().comparison
    unsized = type(comparison)(**{**vars(comparison), "sizes": {}})
    assert "sizes were not measured" in [a.text for a in overview(unsized).layout.annotations]


# Class maps.


def mapped(*maps):
    return Coverage("invariant", "M", [], [KernelMap(name, f"{name}: ...", members, others) for name, members, others in maps])


def test_each_row_count_of_a_class_map_is_drawn_as_what_it_is() -> None:
    figure = class_map_figure(mapped(("first", (1, 2, 2048), (40,)), ("second", (2, 64), ()), ("attention", (), ())))
    columns = ["1", "2", "40", "64", "2048"]
    assert list(figure.layout.xaxis.categoryarray) == columns and list(figure.layout.yaxis.categoryarray) == ["first", "second"]
    expected = {
        "member": [[1, 1, 0, 0, 1], [0, 1, 0, 1, 0]],
        "another class": [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]],
        "not probed": [[0, 0, 0, 1, 0], [1, 0, 1, 0, 1]],
    }
    for name, mask in expected.items():
        (drawn,) = traces(figure, "heatmap", name)
        assert np.array_equal(~np.isnan(np.asarray(drawn.z, float)), np.array(mask, bool)) and list(drawn.x) == columns
        assert "%{x} rows" in drawn.hovertemplate
        assert len([t for t in traces(figure, "scatter", name) if t.marker.color == drawn.colorscale[0][1]]) == 1
    colours = [t.marker.color for t in traces(figure, "scatter")]
    assert len(set(colours)) == 3 and figure.layout.paper_bgcolor == "rgba(0,0,0,0)"


def test_a_kind_that_does_not_occur_is_not_in_the_legend() -> None:
    figure = class_map_figure(mapped(("first", (1, 2), ())))
    assert [t.name for t in traces(figure, "heatmap")] == ["member"] and len(traces(figure, "scatter")) == 1


def test_a_tier_without_class_maps_says_so() -> None:
    assert class_map_figure(mapped()).layout.annotations[0].text == "no kernel of this tier has a class map"
    assert not class_map_figure(mapped(("attention", (), ()))).data


def test_kernel_names_are_shown_as_they_are() -> None:
    text = json.dumps(class_map_figure(mapped(("<b>k</b>%{x}", (1,), ()))).to_plotly_json(), default=str)
    assert "<b>k" not in text and "&lt;b&gt;k" in text


# One cell in words.


def test_cells_follow_the_lines_of_the_grid() -> None:
    for comparison in (diverged().comparison, other_path().comparison):
        for prompt in (0, 1):
            grid, cells = comparison.grid(prompt), Cells(comparison, prompt)
            assert [(m, o) for m, o, _ in cells.lines] == list(zip(grid.modules, grid.ops, strict=True))
            for line, column in ((0, 0), (5, 1), (len(grid.ops) - 1, 2)):
                cell = cells.cell(line, grid.positions[column])
                assert cell.state == grid.state[line, column]
                if cell.state > 1 and not np.isnan(grid.max_abs[line, column]):
                    assert cell.max_abs == grid.max_abs[line, column]


def test_an_origin_and_a_carrier_are_told_in_words() -> None:
    comparison = diverged().comparison
    cells = Cells(comparison, 0)
    lines = {(module, op): i for i, (module, op, _) in enumerate(cells.lines)}
    origin = dict(cell_rows(cells.cell(lines[PLANTED], 0)))
    assert origin["kind"] == "differs although its inputs matched (origin)"
    assert origin["inputs"].startswith("all matched")
    assert "ULP" in origin["largest difference here"]
    carrier = dict(cell_rows(cells.cell(lines["model.layers.0.self_attn.q_proj", "mm"], 0)))
    assert carrier["kind"] == "differs; an input already differed (carrier)"
    assert "already differed" in carrier["inputs"]
    assert "input_layernorm" in carrier["inputs"]
    same = dict(cell_rows(cells.cell(0, 0)))
    assert same["kind"] == "bit-identical"
    assert "inputs" not in same
    assert dict(cell_rows(cells.cell(0, 999)))["kind"] == "not computed in both runs"
