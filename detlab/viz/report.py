"""One HTML file that shows an investigation to somebody who has neither detlab nor a network.

Everything the page needs is in it. Its content security policy lets the page load nothing and run only the
scripts written here, named by their SHA-256, so a prompt that looks like a script stays a prompt.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from detlab.divergence.result import Comparison
from detlab.files import write_text
from detlab.viz.answers import fixes_table, proof_html
from detlab.viz.elements import elements_in_words, histogram
from detlab.viz.figures import CONFIG, heatmap, overview
from detlab.viz.trees import draw_trees
from detlab.viz.why import why_html
from detlab.viz.words import escape, first_in_words, number, plural, style, ulps, verdict_words

if TYPE_CHECKING:
    from detlab.divergence.look import Look
    from detlab.environment import Environment
    from detlab.inquiry import Fix
    from detlab.investigate import Investigation

MAX_ROWS = 50  # of a table; what is left out is counted
MAX_LOOKS = 6


_DRAW = """
document.querySelectorAll("script[data-figure]").forEach(function (source) {
  var place = document.getElementById(source.dataset.figure);
  var figure = JSON.parse(source.textContent);
  Plotly.newPlot(place, figure.data, figure.layout, JSON.parse(place.dataset.config));
});
"""


def write_report(investigation: Investigation, path: str | os.PathLike[str], *, fixes: Sequence[Fix] = (),
                 looks: Sequence[Look] = ()) -> Path:  # fmt: skip
    """Writes a stand-alone HTML report, whole or not at all. It opens offline and follows the reader's theme.

    Args:
        investigation: what `investigate` returned.
        path: the file; an existing one is replaced once the new one is complete.
        fixes: what an `Inquiry` tried on the pair; the last one is shown as the paired proof.
        looks: what it found inside ops.

    Returns:
        The path written.

    Raises:
        UsageError: the folder is missing, the path is a folder, or the file cannot be written.
    """
    return write_text(path, report_html(investigation, fixes, looks), "write_report", "report.html")


def report_html(investigation: Investigation, fixes: Sequence[Fix] = (), looks: Sequence[Look] = ()) -> str:
    """The report as one HTML document; arguments are those of `write_report`."""
    comparison = investigation.comparison
    verdict = verdict_words(investigation.verdict)
    figures = {"overview": overview(comparison), "heatmap": heatmap(comparison)}
    inside = _inside(looks[:MAX_LOOKS], comparison, figures)
    proof = _proof(investigation, fixes, figures)
    body = [
        "<header><h1>Where do two runs part?</h1></header><main>",
        _question(investigation),
        f'<div class="verdict {verdict.css}"><strong>{escape(verdict.sign + " " + verdict.headline)}</strong>'
        f"<span>{escape(verdict.sentence)}</span></div>",
        "<h2>First divergence</h2>",
        f"<p>{escape(first_in_words(comparison))}</p>",
        "<h2>Why</h2>",
        why_html(investigation),
        *inside,
        "<h2>Controls</h2>",
        _controls(comparison),
        "<h2>Layer by layer</h2>",
        _place("overview", "Share of differing rows, and growth of the difference, layer by layer"),
        "<h2>Op by op</h2>",
        "<p>Lines are ops in execution order, columns token positions. Blue is bit-identical; a diamond is "
        "an origin: an op whose inputs matched and whose output differs.</p>",
        _place("heatmap", "Heatmap of ops against token positions; the tables below hold the same facts"),
        "<h2>Origins</h2>",
        _origins(comparison),
        "<h2>Texts</h2>",
        _texts(investigation),
        *proof,
        "<h2>What is not shown</h2>",
        _list(_limits(comparison)),
        "<h2>Environment</h2>",
        _environment(investigation),
        "<h2>Run it again</h2>",
        *(f"<pre><code>{escape(call)}</code></pre>" for call in (investigation.call, *(fix.call for fix in fixes))),
        "</main>",
    ]
    scripts = [get_plotlyjs(), _DRAW]
    data = [
        f'<script type="application/json" data-figure="{name}">{_json(figure)}</script>' for name, figure in figures.items()
    ]
    title = f"{verdict.headline}: {comparison.label_a} against {comparison.label_b}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',  # or the browser would ask the server for one
            f"<title>{escape(title)}</title><style>{style('report.css')}{style('proof.css')}</style></head><body>",
            *body,
            *data,
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _inside(looks: Sequence[Look], comparison: Comparison, figures: dict[str, go.Figure]) -> list[str]:
    """What was seen inside ops: elements by distance, and both orders of addition, whose drawings go to the figures."""
    parts = ["<h2>Inside an op</h2>"] if looks else []
    for number_of, found in enumerate(looks):
        ids = comparison.prompt_ids
        where = f"prompt {ids[found.prompt] if found.prompt < len(ids) else found.prompt}, position {found.position}"
        parts.append(f"<h3>{escape(found.module or '(model)')} · {escape(found.op)} at {escape(where)}</h3>")
        parts.append(f"<p>{escape(elements_in_words(found))}</p>{histogram(found)}")
        a, b = found.trees
        if a is not None and b is not None:
            name = f"trees-{number_of}"
            figures[name] = draw_trees(a, b, labels=(comparison.label_a, comparison.label_b))
            parts.append(_place(name, "The order in which each run adds the terms of one element"))
            parts.append(_list([f"a: {a.describe()}", f"b: {b.describe()}"]))
        if found.notes:
            parts.append(_list(found.notes))
    return parts


def _proof(investigation: Investigation, fixes: Sequence[Fix], figures: dict[str, go.Figure]) -> list[str]:
    """What was tried, and the pair without and with the last of it."""
    if not fixes:
        return []
    last = fixes[-1]
    parts = ["<h2>What fixes it</h2>", fixes_table(fixes), "<h2>Proof and cost</h2>", proof_html(investigation, last)]
    if last.comparison is not None:
        first = investigation.comparison.first
        figures["proof"] = heatmap(last.comparison, first.prompt if first else 0)
        words = f"The same heatmap with {' + '.join(last.names)}"
        parts += [f"<p>{escape(words)}:</p>", _place("proof", words)]
    return parts


def _policy(scripts: Iterable[str]) -> str:
    """Nothing may be loaded; these scripts may run, and no other."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    rest = "img-src data: blob:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {hashes}; {rest}"


def _json(figure: go.Figure) -> str:
    """A figure as JSON that cannot end the script element it stands in."""
    return str(figure.to_json()).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _place(name: str, words: str) -> str:
    config = escape(json.dumps(CONFIG))
    return (
        f'<div id="{name}" role="img" aria-label="{escape(words)}" data-config="{config}"></div>'
        "<noscript><p>The figure needs scripts; the tables hold the same facts.</p></noscript>"
    )


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of plain text, escaped here; ``numbers`` are the columns set flush right."""
    lines = "".join(
        "<tr>"
        + "".join(f'<td class="n">{escape(c)}</td>' if i in numbers else f"<td>{escape(c)}</td>" for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    content = f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="wide"><table>{content}</table></div>'


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _question(investigation: Investigation) -> str:
    comparison = investigation.comparison
    ids = comparison.prompt_ids
    named = ", ".join(ids[:6]) + (f" and {len(ids) - 6} more" if len(ids) > 6 else "")
    steps = investigation.a.num_steps
    return (
        f"<p>One model answered the same {plural(len(ids), 'prompt')} ({escape(named)}) twice, "
        f"decoding {plural(steps, 'token')} each.</p>"
        + _table("The two conditions", ("run", "condition"), (("a", comparison.label_a), ("b", comparison.label_b)))
    )


def _controls(comparison: Comparison) -> str:
    words = {True: "held", False: "FAILED", None: "not run"}
    meaning = {
        "a_repeated": "condition a, executed twice, gives the same bits",
        "b_repeated": "condition b, executed twice, gives the same bits",
    }
    rows = [(meaning.get(name, name.replace("_", " ")), words[held]) for name, held in comparison.controls.items()]
    if not rows:
        return "<p>No control was run.</p>"
    return _table(
        "Experiments whose answer is known; one that fails would void the verdict",
        ("control", "result"),
        rows,
    )


def _origins(comparison: Comparison) -> str:
    if not comparison.origins:
        return "<p>No op whose inputs matched gave another output.</p>"
    shown = comparison.origins[:MAX_ROWS]
    rows = [
        (
            d.module or "(model)",
            d.op,
            d.phase,
            d.prompt_id,
            str(d.position) if d.position >= 0 else "whole prompt",
            f"{d.num_rows:,}",
            number(d.max_abs),
            ulps(d.max_ulp),
            "" if d.share is None else f"{d.share:.1%}",
        )
        for d in shown
    ]
    more = len(comparison.origins) - len(shown)
    tail = f"<p>{more:,} more origins are not listed.</p>" if more else ""
    caption = (
        f"{len(comparison.origins):,} ops and calls made a difference from matching inputs; "
        f"{len(comparison.carriers):,} passed one on and are not listed"
    )
    head = (
        "module",
        "op",
        "phase",
        "prompt",
        "first position",
        "rows",
        "largest |a − b|",
        "largest ULP",
        "share of elements",
    )
    return _table(caption, head, rows, numbers=(4, 5, 6, 7, 8)) + tail


def _texts(investigation: Investigation) -> str:
    comparison = investigation.comparison
    flips = comparison.token_flips
    texts_a, texts_b = comparison.texts
    if not investigation.a.num_steps:
        return "<p>No token was decoded.</p>"
    if not flips:
        return "<p>Decoding freely, both runs chose the same tokens for every prompt.</p>"
    rows = [
        (
            flip.prompt_id,
            str(flip.step),
            str(flip.a_token),
            str(flip.b_token),
            texts_a[flip.prompt] if texts_a else "no tokenizer",
            texts_b[flip.prompt] if texts_b else "no tokenizer",
        )
        for flip in flips[:MAX_ROWS]
    ]
    more = len(flips) - len(rows)
    tail = f"<p>{more:,} more prompts part and are not listed.</p>" if more else ""
    caption = f"{len(flips):,} of {len(comparison.prompt_ids):,} prompts got another token, decoding freely"
    head = ("prompt", "first at step", "token in a", "token in b", "text of a", "text of b")
    return _table(caption, head, rows, numbers=(1, 2, 3)) + tail


def _limits(comparison: Comparison) -> list[str]:
    """What the reader does not see here, in words."""
    items = [
        f"{comparison.rows_compared:,} rows were compared; padding and batch mates, which are not part of "
        "the question, were not."
    ]
    if len(comparison.prompt_ids) > 1:
        items.append(f"The heatmap shows one of {len(comparison.prompt_ids)} prompts.")
    if comparison.sizes:
        items.append("Sizes were measured for that prompt; elsewhere a difference is known and its size is not.")
    if comparison.teacher_forced:
        items.append("The texts part, so run b was fed the tokens of run a while ops were compared (teacher forcing).")
    if any(comparison.num_nan):
        items.append(f"Logits that are NaN: {comparison.num_nan[0]:,} in a, {comparison.num_nan[1]:,} in b.")
    return items + list(comparison.notes)


def _environment(investigation: Investigation) -> str:
    a, b = investigation.a.environment, investigation.b.environment
    if a.fingerprint() == b.fingerprint():
        return _environment_table("both runs", investigation.environment)
    warning = "<p><strong>The runs were made in two environments.</strong></p>"
    return warning + _environment_table("run a", a) + _environment_table("run b", b)


def _environment_table(name: str, record: Environment) -> str:
    """The record, folded: its first line names what matters most."""
    words = (
        record.cpu.get("model"),
        f"torch {record.versions.get('torch')}",
        f"fingerprint {record.fingerprint()}",
    )
    summary = f"{escape(name)}: {escape(', '.join(map(str, words)))}"
    return f'<details><summary>{summary}</summary><div class="wide">{record._repr_html_()}</div></details>'
