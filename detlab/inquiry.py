"""The four questions about one model, asked one after another, with what was answered so far: where, why, fix, proof.

What a workbench shows, without anything that shows: no widget, no figure. Each question is one call, which can be stopped from
another thread; an answer is kept when it is complete, and not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from detlab.condition import Condition
from detlab.divergence.compare import compare
from detlab.divergence.look import Look, look
from detlab.divergence.result import IDENTICAL_VERDICT, Comparison
from detlab.errors import UsageError
from detlab.investigate import Investigation, explain_why, investigate
from detlab.remedies.attempt import prepared, try_remedies
from detlab.remedies.registry import REMEDIES, plan_of
from detlab.remedies.remedy import CONDITION, FLAG, GENERATION, START, TIER, Plan, Setup
from detlab.remedies.table import CONTROL_FAILED, NOT_APPLICABLE, Attempt, Attempts
from detlab.runner import run

__all__ = ["Fix", "Inquiry", "Progress", "Stopped", "Switch"]

#: Called with (share done, 0 to 1, what).
Progress = Callable[[float, str], None]
_ORDER = (TIER, CONDITION, FLAG, GENERATION, START)


class Stopped(KeyboardInterrupt):
    """Somebody asked the work to stop; like Ctrl-C, it passes everything that only handles errors."""


@dataclass(frozen=True)
class Switch:
    """A remedy as a switch: what is said of it, how it is applied, and why it cannot be tried here ("" where it can)."""

    name: str
    claim: str
    mechanism: str
    how: str
    reason: str


@dataclass(frozen=True)
class Fix:
    """One or several remedies, tried on the pair of conditions.

    Attributes:
        names: of the remedies.
        attempts: what was measured, before and after.
        comparison: both conditions under the remedies, op by op; None where they cannot be traced here.
        call: the Python call that measures it again.
    """

    names: tuple[str, ...]
    attempts: Attempts
    comparison: Comparison | None
    call: str

    @property
    def attempt(self) -> Attempt:
        """The measurement: verdict, difference before and after, cost."""
        return self.attempts.attempts[0]

    @property
    def is_tried(self) -> bool:
        """Whether there is a result: it could be applied here, and its controls held."""
        return self.attempt.verdict not in (NOT_APPLICABLE, CONTROL_FAILED)

    @property
    def verdict(self) -> str:
        """"identical", "diverged" or "untried": what the paired proof says under the remedies.

        Identical needs both: all bits of the answers, and, where they were traced, of every row that was compared.
        """
        if not self.is_tried or self.attempt.after is None:
            return "untried"
        if self.attempt.after.prompts:
            return "diverged"
        return IDENTICAL_VERDICT if self.comparison is None else self.comparison.verdict


class Inquiry:
    """What is asked about one model, and what was answered so far.

    Attributes:
        model, prompts: as for `detlab.investigate`; the model is left as it was, whatever happens.
        a, b: the conditions of the last answer to "where", as text.
        result: that answer; None before there is one.
        looks: (op, prompt, position) -> what was found inside.
        fixes: names of remedies -> what they did to this pair.

    Args:
        new_tokens: tokens to decode after prefill.
        tokenizer: needed for text where the model was not loaded by `load_model`.

    Raises:
        UsageError: the prompts cannot be used with this model.
    """

    def __init__(self, model: nn.Module, prompts: Any, *, new_tokens: int = 8, tokenizer: Any = None) -> None:
        self.model, self.prompts = model, prompts
        self.new_tokens, self.tokenizer = new_tokens, tokenizer
        self._inputs = prepared(model, prompts, new_tokens, tokenizer)
        self._asked_to_stop = threading.Event()
        self._clear()

    def _clear(self) -> None:
        self.a, self.b = "", ""
        self.result: Investigation | None = None
        self.looks: dict[tuple[int, int, int], Look] = {}
        self.fixes: dict[tuple[str, ...], Fix] = {}

    def stop(self) -> None:
        """Asks what runs in another thread to stop, at the next call of a module; it then raises `Stopped` there."""
        self._asked_to_stop.set()

    def go_on(self) -> None:
        """Takes back a `stop` that came too late to stop anything."""
        self._asked_to_stop.clear()

    # ------------------------------------------------------------------------------------------------------ the questions
    def where(self, a: str, b: str, progress: Progress | None = None) -> Investigation:
        """Where do the conditions part? Earlier answers, which were about another pair, are dropped first.

        Raises:
            UsageError: a condition cannot be run. ControlError: one does not repeat itself. Stopped: `stop` was called.
        """
        self._clear()
        conditions = [Condition.parse(text) for text in (a, b)]
        with self._stoppable(conditions):
            found = investigate(
                self.model, self.prompts, a=conditions[0], b=conditions[1], new_tokens=self.new_tokens,
                tokenizer=self.tokenizer, why=False, progress=_passes(progress, self._check),
            )  # fmt: skip
        self.a, self.b, self.result = a, b, found
        return found

    def why(self, progress: Progress | None = None) -> Investigation:
        """Why do they part? Adds triage and explanation to the answer to "where"."""
        found = self._answered()
        if progress is not None:
            progress(0.0, "executing the op alone, one factor changed at a time")
        with self._stoppable(self._pair()):
            triage, explanation = found.triage, found.explanation
            try:
                explain_why(found)
            except BaseException:
                found.triage, found.explanation = triage, explanation
                raise
        return found

    def look(self, op: int, prompt: int, position: int, progress: Progress | None = None) -> Look:
        """What happens inside one op at one token? An answer is remembered."""
        found = self._answered()
        key = (op, prompt, position)
        if key not in self.looks:
            if progress is not None:
                progress(0.0, "executing both sides again, to see this op's elements")
            with self._stoppable(self._pair()):
                made = look(found.comparison, op, prompt, position)
            self.looks[key] = made
        return self.looks[key]

    def fix(self, names: Sequence[str], progress: Progress | None = None) -> Fix:
        """What do these remedies, together, do to the pair? An answer is remembered.

        Raises:
            UsageError: a name is unknown, or the remedies contradict one another. Stopped: `stop` was called.
        """
        found = self._answered()
        known = list(REMEDIES)
        key = tuple(sorted(set(names), key=lambda name: known.index(name) if name in known else -1))
        if key not in self.fixes:
            plan = plan_of("+".join(key))
            # The pair without and with it, each after its control; traced with controls; and what looks at coverage.
            num_calls = sum(len(side.trace.calls) for side in (found.a, found.b) if side.trace is not None)
            pair = [*self._pair(), *plan.changed(*self._pair())]
            with self._stoppable(pair, progress, f"trying {plan.name}", 10 * num_calls):
                attempts = try_remedies(
                    self.model, self.prompts, self.a, self.b, [plan.name], self.new_tokens, tokenizer=self.tokenizer
                )  # fmt: skip
                proof = self._traced(plan) if attempts.attempts[0].after is not None else None
            call = (
                f"detlab.try_remedies(model, prompts, a={self.a!r}, b={self.b!r}, remedies=[{plan.name!r}], "
                f"new_tokens={self.new_tokens})"
            )
            self.fixes[key] = Fix(key, attempts, proof, call)
        return self.fixes[key]

    def switches(self) -> list[Switch]:
        """Every remedy, those that can be tried here first; tiers head the list."""
        made = [Switch(r.name, r.claim, r.mechanism, r.how, r.reason(self.model)) for r in REMEDIES.values()]
        return sorted(made, key=lambda one: (bool(one.reason), _ORDER.index(one.how) if one.how in _ORDER else len(_ORDER)))

    # ------------------------------------------------------------------------------------------------------------- inside
    def _answered(self) -> Investigation:
        if self.result is None:
            raise UsageError("the inquiry has no pair of conditions yet: ask where(a, b) first.")
        return self.result

    def _pair(self) -> list[Condition]:
        return [Condition.parse(text) for text in (self.a, self.b)]

    def _traced(self, plan: Plan) -> Comparison | None:
        """Both conditions under the remedies, compared op by op; None where a library must start with other variables."""
        pair = plan.changed(*self._pair())
        if plan.variables or any(condition.variables for condition in pair):
            return None
        with plan.entered(Setup(self.model, self._inputs, pair, self.new_tokens)) as served:
            runs = [run(served, self.prompts, c, new_tokens=self.new_tokens, tokenizer=self.tokenizer) for c in pair]
            made = compare(runs[0], runs[1])
        for one in made.sides or ():
            one._source = None  # nothing must execute it again once the remedies are taken out
        return made

    @contextmanager
    def _stoppable(self, pair: Sequence[Condition], progress: Progress | None = None, what: str = "",
                   num_calls: int = 1) -> Iterator[None]:  # fmt: skip
        """Lets `stop` end a block, and counts calls of the model in it.

        A hook of all modules serves both: models that are copied or rebuilt within the block are met, too. It would get into
        what is compiled, so a compiled condition goes without, and stops between its calls.
        """
        thread, done = threading.get_ident(), 0

        def met(module: nn.Module, _: Any) -> None:
            nonlocal done
            if threading.get_ident() != thread:
                return
            self._check()
            if progress is not None and type(module) is type(self.model):
                done += 1
                progress(min(1.0, done / num_calls), what)

        if any(condition.compile for condition in pair):
            yield
        else:
            handle = nn.modules.module.register_module_forward_pre_hook(met)
            try:
                yield
            finally:
                handle.remove()
        self._check()

    def _check(self) -> None:
        if self._asked_to_stop.is_set():
            self._asked_to_stop.clear()
            raise Stopped("stopped; nothing was concluded.")


def _passes(progress: Progress | None, check: Callable[[], None]) -> Callable[[int, int, str], None]:
    """Turns the count of calls, which begins anew with each run and each repetition, into a share of all of them."""
    passes, before = 0, 0

    def report(done: int, total: int, what: str) -> None:
        nonlocal passes, before
        check()
        passes += done <= before or not passes
        before = done
        expected = max(4, passes)  # a, b, and each again as its control; once more where b is fed a's tokens
        if progress is not None:
            progress(min(1.0, (passes - 1 + done / max(1, total)) / expected), f"pass {passes}: {what}")

    return report
