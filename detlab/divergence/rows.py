"""Compares two traces row by row, and tells origins from carriers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from detlab.divergence.align import Aligner, CallPair, pair_calls
from detlab.trace.records import REGION, Array, OpRecord, TensorRecord, Trace, split_keys, without_copy

IDENTICAL, CARRIER, ORIGIN = 1, 2, 3


@dataclass
class OpComparison:
    """One op computed in both traces: its rows, and the state of each.

    Attributes:
        a, b: indices into the traces' ops.
        keys: row keys compared (`align.split_keys` gives prompt and position).
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

    ops: list[OpComparison] = field(default_factory=list)
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)
    incomparable: list[tuple[int, int, str]] = field(default_factory=list)
    unlaid_differ: list[int] = field(default_factory=list)
    rows_compared: int = 0
    aligned: dict[int, int] = field(default_factory=dict)
    outputs: list[ModuleDifference] = field(default_factory=list)


class RowComparer:
    """Compares the rows of tensors of two traces, remembering what it has compared."""

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        self._diffs: dict[tuple[int, int], tuple[Array, Array] | None] = {}
        self._joins: dict[tuple[int, int], tuple[Array, Array | None, Array | None]] = {}
        self._chosen: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._kept: list[Array] = []  # arrays whose id() is a key above must stay alive

    def compare(self, a: int, b: int) -> tuple[Array, Array] | None:
        """(common row keys, whether the rows are equal) of two tensors; None where rows cannot be compared."""
        at = (a, b)
        if at not in self._diffs:
            self._diffs[at] = self._compare(a, b)
        return self._diffs[at]

    def _compare(self, a: int, b: int) -> tuple[Array, Array] | None:
        ta, tb = self.a.tensors[a], self.b.tensors[b]
        if ta.status != "rows" or tb.status != "rows" or ta.width != tb.width or ta.dtype != tb.dtype:
            return None
        keys_a, digests_a = self.a.rows(a)
        keys_b, digests_b = self.b.rows(b)
        join = (id(keys_a), id(keys_b))
        found = self._joins.get(join)
        if found is None:
            if np.array_equal(keys_a, keys_b):
                found = (keys_a, None, None)
            else:
                found = np.intersect1d(keys_a, keys_b, return_indices=True)
            self._joins[join] = found
            self._kept += [keys_a, keys_b, found[0]]
        keys, at_a, at_b = found
        if at_a is None or at_b is None:
            return keys, digests_a == digests_b
        return keys, digests_a[at_a] == digests_b[at_b]

    def chosen(self, keys: Array, pair: CallPair) -> tuple[Array, Array]:
        """Which rows belong to a pair of calls, and their keys; rows of a whole prompt belong where any of its tokens does.

        The same arrays every time, so that what is worked out for one op's rows serves the next op's.
        """
        at = (id(keys), id(pair))
        found = self._chosen.get(at)
        if found is None:
            if np.array_equal(keys, pair.keys):
                found = (np.ones(len(keys), bool), keys)
            else:
                prompt, position = split_keys(keys)
                inside = np.isin(without_copy(keys), pair.keys) | ((position == -2) & np.isin(prompt, pair.prompts))
                found = (inside, keys[inside])
            self._chosen[at] = found
            self._kept.append(keys)
        return found

    def are_one_call(self, pair: CallPair) -> bool:
        """Whether both calls were given the same tokens in the same slots, mates and padding included."""
        a, b = self.a.calls[pair.a], self.b.calls[pair.b]
        if a.query != b.query:
            return False
        tables = ((a.prompts, b.prompts), (a.positions, b.positions), (a.tokens, b.tokens))
        return all(np.array_equal(ours, theirs) for ours, theirs in tables)

    def whole_equal(self, a: int, b: int) -> bool | None:
        """Whether two tensors without rows are equal; None where they cannot be compared."""
        ta, tb = self.a.tensors[a], self.b.tensors[b]
        if ta.status == "rows" or tb.status == "rows":
            return None
        if len(ta.digests) == len(tb.digests) == 1 and ta.width == tb.width and ta.dtype == tb.dtype:
            return bool(ta.digests[0] == tb.digests[0])
        stored = ("parameter", "buffer")
        if ta.kind in stored and tb.kind in stored:
            return False  # a weight of another shape or dtype is another weight
        if ta.shape != tb.shape or ta.dtype != tb.dtype or len(ta.digests) != len(tb.digests):
            return None
        return bool(np.array_equal(ta.digests, tb.digests))

    def inputs(
        self, op_a: OpRecord, op_b: OpRecord, rows: Array, which: Array
    ) -> tuple[Array, dict[str, Array | None]]:
        """Tells for output rows whether the inputs they saw matched.

        Args:
            op_a, op_b: the op in both traces.
            rows: sorted keys of all output rows.
            which: the rows that are asked about, as indices into ``rows``.

        Returns:
            (matched, by_input): whether every input that both sides have is known to match, per row; and per input its own
            answer, None where it cannot be compared (rows of another form, or an input that only one side has).
        """
        keys = rows[which]
        matched = np.ones(len(keys), bool)
        by_input: dict[str, Array | None] = {}
        of_b = {name: (number, relation) for name, number, relation in op_b.inputs}
        for name, number_a, relation in op_a.inputs:
            if name not in of_b or relation == "place":
                by_input[name] = None
                continue
            answer = self._input(number_a, of_b[name][0], relation, keys, rows, which)
            by_input[name] = answer
            matched &= False if answer is None else answer
        for name in of_b:
            by_input.setdefault(name, None)
        return matched, by_input

    def _input(self, a: int, b: int, relation: str, keys: Array, rows: Array, which: Array) -> Array | None:
        whole = self.whole_equal(a, b)
        if whole is not None:
            return np.full(len(keys), whole)
        found = self.compare(a, b)
        if found is None or not len(found[0]):
            return None
        in_keys, equal = found
        if relation == "row":
            # Tensors of one layout share their array of keys: row i saw row i.
            return equal[which] if in_keys is rows else _same_row(in_keys, equal, keys)
        # Context: every row of the same prompt up to the row's own position must match.
        prompt, position = split_keys(keys)
        in_prompt, in_position = split_keys(in_keys)
        answer = np.ones(len(keys), bool)
        for name in np.unique(prompt):
            mine = in_prompt == name
            broken = in_position[mine & ~equal]
            first = broken.min() if len(broken) else None
            rows = prompt == name
            if first is not None:
                answer[rows] = (position[rows] >= 0) & (position[rows] < first)
        return answer


def _same_row(in_keys: Array, equal: Array, keys: Array) -> Array:
    """Whether each output row's own input row matched; a row that the input does not have counts as matched."""
    tokens_in = without_copy(in_keys)
    if not np.array_equal(tokens_in, in_keys):
        # Copies are numbered in the order in which a tensor holds them, which sorting by expert changes: all must match.
        in_keys, first = np.unique(tokens_in, return_inverse=True)
        gathered = np.ones(len(in_keys), bool)
        np.logical_and.at(gathered, first, equal)
        equal = gathered
    keys = without_copy(keys)  # a token is sent to several places: each copy saw the token's row
    at = np.searchsorted(in_keys, keys)
    inside = (at < len(in_keys)) & (in_keys[np.minimum(at, len(in_keys) - 1)] == keys)
    answer = np.ones(len(keys), bool)
    answer[inside] = equal[at[inside]]
    if not inside.all():  # a row of the whole prompt sees all its tokens' rows, and each of those sees it
        prompt, position = split_keys(keys)
        in_prompt, in_position = split_keys(in_keys)
        broken, broken_whole = in_prompt[~equal], in_prompt[~equal & (in_position == -2)]
        answer[~inside & (position == -2)] = ~np.isin(prompt[~inside & (position == -2)], broken)
        answer[~inside & (position >= 0)] = ~np.isin(prompt[~inside & (position >= 0)], broken_whole)
    return answer


def compare_traces(a: Trace, b: Trace, limits: dict[int, int] | None = None) -> TraceComparison:
    """Compares every op that two traces have in common, row by row.

    Args:
        a, b: the traces; their prompts have the same numbers.
        limits: per prompt, the first position that is left out.
    """
    result = TraceComparison()
    comparer = RowComparer(a, b)
    aligner = Aligner()
    ops_a, ops_b = _computing(a), _computing(b)
    seen_a: set[int] = set()
    seen_b: set[int] = set()
    pairs = pair_calls(a, b, limits)
    outputs_a, outputs_b = _outputs_by_call(a), _outputs_by_call(b)
    for pair in pairs:
        list_a, list_b = ops_a.get(pair.a, []), ops_b.get(pair.b, [])
        alignment = aligner(_program(a, list_a), _program(b, list_b))
        if pair.a not in seen_a:
            result.only_a += [list_a[i].index for i in alignment.only_a]
        if pair.b not in seen_b:
            result.only_b += [list_b[j].index for j in alignment.only_b]
        seen_a.add(pair.a)
        seen_b.add(pair.b)
        for i, j in alignment.pairs:
            result.aligned.setdefault(list_a[i].index, list_b[j].index)
            _compare_op(result, comparer, pair, list_a[i], list_b[j])
        for region in [list_a[i] for i in alignment.only_a if list_a[i].op == REGION]:
            _compare_op(result, comparer, pair, region, _as_region(b, pair.b, region.module))
        for region in [list_b[j] for j in alignment.only_b if list_b[j].op == REGION]:
            _compare_op(result, comparer, pair, _as_region(a, pair.a, region.module), region)
        _compare_outputs(result, comparer, pair, outputs_a.get(pair.a, {}), outputs_b.get(pair.b, {}))
    result.ops.sort(key=lambda op: op.a)
    return result


def _computing(trace: Trace) -> dict[int, list[OpRecord]]:
    calls: dict[int, list[OpRecord]] = {}
    for op in trace.ops:
        if not op.is_view and op.call >= 0 and op.module != "(outside)":
            calls.setdefault(op.call, []).append(op)
    return calls


def _outputs_by_call(trace: Trace) -> dict[int, dict[tuple[str, int], int]]:
    """Call -> (module, how often it was called before) -> the tensor it returned."""
    calls: dict[int, dict[tuple[str, int], int]] = {}
    for record in trace.modules:
        if record.output >= 0 and trace.tensors[record.output].op >= 0:
            seen = calls.setdefault(record.call, {})
            occurrence = 0
            while (record.module, occurrence) in seen:
                occurrence += 1
            seen[record.module, occurrence] = record.output
    return calls


def _compare_outputs(result: TraceComparison, comparer: RowComparer, pair: CallPair,
                     of_a: dict[tuple[str, int], int], of_b: dict[tuple[str, int], int]) -> None:  # fmt: skip
    """Compares what modules returned, where the ops that made it do not correspond: no op's own comparison shows that."""
    for name, output in of_a.items():
        other = of_b.get(name)
        if other is None:
            continue
        made_a, made_b = comparer.a.tensors[output].op, comparer.b.tensors[other].op
        if result.aligned.get(made_a) == made_b:
            continue
        found = comparer.compare(output, other)
        if found is None:
            continue
        chosen, keys = comparer.chosen(found[0], pair)
        parted = keys[~found[1][chosen]]
        if len(parted):
            result.outputs.append(ModuleDifference(name[0], made_a, made_b, parted))


def _program(trace: Trace, ops: list[OpRecord]) -> tuple[tuple[str, str], ...]:
    """What a call computes, as (module, op).

    An op that reads a part of a parameter (one expert's weight) names the part, and so do the ops of that module that follow
    it: two runs that visit other experts are not held against each other expert by expert.
    """
    program = []
    part, owner = "", ""
    for op in ops:
        for _, number, relation in op.inputs:
            if relation == "whole" and trace.tensors[number].name.endswith("]"):
                part, owner = f" with {trace.tensors[number].name}", op.module
        if part and op.module != owner and not op.module.startswith(f"{owner}."):
            part = ""
        program.append((op.module, op.op + part))
    return tuple(program)


def _as_region(trace: Trace, call: int, module: str) -> OpRecord:
    """A module's call as one op, to be held against the compiled region that the other run made of it."""
    for record in trace.modules:
        if record.call == call and record.module == module and record.output >= 0:
            given = [(n, t, "row" if trace.tensors[t].status == "rows" else "whole") for n, t in record.inputs]
            read = {t for op in trace.ops[record.first_op : record.end_op] for _, t, _ in op.inputs}
            stored = [trace.tensors[t] for t in sorted(read) if trace.tensors[t].kind == "parameter"]
            inputs = (*given, *((t.name.removeprefix(f"{module}."), t.number, "whole") for t in stored))
            return OpRecord(trace.tensors[record.output].op, call, module, REGION, 0, inputs, (record.output,))
    return OpRecord(-1, call, module, REGION, 0, (), ())


def _compare_op(result: TraceComparison, comparer: RowComparer, pair: CallPair, op_a: OpRecord, op_b: OpRecord) -> None:
    keys: Array | None = None
    equal: Array | None = None
    for out_a, out_b in zip(op_a.outputs, op_b.outputs, strict=False):
        ta, tb = comparer.a.tensors[out_a], comparer.b.tensors[out_b]
        found = comparer.compare(out_a, out_b)
        if found is None:
            if ta.status == tb.status == "rows":
                result.incomparable.append((op_a.index, op_b.index, _why(ta, tb)))
            elif "unlaid" in (ta.status, tb.status) and comparer.are_one_call(pair):
                if comparer.whole_equal(out_a, out_b) is False:
                    result.unlaid_differ.append(op_a.index)
            continue
        chosen, chosen_keys = comparer.chosen(found[0], pair)
        result.rows_compared += len(chosen_keys)
        if keys is None or equal is None:
            keys, equal = chosen_keys, found[1][chosen]
        elif keys is chosen_keys or np.array_equal(keys, chosen_keys):
            equal = equal & found[1][chosen]  # several outputs: a row is identical where all of them are
    if keys is None or equal is None or not len(keys):
        return
    state = np.full(len(keys), IDENTICAL, np.uint8)
    named: dict[str, str] = {}
    if not equal.all():
        bad = np.flatnonzero(~equal)
        matched, by_input = comparer.inputs(op_a, op_b, keys, bad)
        state[bad] = np.where(matched, ORIGIN, CARRIER)
        # Describe the row that matters most: the first origin row where there is one.
        at = int(np.flatnonzero(matched)[0]) if matched.any() else 0
        named = {n: "unknown" if v is None else ("matched" if v[at] else "differs") for n, v in by_input.items()}
    result.ops.append(OpComparison(op_a.index, op_b.index, keys, state, named))


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
