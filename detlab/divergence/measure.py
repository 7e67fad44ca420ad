"""Sizes differences: values of both runs, kept row by row, are held against each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from detlab import bits
from detlab.divergence.rows import TraceComparison
from detlab.trace.keep import RowKeeper
from detlab.trace.records import Array


@dataclass
class Sizes:
    """How far apart two runs are.

    Attributes:
        rows: op of a -> (row keys, largest absolute difference, largest ULP distance), one of each per row.
        largest: op of a -> (max_abs, max_ulp, share of elements that differ) over its differing rows.
    """

    rows: dict[int, tuple[Array, Array, Array]] = field(default_factory=dict)
    largest: dict[int, tuple[float, int, float]] = field(default_factory=dict)


def keepers(detail: TraceComparison, prompts: list[int]) -> tuple[RowKeeper, RowKeeper]:
    """What the two runs must keep so that their differing ops can be sized for some prompts."""
    differing = list(detail.ops.differing())
    return RowKeeper({f.a for f in differing}, prompts), RowKeeper({f.b for f in differing}, prompts)


def size_differences(detail: TraceComparison, a: RowKeeper, b: RowKeeper) -> Sizes:
    """Sizes every differing op whose rows both runs kept."""
    sizes = Sizes()
    joins: dict[tuple[int, int, int], tuple[Array, Tensor, Tensor]] = {}
    for found in detail.ops.differing():
        if found.a not in a.kept or found.b not in b.kept:
            continue
        (keys_a, values_a), (keys_b, values_b) = a.kept[found.a], b.kept[found.b]
        join = (id(keys_a), id(keys_b), id(found.keys))
        if join not in joins:
            common, at_a, at_b = np.intersect1d(keys_a, keys_b, return_indices=True)
            inside = np.isin(common, found.keys)
            joins[join] = (common[inside], torch.from_numpy(at_a[inside]), torch.from_numpy(at_b[inside]))
        keys, rows_a, rows_b = joins[join]
        if len(keys):
            _measure(sizes, found.a, keys, values_a[rows_a], values_b[rows_b])
    return sizes


def _measure(sizes: Sizes, op: int, keys: Array, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.dtype != b.dtype or not a.numel():
        return
    difference = (a.double() - b.double()).abs()
    unequal = bits.int_view(a) != bits.int_view(b)
    if not bool(difference.isfinite().all()):  # equal infinities are no difference, NaN against a number is
        difference = torch.where(unequal, difference.nan_to_num(nan=float("inf"), posinf=float("inf")), 0.0)
    max_abs, max_ulp = difference.amax(-1).numpy(), bits.ulp_distance(a, b).amax(-1).numpy()
    rows = unequal.any(-1)
    if bool(rows.any()):
        where = rows.numpy()
        share = float(unequal[rows].double().mean())
        old = sizes.largest.get(op, (0.0, 0, 0.0))  # an op can be compared with several calls of b, row by row
        sizes.largest[op] = (
            max(old[0], float(max_abs[where].max())),
            max(old[1], int(max_ulp[where].max())),
            max(old[2], share),
        )
    known = sizes.rows.get(op)
    if known is not None:
        keys, max_abs, max_ulp = (np.concatenate(pair) for pair in zip(known, (keys, max_abs, max_ulp), strict=True))
        order = np.argsort(keys, kind="stable")
        keys, max_abs, max_ulp = keys[order], max_abs[order], max_ulp[order]
    sizes.rows[op] = (keys, max_abs, max_ulp)
