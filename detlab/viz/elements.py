"""A histogram of one row's elements by how many ULPs they are apart, as a drawing that needs no script."""

from __future__ import annotations

import numpy as np

from detlab.divergence.look import Look
from detlab.trace.records import Array
from detlab.viz.figures import BLUE, SCALE
from detlab.viz.words import escape, number, plural, ulps

_NAN = 1 << 62  # what the ULP distance says where one side is NaN
_WIDTH, _HEIGHT, _FOOT, _HEAD, _WIDEST = 460, 190, 38, 18, 70


def bins(distances: Array) -> list[tuple[str, int]]:
    """Counts elements by distance: 0, 1, 2, then up to each power of two, up to the largest that occurs.

    >>> bins(np.array([0, 0, 1, 3, 4, 9]))
    [('0', 2), ('1', 1), ('2', 0), ('≤4', 2), ('≤8', 0), ('≤16', 1)]
    """
    known = distances[distances < _NAN]
    if not len(distances):
        return []
    top = int(known.max(initial=0))
    edges = [0, 1, *(2**k for k in range(1, max(1, (top - 1).bit_length()) + 1))] if top > 1 else [0, top] if top else [0]
    counted = []
    before = -1
    for edge in edges:
        name = str(edge) if edge - before <= 1 else f"≤{_short(edge)}"
        counted.append((name, int(((known > before) & (known <= edge)).sum())))
        before = edge
    missing = len(distances) - len(known)
    return counted + ([("NaN", missing)] if missing else [])


def _short(value: int) -> str:
    """A power of two that fits under a bar."""
    return str(value) if value < 10_000 else f"2^{value.bit_length() - 1}"


def elements_in_words(look: Look) -> str:
    """What the histogram shows, in a sentence."""
    total = len(look.ulps)
    if not total:
        return "The elements of this row are not at hand."
    if not look.num_differing:
        return f"None of {plural(total, 'element')} of this row differs."
    middle = int(np.median(look.ulps[look.ulps > 0]))
    return (
        f"{look.num_differing:,} of {plural(total, 'element')} of this row differ: by {ulps(middle)} in the middle, by "
        f"{ulps(int(look.ulps.max()))} ({number(look.max_abs)}) at most, in {look.dtype}."
    )


def histogram(look: Look) -> str:
    """Draws how many elements are how far apart; an empty text where they are not at hand."""
    counted = bins(look.ulps)
    if not counted:
        return ""
    step = min(_WIDTH / len(counted), _WIDEST)
    tallest = max(count for _, count in counted)
    floor = _HEIGHT - _FOOT
    crowded = len(counted) > 12
    parts = []
    for at, (name, count) in enumerate(counted):
        height = (floor - _HEAD) * count / tallest
        left, middle = at * step + 0.12 * step, (at + 0.5) * step
        colour = BLUE if name == "0" else SCALE[2][1]
        shape = f'<rect x="{left:.1f}" y="{floor - height:.1f}" width="{0.76 * step:.1f}" height="{max(height, 0.5):.1f}"'
        parts.append(f'<g><title>{escape(f"{name} ULP: {count:,} elements")}</title>{shape} fill="{colour}"/></g>')
        if count:
            parts.append(f'<text x="{middle:.1f}" y="{floor - height - 4:.1f}" class="count">{count:,}</text>')
        if not crowded or at % 2 == 0 or name == "NaN":
            parts.append(f'<text x="{middle:.1f}" y="{floor + 14}">{escape(name)}</text>')
    axis = f'<line x1="0" x2="{_WIDTH}" y1="{floor}" y2="{floor}"/>'
    foot = f'<text x="0" y="{_HEIGHT - 5}" class="foot">distance in ULPs of {escape(look.dtype)}; elements of the row</text>'
    label = escape(elements_in_words(look))
    return (
        f'<svg class="detlab-bars" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{axis}{''.join(parts)}{foot}</svg>"
    )
