"""A picture of class maps: which row counts of which kernel share one order of additions."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from detlab.coverage import Coverage
from detlab.viz.figures import BLUE, SCALE, _say, _style
from detlab.viz.words import distinct, plotly_text

__all__ = ["class_map_figure"]

_OTHER, _UNKNOWN = SCALE[3][1], "rgba(128,128,128,0.25)"
_KINDS = (
    (1, BLUE, "member", "a member of the class: the tier calls it"),
    (2, _OTHER, "another class", "it gives other bits: the tier does not call it"),
    (0, _UNKNOWN, "not probed", "not probed yet: it is, before it is first called"),
)


def class_map_figure(coverage: Coverage) -> go.Figure:
    """Draws the class maps of a model's kernels.

    Args:
        coverage: what `coverage` returned.

    Returns:
        A figure: a line for each kernel, a column for each row count that was probed of any of them, ascending (so the scale
        is close to a logarithmic one). Members of the class, row counts of another class, and what was not probed have
        colours of their own, each told in the hover text, too. Kernels whose shapes are more than a number of rows are
        left out.
    """
    maps = [known for known in coverage.class_maps if known.members or known.others]
    counts = sorted({count for known in maps for count in (*known.members, *known.others)})
    figure = go.Figure()
    title = f"Row counts that share one order of additions, tier {plotly_text(coverage.tier)}"
    _style(figure, title, height=190 + 28 * len(maps))
    if not maps:
        _say(figure, "no kernel of this tier has a class map")
        return figure
    labels = distinct([plotly_text(known.kernel, 70) for known in maps])
    columns = [str(count) for count in counts]
    state = np.array([[1 if c in known.members else 2 if c in known.others else 0 for c in counts] for known in maps])
    for number, colour, name, words in _KINDS:
        if not (state == number).any():
            continue
        figure.add_heatmap(
            x=columns, y=labels, z=np.where(state == number, 1, np.nan).astype(np.float32),
            colorscale=[[0, colour], [1, colour]], showscale=False, name=name, showlegend=False, hoverongaps=False,
            xgap=1, ygap=2, hovertemplate=f"%{{y}}<br>%{{x}} rows<br>{words}<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(  # a heatmap's own legend entry would be a gradient
            x=[None], y=[None], mode="markers", name=name, hoverinfo="skip",
            marker={"color": colour, "symbol": "square", "size": 11},
        )  # fmt: skip
    figure.update_layout(legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0}, margin={"t": 80})
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=columns, range=[-0.5, len(columns) - 0.5], showgrid=False,
        zeroline=False, title_text="rows of a call", tickangle=-45, tickfont={"size": 10},
    )  # fmt: skip
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=labels, range=[len(labels) - 0.5, -0.5], showgrid=False,
        automargin=True, tickfont={"size": 11},
    )  # fmt: skip
    return figure
