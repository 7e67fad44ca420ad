"""Compares two traces row by row, and tells origins from carriers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import overload

import numpy as np

from detlab.divergence.align import Aligner, CallPair, OpAlignment, pair_calls
from detlab.divergence.inputs import ANSWERS, CARRIER, IDENTICAL, ORIGIN, InputAnswers, InputJudge
from detlab.divergence.sides import Sides, region_as_op
from detlab.trace.records import REGION, Array, OpRecord, TensorRecord, Trace, split_keys

__all__ = ["CARRIER", "IDENTICAL", "ORIGIN", "OpComparison", "OpComparisons", "TraceComparison", "compare_traces"]

#: Rows that are compared in one step: enough that numpy's calls do not matter, and small beside the traces.
STEP_ROWS = 1 << 20


@dataclass
class OpComparison:
    """One op computed in both traces: its rows, and the state of each.

    Attributes:
        a, b: indices into the traces' ops.
        keys: row keys compared (`records.split_keys` gives prompt and position).
        state: uint8 per row: 1 identical, 2 carrier (differs, and so did an input), 3 origin (differs, inputs matched).
        inputs: what the first differing row's inputs looked like: name -> "matched", "differs" or "unknown".
    """

    a: int
    b: int
    keys: Array
    state: Array
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether any row differs."""
        return bool((self.state > IDENTICAL).any())


@dataclass(eq=False)
class Block:
    """Ops that have the same rows: their states, [ops, rows], and what is known of the inputs of those that differ."""

    a: Array
    b: Array
    keys: Array
    state: Array
    inputs: list[InputAnswers]

    def inputs_of(self, row: int) -> dict[str, str]:
        """What is known of the inputs of one op; nothing where it does not differ."""
        for ops, names, answers in self.inputs:
            at = int(np.searchsorted(ops, row))
            if at < len(ops) and ops[at] == row:
                return {name: ANSWERS[answer] for name, answer in zip(names, answers[at].tolist(), strict=True)}
        return {}


class OpComparisons(Sequence[OpComparison]):
    """Every op that was compared, in the order of trace a; an `OpComparison` is made when it is asked for.

    Attributes:
        differs, is_origin: per op, whether any of its rows differs, and whether any is an origin.
    """

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        self._blocks = blocks
        ops = np.concatenate([np.zeros(0, np.int64), *(block.a for block in blocks)])
        order = np.argsort(ops, kind="stable")  # an op that is compared with several calls of b keeps their order
        sizes = [len(block.a) for block in blocks]
        self._block = np.repeat(np.arange(len(blocks)), sizes)[order]
        self._row = np.concatenate([np.zeros(0, np.int64), *(np.arange(size) for size in sizes)])[order]
        worst = np.concatenate([np.zeros(0, np.uint8), *(block.state.max(1) for block in blocks)])[order]
        self.differs = worst > IDENTICAL
        self.is_origin = worst == ORIGIN

    def __len__(self) -> int:
        """How many there are."""
        return len(self._row)

    @overload
    def __getitem__(self, at: int) -> OpComparison: ...
    @overload
    def __getitem__(self, at: slice) -> list[OpComparison]: ...
    def __getitem__(self, at: int | slice) -> OpComparison | list[OpComparison]:
        """One of them."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        block, row = self._blocks[self._block[at]], int(self._row[at])
        return OpComparison(int(block.a[row]), int(block.b[row]), block.keys, block.state[row], block.inputs_of(row))

    def differing(self) -> Iterator[OpComparison]:
        """Those with a row that differs."""
        return (self[at] for at in np.flatnonzero(self.differs).tolist())

    def holding(self, prompt: int) -> Iterator[OpComparison]:
        """Those with a row of one of a prompt's tokens."""
        names = [split_keys(block.keys) for block in self._blocks]
        holds = np.array([bool(((prompts == prompt) & (positions >= 0)).any()) for prompts, positions in names], bool)
        return (self[at] for at in np.flatnonzero(holds[self._block]).tolist())


@dataclass(frozen=True)
class ModuleDifference:
    """A module whose output rows differ, made by ops that are not aligned with each other.

    Attributes:
        module: its name.
        a, b: the ops that made the outputs.
        keys: the rows that differ.
    """

    module: str
    a: int
    b: int
    keys: Array


@dataclass
class TraceComparison:
    """All ops that two traces have in common, and what they do not.

    Attributes:
        ops: in the order of trace a.
        only_a, only_b: ops that computed something in one trace only.
        incomparable: (op of a, op of b, why) where both ran but their rows have other widths or dtypes.
        unlaid_differ: ops of a whose output could not be laid out and differs as a whole, in calls given the same tokens.
        rows_compared: row digests compared.
        aligned: op index of a -> op index of b, for computing ops.
        outputs: modules whose outputs differ and were made by ops that do not correspond (a hook that changes them, say).
    """

    ops: OpComparisons = field(default_factory=OpComparisons)
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)
    incomparable: list[tuple[int, int, str]] = field(default_factory=list)
    unlaid_differ: list[int] = field(default_factory=list)
    rows_compared: int = 0
    aligned: dict[int, int] = field(default_factory=dict)
    outputs: list[ModuleDifference] = field(default_factory=list)


def compare_traces(a: Trace, b: Trace, limits: dict[int, int] | None = None) -> TraceComparison:
    """Compares every op that two traces have in common, row by row.

    Args:
        a, b: the traces; their prompts have the same numbers.
        limits: per prompt, the first position that is left out.
    """
    return _TraceComparer(a, b).compare(pair_calls(a, b, limits))


class _TraceComparer:
    """Compares pair of calls by pair of calls; in each, ops whose outputs have the same rows are compared in one step."""

    def __init__(self, a: Trace, b: Trace) -> None:
        self._sides = Sides(a, b)
        self._judge = InputJudge(self._sides)
        self._aligner = Aligner()
        self._result = TraceComparison()
        self._blocks: list[Block] = []
        self._outputs_a, self._outputs_b = _outputs_by_call(a), _outputs_by_call(b)

    def compare(self, pairs: list[CallPair]) -> TraceComparison:
        sides, result = self._sides, self._result
        seen_a: set[int] = set()
        seen_b: set[int] = set()
        for pair in pairs:
            ops_a, ops_b = sides.a.of_call(pair.a), sides.b.of_call(pair.b)
            alignment = self._align(ops_a, ops_b)
            only_a = [sides.a.ops[i] for i in ops_a[list(alignment.only_a)].tolist()]
            only_b = [sides.b.ops[i] for i in ops_b[list(alignment.only_b)].tolist()]
            if pair.a not in seen_a:
                result.only_a += [op.index for op in only_a]
            if pair.b not in seen_b:
                result.only_b += [op.index for op in only_b]
            seen_a.add(pair.a)
            seen_b.add(pair.b)
            matches = np.array(alignment.pairs, np.int64).reshape(-1, 2)
            aligned = self._compare_ops(pair, ops_a[matches[:, 0]], ops_b[matches[:, 1]])
            for region in [op for op in only_a if op.op == REGION]:
                other = region_as_op(sides.b.trace, pair.b, region.module, REGION)
                self._compare_some(pair, [(region, other)])
            for region in [op for op in only_b if op.op == REGION]:
                other = region_as_op(sides.a.trace, pair.a, region.module, REGION)
                self._compare_some(pair, [(other, region)])
            self._compare_outputs(pair, aligned)
        result.ops = OpComparisons(self._blocks)
        return result

    def _align(self, ops_a: Array, ops_b: Array) -> OpAlignment:
        a, b = self._sides.a, self._sides.b
        if not (a.reads_experts or b.reads_experts) and np.array_equal(a.op_code[ops_a], b.op_code[ops_b]):
            return OpAlignment(tuple((i, i) for i in range(len(ops_a))), (), ())
        return self._aligner(a.program(ops_a), b.program(ops_b))

    def _compare_ops(self, pair: CallPair, at_a: Array, at_b: Array) -> dict[int, int]:
        """Compares aligned ops, those of one output in steps; returns which op of a is which of b in this pair."""
        a, b = self._sides.a, self._sides.b
        ops = [(a.ops[i], b.ops[j]) for i, j in zip(at_a.tolist(), at_b.tolist(), strict=True)]
        aligned = {op_a.index: op_b.index for op_a, op_b in ops}
        for op_a, op_b in aligned.items():
            self._result.aligned.setdefault(op_a, op_b)
        outs_a, outs_b = a.op_output[at_a], b.op_output[at_b]
        is_single = (a.op_num_outputs[at_a] == 1) & (b.op_num_outputs[at_b] == 1)
        codes = np.where(is_single, self._sides.codes(outs_a, outs_b), -1)
        for code in np.unique(codes[codes >= 0]).tolist():
            which = np.flatnonzero(codes == code)
            self._compare_block(pair, [ops[i] for i in which.tolist()], [(code, outs_a[which], outs_b[which])])
        self._compare_some(pair, [ops[i] for i in np.flatnonzero(codes < 0).tolist()])
        return aligned

    def _compare_some(self, pair: CallPair, ops: list[tuple[OpRecord, OpRecord]]) -> None:
        """Compares ops of any number of outputs; what has no rows, or other ones, is listed."""
        result, sides = self._result, self._sides
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        outputs = [list(zip(op_a.outputs, op_b.outputs, strict=False)) for op_a, op_b in ops]
        all_codes = iter(sides.codes(*np.array(list(chain.from_iterable(outputs)), np.int64).reshape(-1, 2).T).tolist())
        for number, (op_a, op_b) in enumerate(ops):
            codes = tuple(islice(all_codes, len(outputs[number])))
            alike[codes].append(number)
            for (out_a, out_b), code in zip(outputs[number], codes, strict=True):
                if code >= 0:
                    continue
                ta, tb = sides.a.trace.tensors[out_a], sides.b.trace.tensors[out_b]
                if ta.status == tb.status == "rows":
                    result.incomparable.append((op_a.index, op_b.index, _why(ta, tb)))
                elif "unlaid" in (ta.status, tb.status) and sides.are_one_call(pair):
                    if sides.whole_equal(out_a, out_b) is False:
                        result.unlaid_differ.append(op_a.index)
        for codes, numbers in alike.items():
            members = [ops[i] for i in numbers]
            outputs_a, outputs_b = (np.array([op[side].outputs[: len(codes)] for op in members]) for side in (0, 1))
            slots = [(code, outputs_a[:, k], outputs_b[:, k]) for k, code in enumerate(codes) if code >= 0]
            self._compare_block(pair, members, slots)

    def _compare_block(
        self, pair: CallPair, ops: list[tuple[OpRecord, OpRecord]], outputs: list[tuple[int, Array, Array]]
    ) -> None:
        """Compares ops that have the same rows.

        Args:
            pair: the calls.
            ops: each op in both traces.
            outputs: (code of the layouts, tensors of a, tensors of b), once per output that can be compared.
        """
        joins = [self._sides.join(code) for code, _, _ in outputs]
        chosen = [self._sides.chosen(join, pair) for join in joins]
        self._result.rows_compared += len(ops) * sum(len(keys) for _, keys in chosen)
        if not chosen or not len(chosen[0][1]):
            return
        keys = chosen[0][1]
        state = np.empty((len(ops), len(keys)), np.uint8)
        inputs: list[InputAnswers] = []
        step = max(1, STEP_ROWS // len(joins[0].keys))
        for start in range(0, len(ops), step):
            some = slice(start, start + step)
            equal = np.ones(state[some].shape, bool)
            for join, (inside, own), (_, a, b) in zip(joins, chosen, outputs, strict=True):
                if own is keys or np.array_equal(own, keys):  # several outputs: a row is identical where all of them are
                    equal &= self._sides.equal(join, a[some], b[some])[:, inside]
            state[some], found = self._judge.judge(ops[some], keys, equal)
            inputs += [told._replace(ops=told.ops + start) for told in found]
        index_a, index_b = (np.array([op[side].index for op in ops], np.int64) for side in (0, 1))
        self._blocks.append(Block(index_a, index_b, keys, state, inputs))

    def _compare_outputs(self, pair: CallPair, aligned: dict[int, int]) -> None:
        """Compares what modules returned, where the ops that made it do not correspond: no op's own comparison shows that."""
        sides, result = self._sides, self._result
        of_b = self._outputs_b.get(pair.b, {})
        for name, output in self._outputs_a.get(pair.a, {}).items():
            other = of_b.get(name)
            if other is None:
                continue
            made_a, made_b = sides.a.trace.tensors[output].op, sides.b.trace.tensors[other].op
            if aligned.get(made_a) == made_b:
                continue
            numbers = np.array([output]), np.array([other])
            (code,) = sides.codes(*numbers).tolist()
            if code < 0:
                continue
            join = sides.join(code)
            inside, keys = sides.chosen(join, pair)
            parted = keys[~sides.equal(join, *numbers)[0, inside]]
            if len(parted):
                result.outputs.append(ModuleDifference(name[0], made_a, made_b, parted))


def _outputs_by_call(trace: Trace) -> dict[int, dict[tuple[str, int], int]]:
    """Call -> (module, how often it was called before) -> the tensor it returned."""
    calls: dict[int, dict[tuple[str, int], int]] = defaultdict(dict)
    times: dict[tuple[int, str], int] = defaultdict(int)
    for record in trace.modules:
        if record.output >= 0 and trace.tensors[record.output].op >= 0:
            at = (record.call, record.module)
            calls[record.call][record.module, times[at]] = record.output
            times[at] += 1
    return calls


def _why(a: TensorRecord, b: TensorRecord) -> str:
    if a.dtype != b.dtype:
        return f"{a.dtype} against {b.dtype}"
    return f"rows of {a.width} against {b.width} elements"


def first_difference(a: Trace, b: Trace) -> tuple[OpRecord, OpRecord] | None:
    """The first op at which two executions of *one* condition differ in any digest, rows without names included.

    A stricter and faster question than `compare_traces`: the same condition must give the same ops and digests.
    """
    for op_a, op_b in zip(a.ops, b.ops, strict=False):
        if op_a.key != op_b.key:
            return op_a, op_b
        if op_a.is_view:
            continue
        for out_a, out_b in zip(op_a.outputs, op_b.outputs, strict=False):
            if not np.array_equal(a.tensors[out_a].digests, b.tensors[out_b].digests):
                return op_a, op_b
    if len(a.ops) != len(b.ops):
        longer = a if len(a.ops) > len(b.ops) else b
        extra = longer.ops[min(len(a.ops), len(b.ops))]
        return extra, extra
    return None
