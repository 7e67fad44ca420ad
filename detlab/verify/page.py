"""A certificate as HTML: a fragment for notebooks, a page for readers without detlab or a network.

All text is escaped; the page's content security policy lets it load and run nothing.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from detlab.verify.certificate import Certificate

__all__ = ["fragment", "page"]

_HEAD = ("axis", "verdict", "comparisons", "mismatches", "bound 95 %", "with the tier off", "note")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .75rem; border-bottom: 1px solid #8886; vertical-align: top; }
caption { text-align: left; padding: .5rem 0; }
.verdict { border-left: .4rem solid; padding: .5rem 1rem; } .holds { border-color: #1a7f37; } .fails { border-color: #cf222e; }
code { overflow-wrap: anywhere; }
"""


def _escape(text: object) -> str:
    return html.escape(str(text))


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{_escape(first)}</th>' + "".join(f"<td>{_escape(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="wide"><table><caption>{_escape(caption)}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_escape(item)}</li>" for item in items) + "</ul>"


def _verdict(certificate: Certificate) -> str:
    sign = "✓" if certificate.holds else "✗" if certificate.is_refuted else "?"
    kind = "holds" if certificate.holds else "fails"
    return f'<p class="verdict {kind}"><strong>{sign} {_escape(certificate.headline)}</strong></p>'


def _matrix(certificate: Certificate) -> str:
    caption = "Texts served in many ways and compared bit by bit; the same trials with the tier off are the control"
    return _table(caption, _HEAD, certificate.rows())


def fragment(certificate: Certificate) -> str:
    """Verdict and matrix, for a notebook."""
    firsts = [f"first on {a.axis}: {a.first}" for a in certificate.axes.values() if a.first is not None]
    limits = [f"not tested: {limit}" for limit in certificate.limits]
    kernels = [certificate.kernel_words, *(f"wrong: {check}" for check in certificate.wrong_kernels)]
    return _verdict(certificate) + _matrix(certificate) + _list([*firsts, *kernels, *limits])


def page(certificate: Certificate) -> str:
    """The whole certificate as one HTML document."""
    model = certificate.model
    title = f"Certificate: {model['class']} {model['name']}, tier {certificate.tier}"
    firsts = [f"{a.axis}: {a.first}" for a in certificate.axes.values() if a.first is not None]
    controls = [f"{a.axis}: {a.control_first}" for a in certificate.axes.values() if a.control_first is not None]
    ops: dict[tuple[str, str, str], int] = {}
    for op in certificate.coverage.ops:
        key = (op.op, op.status, op.reason)
        ops[key] = ops.get(key, 0) + op.count
    ways = [f"{a.axis}: {'; '.join(a.ways)}" for a in certificate.axes.values()]
    wrong = [str(check) for check in certificate.wrong_kernels]
    shapes = [
        (check.kernel, check.where or "here", ", ".join(check.shapes), ", ".join(check.failed) or "none")
        for check in certificate.kernels
    ]
    rules = [(name, json.dumps(rule)) for name, rule in certificate.class_map.items()]
    body = [
        f"<h1>{_escape(title)}</h1>",
        _verdict(certificate),
        _table("The model", ("what", "value"), model.items()),
        "<h2>The invariance matrix</h2>",
        _matrix(certificate),
        "<h2>First mismatches under the tier</h2>" + _list(firsts) if firsts else "",
        "<h2>First mismatches with the tier off</h2>",
        _list(controls or ["none: nothing is shown here"]),
        "<h2>The kernels, probed again</h2>",
        _list([certificate.kernel_words, *wrong]),
        "<h2>Not tested</h2>",
        _list(certificate.limits),
        "<h2>What the calls looked like</h2>",
        _list(certificate.evidence()),
        "<h2>MD5 of the logits, each prompt alone in one call</h2>",
        _table(
            f"Another party whose integers are exact must get the same: the function is spec {certificate.spec}"
            if certificate.spec
            else "Another party with this machine's class map must get the same",
            ("prompt", "MD5"),
            certificate.md5.items(),
        ),
        "<h2>Details</h2>",
        "<details><summary>Ways that were tried</summary>" + _list(ways) + "</details>",
        "<details><summary>Coverage</summary>"
        + _table("Ops by status", ("op", "status", "reason", "calls"), [(*key, count) for key, count in ops.items()])
        + "</details>",
        "<details><summary>Kernels and the shapes that ran</summary>"
        + _table("Each probed with data that no map was made with", ("kernel", "process", "shapes", "failed"), shapes)
        + "</details>",
        "<details><summary>Class map</summary>" + _table("Measured on this machine", ("what", "rule"), rules) + "</details>",
        "<details><summary>Environment</summary>" + certificate.environment._repr_html_() + "</details>",
        _table("Settings", ("what", "value"), certificate.settings.items()),
        f"<p>Made by detlab {_escape(certificate.version)}, {_escape(certificate.date)}.</p>",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_escape(title)}</title><style>{_STYLE}</style></head><body><main>",
            *filter(None, body),
            "</main></body></html>\n",
        ]
    )
