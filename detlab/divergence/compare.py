"""Compares two runs or traces: controls first, then where they part, then how far apart they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from detlab import bits
from detlab.divergence.measure import keepers, size_differences
from detlab.divergence.result import (
    CONTROL_FLOW,
    DIFFERENT_INPUTS,
    DIVERGED,
    IDENTICAL_VERDICT,
    Comparison,
    Divergence,
    Entries,
    TokenFlip,
    divergences,
)
from detlab.divergence.rows import TraceComparison, compare_traces, first_difference
from detlab.errors import ControlError, TraceError, TraceMismatch, UsageError
from detlab.trace.records import TensorRecord, Trace, split_keys

if TYPE_CHECKING:
    from detlab.runner import Progress, Run


def compare(a: Run | Trace, b: Run | Trace, *, controls: bool = True, measure: bool = True,
            progress: Progress | None = None) -> Comparison:  # fmt: skip
    """Finds where two runs of the same prompts stop being bit-identical.

    Where the runs' model is still at hand, each condition is executed once more. The repetition is the control (the same
    condition must give the same bits) and lends the tensors by which differences are measured. Where greedy texts part,
    the comparison goes on with b fed a's tokens, and the flip of the free run is reported beside it.

    Args:
        a, b: runs (`run`, `load_trace`) or bare traces (`capture`).
        controls: repeat each condition; False leaves the controls out and says so.
        measure: size the differences (ULP, absolute, share of elements); needs the model.
        progress: called with (calls done, calls in all, what).

    Raises:
        TraceMismatch: the runs answer different prompts.
        TraceError: a run has no trace.
        ControlError: the same condition gave other bits when it was repeated, so that a difference between conditions
            would show nothing; its message names the first op that is not repeatable.
    """
    if isinstance(a, Trace) != isinstance(b, Trace):
        raise UsageError("compare takes two runs or two traces; got one of each. Pass run.trace for the run.")
    if isinstance(a, Trace) and isinstance(b, Trace):
        return _compare_bare(a, b)
    return _compare_runs(a, b, controls, measure, progress)  # type: ignore[arg-type]


def first_divergence(a: Run | Trace, b: Run | Trace) -> Divergence | None:
    """The first place where two runs differ, or None. Controls and sizes are left to `compare`."""
    return compare(a, b, controls=False, measure=False).first


def _compare_bare(a: Trace, b: Trace) -> Comparison:
    detail = compare_traces(a, b)
    num_prompts = max((int(c.prompts.max(initial=-1)) + 1 for c in a.calls), default=0)
    ids = [str(i) for i in range(num_prompts)]
    result = _judge(a, b, detail, ids)
    carried = _carried_over(a, b, detail.rows_compared > 0)
    if carried is not None:
        result.verdict, result.first = DIVERGED, carried
        result.carriers = [carried, *result.carriers]
    elif _are_different_questions(a, b, result):
        result.verdict = DIFFERENT_INPUTS
    result.notes += _tokens_that_part(a, b) + _limits(a, b, detail)
    result.controls = {"a_repeated": None, "b_repeated": None}
    return result.remember(a, b)


def _are_different_questions(a: Trace, b: Trace, result: Comparison) -> bool:
    """Whether traces part at what the model was called with, or have no token in common."""
    if result.first is not None:
        return result.first.kind == "carrier" and result.first.source.startswith("input ")
    return not result.rows_compared and not (_tokens(a).keys() & _tokens(b).keys()) and bool(_tokens(a) and _tokens(b))


def _tokens(trace: Trace) -> dict[tuple[int, int], int]:
    """(prompt, position) -> the token that was computed there first; -1 where embeddings were given."""
    found: dict[tuple[int, int], int] = {}
    for call in trace.calls:
        prompts, positions = call.row_names(range(len(call.prompts)), call.query)
        for prompt, position, token in zip(prompts.tolist(), positions.tolist(), call.tokens.reshape(-1).tolist(), strict=True):
            if prompt >= 0:
                found.setdefault((prompt, position), token)
    return found


def _tokens_that_part(a: Trace, b: Trace) -> list[str]:
    """Says which prompts were fed other tokens, or exist in one of the traces only."""
    of_a, of_b = _tokens(a), _tokens(b)
    parted: dict[int, int] = {}
    for prompt, position in sorted(of_a.keys() & of_b.keys()):
        if of_a[prompt, position] != of_b[prompt, position]:
            parted.setdefault(prompt, position)
    notes = []
    for prompt, position in parted.items():
        ours, theirs = of_a[prompt, position], of_b[prompt, position]
        notes.append(f"prompt {prompt} holds other tokens from position {position} on: {ours} in a, {theirs} in b")
    if len(notes) > 4:
        notes = [f"{len(notes)} prompts hold other tokens, the first of them: {notes[0]}"]
    in_a, in_b = {prompt for prompt, _ in of_a}, {prompt for prompt, _ in of_b}
    for side, only in (("a", in_a - in_b), ("b", in_b - in_a)):
        if only and in_a and in_b:
            notes.append(f"prompts that are in {side} only: {_few([str(prompt) for prompt in sorted(only)], 6)}")
    if of_a and of_b and in_a & in_b and not of_a.keys() & of_b.keys():
        notes.append("no token position was computed in both traces")
    return notes


def _carried_over(a: Trace, b: Trace, is_comparable: bool) -> Divergence | None:
    """The first call on top of a cache of another length: state from an earlier call.

    It was given the same tokens; or the traces have no row in common, since the cache moved every token.
    """
    for call_a, call_b in zip(a.calls, b.calls, strict=False):
        start_a, start_b = call_a.query.start, call_b.query.start
        same_tokens = np.array_equal(call_a.tokens, call_b.tokens)
        if start_a != start_b and call_a.tokens.size and (same_tokens or not is_comparable):
            return Divergence(
                kind="carrier", module="", op="(call)", occurrence=0, call=call_a.index, prompt=0, prompt_id="0",
                position=int(call_a.positions[0, start_a]),
                inputs={"input_ids": "matched" if same_tokens else "differs", "cache": "differs"},
                num_rows=call_a.tokens.size, source=f"an earlier call: the cache held {start_a} tokens in a, {start_b} in b",
            )  # fmt: skip
        if start_a != start_b:
            return None
    return None


def _compare_runs(a: Run, b: Run, controls: bool, measure: bool, progress: Progress | None) -> Comparison:
    _check_same_question(a, b)
    if a.trace is None or b.trace is None:
        raise TraceError("compare needs two runs with traces; run again with trace=True.")
    flips = token_flips(a, b)
    forced = b
    notes: list[str] = []
    if a.num_steps != b.num_steps:
        notes.append(f"a has {a.num_steps} steps and b has {b.num_steps}: only what both computed is compared")
    limits: dict[int, int] | None = None
    parted = _parted(a, b)
    if parted and b.is_live:
        fed = [(ours + theirs[len(ours) :])[: len(theirs)] for ours, theirs in zip(_fed(a), _fed(b), strict=True)]
        forced = b.replay(force=fed, progress=progress)
    elif parted:
        limits = {prompt: len(a.inputs[prompt]) + step for prompt, step in parted.items()}
        notes.append("texts part and the model is not at hand to feed b the tokens of a: rows after each flip are left out")
    assert forced.trace is not None
    if a.forced is not None or b.forced is not None:  # what they chose after being fed other tokens is no flip
        flips = [f for f in token_flips(a, forced) if limits is None or f.step <= parted.get(f.prompt, f.step)]
    detail = compare_traces(a.trace, forced.trace, limits)
    result = _judge(a.trace, forced.trace, detail, a.prompt_ids)
    result.token_flips = flips
    result.teacher_forced = forced is not b
    result.label_a, result.label_b = str(a.condition), str(b.condition)
    result.texts = (a.texts, b.texts)
    result.num_nan = (sum(n.count for n in a.nans), sum(n.count for n in b.nans))
    result.cosine, result.logits_equal = _logits(a, forced, limits)
    if result.verdict == CONTROL_FLOW and result.first is None and result.logits_equal and result.rows_compared:
        result.verdict = IDENTICAL_VERDICT  # rows of another form, noted below, that changed no bit of what came after them
    if result.verdict == IDENTICAL_VERDICT and result.logits_equal is False:
        result.verdict = DIVERGED
        notes.append(
            "logits differ although no aligned row does: the difference arises in an op that is unlaid, or that ran in one "
            "of the runs only"
        )
    if flips and result.verdict == IDENTICAL_VERDICT:
        result.verdict = DIVERGED
        notes.append("tokens differ although the logits are bitwise equal: the random draws differ, not the arithmetic")
    if any(result.num_nan):
        notes.append(f"logits hold NaN: {result.num_nan[0]} in a, {result.num_nan[1]} in b; greedy tokens mean nothing there")
    result.notes = notes + _limits(a.trace, forced.trace, detail)
    _repeat(result, a, forced, detail, controls, measure, progress)
    return result.remember(a, forced)


def _check_same_question(a: Run, b: Run) -> None:
    if len(a.inputs) != len(b.inputs):
        raise TraceMismatch(f"the runs answer different prompts: {len(a.inputs)} against {len(b.inputs)}.")
    for i, (ours, theirs) in enumerate(zip(a.inputs, b.inputs, strict=True)):
        if ours != theirs:
            at = next((k for k, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
            raise TraceMismatch(
                f"the runs answer different prompts: prompt {i} ({a.prompt_ids[i]!r} against {b.prompt_ids[i]!r}) differs "
                f"from token {at} on. Compare runs of the same prompts, in the same order."
            )
    vocabularies = {run.logits[0].shape[-1] for run in (a, b) if run.logits}
    if len(vocabularies) > 1:
        raise TraceMismatch(
            f"the runs are of models with different vocabularies: {a.logits[0].shape[-1]} against {b.logits[0].shape[-1]} "
            "logits. Compare runs of one model, or of copies of it."
        )


def token_flips(a: Run, b: Run) -> list[TokenFlip]:
    """The first token per prompt that two free runs chose differently."""
    flips = []
    for prompt, (ours, theirs) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
        if at is not None:
            flips.append(TokenFlip(prompt, a.prompt_ids[prompt], at, ours[at], theirs[at]))
    return flips


def _fed(run: Run) -> list[list[int]]:
    """The tokens that a run was fed after each step: its own, or those that it was forced to take."""
    return run.tokens if run.forced is None else run.forced


def _parted(a: Run, b: Run) -> dict[int, int]:
    """Prompts that were fed other tokens in the two runs, and the first step of it; the last token is fed to no call."""
    parted = {}
    for prompt, (ours, theirs) in enumerate(zip(_fed(a), _fed(b), strict=True)):
        num_fed = min(len(ours), len(theirs)) - 1
        at = next((i for i in range(num_fed) if ours[i] != theirs[i]), None)
        if at is not None:
            parted[prompt] = at
    return parted


def _judge(a: Trace, b: Trace, detail: TraceComparison, prompt_ids: list[str]) -> Comparison:
    first, origins, carriers = divergences(a, b, detail, prompt_ids)
    verdict = IDENTICAL_VERDICT if first is None else DIVERGED
    if first is not None and first.kind == "carrier" and _other_path(a, b, detail, first):
        verdict = CONTROL_FLOW
    changed = _changed_output(a, b, detail, prompt_ids) if first is None else None
    if changed is not None:
        first, verdict = changed, CONTROL_FLOW
    elif first is None and detail.unlaid_differ:
        verdict = DIVERGED
    elif first is None and detail.rows_compared == 0 and (a.calls or b.calls):
        verdict = CONTROL_FLOW
    elif first is None and detail.incomparable and _activations(a) & {op for op, _, _ in detail.incomparable}:
        verdict = CONTROL_FLOW
    return Comparison(
        verdict=verdict,
        first=first,
        origins=origins,
        carriers=carriers if changed is None else [changed],
        token_flips=[],
        rows_compared=detail.rows_compared,
        controls={},
        cosine=None,
        num_nan=(0, 0),
        logits_equal=None,
        teacher_forced=False,
        notes=[],
        label_a="trace a",
        label_b="trace b",
        prompt_ids=prompt_ids,
        detail=detail,
        trace=a,
    )


def _changed_output(a: Trace, b: Trace, detail: TraceComparison, prompt_ids: list[str]) -> Divergence | None:
    """The first module whose output differs although no aligned op's does: an op of one run only changed it."""
    if not detail.outputs:
        return None
    found = min(detail.outputs, key=lambda d: d.a)
    op_a, op_b = a.ops[found.a], b.ops[found.b]
    prompt, position = split_keys(found.keys[:1])
    where = int(prompt[0])
    return Divergence(
        kind="carrier", module=found.module, op="(output)", occurrence=0, call=a.calls[op_a.call].step, prompt=where,
        prompt_id=prompt_ids[where] if where < len(prompt_ids) else str(where), position=max(-1, int(position[0])),
        inputs={"output": "differs"}, num_rows=len(found.keys),
        source=f"{op_a.module} · {op_a.op} in a, {op_b.module} · {op_b.op} in b", op_index=found.a,
    )  # fmt: skip


def _activations(trace: Trace) -> set[int]:
    """Ops whose outputs depend on a parameter; masks and positions do not, and have another form where padding differs."""
    ops: set[int] = set()
    tensors: set[int] = {t.number for t in trace.tensors if t.kind == "parameter"}
    for op in trace.ops:
        if any(number in tensors for _, number, _ in op.inputs):
            ops.add(op.index)
            tensors.update(op.outputs)
    return ops


def _other_path(a: Trace, b: Trace, detail: TraceComparison, first: Divergence) -> bool:
    """Whether a first carrier's input was made by an op that the other run did not run, or in another format."""
    if first.op_index not in detail.aligned:
        return False
    op_a = a.ops[first.op_index]
    op_b = b.ops[detail.aligned[first.op_index]]
    of_b = {name: number for name, number, _ in op_b.inputs}
    for name, number, _ in op_a.inputs:
        if first.inputs.get(name) == "unknown" and name in of_b:
            ta, tb = a.tensors[number], b.tensors[of_b[name]]
            if ta.status == tb.status == "rows":
                made = a.producer(number)
                where = f"{made.module} · {made.op}: " if made is not None else ""
                first.source = f"{where}{ta.dtype}[{ta.width}] in a, {tb.dtype}[{tb.width}] in b"
                return True
        if first.inputs.get(name) != "differs":
            continue
        maker_a, maker_b = a.producer(number), b.producer(of_b[name])
        if maker_a is None or maker_b is None or maker_a.is_view or maker_b.is_view:
            continue
        if detail.aligned.get(maker_a.index) != maker_b.index and (
            maker_a.index in set(detail.only_a) or maker_b.index in set(detail.only_b)
        ):
            first.source = f"{maker_a.module} · {maker_a.op} in a, {maker_b.op} in b"
            return True
    return False


def _limits(a: Trace, b: Trace, detail: TraceComparison) -> list[str]:
    """What the comparison could not see, in words."""
    notes = [*a.notes, *(n for n in b.notes if n not in a.notes)]
    stored_a, stored_b = _stored(a), _stored(b)
    for name in stored_a.keys() & stored_b.keys():
        ours, theirs = stored_a[name], stored_b[name]
        if ours.dtype != theirs.dtype:
            notes.append(f"{ours.kind} {name} is {ours.dtype} in a, {theirs.dtype} in b")
        elif not np.array_equal(ours.digests, theirs.digests):
            notes.append(f"{ours.kind} {name} differs between a and b")
    for side, trace in (("a", a), ("b", b)):
        lost = trace.unlaid
        if lost:
            names = sorted({f"{op.module or '(model)'} · {op.op}" for op in lost})
            notes.append(f"{len(lost)} ops of {side} are unlaid, so not compared: {_few(names, 4)}")
    if detail.unlaid_differ:
        op_a = a.ops[detail.unlaid_differ[0]]
        where = f"{op_a.module or '(model)'} · {op_a.op}"
        notes.append(f"{len(detail.unlaid_differ)} ops that could not be laid out differ as a whole, the first of them {where}")
    if detail.incomparable:
        op, _, why = detail.incomparable[0]
        example = f"{a.ops[op].module or '(model)'} · {a.ops[op].op} ({why})"
        notes.append(f"{len(detail.incomparable)} ops have rows of another form, so not compared: such as {example}")
    for side, trace, only in (("a", a, detail.only_a), ("b", b, detail.only_b)):
        if only:
            names = sorted({trace.ops[i].op for i in only})
            notes.append(f"{len(only)} ops ran in {side} only: {_few(names, 6)}")
    return notes


def _stored(trace: Trace) -> dict[str, TensorRecord]:
    """The last version of every parameter and buffer that an op read."""
    return {t.name: t for t in trace.tensors if t.kind in ("parameter", "buffer")}


def _few(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")


def _logits(a: Run, b: Run, limits: dict[int, int] | None) -> tuple[float | None, bool | None]:
    """Smallest cosine similarity of corresponding logits, and whether all are bitwise equal."""
    smallest, equal = 1.0, True
    for prompt, (ours, theirs) in enumerate(zip(a.logits, b.logits, strict=True)):
        steps = min(len(ours), len(theirs))
        if limits is not None and prompt in limits:
            steps = min(steps, limits[prompt] - len(a.inputs[prompt]) + 1)
        x, y = ours[:steps], theirs[:steps]
        if not steps:
            continue
        equal = equal and bits.equal(x, y)
        for ours_step, theirs_step in zip(x, y, strict=True):  # step by step, in the processor's cache: vocabularies are large
            cosine = torch.nn.functional.cosine_similarity(ours_step.double(), theirs_step.double(), dim=-1)
            smallest = float(np.minimum(smallest, float(cosine)))  # keeps NaN, as min() does not
    return (None if np.isnan(smallest) else smallest), equal


def _repeat(result: Comparison, a: Run, b: Run, detail: TraceComparison, controls: bool, measure: bool,
            progress: Progress | None) -> None:  # fmt: skip
    """Executes both conditions again: the control, and the values by which differences are measured."""
    result.controls = {"a_repeated": None, "b_repeated": None}
    if not controls and not (measure and result.first is not None):
        result.notes.append("controls were not run")
        return
    if not (a.is_live and b.is_live):
        result.notes.append("the model is not at hand: controls were not run and differences were not sized")
        return
    assert a.trace is not None and b.trace is not None
    prompts = [result.first.prompt] if measure and result.first is not None else []
    keep_a, keep_b = keepers(detail, prompts)
    _check_control("a", a, a.replay(progress=progress, keep=keep_a), result)
    _check_control("b", b, b.replay(progress=progress, keep=keep_b), result)
    if not prompts:
        return
    sizes = size_differences(detail, keep_a, keep_b)
    result.sizes = sizes.rows

    def fill_in(entry: Divergence) -> None:
        if entry.op_index in sizes.largest and entry.prompt in prompts:
            entry.max_abs, entry.max_ulp, entry.share = sizes.largest[entry.op_index]

    if isinstance(result.carriers, Entries):
        result.carriers.change(fill_in)
    for entry in (*result.origins, *(() if isinstance(result.carriers, Entries) else result.carriers)):
        fill_in(entry)
    if keep_a.is_full or keep_b.is_full:
        result.notes.append("differences were sized until the memory set aside for it was full")


def _check_control(side: str, first: Run, again: Run, result: Comparison) -> None:
    assert first.trace is not None and again.trace is not None
    broken = first_difference(first.trace, again.trace)
    result.controls[f"{side}_repeated"] = broken is None
    if broken is not None and broken[0].key != broken[1].key:
        ours, theirs = (f"{op.module or '(model)'} · {op.op}" for op in broken)
        raise ControlError(
            f"the control failed: {side} ({first.condition}) ran other ops when it was repeated, {theirs} instead of {ours}. "
            "Was the model changed, or a hook added or removed? Run the condition again, then compare."
        )
    if broken is not None:
        op = broken[0]
        raise ControlError(
            f"the control failed: {side} ({first.condition}) gave other bits when it was repeated, first in "
            f"{op.module or '(model)'} · {op.op}. The difference is run-to-run, so comparing conditions would show nothing."
        )
