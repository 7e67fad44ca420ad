"""Sizes differences: values of run a are kept, row by row, and run b's are held against them as they appear."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from detlab import bits
from detlab.divergence.rows import TraceComparison
from detlab.trace.layout import Layout, rows_of
from detlab.trace.records import Array, Call, OpRecord, TensorRecord, split_keys

#: Memory for kept values; what comes after is not sized.
BUDGET_BYTES = 512 << 20


@dataclass
class ValueKeeper:
    """An observer of run a that keeps the rows that will be measured: those of differing ops, for some prompts.

    Attributes:
        kept: op of a -> (row keys, values [num_rows, width]) of its first output.
    """

    detail: TraceComparison
    prompts: list[int]
    kept: dict[int, tuple[Array, Tensor]] = field(default_factory=dict)
    bytes_kept: int = 0
    is_full: bool = False

    def __post_init__(self) -> None:
        self.wanted = {found.a for found in self.detail.ops if found.differs}
        self._cuts: dict[tuple[int, int], tuple[Array, Tensor]] = {}
        self._alive: list[Array] = []

    def __call__(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        """Keeps a copy of the named rows of a wanted op's first output."""
        if op.index not in self.wanted or record.number != op.outputs[0] or self.is_full:
            return
        rows = self.rows(record, tensor, layout, call)
        if rows is None:
            return
        self.bytes_kept += rows[1].numel() * rows[1].element_size()
        if self.bytes_kept > BUDGET_BYTES:
            self.is_full = True
            return
        self.kept[op.index] = rows

    def rows(
        self, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None
    ) -> tuple[Array, Tensor] | None:
        """The wanted prompts' rows of a float tensor: (sorted keys, copied values); None where it has none to measure."""
        if layout is None or call is None or record.status != "rows" or not tensor.is_floating_point():
            return None
        cut = rows_of(tensor, layout)
        if cut.columns is not None:  # scores and masks: their columns are not the same in both runs
            return None
        keys, at = call.keys(record.batch, record.slots)
        known = self._cuts.get((id(keys), 0))
        if known is None:
            mine = np.isin(split_keys(keys)[0], self.prompts)
            known = self._cuts[id(keys), 0] = (keys[mine], torch.from_numpy(at[mine]))
            self._alive.append(keys)
        return known[0], cut.grid[known[1]].cpu()


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
        self.partners: dict[int, list[tuple[int, Array]]] = {}
        for found in self.keeper.detail.ops:
            if found.differs and found.a in self.keeper.kept:
                self.partners.setdefault(found.b, []).append((found.a, found.keys))
        self._joins: dict[tuple[int, int, int], tuple[Array, Tensor, Tensor]] = {}
        self._alive: list[Array] = []

    def __call__(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        """Measures the op's rows that were compared with an op of a."""
        partners = self.partners.get(op.index)
        if partners is None or record.number != op.outputs[0]:
            return
        rows = self.keeper.rows(record, tensor, layout, call)
        if rows is None:
            return
        for partner, compared in partners:
            keys, values = self.keeper.kept[partner]
            common, at_a, at_b = self._join(keys, rows[0], compared)
            if len(common):
                self._measure(partner, common, values[at_a], rows[1][at_b])

    def _join(self, a: Array, b: Array, compared: Array) -> tuple[Array, Tensor, Tensor]:
        at = (id(a), id(b), id(compared))
        found = self._joins.get(at)
        if found is None:
            common, at_a, at_b = np.intersect1d(a, b, return_indices=True)
            inside = np.isin(common, compared)
            found = (common[inside], torch.from_numpy(at_a[inside]), torch.from_numpy(at_b[inside]))
            self._joins[at] = found
            self._alive += [a, b, compared]
        return found

    def _measure(self, partner: int, keys: Array, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape or a.dtype != b.dtype or not a.numel():
            return
        difference = (a.double() - b.double()).abs()
        if not bool(difference.isfinite().all()):  # equal infinities are no difference, NaN against a number is
            same = bits.int_view(a) == bits.int_view(b)
            difference = torch.where(same, 0.0, difference.nan_to_num(nan=float("inf"), posinf=float("inf")))
        max_abs = difference.amax(-1).numpy()
        max_ulp = bits.ulp_distance(a, b).amax(-1).numpy()
        unequal = bits.int_view(a) != bits.int_view(b)
        rows = unequal.any(-1)
        self._add(partner, keys, max_abs, max_ulp)
        if bool(rows.any()):
            share = float(unequal[rows].double().mean())
            old = self.largest.get(partner, (0.0, 0, 0.0))
            where = rows.numpy()
            self.largest[partner] = (
                max(old[0], float(max_abs[where].max())),
                max(old[1], int(max_ulp[where].max())),
                max(old[2], share),
            )

    def _add(self, partner: int, keys: Array, max_abs: Array, max_ulp: Array) -> None:
        old = self.sizes.get(partner)
        if old is not None:
            keys, max_abs, max_ulp = (np.concatenate(pair) for pair in zip(old, (keys, max_abs, max_ulp), strict=True))
            order = np.argsort(keys, kind="stable")
            keys, max_abs, max_ulp = keys[order], max_abs[order], max_ulp[order]
        self.sizes[partner] = (keys, max_abs, max_ulp)
