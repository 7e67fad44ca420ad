"""What a comparison says: verdict, first divergence, origins and carriers, token flips, controls."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from detlab.divergence.rows import CARRIER, ORIGIN, OpComparison, TraceComparison
from detlab.trace.records import Array, TensorRecord, Trace, split_keys

if TYPE_CHECKING:
    import pandas as pd

    from detlab.divergence.amplification import LayerGain
    from detlab.divergence.graft import IsolatedOp

IDENTICAL_VERDICT, DIVERGED, CONTROL_FLOW, DIFFERENT_INPUTS = "identical", "diverged", "control_flow", "different_inputs"


@dataclass
class Divergence:
    """One place where two runs differ.

    Attributes:
        kind: "origin" (inputs matched, output differs) or "carrier" (an input differed already).
        module, op, occurrence: where in the model; occurrence counts ops of this name in this module and call.
        call: the step: 0 is prefill, then one per decoded token; the call's index in bare traces.
        prompt, position: the first row that differs; position -1 where the tensor has one row for the whole prompt.
        inputs: every input of the op: "matched", "differs", or "unknown" (only one side has it, or other shapes).
        num_rows: rows of this op that differ in this call.
        max_ulp, max_abs, share: size of the difference over those rows, as far as they belong to the prompt of the comparison's
            first divergence: largest ULP distance, largest absolute difference, share of elements that differ; None where
            tensors were not at hand or the row is another prompt's.
        source: for a carrier, the first differing input's producer: module, op and call; "" for an origin.
    """

    kind: str
    module: str
    op: str
    occurrence: int
    call: int
    prompt: int
    prompt_id: str
    position: int
    inputs: dict[str, str]
    num_rows: int
    max_ulp: int | None = None
    max_abs: float | None = None
    share: float | None = None
    source: str = ""
    op_index: int = field(default=-1, repr=False)

    @property
    def comparison(self) -> Comparison | None:
        """The comparison that found it; None for one that was made by hand."""
        return self.__dict__.get("_comparison")  # no field: it would be compared, copied and printed with the rest

    @property
    def inputs_matched(self) -> bool:
        """Whether no input differed: the op itself made the difference."""
        return self.kind == "origin"

    @property
    def phase(self) -> str:
        """"prefill" or "decode step N"."""
        return "prefill" if self.call == 0 else f"decode step {self.call}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        data = asdict(self)
        data.pop("op_index")
        if self.max_abs is not None and not math.isfinite(self.max_abs):
            data["max_abs"] = "inf"  # JSON has no infinity
        return data | {"inputs_matched": self.inputs_matched}

    def __str__(self) -> str:
        where = f"{self.module or '(model)'} · {self.op}"
        row = f"prompt {self.prompt_id}, position {self.position}" if self.position >= 0 else f"prompt {self.prompt_id}"
        if self.inputs_matched:
            why = "inputs matched"
        else:
            broken = ", ".join(n for n, v in self.inputs.items() if v == "differs") or "inputs"
            why = f"{broken} already differed" + (f" (from {self.source})" if self.source else "")
        size = "" if self.max_abs is None else f"; up to {self.max_abs:.3g} ({_ulps(self.max_ulp)})"
        return f"{where} at {row}, {self.phase}: {why}{size}"


def _ulps(count: int | None) -> str:
    if count is None:
        return "ULP unknown"
    return "NaN on one side" if count >= 1 << 62 else f"{count:,} ULP"


@dataclass(frozen=True)
class TokenFlip:
    """The first step at which free greedy decoding of one prompt chose another token."""

    prompt: int
    prompt_id: str
    step: int
    a_token: int
    b_token: int


@dataclass
class Grid:
    """Ops x positions of one prompt, for a heatmap.

    Attributes:
        modules, ops: the rows' names, in execution order.
        positions: the columns.
        state: uint8 [ops, positions]: 0 not computed in both, 1 identical, 2 carrier, 3 origin.
        max_abs: float64 [ops, positions]: largest absolute difference of the row; NaN where not measured; 0 where identical.
    """

    prompt: int
    modules: list[str]
    ops: list[str]
    positions: list[int]
    state: Array
    max_abs: Array


@dataclass
class Comparison:
    """Two runs or traces, compared row by row.

    Attributes:
        verdict: "identical", "diverged", "control_flow" (the runs took different code paths), or, of bare traces,
            "different_inputs" (the model was asked different questions: nothing is said about its arithmetic).
        first: the first divergence in execution order, or None.
        origins: one entry for each op and call with at least one origin row, in execution order.
        carriers: the same for ops that only passed a difference on.
        token_flips: first flipped token per prompt, decoding freely.
        rows_compared: row digests compared.
        controls: name -> True (held), False (failed) or None (could not be run).
        cosine: smallest cosine similarity between corresponding logits; None where a trace has no logits.
        num_nan: logits that were NaN, in a and in b.
        teacher_forced: whether b was fed a's tokens for this comparison.
        notes: what limits the comparison, in words.
        sides: the runs or traces that were held against each other; b as it was fed for the comparison.
    """

    verdict: str
    first: Divergence | None
    origins: list[Divergence]
    carriers: Sequence[Divergence]
    token_flips: list[TokenFlip]
    rows_compared: int
    controls: dict[str, bool | None]
    cosine: float | None
    num_nan: tuple[int, int]
    logits_equal: bool | None
    teacher_forced: bool
    notes: list[str]
    label_a: str
    label_b: str
    prompt_ids: list[str]
    texts: tuple[list[str] | None, list[str] | None] = (None, None)
    sides: tuple[Any, Any] | None = field(default=None, repr=False)
    detail: TraceComparison = field(default_factory=TraceComparison, repr=False)
    trace: Trace = field(default_factory=Trace, repr=False)
    sizes: dict[int, tuple[Array, Array, Array]] = field(default_factory=dict, repr=False)

    def remember(self, a: Any, b: Any) -> Comparison:
        """Lets every entry lead back here, and from here to the runs: what explains a difference runs them again."""
        self.sides = (a, b)

        def link(entry: Divergence) -> None:
            entry.__dict__["_comparison"] = self

        if isinstance(self.carriers, Entries):
            self.carriers.change(link)
        for entry in (*self.origins, *(() if isinstance(self.carriers, Entries) else self.carriers)):
            link(entry)
        if self.first is not None:
            link(self.first)
        return self

    def all_origins(self, **options: Any) -> list[IsolatedOp]:
        """Every op that makes a difference of its own, hidden ones included; see `divergence.graft.all_origins`."""
        from detlab.divergence.graft import all_origins  # it builds on this module

        return all_origins(self, **options)

    def amplification(self, **options: Any) -> list[LayerGain]:
        """How much each layer grows or shrinks the difference that reaches it; see `divergence.amplification`."""
        from detlab.divergence.amplification import amplification  # it builds on this module

        return amplification(self, **options)

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Plain values, for machines. ``most`` limits the list of origins; carriers are counted only."""
        return {
            "verdict": self.verdict,
            "a": self.label_a,
            "b": self.label_b,
            "first": self.first.to_json() if self.first else None,
            "origins": [d.to_json() for d in self.origins[:most]],
            "num_origins": len(self.origins),
            "num_carriers": len(self.carriers),
            "token_flips": [asdict(flip) for flip in self.token_flips],
            "rows_compared": self.rows_compared,
            "controls": self.controls,
            "logits_equal": self.logits_equal,
            "cosine": self.cosine,
            "num_nan": list(self.num_nan),
            "teacher_forced": self.teacher_forced,
            "notes": self.notes,
        }

    def to_pandas(self) -> pd.DataFrame:
        """One line per op and call that differs, in execution order."""
        import pandas as pd

        columns = [
            "kind", "module", "op", "occurrence", "call", "prompt_id", "position", "num_rows", "max_ulp", "max_abs", "share",
            "source",
        ]  # fmt: skip
        entries = sorted([*self.origins, *self.carriers], key=lambda d: d.op_index)
        return pd.DataFrame([{c: getattr(d, c) for c in columns} for d in entries], columns=columns)

    def grid(self, prompt: int | None = None) -> Grid:
        """The heatmap of one prompt: the first divergence's by default."""
        if prompt is None:
            prompt = self.first.prompt if self.first else 0
        return _grid(self, prompt)

    def summary(self) -> str:
        """The answer in a few lines of plain text."""
        lines = [f"a: {self.label_a}", f"b: {self.label_b}", f"verdict: {self.verdict}"]
        if self.first is None:
            lines.append(f"all {self.rows_compared:,} rows compared are bitwise equal")
        else:
            lines.append(f"first: {self.first}")
            others = [d for d in self.origins if d.op_index != self.first.op_index]
            if others:
                lines.append(f"other origins: {len(others)} (such as {others[0]})")
            lines.append(f"rows compared: {self.rows_compared:,}; ops that carried the difference on: {len(self.carriers):,}")
        if self.cosine is not None:
            lines.append(f"logits: {'bitwise equal' if self.logits_equal else 'differ'}, smallest cosine {self.cosine:.9f}")
        for flip in self.token_flips:
            lines.append(f"token flip: prompt {flip.prompt_id}, step {flip.step}: {flip.a_token} against {flip.b_token}")
        held = {True: "held", False: "FAILED", None: "not run"}
        lines.append("controls: " + ", ".join(f"{name} {held[value]}" for name, value in self.controls.items()))
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td style='text-align:left'>{html.escape(line)}</td></tr>" for line in self.summary().splitlines())
        return f"<table>{rows}</table>"


class Entries(Sequence[Divergence]):
    """Entries that are made when they are asked for: carriers can be tens of thousands, of which few are looked at.

    An entry is the same object every time. As a sequence it equals any other of equal entries, a list for one.
    """

    def __init__(self, num: int, make: Callable[[int], Divergence]) -> None:
        self._num, self._make = num, make
        self._made: dict[int, Divergence] = {}
        self._changes: list[Callable[[Divergence], None]] = []

    def change(self, change: Callable[[Divergence], None]) -> None:
        """Applies a change to every entry, to those that are not made yet when they are."""
        self._changes.append(change)
        for entry in self._made.values():
            change(entry)

    def __len__(self) -> int:
        """How many there are."""
        return self._num

    @overload
    def __getitem__(self, at: int) -> Divergence: ...
    @overload
    def __getitem__(self, at: slice) -> list[Divergence]: ...
    def __getitem__(self, at: int | slice) -> Divergence | list[Divergence]:
        """One entry, or a list of some."""
        numbers = range(self._num)[at]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        if numbers not in self._made:
            entry = self._made[numbers] = self._make(numbers)
            for change in self._changes:
                change(entry)
        return self._made[numbers]

    def __eq__(self, other: object) -> bool:
        """Whether another sequence has equal entries in the same order."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    def __repr__(self) -> str:
        shown = ", ".join(repr(entry) for entry in self[:3])
        return f"[{shown}{', ...' if len(self) > 3 else ''}] ({len(self):,} entries)"


def divergences(
    a: Trace, b: Trace, detail: TraceComparison, prompt_ids: list[str]
) -> tuple[Divergence | None, list[Divergence], Entries]:
    """Turns differing ops into entries, in execution order: (the first, origins, carriers); sizes are filled in later."""

    def entry(at: int) -> Divergence:
        return _divergence(a, b, detail, detail.ops[at], prompt_ids)

    ops = detail.ops
    at_origins, at_carriers = np.flatnonzero(ops.is_origin).tolist(), np.flatnonzero(ops.differs & ~ops.is_origin).tolist()
    origins = [entry(at) for at in at_origins]
    carriers = Entries(len(at_carriers), lambda number: entry(at_carriers[number]))
    if at_origins and not (at_carriers and at_carriers[0] < at_origins[0]):
        return origins[0], origins, carriers
    return (carriers[0] if at_carriers else None), origins, carriers


def _divergence(a: Trace, b: Trace, detail: TraceComparison, found: OpComparison, prompt_ids: list[str]) -> Divergence:
    op = a.ops[found.a]
    is_origin = bool((found.state == ORIGIN).any())
    rows = found.keys[found.state == (ORIGIN if is_origin else CARRIER)]
    prompt, position = split_keys(rows[:1])
    source = ""
    if not is_origin:
        source = _source(a, b, detail, found)
    return Divergence(
        kind="origin" if is_origin else "carrier",
        module=op.module,
        op=op.op,
        occurrence=op.occurrence,
        call=a.calls[op.call].step,
        prompt=int(prompt[0]),
        prompt_id=prompt_ids[int(prompt[0])] if int(prompt[0]) < len(prompt_ids) else str(int(prompt[0])),
        position=max(-1, int(position[0])),
        inputs=dict(found.inputs),
        num_rows=int((found.state > 1).sum()),
        source=source,
        op_index=found.a,
    )


def _source(a: Trace, b: Trace, detail: TraceComparison, found: OpComparison) -> str:
    """Names what made a carrier's first differing input, and the earlier call it comes from where it does."""
    op = a.ops[found.a]
    of_b = {name: number for name, number, _ in b.ops[found.b].inputs}
    for name, number, _ in op.inputs:
        if found.inputs.get(name) != "differs":
            continue
        record = a.tensors[_broken_part(a, b, number, of_b[name], found)]
        if record.kind != "op":
            return f"{record.kind} {record.name}".strip()
        maker = a.producer(record.number)
        if maker is None:
            return "an earlier call"
        maker_b, partner = b.producer(of_b[name]), detail.aligned.get(maker.index)
        if maker_b is None or partner is None or b.ops[partner].key != maker_b.key:
            stored, other = _stored_behind(a, record), _stored_behind(b, b.tensors[of_b[name]])
            if stored is not None and other is not None and stored.name == other.name and _are_unlike(stored, other):
                return f"{stored.kind} {stored.name}"  # the op only casts it, which the other side did not need
        step = a.calls[maker.call].step
        when = f" in call {step}" if maker.call != op.call else ""
        return f"{maker.module or '(model)'} · {maker.op}{when}"
    return ""


def _stored_behind(trace: Trace, record: TensorRecord) -> TensorRecord | None:
    """The parameter or buffer from which alone a tensor was made, or which it is."""
    while record.kind == "op":
        maker = trace.producer(record.number)
        if maker is None or len(maker.inputs) != 1 or maker.inputs[0][1] >= record.number:
            return None
        record = trace.tensors[maker.inputs[0][1]]
    return record if record.kind in ("parameter", "buffer") else None


def _are_unlike(a: TensorRecord, b: TensorRecord) -> bool:
    return a.dtype != b.dtype or not np.array_equal(a.digests, b.digests)


def _broken_part(a: Trace, b: Trace, ours: int, theirs: int, found: OpComparison) -> int:
    """The part of a cache that grew call by call in which the first differing row lies that the carrier's first row sees."""
    parts = a.tensors[ours].parts
    if not parts:
        return ours
    (keys_a, digests_a), (keys_b, digests_b) = a.rows(ours), b.rows(theirs)
    keys, at_a, at_b = np.intersect1d(keys_a, keys_b, return_indices=True)
    prompt, position = split_keys(keys)
    (row_prompt,), (row_position,) = split_keys(found.keys[found.state == CARRIER][:1])
    seen = (prompt == row_prompt) & (position <= row_position)
    broken = keys[seen & (digests_a[at_a] != digests_b[at_b])]
    return next((part for part in parts if np.isin(a.rows(part)[0], broken[:1]).any()), ours)


def _grid(comparison: Comparison, prompt: int) -> Grid:
    trace = comparison.trace
    order: dict[tuple[str, str, int], int] = {}
    cells: list[tuple[int, Array, Array, Array]] = []
    places: dict[int, tuple[Array, Array]] = {}  # per array of keys, which many ops share: the prompt's rows, their positions
    for found in comparison.detail.ops.holding(prompt):
        if id(found.keys) not in places:
            names, position = split_keys(found.keys)
            mine = np.flatnonzero((names == prompt) & (position >= 0))
            places[id(found.keys)] = mine, position[mine]
        mine, position = places[id(found.keys)]
        line = order.setdefault(trace.ops[found.a].key, len(order))
        state = found.state[mine]
        size = np.where(state == 1, 0.0, np.nan)
        measured = comparison.sizes.get(found.a)
        if measured is not None:
            keys, max_abs, _ = measured
            at = np.searchsorted(keys, found.keys[mine])
            inside = (at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == found.keys[mine])
            size[inside] = max_abs[at[inside]]
        cells.append((line, position, state, size))
    positions = np.unique(np.concatenate([np.zeros(0, np.int64), *(position for _, position in places.values())]))
    state_grid = np.zeros((len(order), len(positions)), np.uint8)
    max_abs_grid = np.full((len(order), len(positions)), np.nan)
    for line, position, states, size in cells:
        at = np.searchsorted(positions, position)
        worse = states >= state_grid[line, at]
        chosen = at[worse]
        state_grid[line, chosen] = states[worse]
        max_abs_grid[line, chosen] = size[worse]
    return Grid(prompt, [k[0] for k in order], [k[1] for k in order], positions.tolist(), state_grid, max_abs_grid)
