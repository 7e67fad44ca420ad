"""The "why" of an investigation: for the report as HTML, for the panel as lines, and each layer's own noise as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from detlab.divergence.explain_result import factor_words, kernel_words
from detlab.divergence.graft import IsolatedOp
from detlab.viz.arrange import layer_name
from detlab.viz.figures import BLUE, LETTERS, SCALE
from detlab.viz.words import escape, number, plotly_text, plural

if TYPE_CHECKING:
    from detlab.divergence.amplification import LayerGain
    from detlab.divergence.explain_result import Explanation
    from detlab.investigate import Investigation


def why_lines(investigation: Investigation) -> list[str]:
    """The answer to "why" in a few plain lines, for the panel and the terminal; none where nothing differs."""
    found, explanation = investigation.triage, investigation.explanation
    if found is None or found.verdict == "identical":
        return []
    cause = f" ({found.cause})" if found.cause else ""
    lines = [f"Why: {found.verdict.replace('_', ' ')}{cause}: {found.sentence}"]
    if explanation is not None and explanation.factors:
        lines.append(str(explanation.mechanism))
    lines.append(f"Size: {found.size_words()}.")
    return lines


def why_html(investigation: Investigation) -> str:
    """The report's section; everything in it is escaped."""
    found, explanation = investigation.triage, investigation.explanation
    if found is None:
        return "<p>It was not asked why.</p>"
    if found.verdict == "identical":
        return "<p>There is no difference to explain.</p>"
    parts = [f"<p>{escape(line)}</p>" for line in why_lines(investigation)]
    parts.append("<ul>" + "".join(f"<li>{escape(one)}</li>" for one in found.evidence) + "</ul>")
    if found.flips:
        parts.append("<ul>" + "".join(f"<li>{escape(flip)}</li>" for flip in found.flips[:10]) + "</ul>")
    if explanation is not None and explanation.factors:
        parts.append(_table(explanation))
    notes = [*found.notes, *(explanation.notes if explanation is not None else [])]
    if notes:
        parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
    return "\n".join(parts)


def _table(explanation: Explanation) -> str:
    rows = [(factor.name, factor_words(factor)) for factor in explanation.factors]
    rows += [(f"kernels of {side}", kernel_words(kernels)) for side, kernels in zip("ab", explanation.kernels, strict=True)]
    rows.append(("order of additions", explanation.tree_words()))
    held = ["yes" if one else "NO" for one in explanation.reproduced]
    rows.append(("executed alone on the captured inputs", f"a's bits: {held[0]}; b's bits: {held[1]}"))
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(words)}</td></tr>" for name, words in rows)
    caption = f"The op alone, one factor changed at a time, all else as in a; {plural(explanation.num_rows, 'row')} looked at"
    head = '<tr><th scope="col">factor</th><th scope="col">does it move the bits?</th></tr>'
    content = f"<caption>{escape(caption)}</caption><thead>{head}</thead><tbody>{lines}</tbody>"
    return f'<div class="wide"><table>{content}</table></div>'




def noise_budget(ops: Sequence[IsolatedOp], gains: Sequence[LayerGain] = (),
                 title: str = "What each layer adds by itself") -> go.Figure:  # fmt: skip
    """Draws how much difference each layer makes of its own, beside what reaches it and leaves it.

    Args:
        ops: what `Comparison.all_origins` returned: every op that makes a difference of its own from a's inputs.
        gains: what `Comparison.amplification` returned: adds, on an axis of its own, how often larger a difference leaves
            each layer than it came in.
        title: of the figure.

    Returns:
        A figure: per layer, bars of the largest difference that its ops make by themselves, and a line of the largest
        difference of these ops' outputs in the free run (own and inherited together), both on a logarithmic axis. The gap
        between bar and line is what was inherited, and amplified on the way. Sizes of 0 (a zero's sign) are not drawn.
    """
    layers: dict[str, list[IsolatedOp]] = {}
    for op in ops:
        layers.setdefault(layer_name(op.module), []).append(op)
    names = list(layers)
    own = [max(op.own for op in found) for found in layers.values()]
    totals = [max((op.total for op in found if op.total is not None), default=None) for found in layers.values()]
    words = [
        f"{plural(len(found), 'op')}, {sum(op.is_masked for op in found)} of them hidden behind earlier differences"
        for found in layers.values()
    ]
    labels = [plotly_text(name) for name in names]
    figure = go.Figure()
    figure.add_bar(
        x=labels, y=[size or None for size in own], name="made in the layer itself", marker={"color": BLUE}, customdata=words,
        hovertemplate="%{x}<br>own: %{y:.3g}<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=labels, y=[size or None for size in totals], name="in the free run, inherited included", mode="lines+markers",
        line={"color": SCALE[2][1]}, hovertemplate="%{x}<br>in the free run: %{y:.3g}<extra></extra>",
    )  # fmt: skip
    grown = {str(one.layer): one.factor for one in gains if one.factor is not None}
    if grown:
        figure.add_scatter(
            x=[plotly_text(name) for name in grown], y=list(grown.values()), name="growth of what comes in (right)", yaxis="y2",
            mode="lines+markers", line={"color": LETTERS, "dash": "dot"},
            hovertemplate="%{x}<br>leaves it %{y:.3g} times as large as it came in<extra></extra>",
        )  # fmt: skip
        axis = {"overlaying": "y", "side": "right", "title": {"text": "outgoing / incoming"}, "rangemode": "tozero"}
        figure.update_layout(yaxis2=axis)
    if not ops:
        where = {"xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}
        figure.add_annotation(text="no op makes a difference of its own", showarrow=False, **where)
    largest = f"<br><sub>{plural(len(ops), 'op')}; largest own difference {number(max(own))}</sub>" if own else ""
    figure.update_layout(
        title={"text": plotly_text(title) + largest, "x": 0}, height=420, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)", font={"color": LETTERS}, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        margin={"t": 110},
    )  # fmt: skip
    lines = {"exponentformat": "power", "gridcolor": "rgba(128,128,128,0.25)"}
    figure.update_layout(yaxis={"type": "log", "title": {"text": "largest absolute difference"}, **lines})
    figure.update_xaxes(type="category", title_text="layer")
    return figure
