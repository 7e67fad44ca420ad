"""Tries remedies on a pair of conditions: how far apart they are before and after, at what cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from detlab.condition import Condition
from detlab.divergence.compare import compare
from detlab.engine.greedy import check_generation_config
from detlab.environment import environment
from detlab.errors import ControlError, DetlabError, UsageError
from detlab.models import tokenizer_for
from detlab.prompts import as_prompts, encode
from detlab.remedies.registry import REMEDIES, plan_of
from detlab.remedies.remedy import GENERATION, Plan, Remedy
from detlab.remedies.serve import Served, serve
from detlab.remedies.table import CONTROL_FAILED, NO_EFFECT, NOT_APPLICABLE, Attempt, Attempts, difference_of, verdict_of
from detlab.runner import Progress
from detlab.serving import check_inputs, check_model

__all__ = ["prepared", "try_remedies"]


def try_remedies(model: nn.Module, prompts: Any, a: Condition | str = "", b: Condition | str = "batch_size=4",
                 remedies: Sequence[str | Remedy] | None = None, new_tokens: int = 8, trials: int = 1, *,
                 tokenizer: Any = None, progress: Progress | None = None) -> Attempts:  # fmt: skip
    """Tries remedies on two conditions that part, and measures each.

    Each condition is first held against its own repetition, without a remedy and under each. A remedy changes the conditions,
    or is put in around the runs and taken out again, or, where a library reads it when it starts, is run in a fresh process.

    Args:
        model: a transformers causal language model in eval mode; it is left as it was.
        prompts: what `load_prompts` returns, or strings, or lists of token ids.
        a, b: conditions, as objects or as text: "batch_size=8,padding_side=left".
        remedies: names (see `detlab.remedies`), or several joined by "+"; None tries all.
        new_tokens: tokens to decode after prefill.
        trials: rounds; in each, stock and remedy take turns, so that the cost is an interleaved median.
        tokenizer: needed for text where the model was not loaded by `load_model`.
        progress: called with (remedies done, remedies in all, what).

    Returns:
        `Attempts`: a table. A remedy that cannot be tried here is "not applicable", with the reason; one that does nothing is
        said to do nothing.

    Raises:
        UsageError: a name is unknown, joined remedies conflict, a condition or prompt cannot be used.
        ControlError: a condition does not repeat its own bits without any remedy: no remedy could be judged.
    """
    first, second = (Condition.parse(c) if isinstance(c, str) else c for c in (a, b))
    if isinstance(remedies, str):
        raise UsageError(f"remedies is a list of names, such as [{remedies!r}]; got one text.")
    plans = [plan_of(what) for what in (REMEDIES if remedies is None else remedies)]
    if not plans:
        raise UsageError(f"try_remedies needs at least one remedy; got none. Choose from {', '.join(REMEDIES)}.")
    if trials < 1:
        raise UsageError(f"trials={trials!r} is not possible; give a whole number of at least 1.")
    inputs = prepared(model, prompts, new_tokens, tokenizer)
    bench = _Bench(model, inputs, new_tokens, trials, first, second)
    if progress is not None:
        progress(0, len(plans), "without a remedy")
    bench.start()
    attempts = []
    for done, plan in enumerate(plans):
        if progress is not None:
            progress(done, len(plans), plan.name)
        attempts.append(bench.attempt(plan))
    if progress is not None:
        progress(len(plans), len(plans), "done")
    return Attempts(
        model=type(model).__name__, a=str(first), b=str(second), new_tokens=new_tokens, trials=trials, before=bench.before,
        attempts=attempts, controls={"a_repeated": True, "b_repeated": True}, environment=environment(),
    )  # fmt: skip


def prepared(model: nn.Module, prompts: Any, new_tokens: int, tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts that the model can take.

    Raises:
        UsageError: it cannot, or the model is in training mode.
    """
    if new_tokens < 0:
        raise UsageError(f"new_tokens={new_tokens!r} is not possible; give a whole number of at least 0.")
    check_model(model)
    if model.training:
        raise UsageError("the model is in training mode: dropout would make every run another one. Call model.eval().")
    chosen = as_prompts(prompts)
    if tokenizer is None and any(p.tokens is None for p in chosen):
        tokenizer = tokenizer_for(model)
    inputs = encode(chosen, tokenizer)
    check_inputs(model, chosen, inputs, new_tokens)
    return inputs


_STOCK = Plan(())


def _rounded(one: Served) -> Served:
    return Served([rows.float() for rows in one.logits], one.tokens, one.steps)


@dataclass
class _Bench:
    """Two conditions, and what they are without a remedy."""

    model: nn.Module
    inputs: list[list[int]]
    new_tokens: int
    trials: int
    a: Condition
    b: Condition

    def _served(self, conditions: Sequence[Condition], plan: Plan, trace: bool = False) -> list[Served]:
        return serve(self.model, self.inputs, conditions, self.new_tokens, plan, trace)

    def start(self) -> None:
        """Runs the pair twice: the control, and what remedies are held against."""
        again_a, again_b, first, second = self._served((self.a, self.b, self.a, self.b), _STOCK)
        for name, condition, runs in (("a", self.a, (again_a, first)), ("b", self.b, (again_b, second))):
            if runs[0].md5 != runs[1].md5:
                raise ControlError(
                    f"{name} ({condition}) does not repeat its own bits without any remedy, so that no remedy could be judged. "
                    "Find out first what moves from run to run: detlab.compare(run, run) names the op."
                )
        self.first, self.second = first, second
        self.before = difference_of([first], [second], self._origin(first, second, (self.a, self.b), _STOCK))
        # An answer compared once counts once: the bits of a trial are the bits of each, as the control showed.
        self.seconds = first.seconds + second.seconds

    def _origin(self, first: Served, second: Served, pair: tuple[Condition, Condition], plan: Plan) -> str:
        """The first place where a pair parts, as text; found by a traced run of each."""
        if first.md5 == second.md5:
            return ""
        traced = [one.traced for one in (first, second)]
        if pair[0] == pair[1] or None in traced:
            traced = [one.traced for one in self._served(pair, plan, trace=True)]
        if traced[0] is None or traced[1] is None:
            return ""
        result = compare(traced[0], traced[1], controls=False, measure=False)
        found = result.origins[0] if result.origins else result.first
        return "" if found is None else f"{found.module or '(model)'} · {found.op} ({found.phase})"

    def attempt(self, plan: Plan) -> Attempt:
        """Tries one plan; what cannot be tried says why."""
        reason = plan.reason(self.model)
        if reason:
            return self._made(plan, (self.a, self.b), NOT_APPLICABLE, reason)
        try:
            pair = plan.changed(self.a, self.b)
            return self._tried(plan, pair)
        except (DetlabError, RuntimeError, NotImplementedError) as error:
            # What a remedy's own ops refuse (an op without a deterministic form, a memory limit) is its result, not ours.
            kind = "" if isinstance(error, DetlabError) else f"{type(error).__name__}: "
            words = (str(error).strip().splitlines() or ["it failed"])[0]
            return self._made(plan, (self.a, self.b), NOT_APPLICABLE, kind + words)

    def _tried(self, plan: Plan, pair: tuple[Condition, Condition]) -> Attempt:
        is_here = not (plan.variables or any(c.variables for c in (*pair, self.a, self.b)))
        firsts, seconds, ratios = [], [], []
        for _ in range(self.trials):
            stock = self.seconds
            if is_here:
                stock = sum(one.seconds for one in self._served((self.a, self.b), _STOCK))
            # The first of each warms up, and is the control. A fresh process is dear: its traces are made at once.
            again_a, again_b, first, second = self._served((*pair, *pair), plan, trace=not is_here)
            for name, runs in (("a", (again_a, first)), ("b", (again_b, second))):
                if runs[0].md5 != runs[1].md5:
                    return self._made(plan, pair, CONTROL_FAILED, f"under it, {name} does not repeat its own bits")
            ratios.append((first.seconds + second.seconds) / stock)
            firsts.append(first)
            seconds.append(second)
        unchanged = all(x.md5 == y.md5 for x, y in ((firsts[-1], self.first), (seconds[-1], self.second)))
        # Where neither a condition nor a bit of an answer is another than before, the two part where they did.
        is_known = unchanged and pair == (self.a, self.b)
        origin = self.before.origin if is_known else self._origin(firsts[-1], seconds[-1], pair, plan)
        after = difference_of(firsts, seconds, origin)
        verdict = verdict_of(self.before, after)
        notes = []
        if pair[0] == pair[1]:
            notes.append("both conditions became the same")
        if verdict == NO_EFFECT and unchanged:
            notes.append("every bit of both is as before")
        if after.prompts and all(rows.dtype == torch.float64 for one in (firsts[0], seconds[0]) for rows in one.logits):
            rounded = difference_of([_rounded(one) for one in firsts], [_rounded(one) for one in seconds])
            notes.append(f"rounded to float32, {rounded.prompts} of {rounded.of} differ")
        notes += self._settings(plan)
        made = self._made(plan, pair, verdict, "", "; ".join(notes))
        return Attempt(**made.__dict__ | {"after": after, "cost": statistics.median(ratios), "is_interleaved": is_here})

    def _settings(self, plan: Plan) -> list[str]:
        """What the model's own generation config still holds against greedy decoding."""
        config = getattr(self.model, "generation_config", None)
        if config is None or all(part.how != GENERATION for part in plan.parts):
            return []
        found = [warning.setting for warning in check_generation_config(config)]
        return [f"the model's generation config also sets {', '.join(found)}"] if found else []

    def _made(self, plan: Plan, pair: tuple[Condition, Condition], verdict: str, reason: str, note: str = "") -> Attempt:
        return Attempt(
            remedy=plan.name, how=", ".join(dict.fromkeys(p.how for p in plan.parts)), verdict=verdict, reason=reason,
            a=str(pair[0]), b=str(pair[1]), before=self.before, after=None, cost=None, is_interleaved=False, note=note,
            source=", ".join(dict.fromkeys(p.source for p in plan.parts)),
        )  # fmt: skip
