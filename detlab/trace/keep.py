"""Keeps the values of chosen ops' rows during a run, within a budget of memory, so that differences can be sized."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detlab.trace.layout import Layout, rows_of
from detlab.trace.records import Array, Call, OpRecord, TensorRecord, split_keys

#: Memory for kept values; what comes after is not kept.
BUDGET_BYTES = 512 << 20


@dataclass
class RowKeeper:
    """Keeps rows of the first output of some ops.

    Attributes:
        ops: indices of the ops, as in the trace of the same condition that ran before.
        prompts: prompts whose rows are kept.
        kept: op -> (sorted row keys, values [num_rows, width]).
        is_full: whether the budget cut something off.
    """

    ops: set[int]
    prompts: list[int]
    budget: int = BUDGET_BYTES
    kept: dict[int, tuple[Array, Tensor]] = field(default_factory=dict)
    is_full: bool = False
    _bytes: int = 0
    _cuts: dict[int, tuple[Array, Tensor]] = field(default_factory=dict, repr=False)
    _alive: list[Array] = field(default_factory=list, repr=False)  # arrays whose id() is a key must stay alive

    def __call__(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        """Keeps a copy of the rows, where they are wanted; scores and masks, whose columns differ between runs, are not."""
        if op.index not in self.ops or op.index in self.kept or self.is_full:
            return
        if layout is None or call is None or record.status != "rows" or not tensor.is_floating_point():
            return
        cut = rows_of(tensor, layout)
        if cut.columns is not None:
            return
        keys, at = call.keys(record.batch, record.slots, record.pairs)
        known = self._cuts.get(id(keys))
        if known is None:
            mine = np.isin(split_keys(keys)[0], self.prompts)
            known = self._cuts[id(keys)] = (keys[mine], torch.from_numpy(at[mine]))
            self._alive.append(keys)
        if not len(known[0]):  # a call that serves other prompts
            return
        self._bytes += len(known[0]) * cut.grid.shape[1] * cut.grid.element_size()
        if self._bytes > self.budget:
            self.is_full = True
            return
        self.kept[op.index] = (known[0], cut.grid[known[1].to(cut.grid.device)].cpu())

    def request(self) -> dict[str, Any]:
        """What is to be kept, as plain values: so that a fresh process can keep it."""
        return {"ops": sorted(self.ops), "prompts": self.prompts, "budget": self.budget}

    @classmethod
    def from_request(cls, request: dict[str, Any]) -> RowKeeper:
        """The keeper that `request` describes."""
        return cls(set(request["ops"]), list(request["prompts"]), int(request["budget"]))
