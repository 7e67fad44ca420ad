"""Figures of accumulation trees: which terms an op adds first. A tree in, a plotly figure out.

Equal subtrees are drawn once, with their number, so that a sum of a thousand terms takes a few lines. Each line has its
terms beside it: those of the subtree that is drawn in orange, those of its equals in blue. Kinds of sums are told apart by the
shape of their marks and by words, never by colour alone.
"""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from detlab.divergence.accumulation_words import CHAIN, CYCLE, PAIRS, TERM, TOGETHER, Line, leaves_of, lines
from detlab.divergence.trees import AccumulationTree
from detlab.errors import UsageError
from detlab.trace.records import Array
from detlab.viz.figures import BLUE, LETTERS, SCALE, _say, _style
from detlab.viz.words import plotly_text, plural

ORANGE = SCALE[2][1]
MAX_COLUMNS, MAX_STRIPES, FIRST_TERMS = 1024, 100, 128
_MARKS = {
    CHAIN: ("square", "added one after another"),
    PAIRS: ("diamond", "added in pairs"),
    CYCLE: ("triangle-up", "a cycle within a chain"),
    TOGETHER: ("hexagon", "added at once"),
    TERM: ("circle", "single terms"),
}


def draw_tree(tree: AccumulationTree, *, most: int = 40) -> go.Figure:
    """Draws one accumulation tree: its sums from the root down on the left, the terms of each on the right.

    Args:
        tree: what `accumulation_tree` returned.
        most: lines to draw; a tree without any pattern has as many as it has additions, and is cut.

    Returns:
        A figure. Orange are the terms of the first subtree of a line, blue those of its equals beside it. A tree
        that no replay confirmed says so in the title.

    Raises:
        UsageError: ``most`` is below 1.
    """
    found = _lines(tree, most)
    figure = make_subplots(1, 2, column_widths=[0.55, 0.45], horizontal_spacing=0.03)
    title, num_title_lines = _title(tree, 120, f" · the first {most} lines" if len(found) == most else "")
    _style(figure, title, height=_height(len(found)) + 20 * num_title_lines)
    if not found:
        _say(figure, "no terms, nothing is added")
        return figure
    _structure(figure, found, row=1, col=1, room=80)
    _terms(figure, tree, found, row=1, col=2)
    figure.update_yaxes(showticklabels=False, ticks="")
    _finish(figure, num_title_lines)
    return figure


def draw_trees(
    a: AccumulationTree, b: AccumulationTree, *, labels: tuple[str, str] = ("a", "b"), most: int = 24
) -> go.Figure:
    """Draws two accumulation trees side by side: sums above, terms below.

    Args:
        a, b: the trees.
        labels: what they are called.
        most: lines to draw of each.

    Returns:
        A figure whose title says whether the two are one tree (up to an exchange of children).

    Raises:
        UsageError: ``most`` is below 1.
    """
    both = [(a, _lines(a, most)), (b, _lines(b, most))]
    num_lines = max(1, *(len(found) for _, found in both))
    figure = make_subplots(
        2, 2, row_heights=[0.6, 0.4], vertical_spacing=0.12, horizontal_spacing=0.06,
        subplot_titles=[_subtitle(shown, label) for (shown, _), label in zip(both, labels, strict=True)],
    )  # fmt: skip
    names = tuple(plotly_text(label, 40) for label in labels)
    verdict = "one tree: the same terms are added in the same order" if a == b else "two trees: the order of additions differs"
    _style(figure, f"{names[0]} against {names[1]} · {verdict}", height=_height(num_lines) * 5 // 3 + 40)
    for col, (shown, found) in enumerate(both, start=1):
        if not found:
            where = {"xref": f"x{col if col > 1 else ''} domain", "yref": f"y{col if col > 1 else ''} domain"}
            figure.add_annotation(text="no terms, nothing is added", showarrow=False, x=0.5, y=0.5, **where)
            continue
        _structure(figure, found, row=1, col=col, room=44)
        _terms(figure, shown, found, row=2, col=col)
    _finish(figure, 2)
    return figure


def _lines(tree: AccumulationTree, most: int) -> list[Line]:
    if most < 1:
        raise UsageError(f"a drawing of a tree needs most of at least 1; got most={most}.")
    return lines(tree.n, tree.nodes, most)


def _height(num_lines: int) -> int:
    return int(np.clip(190 + 24 * num_lines, 260, 1200))


def _title(tree: AccumulationTree, width: int, tail: str) -> tuple[str, int]:
    name = plotly_text(tree.op or "accumulation tree", width)
    sign = "" if tree.is_confirmed or not tree.trials else "not confirmed · "
    said = textwrap.wrap(tree.describe(), width + 10)
    said = said if len(said) <= 4 else [*said[:3], said[3] + " …"]
    below = "".join(f"<br><sub>{plotly_text(line, 200)}</sub>" for line in said)
    return f"{sign}{name} · {tree.signature}{tail}{below}", 1 + len(said)


def _subtitle(tree: AccumulationTree, label: str) -> str:
    if not tree.trials:
        replayed = ""
    elif tree.is_confirmed:
        replayed = f" · replayed {tree.reproduced} of {tree.trials}"
    else:
        replayed = f" · NOT CONFIRMED, {tree.reproduced} of {tree.trials}"
    return f"{plotly_text(label, 40)}: {plural(tree.n, 'term')}, depth {tree.depth}{replayed}"


def _structure(figure: go.Figure, found: list[Line], *, row: int, col: int, room: int) -> None:
    """Marks, connecting lines and words, one line each; the root on top."""
    x: list[float | None] = []
    y: list[float | None] = []
    for at, line in enumerate(found):
        above = next((i for i in range(at - 1, -1, -1) if found[i].depth == line.depth - 1), None)
        if above is not None:
            x += [line.depth - 1, line.depth - 1, line.depth, None]
            y += [above, at, at, None]
    place: dict[str, Any] = {"row": row, "col": col}
    if x:
        figure.add_scatter(
            x=x, y=y, mode="lines", line={"color": LETTERS, "width": 1.2}, hoverinfo="skip", showlegend=False, **place
        )
    for kind, (symbol, words) in _MARKS.items():
        mine = [at for at, line in enumerate(found) if line.part.kind == kind]
        if not mine:
            continue
        is_new = all(trace.name != words for trace in figure.data)
        figure.add_scatter(
            x=[found[at].depth for at in mine],
            y=mine,
            mode="markers+text",
            marker={"symbol": symbol, "size": 11, "color": ORANGE, "line": {"color": LETTERS, "width": 1}},
            text=[f"  {plotly_text(found[at].text, room)}" for at in mine],
            textposition="middle right",
            textfont={"color": LETTERS, "size": 12},
            cliponaxis=False,
            customdata=[[plotly_text(found[at].text, 160), found[at].count, found[at].part.size] for at in mine],
            hovertemplate=(
                "%{customdata[0]}<br>%{customdata[1]} equal subtrees of %{customdata[2]} terms each" f"<extra>{words}</extra>"
            ),
            name=words,
            legendgroup=words,
            showlegend=is_new,
            **place,
        )
    deepest = max(line.depth for line in found)
    figure.update_xaxes(visible=False, range=[-0.3, deepest + 6], fixedrange=True, **place)
    _rows(figure, len(found), **place)


def _terms(figure: go.Figure, tree: AccumulationTree, found: list[Line], *, row: int, col: int) -> None:
    """For each line, the terms of its first subtree and of the equal ones."""
    width = -(-tree.n // MAX_COLUMNS)
    state = np.zeros((len(found), -(-tree.n // width)), np.int8)
    for at, line in enumerate(found):
        for number, member in enumerate(line.members):
            columns = np.asarray(leaves_of(tree.n, tree.nodes, member)) // width
            state[at, columns] = np.maximum(state[at, columns], 2 if number == 0 else 1)
    place: dict[str, Any] = {"row": row, "col": col}
    where = "term %{x}" if width == 1 else f"terms from %{{x}}, {width} together"
    for value, colour, words in ((2, ORANGE, "terms of the subtree drawn"), (1, BLUE, "terms of its equals")):
        mask: Array = state == value
        is_new = all(trace.name != words for trace in figure.data if trace.type == "scatter")
        if not mask.any():
            continue
        figure.add_heatmap(
            x=np.arange(state.shape[1]) * width,
            y=np.arange(len(found)),
            z=np.where(mask, 1, np.nan).astype(np.float32),
            colorscale=[[0, colour], [1, colour]],
            showscale=False,
            hoverongaps=False,
            ygap=6,
            name=words,
            showlegend=False,
            hovertemplate=f"{where}<br>{words}<extra></extra>",
            **place,
        )
        if is_new:  # a heatmap's own legend entry would be a gradient
            mark = {"symbol": "square", "size": 11, "color": colour}
            figure.add_scatter(x=[None], y=[None], mode="markers", marker=mark, name=words, **place)
    # Stripes finer than a pixel would look like one block: only the first of them are shown at first.
    is_fine = int((np.diff(state, axis=1) != 0).sum(1).max(initial=0)) > MAX_STRIPES
    shown = min(tree.n, FIRST_TERMS) if is_fine else tree.n
    figure.update_xaxes(
        title_text="term" if shown == tree.n else f"term (the first {shown} of {tree.n}; zoom out for all)",
        range=[-width / 2, shown - 1 + width / 2], showgrid=False, zeroline=False, ticks="outside",
        **({"dtick": 1} if tree.n <= 20 else {}), **place,
    )  # fmt: skip
    _rows(figure, len(found), **place)


def _rows(figure: go.Figure, num_lines: int, **place: Any) -> None:
    figure.update_yaxes(
        range=[num_lines - 0.5, -0.5], showgrid=False, zeroline=False, fixedrange=True,
        tickvals=list(range(num_lines)), ticktext=[str(at + 1) for at in range(num_lines)], **place,
    )  # fmt: skip


def _finish(figure: go.Figure, num_title_lines: int) -> None:
    figure.update_layout(
        hovermode="closest",
        legend={
            "orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0, "x": 0, "itemsizing": "constant",
        },  # fmt: skip
        title_yref="container",
        title_y=1 - 14 / figure.layout.height,
        title_yanchor="top",
        margin={"t": 36 + 20 * num_title_lines, "b": 84, "l": 40},
    )
    figure.update_annotations(font={"size": 12, "color": LETTERS})
