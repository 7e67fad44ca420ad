"""Figures: a comparison in, a plotly figure out; nothing else is read or changed.

Colours are told apart by people with any colour vision: bit-identical is blue, differences run from yellow to
dark brown. Backgrounds are transparent, and the lettering is a grey that can be read on white and on black.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from detlab.divergence.result import Comparison, Grid
from detlab.divergence.rows import CARRIER, IDENTICAL, ORIGIN
from detlab.errors import UsageError
from detlab.trace.records import Array, split_keys
from detlab.viz.arrange import Arrangement, arrange, layer_name
from detlab.viz.words import distinct, plotly_text

BLUE, GREY, DARK, LETTERS = "#8fb8da", "#6e6e6e", "#1b1b1b", "#7a7a7a"
#: ColorBrewer's YlOrBr without its palest steps, which would vanish on white.
SCALE = [[0.0, "#fed976"], [0.25, "#fe9929"], [0.5, "#ec7014"], [0.75, "#b23c03"], [1.0, "#5c1f02"]]
MAX_MARKS = 600
CONFIG = {"displaylogo": False, "responsive": True, "showTips": False}


def heatmap(comparison: Comparison, prompt: int | str | None = None, *, most: int = 400) -> go.Figure:
    """Draws ops against token positions, coloured by how far the two runs are apart.

    Args:
        comparison: what `compare` returned.
        prompt: the prompt's number or id; None is the first divergence's.
        most: lines to draw; with more ops than that, the ops of a module share a line.

    Returns:
        A figure. Lines are in execution order, top down. Colour is log10 of the largest absolute difference;
        bit-identical cells and cells that differ by an unknown size have their own colours, origins carry a
        diamond, and a cell not computed in both runs is empty.

    Raises:
        UsageError: there is no such prompt, or ``most`` is below 1.
    """
    if most < 1:
        raise UsageError(f"heatmap needs most of at least 1; got most={most}.")
    grid = comparison.grid(prompt_number(comparison, prompt))
    return draw(comparison, grid, arrange(grid, most))


def prompt_number(comparison: Comparison, prompt: int | str | None) -> int:
    """The number of a prompt given by number or id; None is the first divergence's.

    Raises:
        UsageError: there is no such prompt.
    """
    ids = comparison.prompt_ids
    if prompt is None:
        return comparison.first.prompt if comparison.first else 0
    if isinstance(prompt, str) and prompt in ids:
        return ids.index(prompt)
    if isinstance(prompt, int) and not isinstance(prompt, bool) and 0 <= prompt < len(ids):
        return prompt
    known = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    raise UsageError(f"there is no prompt {prompt!r}; give a number from 0 to {len(ids) - 1}, or one of: {known}.")


def draw(comparison: Comparison, grid: Grid, plan: Arrangement, height: int = 1000) -> go.Figure:
    """Draws a grid that has been arranged, up to ``height`` pixels tall."""
    figure = go.Figure()
    ids = comparison.prompt_ids
    names = (
        ids[grid.prompt] if grid.prompt < len(ids) else grid.prompt,
        comparison.label_a,
        comparison.label_b,
    )
    title = "Prompt {}: {} against {}".format(*(plotly_text(name, 60) for name in names))
    if plan.notes:
        title += f"<br><sub>{plotly_text('; '.join(plan.notes), 200)}</sub>"
    num_lines = len(plan.labels)
    _style(figure, title, height=int(np.clip(190 + 12 * num_lines, 380, height)))
    if not plan.state.any():
        _say(figure, "no row of this prompt was computed in both runs")
        return figure
    labels = distinct([plotly_text(label) for label in plan.labels])
    _cells(figure, plan, labels)
    _marks(figure, plan, labels)
    figure.update_layout(
        hovermode="closest",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "itemsizing": "constant"},
        margin={"t": 100 if plan.notes else 80},
    )
    edge = plan.width / 2
    figure.update_xaxes(
        range=[plan.positions[0] - edge, plan.positions[-1] + edge],
        title_text="token position",
        showgrid=False,
        zeroline=False,
        ticks="outside",
        **({"dtick": 1} if len(plan.positions) <= 20 and plan.width == 1 else {}),
    )
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=labels,
        range=[num_lines - 0.5, -0.5],
        showgrid=False,
        automargin=True,
        tickfont={"size": 11 if num_lines <= 60 else 10},
        title_text="",
    )
    return figure


def _cells(figure: go.Figure, plan: Arrangement, labels: list[str]) -> None:
    """One heatmap trace per kind of cell, so that each has its own colour, legend entry and hover text."""
    size = plan.max_abs
    known = ~np.isnan(size)
    x = plan.positions
    where = "%{y}<br>position %{x}" if plan.width == 1 else f"%{{y}}<br>positions from %{{x}}, {plan.width} together"

    def add(mask: Array, colour: str, name: str, words: str) -> None:
        if mask.any():
            figure.add_heatmap(
                x=x,
                y=labels,
                z=np.where(mask, 1, np.nan).astype(np.float32),
                colorscale=[[0, colour], [1, colour]],
                showscale=False,
                name=name,
                showlegend=False,
                hoverongaps=False,
                xgap=0,
                ygap=0,
                hovertemplate=f"{where}<br>{words}<extra></extra>",
            )
            figure.add_scatter(  # a heatmap's own legend entry would be a gradient
                x=[None],
                y=[None],
                mode="markers",
                name=name,
                marker={"color": colour, "symbol": "square", "size": 11},
                hoverinfo="skip",
                showlegend=all(not (t.type == "scatter" and t.name == name) for t in figure.data),
            )

    add(plan.state == IDENTICAL, BLUE, "bit-identical", "bit-identical")
    for state, words in (
        (CARRIER, "carrier: an input already differed"),
        (ORIGIN, "origin: its inputs matched"),
    ):
        mask = (plan.state == state) & ~known
        add(mask, GREY, "differs, size not measured", f"{words}<br>size not measured")
    measured = (plan.state > IDENTICAL) & known
    with np.errstate(over="ignore"):  # beyond float32 a size is shown as infinite
        shown = np.where(measured, size, np.nan).astype(np.float32)
    if not measured.any():
        return
    low, high, logs = _logs(size, measured)
    ticks = list(range(low, high + 1, max(1, (high - low) // 8)))
    figure.update_layout(
        coloraxis={
            "colorscale": SCALE,
            "cmin": low,
            "cmax": high,
            "colorbar": {
                "title": {"text": "largest |a − b|", "side": "right"},
                "tickvals": ticks,
                "ticktext": [f"1e{t}" for t in ticks],
                "len": min(1.0, 320 / figure.layout.height),
                "thickness": 14,
                "outlinewidth": 0,
                "y": 1,
                "yanchor": "top",
            },
        }
    )
    for state, words in (
        (CARRIER, "carrier: an input already differed"),
        (ORIGIN, "origin: its inputs matched"),
    ):
        mask = measured & (plan.state == state)
        if mask.any():
            figure.add_heatmap(
                x=x,
                y=labels,
                z=np.where(mask, logs, np.nan).astype(np.float32),
                coloraxis="coloraxis",
                customdata=np.where(mask, shown, np.nan),
                name=words,
                showlegend=False,
                hoverongaps=False,
                hovertemplate=f"{where}<br>{words}<br>largest |a − b| %{{customdata:.3g}}<extra></extra>",
            )


def _logs(size: Array, measured: Array) -> tuple[int, int, Array]:
    """Bounds of the colour scale in whole decades, and log10 of the sizes cut to it (0 has no logarithm)."""
    ordinary = size[measured & np.isfinite(size) & (size > 0)]
    if not len(ordinary):
        return -1, 0, np.where(size > 0, 0.0, -1.0)
    low, high = int(np.floor(np.log10(ordinary.min()))), int(np.ceil(np.log10(ordinary.max())))
    high = max(high, low + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return low, high, np.clip(np.log10(size), low, high)


def _marks(figure: go.Figure, plan: Arrangement, labels: list[str]) -> None:
    """Diamonds on the origins; where there are very many, on the first of each line."""
    lines, columns = np.nonzero(plan.state == ORIGIN)
    name = "origin: inputs matched, output differs"
    if not len(lines):
        return
    if len(lines) > MAX_MARKS:
        lines, first = np.unique(lines, return_index=True)
        columns = columns[first]
        name += " (first of each line)"
    sizes = plan.max_abs[lines, columns]
    text = ["size not measured" if np.isnan(s) else f"largest |a − b| {s:.3g}" for s in sizes]
    figure.add_scatter(
        x=[plan.positions[c] for c in columns],
        y=[labels[line] for line in lines],
        mode="markers",
        name=name,
        text=text,
        marker={"symbol": "diamond", "size": 7, "color": DARK, "line": {"color": "#ffffff", "width": 1.2}},
        hovertemplate="%{y}<br>position %{x}<br>origin: its inputs matched<br>%{text}<extra></extra>",
    )


def overview(comparison: Comparison) -> go.Figure:
    """Draws how a difference spreads and grows through the layers.

    Left: the share of rows that differ in each layer, over all prompts. Right: the largest absolute
    difference in each layer at the token where the runs part (logarithmic).
    """
    shares = _shares(comparison)
    position, sizes = _growth(comparison)
    at = "" if position is None else f", position {position}"
    figure = make_subplots(1, 2, horizontal_spacing=0.12, subplot_titles=("rows that differ", f"largest |a − b|{at}"))
    _style(figure, "", height=300)
    names = [plotly_text(name, 24) for name in shares]
    figure.add_bar(
        x=names,
        y=[bad / total for bad, total in shares.values()],
        marker_color=SCALE[2][1],
        showlegend=False,
        customdata=[[bad, total] for bad, total in shares.values()],
        hovertemplate="%{x}<br>%{customdata[0]} of %{customdata[1]} rows differ (%{y:.1%})<extra></extra>",
        row=1,
        col=1,
    )
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%", row=1, col=1)
    if sizes:
        figure.add_scatter(
            x=[plotly_text(name, 24) for name in sizes],
            y=list(sizes.values()),
            mode="lines+markers",
            showlegend=False,
            marker_color=SCALE[2][1],
            hovertemplate="%{x}<br>largest |a − b| %{y:.3g}<extra></extra>",
            row=1,
            col=2,
        )
        figure.update_xaxes(categoryorder="array", categoryarray=names, row=1, col=2)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1 if _decades(sizes) <= 6 else 2, row=1, col=2)
    if not sizes:
        words = "nothing differs" if comparison.first is None else "sizes were not measured"
        figure.add_annotation(text=words, showarrow=False, x=0.5, y=0.5, xref="x2 domain", yref="y2 domain")
    figure.update_xaxes(
        type="category",
        showgrid=False,
        tickangle=-45,
        tickfont={"size": 11},
        automargin=True,
        title_text="layer, in execution order",
    )
    figure.update_yaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    return figure


def _decades(sizes: dict[str, float]) -> float:
    values = list(sizes.values()) or [1.0]
    return float(np.log10(max(values) / min(values)))


def _shares(comparison: Comparison) -> dict[str, tuple[int, int]]:
    """Layer -> (rows that differ, rows compared), in execution order."""
    counts: dict[str, list[int]] = {}
    for found in comparison.detail.ops:
        entry = counts.setdefault(layer_name(comparison.trace.ops[found.a].module), [0, 0])
        entry[0] += int((found.state > IDENTICAL).sum())
        entry[1] += len(found.state)
    return {name: (bad, total) for name, (bad, total) in counts.items()}


def _growth(comparison: Comparison) -> tuple[int | None, dict[str, float]]:
    """The token where the runs part, and layer -> largest finite difference there."""
    first = comparison.first
    if first is None:
        return None, {}
    sizes: dict[str, float] = {}
    position = first.position
    for found in comparison.detail.ops:
        measured = comparison.sizes.get(found.a)
        if measured is None:
            continue
        prompts, positions = split_keys(measured[0])
        mine = (prompts == first.prompt) & ((positions == position) | (position < 0))
        values = measured[1][mine & np.isfinite(measured[1]) & (measured[1] > 0)]
        if len(values):
            name = layer_name(comparison.trace.ops[found.a].module)
            sizes[name] = max(sizes.get(name, 0.0), float(values.max()))
    return (position if position >= 0 else None), sizes


def _style(figure: go.Figure, title: str, height: int) -> None:
    settings: dict[str, Any] = {
        "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(128,128,128,0.10)",
        "font": {"color": LETTERS, "size": 12},
        "hoverlabel": {
            "bgcolor": "#2b2b2b",
            "bordercolor": "#2b2b2b",
            "font": {"color": "#ffffff"},
            "align": "left",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": LETTERS, "activecolor": SCALE[2][1]},
        "margin": {"l": 60, "r": 20, "t": 50, "b": 60},
        "height": height,
        "autosize": True,
    }
    if title:
        settings["title"] = {"text": title, "x": 0, "xref": "paper", "font": {"size": 14}}
    figure.update_layout(settings)


def _say(figure: go.Figure, words: str) -> None:
    figure.add_annotation(text=words, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font={"size": 14})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
