"""Experiments that tell rounding from another function: hidden inputs, tokens of the future, padding, experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detlab import bits
from detlab.condition import Condition
from detlab.divergence.explain_attention import visible_to
from detlab.divergence.measure import size_differences
from detlab.divergence.noise import again, in_float64
from detlab.divergence.replay import Met, Side, meet, name_of, replay
from detlab.divergence.replay_op import Operation, row_of
from detlab.divergence.result import Comparison, Divergence
from detlab.divergence.rows import IDENTICAL, ORIGIN, compare_traces
from detlab.divergence.triage_result import Evidence
from detlab.errors import DetlabError
from detlab.serving import config_of, served_model
from detlab.trace.keep import RowKeeper
from detlab.trace.layout import rows_of
from detlab.trace.records import OpRecord, Trace, split_keys

#: Ops that draw random numbers.
_RANDOM = {"bernoulli", "bernoulli_", "native_dropout", "dropout", "rand", "rand_like", "randn", "randn_like", "multinomial",
           "uniform_", "normal_", "exponential_"}  # fmt: skip
#: Float64 errors of one side this many times the other's are no rounding.
MOST_RATIO = 1000.0


def random_ops(trace: Trace, first: Divergence) -> list[OpRecord]:
    """Ops of the model's calls that draw random numbers, where the first divergence is one of them or may follow from them."""
    found = [op for op in trace.ops if op.op in _RANDOM and op.module != "(outside)" and op.call >= 0]
    return [op for op in found if first.op_index < 0 or op.index <= first.op_index + 4]


def size_of_stored(name: str, sides: tuple[Side, Side] | None) -> Evidence | None:
    """How far a parameter or buffer differs between the models of both sides."""
    if sides is None or sides[0].model is sides[1].model:
        return None
    stored = []
    for side in sides:
        tensors = {**dict(side.model.named_parameters()), **dict(side.model.named_buffers())}
        if name not in tensors:
            return Evidence("stored", f"{name} is in one model only")
        stored.append(tensors[name].detach())
    a, b = stored
    if a.shape != b.shape or a.dtype != b.dtype:
        return Evidence("stored", f"{a.dtype} {list(a.shape)} in a, {b.dtype} {list(b.shape)} in b".replace("torch.", ""))
    unequal = int((bits.int_view(a.contiguous()) != bits.int_view(b.contiguous())).sum())
    nans = [int(one.isnan().sum()) if one.is_floating_point() else 0 for one in stored]
    if any(nans):  # no distance leads to NaN
        return Evidence("stored", f"{unequal:,} of {a.numel():,} elements differ; {nans[0]:,} are NaN in a, {nans[1]:,} in b")
    if not a.is_floating_point() or a.dtype == torch.float64:
        return Evidence("stored", f"{unequal:,} of {a.numel():,} elements differ")
    largest = int(bits.ulp_distance(a.contiguous(), b.contiguous()).max())
    return Evidence(
        "stored", f"{unequal:,} of {a.numel():,} elements differ, by up to {largest:,} ULP",
        {"elements": unequal, "max_ulp": largest},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- hidden inputs
Rows = tuple[tuple[Met, Met], list[Operation], np.ndarray]


def met_rows(comparison: Comparison, first: Divergence, sides: tuple[Side, Side]) -> Rows | None:
    """An origin as both sides met it, and some of its rows; None where it cannot be met."""
    found = next(f for f in comparison.detail.ops.differing() if f.a == first.op_index)
    if any(side.variables for side in sides):
        return None
    try:
        met = meet(sides[0], found.a), meet(sides[1], found.b)
    except (DetlabError, AssertionError):
        return None
    ops = [Operation.of(one, side.settings) for one, side in zip(met, sides, strict=True)]
    keys = found.keys[found.state == ORIGIN]
    picked = keys[np.unique(np.linspace(0, len(keys) - 1, min(8, len(keys))).astype(int))]
    return met, ops, picked


def foreign_inputs(met: tuple[Met, Met], ops: list[Operation], keys: np.ndarray) -> Evidence | None:
    """What an origin's full inputs show and rows do not: other keys to see, a leak, a row that sees nothing."""
    return _other_keys(met, ops, keys) or _leaking_scores(met, keys) or _not_numbers(met, keys)


def _rows(met: Met, keys: np.ndarray) -> Iterator[Tensor]:
    elements = met.elements().of(keys)
    start = 0
    for length in elements.lengths.tolist():
        yield elements.at[start : start + length]
        start += length


def _other_keys(met: tuple[Met, Met], ops: list[Operation], keys: np.ndarray) -> Evidence | None:
    """Attention rows that may see other tokens: a leak, a missing key, a key of padding."""
    _, positions = split_keys(keys)
    pairs = zip(keys.tolist(), positions.tolist(), *(_rows(one, keys) for one in met), strict=True)
    for key, position, at_a, at_b in pairs:
        seen = []
        for one, op, at in zip(met, ops, (at_a, at_b), strict=True):
            row = row_of(int(key), at, op.shape)
            visible = visible_to(op, row)
            if visible is None or one.call is None:
                return None
            names = one.call.positions[row.where[0]]
            seen.append({int(names[slot]) if slot < len(names) else -1 for slot in visible.tolist()})
        for side, names_seen in zip("ab", seen, strict=True):
            leak = _leak(side, position, names_seen)
            if leak is not None:
                return leak
        if seen[0] != seen[1]:
            missing = sorted(seen[0] ^ seen[1])
            return Evidence(
                "mask", f"position {position} sees other tokens in a than in b: position {missing[0]} is seen by one of them.",
                {"position": position},
            )  # fmt: skip
    return None


def _leak(side: str, position: int, seen: set[int]) -> Evidence | None:
    future = sorted(p for p in seen if p > position)
    if future:
        return Evidence(
            "mask", f"the mask of {side} lets position {position} see the future position {future[0]}.",
            {"position": position, "sees": future[0]},
        )  # fmt: skip
    if -1 in seen:
        return Evidence("mask", f"the mask of {side} lets position {position} see padding.", {"position": position})
    return None


def _leaking_scores(met: tuple[Met, Met], keys: np.ndarray) -> Evidence | None:
    """Softmax over scores that gives weight to tokens that the row may not see."""
    for side, one in zip("ab", met, strict=True):
        if name_of(one.func) != "_softmax" or one.layout is None or one.call is None or one.record is None:
            return None
        cut = rows_of(one.output, one.layout)
        if cut.columns is None:
            return None
        columns = np.asarray(cut.columns) + one.call.query.start
        all_keys, at = one.call.keys(one.record.batch, one.record.slots, one.record.pairs)
        prompts, positions = split_keys(keys)
        for key, prompt, position in zip(keys.tolist(), prompts.tolist(), positions.tolist(), strict=True):
            weights = cut.grid[int(at[np.searchsorted(all_keys, key)])].amax(0)
            held = one.call.positions[one.call.prompts.tolist().index(prompt)]
            names = np.where(columns < len(held), held[np.minimum(columns, len(held) - 1)], -1)
            leak = _leak(side, position, set(names[(weights > 0).numpy()].tolist()))
            if leak is not None:
                return leak
    return None


def _not_numbers(met: tuple[Met, Met], keys: np.ndarray) -> Evidence | None:
    for side, one in zip("ab", met, strict=True):
        if not one.output.is_floating_point():
            return None
        bad = [bool(one.output.reshape(-1)[at].isnan().any()) for at in _rows(one, keys)]
        inputs = [t for _, t in Operation.of(one, _nothing).tensors() if t.is_floating_point()]
        if any(bad) and not any(bool(t.isnan().any()) for t in inputs):
            _, positions = split_keys(keys)
            at = int(positions[bad.index(True)])
            masked = any(bool((t == float("-inf")).all(-1).any()) for t in inputs)
            why = "its row is masked completely: it sees no key" if masked else "its inputs hold no NaN"
            return Evidence("mask" if masked else "NaN", f"{side} computes NaN at position {at} from numbers: {why}.")
    return None


def other_function(met: tuple[Met, Met], ops: list[Operation], keys: np.ndarray) -> Evidence | None:
    """Float64 on each side's own inputs: the same rows must mean the same numbers."""
    exact = [op.in_float64() for op in ops]
    if exact[0] is None or exact[1] is None:
        return None
    apart, size = 0.0, 0.0
    for at_a, at_b in zip(_rows(met[0], keys), _rows(met[1], keys), strict=True):
        a, b = exact[0].reshape(-1)[at_a], exact[1].reshape(-1)[at_b]
        if a.shape == b.shape:
            apart, size = max(apart, float((a - b).abs().max())), max(size, float(a.abs().max()))
    step = torch.finfo(met[0].output.dtype).eps if met[0].output.is_floating_point() else 0.0
    if step and size and apart > MOST_RATIO * 2.0**-53 * max(size, 1.0):
        return Evidence(
            "hidden input", f"in float64, too, the op gives other numbers on the two sides (by {apart:.3g}): something that "
            "rows do not show, such as its mask, differs.", {"apart": apart},
        )  # fmt: skip
    return None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# -------------------------------------------------------------------------------------------------- causality and padding
#: Differences in float64, as a share of an op's largest value, up to which they are rounding there.
FLOAT64_ROUNDING = 1e-10


def reads_other_tokens(side: Side) -> Evidence | None:
    """Whether a row depends on a later token, or on what stands in padding: these are changed, and no other row may move.

    Returns:
        None where nothing moves. "mask" where a row moves in float64, too. "other tokens" where rows move by rounding alone,
        as they do where the number of rows that an expert is given depends on all tokens.
    """
    run = side.run
    if run is None or side.variables:
        return None
    later = [[*tokens[:-1], (tokens[-1] + 1) % 200 + 3] for tokens in run.inputs]
    limits = {prompt: len(tokens) - 1 for prompt, tokens in enumerate(run.inputs)}
    pad = config_of(side.model).pad_token_id if run.condition.padding_side is not None else None
    other = None if run.condition.padding_side is None else (6 if pad == 5 else 5)
    if _moved(side.trace, _prefill(side, later, other), limits) is None:  # one execution settles it, most often
        return None
    plain = _prefill(side, run.inputs, None)
    moved = _moved(plain, _prefill(side, later, None), limits)
    if moved is not None:
        op, position = moved
        where = f"position {position} moves in {op.module or '(model)'} · {op.op} when the last token is changed"
        return _judged(side, f"{side.name} is not causal: {where}", position, later, None, limits)
    moved = None if other is None else _moved(plain, _prefill(side, run.inputs, other), None)
    if moved is not None:
        op, position = moved
        where = f"{side.name} reads padding: {op.module or '(model)'} · {op.op} moves with the pad token"
        return _judged(side, where, position, run.inputs, other, None)
    return None


def _prefill(side: Side, inputs: list[list[int]], pad: int | None, keep: RowKeeper | None = None,
             condition: Condition | None = None) -> Trace:  # fmt: skip
    run = side.run
    assert run is not None
    condition = condition or run.condition
    # The copy that is served in another dtype has a configuration of its own.
    with served_model(side.model, replace(condition, compile=None, attention=None)) as served:
        config = config_of(served)
    with _pad_token(config, pad):
        trace = again(run, condition, inputs, new_tokens=0, trace=True, keep=keep).trace
    assert trace is not None
    return trace


def _moved(a: Trace, b: Trace, limits: dict[int, int] | None) -> tuple[OpRecord, int] | None:
    """The first op with a row that differs, and that row's position."""
    for found in compare_traces(a, b, limits).ops.differing():
        _, positions = split_keys(found.keys[found.state > IDENTICAL])
        return a.ops[found.a], int(positions[0])
    return None


def _judged(side: Side, words: str, position: int, inputs: list[list[int]], pad: int | None,
            limits: dict[int, int] | None) -> Evidence:  # fmt: skip
    """The same experiment in float64, which tells a dependence from rounding."""
    run = side.run
    assert run is not None
    keeps = [RowKeeper(set(range(2 * len(side.trace.ops))), list(range(len(run.inputs)))) for _ in range(2)]
    try:
        with in_float64(side.model, run.condition) as (_, condition):
            plain = _prefill(side, run.inputs, None, keeps[0], condition)
            changed = _prefill(side, inputs, pad, keeps[1], condition)
    except (DetlabError, RuntimeError, ValueError) as error:
        return Evidence("mask", f"{words}; whether it does in float64, too, could not be tested ({error}).",
                        {"position": position})  # fmt: skip
    sizes = size_differences(compare_traces(plain, changed, limits), *keeps)
    share = 0.0
    for op, (apart, _, _) in sizes.largest.items():
        share = max(share, apart / max(1.0, float(keeps[0].kept[op][1].abs().nan_to_num(nan=0.0, posinf=0.0).max())))
    if share <= FLOAT64_ROUNDING:
        return Evidence(
            "other tokens", f"{words}, by rounding alone: in float64, by {share:.2g} of an op's largest value at most. "
            "How rows are grouped depends on other tokens, not what they mean.", {"position": position, "float64": share},
        )  # fmt: skip
    return Evidence("mask", f"{words}.", {"position": position, "float64": share})


@contextmanager
def _pad_token(config: Any, token: int | None) -> Iterator[None]:
    """Lets padding be made of another token; None leaves it as it is."""
    before = config.pad_token_id
    config.pad_token_id = before if token is None else token
    try:
        yield
    finally:
        config.pad_token_id = before


# --------------------------------------------------------------------------------------------------------------- experts
def experts_changed(comparison: Comparison, sides: tuple[Side, Side]) -> Evidence | None:
    """Tokens that a router sent to other experts, with the router's margin at the first of them."""
    trace_a, trace_b = comparison.trace, sides[1].trace
    pairs = [
        (f.a, f.b) for f in comparison.detail.ops.differing()
        if trace_a.ops[f.a].op == "topk" and len(trace_a.ops[f.a].outputs) == 2
    ]  # fmt: skip
    if not pairs or any(side.variables for side in sides):
        return None
    spots = [replay(side, [pair[at] for pair in pairs])[1] for at, side in enumerate(sides)]
    for a, b in pairs:
        met = spots[0].met.get(a), spots[1].met.get(b)
        if met[0] is None or met[1] is None:
            continue
        found = _router(met[0], met[1], trace_a.ops[a], trace_a, trace_b)
        if found is not None:
            return found
    return None


def _router(a: Met, b: Met, op: OpRecord, trace_a: Trace, trace_b: Trace) -> Evidence | None:
    count = a.args[1] if len(a.args) > 1 else a.kwargs["k"]
    scores = [met.args[0].reshape(-1, met.args[0].shape[-1]).double() for met in (a, b)]
    keys = [met.elements() for met in (a, b)]
    common = np.intersect1d(keys[0].keys, keys[1].keys)
    rows = [[int(at[0]) // count for at in _rows(met, common)] for met in (a, b)]
    changed = 0
    first: Evidence | None = None
    for at, (row_a, row_b) in enumerate(zip(*rows, strict=True)):
        ours, theirs = scores[0][row_a], scores[1][row_b]
        chosen = [set(s.topk(count).indices.tolist()) for s in (ours, theirs)]
        if chosen[0] == chosen[1]:
            continue
        changed += 1
        if first is None:
            _, positions = split_keys(common[at : at + 1])
            margins = [float(s.topk(count + 1).values[-2] - s.topk(count + 1).values[-1]) for s in (ours, theirs)]
            moved = float((ours - theirs).abs().max())
            out, into = sorted(chosen[0] - chosen[1]), sorted(chosen[1] - chosen[0])
            first = Evidence(
                "experts",
                f"the router {op.module} sends position {int(positions[0])} to other experts ({out} in a, {into} in b). "
                f"The last chosen led by {margins[0]:.3g} in a and {margins[1]:.3g} in b; scores moved by up to {moved:.3g}.",
                {"position": int(positions[0]), "margin_a": margins[0], "margin_b": margins[1], "moved": moved},
            )  # fmt: skip
    if first is None:
        return None
    tail = f" {changed} tokens of this router changed." if changed > 1 else ""
    return Evidence(first.name, first.found + tail, first.numbers | {"tokens": changed})
