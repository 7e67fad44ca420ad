"""The causal check: a's rows are put in at the named origin while b runs. If nothing differs then, that was the cause.

The same experiment at every op at once is the isolated replay: each op of b meets a's inputs, so that an op that makes a
difference of its own is seen although an earlier one did so before it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from detlab.divergence.compare import compare
from detlab.divergence.graft_rows import RowsOf, targets_from
from detlab.divergence.replay import Again, Side, Targets, comparison_of, replay, sides_of
from detlab.divergence.result import Comparison, Divergence, divergences
from detlab.divergence.rows import ORIGIN, compare_traces
from detlab.errors import UsageError
from detlab.trace.records import Trace

if TYPE_CHECKING:
    from detlab.runner import Run


#: Kinds of ops at which rows are put in together, at most.
MOST_KINDS = 6


@dataclass
class Grafted:
    """What b did with a's rows put in.

    Attributes:
        ops: ops at which rows of a were put in, and at which b had computed other bits.
        rows: rows that were put in and differed.
        differing: ops that differ from a, still.
        first: the first of them, or None.
    """

    ops: int
    rows: int
    differing: int
    first: Divergence | None


@dataclass
class Graft:
    """Whether the named origin is the cause, by experiment.

    Attributes:
        divergence: the origin.
        before: ops that differ between a and b.
        alone: b with a's rows at the named op and call alone.
        kind: b with a's rows at every op of that name, in every call; None where ``alone`` left nothing.
        others: where ``kind`` leaves another origin: b with a's rows at all ops of these kinds together; None else.
        kinds: names of these ops, the origin's first.
        notes: what could not be put in.
    """

    divergence: Divergence
    before: int
    alone: Grafted
    kind: Grafted | None = None
    others: Grafted | None = None
    kinds: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def proved(self) -> bool:
        """Whether all bits of b match a's, once the origin (alone, or with its kind) returns a's rows."""
        return self.alone.differing == 0 or (self.kind is not None and self.kind.differing == 0)

    @property
    def complete(self) -> bool:
        """Whether all bits match once every op of ``kinds`` returns a's rows: then no other kind of op is a cause."""
        return self.proved or (self.others is not None and self.others.differing == 0)

    @property
    def left(self) -> Divergence | None:
        """What still differs first; None where nothing does."""
        if self.proved:
            return None
        return self.kind.first if self.kind is not None else self.alone.first

    def summary(self) -> str:
        """The result in a few sentences."""
        d = self.divergence
        where = f"{d.module or '(model)'} · {d.op} ({d.phase})"
        if self.alone.differing == 0:
            lines = [
                f"proved: with a's {self.alone.rows:,} rows at {where}, all {self.before:,} ops that differed match bit by bit."
            ]
        else:
            lines = [
                f"with a's {self.alone.rows:,} rows at {where} alone, {self.alone.differing:,} of {self.before:,} ops differ "
                f"still, the first of them {self.alone.first}"
            ]
        if self.kind is not None and self.kind.differing == 0:
            lines.append(
                f"proved: with a's rows at all ops named {d.op} ({self.kind.ops:,} of them had computed other bits from a's "
                "inputs), every op matches bit by bit. The cause is this op, wherever the model calls it."
            )
        elif self.kind is not None:
            lines.append(
                f"not proved: with a's rows at all ops named {d.op}, {self.kind.differing:,} ops differ still, the first of "
                f"them {self.kind.first}"
            )
        if self.others is not None:
            named = " and ".join(self.kinds)
            state = "everything matches: these together are the cause" if self.complete else (
                f"{self.others.differing:,} ops differ still, the first of them {self.others.first}"
            )
            lines.append(f"with a's rows at all ops named {named}, {state}.")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""

        def plain(found: Grafted | None) -> dict[str, Any] | None:
            if found is None:
                return None
            first = found.first.to_json() if found.first else None
            return {"ops": found.ops, "rows": found.rows, "differing": found.differing, "first": first}

        return {
            "origin": self.divergence.to_json(), "proved": self.proved, "before": self.before, "alone": plain(self.alone),
            "kind": plain(self.kind), "others": plain(self.others), "kinds": self.kinds, "complete": self.complete,
            "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return "".join(f"<p>{html.escape(line)}</p>" for line in self.summary().splitlines())


def graft(a: Run | Trace, b: Run | Trace, divergence: Divergence | None = None, *, again: Sequence[Again] | None = None,
          model: nn.Module | None = None) -> Graft:  # fmt: skip
    """Puts a's rows in at an origin while b runs, and looks whether everything matches then.

    Args:
        a, b: the runs (or bare traces) that were compared.
        divergence: the origin; None takes the first one that `compare` finds.
        again, model: for bare traces: two functions that repeat the calls of a and of b, and the model.

    Returns:
        A `Graft`: the origin alone, and where that leaves a difference, all ops of its name as well: a cause such as
        "another number of rows" acts wherever the model calls the op.

    Raises:
        UsageError: there is no origin, or a condition needs a fresh process, into which rows cannot be put.
        TraceError: the repetition did not come by the op.
    """
    comparison = comparison_of(divergence)[0] if divergence is not None else compare(a, b, controls=False, measure=False)
    if comparison.sides is not None and comparison.sides[0] is not a:
        raise UsageError("graft: the divergence belongs to another comparison than that of these runs.")
    chosen = divergence or next(iter(comparison.origins), None)
    if chosen is None:
        raise UsageError("graft needs an origin, an op whose inputs matched and whose output differs; there is none here.")
    if chosen.kind != "origin":
        raise UsageError(f"graft needs an origin; {chosen.module} · {chosen.op} only carried a difference on. Try .origins.")
    ours, theirs = sides_of(comparison, again, model)
    refuse_variables(ours, theirs)
    aligned = comparison.detail.aligned
    found = [f for f in comparison.detail.ops.differing() if f.a == chosen.op_index]
    kinds = [chosen.op]
    kind = _of_kinds(ours.trace, aligned, kinds)
    rows_a, rows_b = _rows(ours, theirs, kind + [(f.a, f.b) for f in found], None)
    exact = {f.b: f.keys[f.state == ORIGIN] for f in found}
    alone = _grafted(ours, theirs, comparison, targets_from([(f.a, f.b) for f in found], rows_a, rows_b, exact))
    result = Graft(chosen, int(comparison.detail.ops.differs.sum()), alone, kinds=kinds)
    if alone.differing:
        result.kind = left = _grafted(ours, theirs, comparison, targets_from(kind, rows_a, rows_b))
        while left.first is not None and left.first.kind == "origin" and left.first.op not in kinds and len(kinds) < MOST_KINDS:
            kinds.append(left.first.op)
            pairs = _of_kinds(ours.trace, aligned, kinds)
            rows_a, rows_b = _rows(ours, theirs, pairs, None)
            result.others = left = _grafted(ours, theirs, comparison, targets_from(pairs, rows_a, rows_b))
    if rows_a.is_full or rows_b.is_full:
        result.notes.append("rows were put in until the memory set aside for them was full")
    return result


def _of_kinds(trace: Trace, aligned: dict[int, int], kinds: list[str]) -> list[tuple[int, int]]:
    return [(x, y) for x, y in aligned.items() if trace.ops[x].op in kinds]


def refuse_variables(*sides: Side) -> None:
    """Says that rows cannot be put into a fresh process.

    Raises:
        UsageError: a side's condition needs one.
    """
    for side in sides:
        if side.variables:
            raise UsageError(
                f"{side.name} needs a fresh process ({', '.join(side.variables)}), into which rows cannot be put; "
                "detlab.explain executes the op alone in such a process."
            )


def _rows(a: Side, b: Side, pairs: list[tuple[int, int]], prompts: list[int] | None) -> tuple[RowsOf, RowsOf]:
    """Rows of aligned ops: a's values, and where they go in b."""
    kept = RowsOf({x for x, _ in pairs}, prompts, values=True)
    a.execute(kept)
    places = RowsOf({y for _, y in pairs}, prompts, values=False)
    b.execute(places)
    return kept, places


def _grafted(a: Side, b: Side, comparison: Comparison, targets: Targets) -> Grafted:
    trace, spot = replay(b, targets=targets)
    assert trace is not None
    detail = compare_traces(a.trace, trace)
    first, _, _ = divergences(a.trace, trace, detail, comparison.prompt_ids)
    changed = [r for r in spot.replaced.values() if r.differing]
    return Grafted(len(changed), sum(r.differing for r in changed), int(detail.ops.differs.sum()), first)


# ---------------------------------------------------------------------------------------------------------- all origins
@dataclass(frozen=True)
class IsolatedOp:
    """One op of b, given a's inputs.

    Attributes:
        module, op, occurrence, call: where.
        num_rows, differing: rows compared, and those with other bits.
        own: largest absolute difference that the op makes by itself.
        total: largest absolute difference of its output in the free run of b; None where it was not measured.
        is_masked: whether the comparison could not see it, since its inputs had differed already.
    """

    module: str
    op: str
    occurrence: int
    call: int
    num_rows: int
    differing: int
    own: float
    total: float | None
    is_masked: bool


def all_origins(comparison: Comparison, *, prompt: int | None = None, again: Sequence[Again] | None = None,
                model: nn.Module | None = None) -> list[IsolatedOp]:  # fmt: skip
    """Every op that makes a difference of its own, those that an earlier difference hides among them, in execution order.

    Args:
        comparison: what `compare` returned.
        prompt: the prompt whose rows are looked at; None takes the first divergence's.
        again, model: as for `graft`.

    Raises:
        UsageError: the comparison does not hold its runs, or a condition needs a fresh process.
    """
    a, b = sides_of(comparison, again, model)
    refuse_variables(a, b)
    if prompt is None:
        prompt = comparison.first.prompt if comparison.first is not None else 0
    pairs = [(x, y) for x, y in comparison.detail.aligned.items() if a.trace.ops[x].outputs]
    rows_a, rows_b = _rows(a, b, pairs, [prompt])
    targets = targets_from(pairs, rows_a, rows_b)
    _, spot = replay(b, targets=targets)
    back = {y: x for x, y in pairs}
    seen = {d.op_index for d in comparison.origins}
    made = []
    for number, replaced in sorted(spot.replaced.items()):
        if not replaced.differing:
            continue
        op = a.trace.ops[back[number]]
        sizes = comparison.sizes.get(op.index)
        total = float(np.max(sizes[1])) if sizes is not None and len(sizes[1]) else None
        step = a.trace.calls[op.call].step
        made.append(
            IsolatedOp(
                op.module, op.op, op.occurrence, step, replaced.num_rows, replaced.differing, replaced.max_abs, total,
                op.index not in seen,
            )
        )  # fmt: skip
    return made
