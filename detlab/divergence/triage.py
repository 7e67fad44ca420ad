"""What kind of difference a comparison shows: rounding, other semantics, state, sampling, control flow, or run to run.

Structure speaks first: a weight that is off by one ULP is smaller than any rounding and no rounding. Size and growth are
evidence beside it, never the verdict alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from detlab.divergence.noise import Noise, logits_in_float64, measure_noise
from detlab.divergence.replay import Again, Side, sides_of
from detlab.divergence.result import CONTROL_FLOW as OTHER_PATH
from detlab.divergence.result import DIFFERENT_INPUTS, IDENTICAL_VERDICT, Comparison
from detlab.divergence.rows import first_difference
from detlab.divergence.triage_probes import (
    experts_changed,
    foreign_inputs,
    met_rows,
    other_function,
    random_ops,
    reads_other_tokens,
    size_of_stored,
)
from detlab.divergence.triage_result import (
    CONTROL_FLOW,
    IDENTICAL,
    ROUNDING,
    RUN_TO_RUN,
    SAMPLING,
    SEMANTICS,
    STATE,
    UNDECIDED,
    Evidence,
    Flip,
    LayerSize,
    Triage,
)
from detlab.errors import DetlabError, UsageError
from detlab.trace.records import Trace

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
#: How the call's arguments are called in a verdict.
_INPUTS = {"position_ids": "positions", "attention_mask": "mask", "input_ids": "tokens", "inputs_embeds": "embeddings"}


def triage(comparison: Comparison, *, again: Sequence[Again] | None = None, model: nn.Module | None = None,
           noise: bool = True, probes: bool = True) -> Triage:  # fmt: skip
    """Says what kind of difference a comparison shows, with the evidence.

    Args:
        comparison: what `compare` returned.
        again, model: for bare traces: two functions that repeat the calls of a and of b, and the model.
        noise: measure this model's path noise by a few harmless conditions, and judge token flips in float64.
        probes: execute each side again: for repeatability, causality, padding and hidden inputs.

    Returns:
        A `Triage`. Where something could not be looked at, its notes say so.

    Raises:
        UsageError: the argument is no comparison.
    """
    if not isinstance(comparison, Comparison):
        raise UsageError(f"triage takes a Comparison; got {type(comparison).__name__}. Try detlab.compare(a, b).")
    if comparison.verdict == IDENTICAL_VERDICT:
        rows = f"all {comparison.rows_compared:,} rows compared are bitwise equal"
        return Triage(IDENTICAL, "", f"there is no difference: {rows}.")
    notes: list[str] = []
    aside: list[Evidence] = []
    sides: tuple[Side, Side] | None = None
    try:
        sides = sides_of(comparison, again, model)
    except DetlabError as error:
        notes.append(f"nothing was executed again: {error}")
    result = (
        _state(comparison)
        or _sampling(comparison)
        or _random(comparison)
        or (_run_to_run(comparison, sides) if probes and sides is not None else None)
        or _control_flow(comparison, sides)
        or _semantics(comparison, sides)
        or (_hidden(comparison, sides, aside) if probes and sides is not None else None)
        or _rounding(comparison)
    )
    result.notes += notes
    result.evidence += aside
    result.growth = growth_of(comparison)
    _sized(result, comparison, noise)
    return result


# ------------------------------------------------------------------------------------------------------------- verdicts
def _state(comparison: Comparison) -> Triage | None:
    first = comparison.first
    if first is None or first.kind != "carrier":
        return None
    if first.source.startswith("an earlier call:"):
        return Triage(
            STATE, "cache", f"the runs start from other states: {first.source}.", [Evidence("where", str(first))]
        )  # fmt: skip
    if first.source.startswith("cache "):
        name = first.source.removeprefix("cache ")
        return Triage(
            STATE, "cache", f"{name} held other values before the call; an earlier call, or the caller, left them there.",
            [Evidence("where", str(first))],
        )  # fmt: skip
    return None


def _sampling(comparison: Comparison) -> Triage | None:
    """Tokens were drawn, and the distributions they were drawn from are (nearly) one."""
    if comparison.sides is None or not comparison.token_flips:
        return None
    a, b = comparison.sides
    if isinstance(a, Trace) or not (a.condition.temperature or b.condition.temperature):
        return None
    worst, seen = 0.0, 0
    for flip in comparison.token_flips:
        chances = []
        for run in (a, b):
            heat = run.condition.temperature or 1.0
            chances.append((run.logits[flip.prompt][flip.step].double() / heat).softmax(-1))
        worst = max(worst, float((chances[0] - chances[1]).abs().sum() / 2))
        seen += 1
    if worst > 0.01:
        return None
    shared = [run.condition for run in (a, b) if run.condition.batch_size > 1 and run.condition.tier == "stock"]
    why = "the random stream is shared by the batch, so that a token depends on the neighbours and the row" if shared else (
        "the draws come from other random numbers"
    )
    return Triage(
        SAMPLING, "shared stream" if shared else "seed",
        f"tokens were drawn with other random numbers from the same distributions: {why}. It is not the arithmetic.",
        [
            Evidence(
                "distributions", f"where {seen} prompts flip, the distributions differ by {worst:.2g} at most (total "
                "variation); rounding would flip a draw that rarely", {"total_variation": worst},
            )
        ],
    )  # fmt: skip


def _random(comparison: Comparison) -> Triage | None:
    """Ops that draw random numbers inside the forward pass: dropout left on."""
    first = comparison.first
    if first is None:
        return None
    found = random_ops(comparison.trace, first)
    if not found:
        return None
    op = found[0]
    return Triage(
        SEMANTICS, "dropout" if "dropout" in op.op or op.op == "bernoulli_" else "random numbers",
        f"the forward pass draws random numbers: {op.module or '(model)'} · {op.op}. Dropout was left on; call model.eval().",
        [Evidence("random ops", f"{len(found)} in a's trace, the first of them {op.module or '(model)'} · {op.op}")],
    )  # fmt: skip


def _run_to_run(comparison: Comparison, sides: tuple[Side, Side]) -> Triage | None:
    """The same condition, repeated, gives other bits."""
    if all(comparison.controls.values()) and comparison.controls:
        return None  # compare repeated both already
    for side in sides:
        if side.variables:
            continue
        broken = first_difference(side.trace, side.execute(None))
        if broken is not None:
            op = broken[0]
            where = f"{op.module or '(model)'} · {op.op}"
            return Triage(
                RUN_TO_RUN, where, f"the same condition ({side.name}) gave other bits when it was repeated, first in {where}.",
                [Evidence("repetition", f"{side.name} differs from itself at {where}")],
            )  # fmt: skip
    return None


def _control_flow(comparison: Comparison, sides: tuple[Side, Side] | None) -> Triage | None:
    detail = comparison.detail
    changed = experts_changed(comparison, sides) if sides is not None else None
    if changed is not None:
        return Triage(CONTROL_FLOW, "experts", changed.found, [changed])
    if comparison.verdict != OTHER_PATH:
        return None
    first = comparison.first
    ran = f"{len(detail.only_a)} ops ran in a only, {len(detail.only_b)} in b only"
    where = f", first where {first.source}" if first is not None and first.source else ""
    return Triage(
        CONTROL_FLOW, "", f"the runs took other code paths{where}.", [Evidence("ops", ran)]
    )  # fmt: skip


def _semantics(comparison: Comparison, sides: tuple[Side, Side] | None) -> Triage | None:
    """The first differing op was given something else than in the other run."""
    first = comparison.first
    if comparison.verdict == DIFFERENT_INPUTS and (first is None or not first.source.startswith("input ")):
        return Triage(SEMANTICS, "tokens", "the model was asked about other tokens.", [Evidence("inputs", _notes(comparison))])
    if first is None or first.kind != "carrier":
        return None
    kind, _, name = first.source.partition(" ")
    evidence = [Evidence("where", str(first))]
    if "changed in place" in first.source:
        return Triage(
            SEMANTICS, "changed in place", f"a tensor was written to after the op that made it: {first.source}.", evidence
        )  # fmt: skip
    if kind in ("parameter", "buffer"):
        cause = "adapters" if "lora" in name.lower() else "weights" if kind == "parameter" else "buffers"
        size = size_of_stored(name, sides)
        if size is not None:
            evidence.append(size)
        told = next((note for note in comparison.notes if name in note), f"{kind} {name} differs between a and b")
        return Triage(SEMANTICS, cause, f"the models are not the same: {told}.", evidence)
    if kind == "input":
        cause = _INPUTS.get(name, "inputs")
        return Triage(SEMANTICS, cause, f"the model was called with other {cause} ({name}): another question.", evidence)
    if kind == "constant":
        return Triage(SEMANTICS, "inputs", "the caller's Python code gave the op another tensor.", evidence)
    return None


def _hidden(comparison: Comparison, sides: tuple[Side, Side], aside: list[Evidence]) -> Triage | None:
    """An origin whose inputs matched as far as rows tell, and that computes another function: masks, leaks, missing keys.

    What was seen and decides nothing is added to ``aside``.
    """
    first = comparison.first
    if first is None or first.kind != "origin":
        return None
    met = met_rows(comparison, first, sides)
    found = foreign_inputs(*met) if met is not None else None
    for side in sides:
        read = reads_other_tokens(side) if found is None else None
        if read is not None and read.name == "mask":
            found = read
        elif read is not None:
            aside.append(read)
    if found is None and met is not None:
        found = other_function(*met)
    if found is None:
        return None
    return Triage(SEMANTICS, found.name, found.found, [Evidence("where", str(first)), found])


def _rounding(comparison: Comparison) -> Triage:
    first = comparison.first
    if first is not None and first.kind == "origin":
        kinds = sorted({d.op for d in comparison.origins})
        more = f"; {len(comparison.origins)} ops and calls do so, of the kinds {', '.join(kinds[:4])}"
        return Triage(
            ROUNDING, first.op, f"{first.module or '(model)'} · {first.op} computed other bits from matching inputs{more}.",
            [Evidence("where", str(first))],
        )  # fmt: skip
    return Triage(UNDECIDED, "", f"no cause was found: {_notes(comparison)}", [Evidence("where", str(first))] if first else [])


def _notes(comparison: Comparison) -> str:
    return "; ".join(comparison.notes) or "there is nothing to point at"


# ----------------------------------------------------------------------------------------------------------------- sizes
def growth_of(comparison: Comparison) -> list[LayerSize]:
    """The largest difference of any op, layer by layer, as far as sizes were measured."""
    sizes: dict[int, float] = {}
    for op, (_, max_abs, _) in comparison.sizes.items():
        if len(max_abs):
            found = _LAYER.search(comparison.trace.ops[op].module)
            layer = int(found[1]) if found else -1
            sizes[layer] = max(sizes.get(layer, 0.0), float(np.max(max_abs)))
    return [LayerSize(layer, size) for layer, size in sorted(sizes.items())]


def _sized(result: Triage, comparison: Comparison, noise: bool) -> None:
    """Holds the size against the noise, and asks float64 which side is nearer."""
    if comparison.sides is None or isinstance(comparison.sides[0], Trace):
        return
    a, b = comparison.sides
    gaps = [_gap(x[: len(y)], y[: len(x)]) for x, y in zip(a.logits, b.logits, strict=True)]
    result.size = max(gaps, default=None)
    if not noise or not gaps or not (a.is_live and b.is_live) or any(comparison.num_nan):
        return
    prompts = _prompts_to_judge(gaps, [flip.prompt for flip in comparison.token_flips])
    result.noise = measured = measure_noise(a, avoid=(b,), prompts=prompts)
    try:
        exact = logits_in_float64(a, prompts)
    except (DetlabError, RuntimeError, ValueError) as error:
        exact = {}
        result.notes.append(f"float64 was not run: {error}")
    if exact:
        errors = [
            max(_gap(run.logits[prompt], truth[: len(run.logits[prompt])]) for prompt, truth in exact.items()) for run in (a, b)
        ]
        result.nearer = "neither" if errors[0] == errors[1] else "a" if errors[0] < errors[1] else "b"
        result.evidence.append(
            Evidence("float64", f"largest error of a logit: {errors[0]:.3g} in a, {errors[1]:.3g} in b",
                     {"a": errors[0], "b": errors[1]})
        )  # fmt: skip
    result.flips = _flips(comparison, measured, exact)


def _prompts_to_judge(gaps: Sequence[float], flipped: Sequence[int]) -> list[int]:
    """Prompts on which noise and float64 are measured: the worst, those that flip, and others up to three."""
    worst = sorted(range(len(gaps)), key=lambda prompt: -gaps[prompt])
    first = list(dict.fromkeys([worst[0], *flipped]))
    return sorted([*first, *(prompt for prompt in worst if prompt not in first)][: max(3, len(first))])


def _gap(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest absolute difference; infinite where one is NaN."""
    if not x.numel() or not y.numel():
        return 0.0
    return float((x.double() - y.double()).abs().nan_to_num(nan=float("inf")).max())


def _flips(comparison: Comparison, noise: Noise, exact: dict[int, torch.Tensor]) -> list[Flip]:
    assert comparison.sides is not None
    a, b = comparison.sides
    made = []
    for flip in comparison.token_flips:
        at, one, two = flip.step, flip.a_token, flip.b_token

        def margin(logits: torch.Tensor, at: int = at, one: int = one, two: int = two) -> float:
            return float(logits[at, one].double() - logits[at, two].double())

        moved = noise.by_step[flip.prompt][at] if noise.measured else None
        made.append(
            Flip(
                flip.prompt_id, at, one, two, margin(a.logits[flip.prompt]), margin(b.logits[flip.prompt]),
                margin(exact[flip.prompt]) if flip.prompt in exact else None,
                None if moved is None else 2 * max(float(moved[one]), float(moved[two])),
            )
        )  # fmt: skip
    return made
