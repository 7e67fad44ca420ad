"""Rows of many ops: kept on one side, put in on the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from detlab.divergence.replay import Elements, Target, Targets, elements_of
from detlab.trace.keep import RowKeeper
from detlab.trace.layout import Layout
from detlab.trace.records import Array, Call, OpRecord, TensorRecord, split_keys


class RowsOf(RowKeeper):
    """Keeps where named rows of some ops stand, and their values if asked for, within a budget of memory.

    Attributes:
        found: (op, number of the output) -> (places, values [num_elements]; empty where values are not kept).
    """

    def __init__(self, ops: set[int], prompts: Sequence[int] | None, values: bool) -> None:
        super().__init__(ops, list(prompts or ()))
        self.all_prompts, self.values = prompts is None, values
        self.found: dict[tuple[int, int], tuple[Elements, Tensor]] = {}

    def __call__(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        """Keeps an op's output."""
        if op.index not in self.ops or self.is_full:
            return
        if layout is None or call is None or record.status != "rows" or not tensor.numel():
            return
        elements = elements_of(tensor.shape, layout, record, call)
        if not self.all_prompts:
            elements = elements.of(elements.keys[np.isin(split_keys(elements.keys)[0], self.prompts)])
        if not len(elements.keys):
            return
        self._bytes += elements.at.numel() * (8 + (tensor.element_size() if self.values else 0))
        if self._bytes > self.budget:
            self.is_full = True
            return
        value = tensor.detach().reshape(-1)[elements.at.to(tensor.device)].cpu() if self.values else tensor.new_zeros(0).cpu()
        self.found[op.index, op.outputs.index(record.number)] = elements, value


def targets_from(pairs: Sequence[tuple[int, int]], a: RowsOf, b: RowsOf, rows: dict[int, Array] | None = None) -> Targets:
    """Rows of a to be put in at b's ops.

    Args:
        pairs: (op of a, op of b).
        a, b: rows of both; a's with values.
        rows: op of b -> the row keys to take; all that both have where an op is not named.
    """
    targets: Targets = {}
    slots: dict[int, list[int]] = {}
    for op, slot in a.found:
        slots.setdefault(op, []).append(slot)
    for op_a, op_b in pairs:
        for slot in slots.get(op_a, ()):
            if (op_b, slot) not in b.found or (op_b, slot) in targets:
                continue
            (ours, values), (theirs, _) = a.found[op_a, slot], b.found[op_b, slot]
            keys = np.intersect1d(ours.keys, theirs.keys)
            if rows is not None and op_b in rows:
                keys = np.intersect1d(keys, rows[op_b])
            put, taken = theirs.of(keys), ours.of(keys)
            if len(keys) and torch.equal(put.lengths, taken.lengths):  # rows of another form cannot be put in
                targets[op_b, slot] = Target(put, values[ours.mask(keys)])
    return targets
