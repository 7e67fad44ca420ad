"""What was measured of remedies: one line each, before and after."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from detlab import bits
from detlab.environment import Environment
from detlab.remedies.serve import Served

__all__ = ["Attempt", "Attempts", "Difference", "difference_of", "verdict_of"]

RESTORES, REDUCES, NO_EFFECT = "restores equality", "reduces", "no effect"
WORSE, NOT_APPLICABLE, CONTROL_FAILED = "makes it worse", "not applicable", "control failed"


@dataclass(frozen=True)
class Difference:
    """How far two conditions are apart.

    Attributes:
        prompts: pairs of answers to a prompt whose logits differ in any bit.
        of: pairs compared: prompts times trials.
        token_flips: pairs whose greedy tokens part.
        max_ulp: largest ULP distance of logits, up to the step at which a prompt's tokens part, since other questions are
            asked from there on; None where the two are of different formats.
        max_abs: the same, as an absolute difference; infinity where one side is not a number.
        origin: the first place where they part; "" where nothing differs, or it was not looked for.
    """

    prompts: int
    of: int
    token_flips: int
    max_ulp: int | None
    max_abs: float
    origin: str = ""

    @property
    def bound(self) -> float | None:
        """Where nothing differs: at most this share of answers differs, at 95 % (3/n). None where some do.

        It counts prompts times trials. A trial asks the same questions again: for other prompts than these, n is their number.
        """
        return min(1.0, 3 / self.of) if self.of and not self.prompts else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        size = self.max_abs if math.isfinite(self.max_abs) else "inf"  # JSON has no infinity
        return asdict(self) | {"max_abs": size, "bound": self.bound}

    def __str__(self) -> str:
        if not self.prompts:
            return f"0 of {self.of}"
        ulp = "" if self.max_ulp is None else f", {'NaN' if self.max_ulp >= 1 << 62 else f'{self.max_ulp:,} ULP'}"
        flips = f", {self.token_flips} flips" if self.token_flips else ""
        return f"{self.prompts} of {self.of}{flips}{ulp}"


def difference_of(a: Sequence[Served], b: Sequence[Served], origin: str = "") -> Difference:
    """Compares trials of two conditions, pair by pair; each holds logits [num_steps, vocab] for each prompt."""
    prompts = count = flips = 0
    max_ulp: int | None = 0
    max_abs = 0.0
    for first, second in zip(a, b, strict=True):
        for index, (actual, expected) in enumerate(zip(first.logits, second.logits, strict=True)):
            count += 1
            tokens = first.tokens[index], second.tokens[index]
            flips += tokens[0] != tokens[1]
            if bits.equal(actual, expected):
                continue
            prompts += 1
            parts = next((i for i, (s, t) in enumerate(zip(*tokens, strict=True)) if s != t), len(actual) - 1)
            actual, expected = actual[: parts + 1], expected[: parts + 1]
            gap = (actual.double() - expected.double()).abs()
            max_abs = max(max_abs, float(torch.where(gap.isnan(), math.inf, gap).max()))
            if actual.dtype != expected.dtype:
                max_ulp = None
            elif max_ulp is not None:
                max_ulp = max(max_ulp, int(bits.ulp_distance(actual.contiguous(), expected.contiguous()).max()))
    return Difference(prompts, count, flips, max_ulp, max_abs, origin if prompts else "")


def verdict_of(before: Difference, after: Difference) -> str:
    """Judges a remedy by the answers that differ, then by the tokens that flip, then by the size of the difference.

    Another size counts from a factor of ten on: any change of the path draws new roundings of the same size.
    """
    share, shared = before.prompts / before.of, after.prompts / after.of
    if not after.prompts:
        return RESTORES if before.prompts else NO_EFFECT
    if shared != share:
        return REDUCES if shared < share else WORSE
    flips, flipped = before.token_flips / before.of, after.token_flips / after.of
    if flips != flipped:
        return REDUCES if flipped < flips else WORSE
    if after.max_abs == before.max_abs:  # 0 as well: texts that were drawn apart at the first step
        return NO_EFFECT
    if after.max_abs * 10 <= before.max_abs:
        return REDUCES
    return WORSE if after.max_abs >= 10 * before.max_abs else NO_EFFECT


@dataclass(frozen=True)
class Attempt:
    """One remedy, tried.

    Attributes:
        remedy: its name, or several joined by "+".
        how: how it is applied.
        verdict: "restores equality", "reduces", "no effect", "makes it worse", "not applicable", or "control failed" (under
            it a condition did not repeat its own bits, so that nothing was shown).
        reason: why it is not applicable, or which control failed.
        a, b: the conditions with it, as text.
        before, after: how far the conditions are apart.
        cost: time of both conditions' model calls with it, over that without; None where it was not run.
        is_interleaved: whether this is a median over rounds that alternate in one process; a fresh process is another place.
        note: what else is to be known: bits unchanged, conditions that became the same.
        source: rows of the requirements.
    """

    remedy: str
    how: str
    verdict: str
    reason: str
    a: str
    b: str
    before: Difference
    after: Difference | None
    cost: float | None
    is_interleaved: bool
    note: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        after = None if self.after is None else self.after.to_json()
        return asdict(self) | {"before": self.before.to_json(), "after": after}


@dataclass(frozen=True)
class Attempts:
    """Remedies for one pair of conditions, each with what it did and what it costs.

    Attributes:
        model: the model's class.
        a, b: the conditions, as text.
        new_tokens: tokens decoded after prefill.
        trials: rounds.
        before: how far apart they are without any remedy.
        attempts: one for each remedy, in the order asked for.
        controls: each condition against its own repetition; True where it held.
        environment: the machine's record.
    """

    model: str
    a: str
    b: str
    new_tokens: int
    trials: int
    before: Difference
    attempts: list[Attempt]
    controls: dict[str, bool]
    environment: Environment = field(repr=False)

    def __getitem__(self, name: str) -> Attempt:
        for attempt in self.attempts:
            if attempt.remedy == name:
                return attempt
        raise KeyError(f"{name!r} was not tried; tried were {', '.join(a.remedy for a in self.attempts)}")

    @property
    def restoring(self) -> list[str]:
        """Names of the remedies that restore equality, the cheapest first."""
        found = [a for a in self.attempts if a.verdict == RESTORES]
        return [a.remedy for a in sorted(found, key=lambda a: math.inf if a.cost is None else a.cost)]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "model": self.model, "a": self.a, "b": self.b, "new_tokens": self.new_tokens, "trials": self.trials,
            "before": self.before.to_json(), "attempts": [a.to_json() for a in self.attempts], "controls": self.controls,
            "environment": self.environment.to_json(),
        }  # fmt: skip

    def to_pandas(self) -> Any:
        """One row a remedy."""
        import pandas as pd

        rows = []
        for attempt in self.attempts:
            row: dict[str, Any] = {"remedy": attempt.remedy, "verdict": attempt.verdict}
            for when, found in (("before", attempt.before), ("after", attempt.after)):
                for name in ("prompts", "of", "token_flips", "max_ulp", "max_abs", "origin"):
                    row[f"{name}_{when}"] = None if found is None else getattr(found, name)
            row["bound"] = None if attempt.after is None else attempt.after.bound
            row |= {"cost": attempt.cost, "is_interleaved": attempt.is_interleaved, "how": attempt.how}
            rows.append(row | {"reason": attempt.reason, "note": attempt.note, "source": attempt.source})
        return pd.DataFrame(rows)

    def _head(self) -> list[str]:
        lines = [f"{self.model}: a = {self.a}, b = {self.b}, {self.new_tokens} new tokens, trials: {self.trials}"]
        origin = f", first at {self.before.origin}" if self.before.origin else ""
        if self.before.prompts:
            lines.append(f"without a remedy the logits differ (prompts: {self.before}){origin}; each condition repeats itself")
        else:
            bound = f"at most {self.before.bound:.2g} at 95 %"
            lines.append(f"without a remedy nothing differs (0 of {self.before.of}: {bound}): there is nothing to restore here")
        return lines

    def _cells(self, attempt: Attempt) -> tuple[str, str, str, str, str]:
        cost = "" if attempt.cost is None else f"{attempt.cost:.2f}{'' if attempt.is_interleaved else ' *'}"
        after = "" if attempt.after is None else str(attempt.after)
        if attempt.after is not None and attempt.after.bound is not None:
            after += f" (at most {attempt.after.bound:.2g})"
        return attempt.remedy, attempt.verdict, after, cost, "; ".join(filter(None, (attempt.reason, attempt.note)))

    def __str__(self) -> str:
        rows = [("remedy", "verdict", "differ after", "cost", ""), *map(self._cells, self.attempts)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join((*(f"{c:<{w}}" for c, w in zip(row[:4], widths, strict=True)), row[4])).rstrip() for row in rows]
        foot = ["* measured in another process, not interleaved"] if any("*" in row[3] for row in rows) else []
        return "\n".join((*self._head(), *lines, *foot))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("remedy", "verdict", "differ after", "cost", "why"))
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in self._cells(attempt)) + "</tr>"
            for attempt in self.attempts
        )
        words = "".join(f"<p>{html.escape(line)}</p>" for line in self._head())
        is_foreign = any("*" in self._cells(attempt)[3] for attempt in self.attempts)
        foot = "<p>* measured in another process, not interleaved</p>" if is_foreign else ""
        return f"{words}<table><tr>{head}</tr>{rows}</table>{foot}"
