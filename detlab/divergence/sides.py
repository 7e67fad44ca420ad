"""The two sides of a comparison, laid out so that many tensors are compared in one step.

Tensors of one call and layout have the same rows. Such tensors are stacked: their digests, gathered from one array that
holds all of a trace's, make a matrix [tensors, rows], and two matrices are compared at once. What rows two layouts have in
common is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detlab.divergence.align import CallPair, Program
from detlab.trace.records import NO_DIGESTS, Array, OpRecord, Trace, split_keys, without_copy


@dataclass(eq=False, frozen=True)
class Form:
    """What rows the tensors of one layout have, and where their digests stand.

    Attributes:
        keys: sorted row keys.
        at: per row, where it stands among the digests of its tensor, or of its part.
        part: per row, which part it comes from; None where the tensor has its own digests.
    """

    keys: Array
    at: Array
    part: Array | None = None


@dataclass(eq=False, frozen=True)
class Join:
    """The rows that a form of a and a form of b have in common; ``at_*`` number them in the form, None for all, in order."""

    form_a: Form
    form_b: Form
    keys: Array
    at_a: Array | None
    at_b: Array | None


class Side:
    """One trace, with the digests of all its rows in one array.

    Attributes:
        trace: the trace.
        layout: per tensor, the number of its form; -1 where it has no rows.
        format: per tensor, a number for its dtype and row width, which both sides share.
        ops: those that compute something in a call, in order; views and what runs between calls are left out.
        op_call, op_code, op_output, op_num_outputs: per op of ``ops``: its call, a number for its (module, op) which both
            sides share, its first output (-1 for none), and how many there are.
    """

    def __init__(self, trace: Trace, formats: dict[Any, int], names: dict[Any, int]) -> None:
        self.trace = trace
        tensors = trace.tensors
        self._digests = np.concatenate([NO_DIGESTS, *(t.digests for t in tensors)])
        sizes = np.array([len(t.digests) for t in tensors], np.int64)
        self._starts = np.cumsum(sizes) - sizes
        self._numbers: dict[Any, int] = {}
        self._forms: dict[int, Form] = {}
        self._parts: dict[int, list[int]] = {}
        self.format = np.array([formats.setdefault((t.dtype, t.width), len(formats)) for t in tensors], np.int64)
        self.layout = self._lay_out()
        self._keys = list(self._numbers)
        self.ops = [op for op in trace.ops if not op.is_view and op.call >= 0 and op.module != "(outside)"]
        self.op_call = np.array([op.call for op in self.ops], np.int64)
        self.op_code = np.array([names.setdefault((op.module, op.op), len(names)) for op in self.ops], np.int64)
        self.op_num_outputs = np.array([len(op.outputs) for op in self.ops], np.int64)
        self.op_output = np.array([op.outputs[0] if op.outputs else -1 for op in self.ops], np.int64)
        self._expert_weights = {t.number for t in tensors if t.name.endswith("]")}

    def _lay_out(self) -> Array:
        tensors, numbers = self.trace.tensors, self._numbers
        layout = [-1] * len(tensors)
        collected = []
        for number, t in enumerate(tensors):
            if t.status != "rows":
                continue
            if t.parts:
                collected.append(number)
                continue
            key = (t.call, t.batch, t.slots, t.pairs)
            found = numbers.get(key)
            if found is None:
                found = numbers[key] = len(numbers)
            if len(t.digests) or not len(self.trace.calls[max(0, t.call)].keys(*key[1:])[0]):  # rows of no elements: no bits
                layout[number] = found
        for number in collected:
            parts = self._parts[number] = self._flat_parts(number)
            layout[number] = numbers.setdefault(tuple(layout[part] for part in parts), len(numbers))
        return np.array(layout, np.int64)

    def _flat_parts(self, number: int) -> list[int]:
        """The tensors that hold the digests of one that only collects rows."""
        flat: list[int] = []
        for part in self.trace.tensors[number].parts:
            record = self.trace.tensors[part]
            if record.status == "rows":
                flat += self._flat_parts(part) if record.parts else [part]
        return flat

    def form(self, layout: int) -> Form:
        """The rows of a layout."""
        found = self._forms.get(layout)
        if found is None:
            key = self._keys[layout]
            found = self._forms[layout] = self._collected(key) if all(isinstance(k, int) for k in key) else self._own(*key)
        return found

    def _own(self, call: int, *layout: Any) -> Form:
        return Form(*self.trace.calls[max(0, call)].keys(*layout))

    def _collected(self, layouts: Sequence[int]) -> Form:
        forms = [self.form(layout) for layout in layouts]
        keys = np.concatenate([NO_DIGESTS, *(form.keys for form in forms)])
        order = np.argsort(keys, kind="stable")
        at = np.concatenate([NO_DIGESTS, *(form.at for form in forms)])
        part = np.repeat(np.arange(len(forms)), [len(form.keys) for form in forms])
        return Form(keys[order], at[order], part[order])

    def digests(self, form: Form, tensors: Array, rows: Array | None) -> Array:
        """Digests [tensors, rows] of tensors of one form; ``rows`` picks some of the form's rows."""
        at = form.at if rows is None else form.at[rows]
        if form.part is None:
            own: Array = self._digests[self._starts[tensors][:, None] + at]
            return own
        part = form.part if rows is None else form.part[rows]
        parts = np.array([self._parts[number] for number in tensors.tolist()], np.int64).reshape(len(tensors), -1)
        collected: Array = self._digests[self._starts[parts][:, part] + at]
        return collected

    def of_call(self, call: int) -> Array:
        """Which of ``ops`` ran in a call."""
        return np.flatnonzero(self.op_call == call)

    @property
    def reads_experts(self) -> bool:
        """Whether any op reads a part of a parameter."""
        return bool(self._expert_weights)

    def program(self, ops: Array) -> Program:
        """What some ops compute, as (module, op).

        An op that reads a part of a parameter (one expert's weight) names the part, and so do the ops of that module that
        follow it: two runs that visit other experts are not held against each other expert by expert.
        """
        program = []
        part, owner = "", ""
        for op in (self.ops[i] for i in ops.tolist()):
            for _, number, relation in op.inputs:
                if relation == "whole" and number in self._expert_weights:
                    part, owner = f" with {self.trace.tensors[number].name}", op.module
            if part and op.module != owner and not op.module.startswith(f"{owner}."):
                part = ""
            program.append((op.module, op.op + part))
        return tuple(program)


class Sides:
    """Two traces, and what the rows of their tensors have in common."""

    def __init__(self, a: Trace, b: Trace) -> None:
        formats: dict[Any, int] = {}
        names: dict[Any, int] = {}
        self.a, self.b = Side(a, formats, names), Side(b, formats, names)
        self._joins: dict[tuple[int, int], Join] = {}
        self._chosen: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._whole: dict[tuple[int, int], bool | None] = {}
        self._one_call: dict[tuple[int, int], bool] = {}

    def codes(self, a: Array, b: Array) -> Array:
        """One number for the layouts of each pair of tensors; -1 where their rows cannot be compared, or they have none."""
        ours, theirs = self.a.layout[a], self.b.layout[b]
        comparable = (ours >= 0) & (theirs >= 0) & (self.a.format[a] == self.b.format[b])
        return np.where(comparable, (ours << 32) + theirs, -1)

    def join(self, code: int) -> Join:
        """The common rows of two layouts that `codes` numbered; the same object every time."""
        at = (code >> 32, code & 0xFFFFFFFF)
        found = self._joins.get(at)
        if found is None:
            form_a, form_b = self.a.form(at[0]), self.b.form(at[1])
            if np.array_equal(form_a.keys, form_b.keys):
                found = Join(form_a, form_b, form_a.keys, None, None)
            else:
                found = Join(form_a, form_b, *np.intersect1d(form_a.keys, form_b.keys, return_indices=True))
            self._joins[at] = found
        return found

    def equal(self, join: Join, a: Array, b: Array) -> Array:
        """Whether the common rows of pairs of tensors are equal, bool [pairs, rows]."""
        equal: Array = self.a.digests(join.form_a, a, join.at_a) == self.b.digests(join.form_b, b, join.at_b)
        return equal

    def chosen(self, join: Join, pair: CallPair) -> tuple[Array, Array]:
        """Which common rows belong to a pair of calls, and their keys.

        Rows of a whole prompt belong where any of its tokens does.
        """
        at = (id(join), id(pair))
        found = self._chosen.get(at)
        if found is None:
            keys = join.keys
            if np.array_equal(keys, pair.keys):
                found = (np.ones(len(keys), bool), keys)
            else:
                prompt, position = split_keys(keys)
                inside = np.isin(without_copy(keys), pair.keys) | ((position == -2) & np.isin(prompt, pair.prompts))
                found = (inside, keys[inside])
            self._chosen[at] = found
        return found

    def are_one_call(self, pair: CallPair) -> bool:
        """Whether both calls were given the same tokens in the same slots, mates and padding included."""
        found = self._one_call.get((pair.a, pair.b))
        if found is None:
            a, b = self.a.trace.calls[pair.a], self.b.trace.calls[pair.b]
            tables = ((a.prompts, b.prompts), (a.positions, b.positions), (a.tokens, b.tokens))
            found = a.query == b.query and all(np.array_equal(ours, theirs) for ours, theirs in tables)
            self._one_call[pair.a, pair.b] = found
        return found

    def whole_equal(self, a: int, b: int) -> bool | None:
        """Whether two tensors without rows are equal; None where they cannot be compared."""
        if (a, b) not in self._whole:
            self._whole[a, b] = self._compare_whole(a, b)
        return self._whole[a, b]

    def _compare_whole(self, a: int, b: int) -> bool | None:
        ta, tb = self.a.trace.tensors[a], self.b.trace.tensors[b]
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


def region_as_op(trace: Trace, call: int, module: str, name: str) -> OpRecord:
    """A module's call as one op, to be held against the compiled region that the other run made of it."""
    for record in trace.modules:
        if record.call == call and record.module == module and record.output >= 0:
            given = [(n, t, "row" if trace.tensors[t].status == "rows" else "whole") for n, t in record.inputs]
            read = {t for op in trace.ops[record.first_op : record.end_op] for _, t, _ in op.inputs}
            stored = [trace.tensors[t] for t in sorted(read) if trace.tensors[t].kind == "parameter"]
            inputs = (*given, *((t.name.removeprefix(f"{module}."), t.number, "whole") for t in stored))
            return OpRecord(trace.tensors[record.output].op, call, module, name, 0, inputs, (record.output,))
    return OpRecord(-1, call, module, name, 0, (), ())
