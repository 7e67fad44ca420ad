"""Looks inside one op at one token: how far apart its elements are, and in which order each side adds them up."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from detlab import bits
from detlab.divergence.explain_trees import tree_of
from detlab.divergence.replay import Met, Side, int_view, meet, sides_of
from detlab.divergence.replay_op import Operation, row_of
from detlab.divergence.result import Comparison
from detlab.divergence.rows import IDENTICAL, OpComparison
from detlab.divergence.trees import AccumulationTree
from detlab.errors import DetlabError, TraceError, UsageError
from detlab.trace.keep import RowKeeper
from detlab.trace.records import Array, split_keys


@dataclass
class Look:
    """One op at one token, both sides.

    Attributes:
        module, op: which.
        prompt, position: the row.
        dtype: of the elements, such as "bfloat16"; "" where they are not at hand.
        ulps: int64 [elements], distance of each element of the row in ULPs of that dtype; empty where not at hand.
        max_abs: largest absolute difference; None where the elements are not at hand.
        element: the element whose additions are shown: the first that differs.
        trees: accumulation trees of that element, of a and of b; None where the op is no sum that can be read.
        notes: what could not be looked at, in words.
    """

    module: str
    op: str
    prompt: int
    position: int
    dtype: str = ""
    ulps: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    max_abs: float | None = None
    element: int = 0
    trees: tuple[AccumulationTree | None, AccumulationTree | None] = (None, None)
    notes: list[str] = field(default_factory=list)

    @property
    def num_differing(self) -> int:
        """Elements whose value differs; a zero of the other sign is at distance 0, and does not count."""
        return int((self.ulps > 0).sum())


def look(comparison: Comparison, op: int, prompt: int, position: int, *, trees: bool = True) -> Look:
    """Looks inside one op at one token, by executing both sides again.

    Args:
        comparison: what `compare` returned for two runs whose model is at hand.
        op: the op's number in the trace of a (`Divergence.op_index`).
        prompt, position: the row.
        trees: also recover the accumulation trees (up to six seconds a side).

    Raises:
        UsageError: both runs did not compute this op for this row, or they cannot be executed again.
        ModelError: the model is gone.
    """
    found, key = _row(comparison, op, prompt, position)
    sides = sides_of(comparison)
    record = comparison.trace.ops[op]
    made = Look(record.module, record.op, prompt, position)
    ops, met = (found.a, found.b), []
    values: list[Tensor] = []
    try:
        for side, number in zip(sides, ops, strict=True):
            if side.variables:
                values.append(_kept(side, number, prompt, key))
            else:
                met.append(meet(side, number))
                values.append(_values(met[-1], key))
    except DetlabError as error:
        made.notes.append(f"its elements are not at hand: {error}")
        return made
    _measure(made, values, bool(found.state[found.keys == key][0] > IDENTICAL))
    if trees and len(met) == 2:
        made.trees = _trees(made, sides, met, key)
    elif trees:
        made.notes.append("no accumulation trees: a run was made in a fresh process, which adds in its own order")
    return made


def _row(comparison: Comparison, op: int, prompt: int, position: int) -> tuple[OpComparison, int]:
    for found in comparison.detail.ops.holding(prompt):
        if found.a == op:
            prompts, positions = split_keys(found.keys)
            at = np.flatnonzero((prompts == prompt) & (positions == position))
            if len(at):
                return found, int(found.keys[at[0]])
    raise UsageError(f"op {op} was not computed for prompt {prompt}, position {position}, in both runs; choose another cell.")


def _values(met: Met, key: int) -> Tensor:
    return met.output.reshape(-1)[met.elements().of(np.array([key])).at].cpu()


def _kept(side: Side, op: int, prompt: int, key: int) -> Tensor:
    """The row's values from a fresh process."""
    assert side.run is not None
    keeper = RowKeeper({op}, [prompt])
    side.run.replay(keep=keeper)
    if op not in keeper.kept:
        raise TraceError("the fresh process kept no row of this op (its columns are tokens, or its numbers are no floats)")
    keys, values = keeper.kept[op]
    return values[int(np.searchsorted(keys, key))]


def _measure(made: Look, values: list[Tensor], differs: bool) -> None:
    a, b = values
    if a.dtype != b.dtype or a.shape != b.shape:
        made.notes.append(f"the rows are not of one form: {a.dtype}[{a.numel()}] in a, {b.dtype}[{b.numel()}] in b")
        return
    unlike = int_view(a) != int_view(b)
    made.element = int(unlike.nonzero()[0]) if bool(unlike.any()) else 0
    if bool(unlike.any()) != differs:
        made.notes.append("executed again, this op gave other bits than in the runs")
    if not a.is_floating_point():
        made.notes.append(f"{str(a.dtype).removeprefix('torch.')} has no ULPs")
        return
    made.dtype = str(a.dtype).removeprefix("torch.")
    made.ulps = bits.ulp_distance(a, b).numpy()
    gap = (a.double() - b.double()).abs()
    made.max_abs = float(torch.where(unlike, gap.nan_to_num(nan=float("inf"), posinf=float("inf")), 0.0).max())


def _trees(made: Look, sides: tuple[Side, Side], met: list[Met], key: int
           ) -> tuple[AccumulationTree | None, AccumulationTree | None]:  # fmt: skip
    found: list[AccumulationTree | None] = []
    for side, one in zip(sides, met, strict=True):
        op = Operation.of(one, side.settings if side.run is not None else nullcontext)
        row = row_of(key, one.elements().of(np.array([key])).at, op.shape)
        tree, why = tree_of(op, row, made.element)
        found.append(tree)
        if why and f"no accumulation tree: {why}" not in made.notes:
            made.notes.append(f"no accumulation tree: {why}")
    return found[0], found[1]
