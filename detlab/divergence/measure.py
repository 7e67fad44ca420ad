"""Sizes differences: values of run a are kept, row by row, and run b's are held against them as they appear."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from detlab import bits
from detlab.divergence.align import row_keys
from detlab.divergence.rows import TraceComparison
from detlab.trace.capture import named_rows_of
from detlab.trace.layout import Layout
from detlab.trace.records import Array, Call, OpRecord, TensorRecord

#: Memory for kept values; what comes after is not sized.
BUDGET_BYTES = 512 << 20


@dataclass
class _Kept:
    keys: Array
    values: Tensor


@dataclass
class ValueKeeper:
    """An observer that keeps the rows that will be measured: those of differing ops, for some prompts."""

    detail: TraceComparison
    prompts: list[int]
    kept: dict[int, _Kept] = field(default_factory=dict)
    bytes_kept: int = 0
    is_full: bool = False

    def __post_init__(self) -> None:
        self.wanted = {found.a for found in self.detail.ops if found.differs}

    def __call__(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        """Keeps a copy of the named rows of a wanted op's first output."""
        if op.index not in self.wanted or op.index in self.kept or self.is_full:
            return
        rows = named_rows_of(call, record, tensor, layout, self.prompts)
        if rows is None or not tensor.is_floating_point():
            return
        prompt, position, values = rows
        self.bytes_kept += values.numel() * values.element_size()
        if self.bytes_kept > BUDGET_BYTES:
            self.is_full = True
            return
        keys = row_keys(prompt, position)
        order = np.argsort(keys, kind="stable")
        self.kept[op.index] = _Kept(keys[order], values[torch.from_numpy(order)].clone())


@dataclass
class SizeMeter:
    """An observer of run b that measures each wanted op against the kept values of run a.

    Attributes:
        sizes: op of a -> (row keys, largest absolute difference, largest ULP distance) per row.
        largest: op of a -> (max_abs, max_ulp, share of elements that differ) over its differing rows.
    """

    keeper: ValueKeeper
    sizes: dict[int, tuple[Array, Array, Array]] = field(default_factory=dict)
    largest: dict[int, tuple[float, int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.partners: dict[int, list[int]] = {}
        for found in self.keeper.detail.ops:
            if found.differs:
                self.partners.setdefault(found.b, []).append(found.a)
        self.chosen = {(f.a, f.b): f.keys for f in self.keeper.detail.ops if f.differs}

    def __call__(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        """Measures the op's rows that were compared with an op of a."""
        for partner in self.partners.get(op.index, ()):
            kept = self.keeper.kept.get(partner)
            if kept is None or record.number != op.outputs[0]:
                continue
            rows = named_rows_of(call, record, tensor, layout, self.keeper.prompts)
            if rows is None:
                continue
            keys = row_keys(rows[0], rows[1])
            common, at_a, at_b = np.intersect1d(kept.keys, keys, return_indices=True)
            in_pair = np.isin(common, self.chosen[partner, op.index])
            if in_pair.any():
                self._measure(partner, common[in_pair], kept.values[torch.from_numpy(at_a[in_pair])], rows[2][torch.from_numpy(at_b[in_pair])])

    def _measure(self, partner: int, keys: Array, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape or a.dtype != b.dtype or not a.numel():
            return
        difference = (a.double() - b.double()).abs()
        difference = torch.where(a.isinf() & (a == b), 0.0, difference)
        max_abs = difference.nan_to_num(nan=float("inf"), posinf=float("inf")).amax(-1)
        max_ulp = bits.ulp_distance(a, b).amax(-1)
        unequal = bits.int_view(a) != bits.int_view(b)
        rows = unequal.any(-1)
        self._add(partner, keys, max_abs.numpy(), max_ulp.numpy())
        if rows.any():
            share = float(unequal[rows].double().mean())
            old = self.largest.get(partner, (0.0, 0, 0.0))
            self.largest[partner] = (
                max(old[0], float(max_abs[rows].max())),
                max(old[1], int(max_ulp[rows].max())),
                max(old[2], share),
            )

    def _add(self, partner: int, keys: Array, max_abs: Array, max_ulp: Array) -> None:
        old = self.sizes.get(partner)
        if old is not None:
            keys, max_abs, max_ulp = (np.concatenate(pair) for pair in zip(old, (keys, max_abs, max_ulp), strict=True))
            order = np.argsort(keys, kind="stable")
            keys, max_abs, max_ulp = keys[order], max_abs[order], max_ulp[order]
        self.sizes[partner] = (keys, max_abs, max_ulp)
