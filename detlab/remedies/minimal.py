"""The smallest set of a model's parts that must run under the engine for two conditions to agree."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from detlab.condition import Condition
from detlab.deterministic import options_of_runs
from detlab.engine import session as engine
from detlab.engine.session import Options
from detlab.environment import Environment, environment
from detlab.errors import ControlError, UsageError
from detlab.remedies.attempt import prepared
from detlab.remedies.remedy import Plan
from detlab.remedies.serve import Served, serve_here
from detlab.runner import Progress
from detlab.serving import served_model

__all__ = ["MinimalFix", "Part", "ddmin", "minimal_fix"]

MINIMAL, SMALL, NOTHING, NOT_FIXED = "minimal", "not proved minimal", "nothing to fix", "not fixed by this tier"


@dataclass(frozen=True, order=True)
class Part:
    """A part of a tier: the module it replaces ("" for the attention, which is one part) and its kind."""

    module: str
    kind: str

    def __str__(self) -> str:
        return f"{self.module} ({self.kind})" if self.module else self.kind


@dataclass(frozen=True)
class MinimalFix:
    """What `minimal_fix` found.

    Attributes:
        verdict: "minimal" (the parts make the conditions agree, and without any one of them they part), "not proved minimal"
            (``max_tests`` was reached before), "nothing to fix" (the conditions agree as they are), "not fixed by this tier".
        parts: the smallest set found, in the model's order.
        of: number of the tier's parts in this model.
        without: part -> prompts whose logits differ when this one is left out; what proves that each is needed.
        a, b: the conditions, as text.
        tier: whose parts.
        prompts: prompts compared; all agree under ``parts``, in a run of its own at the end.
        tests: sets of parts that were run.
        environment: the machine's record.
    """

    verdict: str
    parts: list[Part]
    of: int
    without: dict[Part, int]
    a: str
    b: str
    tier: str
    prompts: int
    tests: int
    environment: Environment = field(repr=False)

    def kinds(self) -> dict[str, int]:
        """Number of parts by kind."""
        return dict(Counter(part.kind for part in self.parts))

    def options(self) -> Options:
        """The parts as options of `detlab.deterministic`."""
        return _options(frozenset(self.parts))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.verdict, "parts": [asdict(p) | {"without": self.without.get(p)} for p in self.parts], "of": self.of,
            "kinds": self.kinds(), "a": self.a, "b": self.b, "tier": self.tier, "prompts": self.prompts, "tests": self.tests,
            "environment": self.environment.to_json(),
        }  # fmt: skip

    def to_pandas(self) -> Any:
        """One row a part."""
        import pandas as pd

        rows = [asdict(part) | {"prompts_differ_without": self.without.get(part)} for part in self.parts]
        return pd.DataFrame(rows, columns=["module", "kind", "prompts_differ_without"])

    def _lines(self) -> list[str]:
        pair = f"a = {self.a}, b = {self.b}"
        if self.verdict == NOTHING:
            return [f"{pair}: nothing to fix, the logits of all {self.prompts} prompts agree as they are"]
        if self.verdict == NOT_FIXED:
            return [f"{pair}: they part even with all {self.of} parts of tier {self.tier!r}"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds().items())
        lines = [f"{pair}: they agree with {len(self.parts)} of the {self.of} parts of tier {self.tier!r} ({kinds})"]
        if self.verdict == MINIMAL:
            lines.append(f"minimal: without any one of them they part ({self.tests} sets were run)")
        else:
            lines.append(f"not proved minimal: the search ended after {self.tests} sets")
        return lines

    def __str__(self) -> str:
        return "\n".join([*self._lines(), *(f"  {part}" for part in self.parts)])

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        rows = "".join(
            f"<tr><td>{html.escape(p.module)}</td><td>{html.escape(p.kind)}</td><td>{self.without.get(p, '')}</td></tr>"
            for p in self.parts
        )
        head = "<tr><th>module</th><th>kind</th><th>prompts that differ without it</th></tr>"
        return f"{words}<table>{head}{rows}</table>"


class _Spent(Exception):
    """The search has used up its tests."""


def ddmin(items: Sequence[Part], agrees: Callable[[frozenset[Part]], bool]) -> list[Part]:
    """The smallest set, one element at a time: leaving out any one of its elements, the conditions part.

    Args:
        items: a set under which they agree.
        agrees: whether they agree under a set. Asked often; let it remember.

    Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002), algorithm ddmin. Its step to one
    chunk alone is left out: a model mostly needs many of its parts, and leaving chunks out finds the few of others as well.
    """
    current, pieces = list(items), 2
    while len(current) > 1:
        size = -(-len(current) // pieces)
        chunks = [current[i : i + size] for i in range(0, len(current), size)]
        for chunk in chunks:
            left = [item for item in current if item not in chunk]
            if agrees(frozenset(left)):
                current, pieces = left, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(current))
    if len(current) == 1 and agrees(frozenset()):
        return []
    return current


def minimal_fix(model: nn.Module, prompts: Any, a: Condition | str = "", b: Condition | str = "batch_size=4", *,
                tier: str = "invariant", new_tokens: int = 8, max_tests: int | None = None, tokenizer: Any = None,
                progress: Progress | None = None) -> MinimalFix:  # fmt: skip
    """Finds the smallest set of parts that must run under the engine for two conditions to agree, by delta debugging.

    Whole kinds are left out first, then layers' parts, down to single modules. The result is proved: a last run with exactly
    that set agrees, and each part left out makes the conditions part again. Another set may be as small: the smallest by
    leaving out, not of all. The parts must agree in every bit of the logits of all prompts.

    Args:
        model: a transformers causal language model in eval mode; it is left as it was.
        prompts: what `load_prompts` returns, or strings, or lists of token ids.
        a, b: conditions of tier "stock" that run in this process, with one attention implementation.
        tier: whose parts.
        new_tokens: tokens to decode after prefill.
        max_tests: sets of parts to run at most; None goes on until the set is proved.
        tokenizer: needed for text where the model was not loaded by `load_model`.
        progress: called with (sets run, parts still in, what).

    Returns:
        A `MinimalFix`.

    Raises:
        UsageError: a condition or prompt cannot be used here.
        ControlError: a condition does not repeat its own bits.
    """
    pair = tuple(Condition.parse(c) if isinstance(c, str) else c for c in (a, b))
    _check(pair)
    if max_tests is not None and max_tests < 1:
        raise UsageError(f"max_tests={max_tests!r} is not possible; give a whole number of at least 1, or None.")
    inputs = prepared(model, prompts, new_tokens, tokenizer)
    with _attention(model, pair[0].attention):
        search = _Search(model, inputs, tuple(replace(c, attention=None) for c in pair), tier, new_tokens, max_tests, progress)
        return search.run(str(pair[0]), str(pair[1]))


def _check(pair: tuple[Condition, ...]) -> None:
    for condition in pair:
        if condition.variables:
            raise UsageError(
                f"minimal_fix runs in this process, and {condition} needs a fresh one: start Python with "
                f"{', '.join(f'{k}={v}' for k, v in condition.variables.items())}, and leave the setting out."
            )
        for name in ("compile", "autocast"):
            if getattr(condition, name) is not None:
                value = getattr(condition, name)
                raise UsageError(f"minimal_fix cannot combine {name}={value!r} with a tier's parts; leave it out.")
        if condition.tier != "stock":
            raise UsageError(f"minimal_fix puts the parts in itself; give conditions of tier 'stock', not {condition.tier!r}.")
    if len({condition.attention for condition in pair}) > 1:
        raise UsageError("minimal_fix needs one attention implementation on both sides; the tier's own would replace either.")


@contextmanager
def _attention(model: Any, name: str | None) -> Iterator[None]:
    """The model under an attention implementation: set before a tier's parts, which replace it where they are asked to."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name is None or name == before:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _options(parts: frozenset[Part]) -> Options:
    return Options(only=lambda name, kind: Part(name, kind) in parts)


class _Search:
    """Runs the pair under sets of parts, and remembers."""

    def __init__(self, model: nn.Module, inputs: list[list[int]], pair: tuple[Condition, ...], tier: str, new_tokens: int,
                 max_tests: int | None, progress: Progress | None) -> None:  # fmt: skip
        self.model, self.inputs, self.pair, self.tier, self.new_tokens = model, inputs, pair, tier, new_tokens
        self.max_tests, self.progress, self.tests = max_tests, progress, 0
        self.known: dict[frozenset[Part], int] = {}
        self.best: list[Part] = []

    def _served(self, parts: frozenset[Part], conditions: Sequence[Condition]) -> list[Served]:
        if not parts:
            return serve_here(self.model, self.inputs, conditions, self.new_tokens, Plan(()), False)
        with options_of_runs(_options(parts)):
            under = [replace(condition, tier=self.tier) for condition in conditions]
            return serve_here(self.model, self.inputs, under, self.new_tokens, Plan(()), False)

    def differing(self, parts: frozenset[Part]) -> int:
        """Prompts whose logits differ under a set of parts."""
        if parts not in self.known:
            if self.max_tests is not None and self.tests >= self.max_tests:
                raise _Spent
            self.tests += 1
            if self.progress is not None:
                self.progress(self.tests, len(parts), f"{len(parts)} parts")
            first, second = self._served(parts, self.pair)
            self.known[parts] = sum(x != y for x, y in zip(first.md5, second.md5, strict=True))
        return self.known[parts]

    def agrees(self, parts: frozenset[Part]) -> bool:
        """Whether the pair agrees; the smallest set that does is kept."""
        if self.differing(parts):
            return False
        if len(parts) < len(self.best):
            self.best = [part for part in self.best if part in parts]
        return True

    def run(self, a: str, b: str) -> MinimalFix:
        """The whole search, with its controls."""
        once, again = (self._served(frozenset(), self.pair) for _ in range(2))
        for name, text, first, second in zip("ab", (a, b), once, again, strict=True):
            if first.md5 != second.md5:
                raise ControlError(f"{name} ({text}) does not repeat its own bits, so that no part could be judged.")
        every = self._parts()
        made = {"of": len(every), "a": a, "b": b, "tier": self.tier, "prompts": len(self.inputs)}
        if self.agrees(frozenset()):
            return self._made(NOTHING, [], {}, made)
        if self.differing(frozenset(every)):
            return self._made(NOT_FIXED, [], {}, made)
        self.best = list(every)
        try:
            found = ddmin(self._fewer_kinds(every), self.agrees)
            without = {part: self.differing(frozenset(found) - {part}) for part in found}
        except _Spent:
            return self._made(SMALL, self.best, {}, made)
        first, second = self._served(frozenset(found), self.pair)  # exactly this set, once more
        if first.md5 != second.md5:
            raise ControlError("the set found did not make the conditions agree again: something moves from run to run.")
        return self._made(MINIMAL, found, without, made)

    def _made(self, verdict: str, parts: list[Part], without: dict[Part, int], made: dict[str, Any]) -> MinimalFix:
        return MinimalFix(verdict, parts, without=without, tests=self.tests, environment=environment(), **made)

    def _parts(self) -> list[Part]:
        with served_model(self.model, self.pair[0]) as twin, engine.applied(twin, self.tier) as session:
            found = {name: kind for name, kind in session.parts.items() if kind != "model"}
        return [Part("" if kind == "attention" else name, kind) for name, kind in found.items()]

    def _fewer_kinds(self, parts: list[Part]) -> list[Part]:
        """Leaves out whole kinds first: most models need one or two of them, of many modules each."""
        for kind in dict.fromkeys(part.kind for part in parts):
            left = [part for part in parts if part.kind != kind]
            if left and self.agrees(frozenset(left)):
                parts = left
        return parts
