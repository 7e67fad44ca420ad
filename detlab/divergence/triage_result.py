"""What a triage holds, and how it is shown."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import Any

from detlab.divergence.noise import Noise

IDENTICAL, ROUNDING, SEMANTICS, STATE = "identical", "rounding", "semantics", "state"
SAMPLING, CONTROL_FLOW, RUN_TO_RUN, UNDECIDED = "sampling", "control_flow", "run_to_run", "undecided"


@dataclass(frozen=True)
class Evidence:
    """One observation: what was looked at, what was found, and numbers where there are any."""

    name: str
    found: str
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {self.found}"


@dataclass(frozen=True)
class Flip:
    """Two candidates where the texts part.

    Attributes:
        prompt_id, step, a_token, b_token: where, and what each run chose.
        margin_a, margin_b, margin_64: logit of a's token minus that of b's, in a, in b and in float64 (None: not computed).
        noise: what harmless conditions move this margin by, at most.
    """

    prompt_id: str
    step: int
    a_token: int
    b_token: int
    margin_a: float
    margin_b: float
    margin_64: float | None
    noise: float | None

    @property
    def is_near_tie(self) -> bool | None:
        """Whether the margin is no larger than the noise; None where either was not measured."""
        if self.margin_64 is None or self.noise is None:
            return None
        return abs(self.margin_64) <= self.noise

    def __str__(self) -> str:
        tie = {True: "a near tie", False: "no near tie", None: "whether it is a near tie was not measured"}[self.is_near_tie]
        exact = "not computed" if self.margin_64 is None else f"{self.margin_64:+.3g}"
        noise = "not measured" if self.noise is None else f"{self.noise:.3g}"
        return (
            f"prompt {self.prompt_id}, step {self.step}: tokens {self.a_token} and {self.b_token} lie {self.margin_a:+.3g} "
            f"apart in a, {self.margin_b:+.3g} in b, {exact} in float64; noise {noise}: {tie}"
        )


@dataclass(frozen=True)
class LayerSize:
    """How large the difference is in one layer: the largest absolute difference of any op; -1 for what is outside layers."""

    layer: int
    max_abs: float


@dataclass
class Triage:
    """What kind of difference this is, with its evidence.

    Attributes:
        verdict: "identical", "rounding", "semantics", "state", "sampling", "control_flow", "run_to_run" or "undecided".
        cause: within the verdict: "weights", "buffers", "positions", "mask", "cache", "experts", ...; "" where there is none.
        sentence: the verdict in words.
        evidence: what it rests on.
        growth: size of the difference layer by layer.
        noise: the path noise of this model; None where it was not measured.
        size: largest difference of a logit; None where there are no logits.
        nearer: the side nearer to float64: "a", "b", "neither"; "" where float64 was not run.
        flips: tokens that flip, with the margins of their candidates.
        notes: what could not be looked at.
    """

    verdict: str
    cause: str
    sentence: str
    evidence: list[Evidence] = field(default_factory=list)
    growth: list[LayerSize] = field(default_factory=list)
    noise: Noise | None = None
    size: float | None = None
    nearer: str = ""
    flips: list[Flip] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_acceptable(self) -> bool | None:
        """Whether the logits differ by no more than twice what harmless conditions move them by; None: not measured.

        This is about size alone: a wrong weight can be as small as rounding.
        """
        if self.noise is None or not self.noise.measured or self.size is None:
            return None
        return self.size <= 2 * self.noise.largest

    def size_words(self) -> str:
        """The size against the noise, in words."""
        if self.size is None or self.is_acceptable is None:
            return "the size was not held against this model's noise"
        noise = self.noise.largest if self.noise is not None else 0.0
        if not noise:
            return f"logits differ by up to {self.size:.3g}; the harmless conditions tried moved no bit"
        how = "within" if self.size <= noise else f"{self.size / noise:.3g} times"
        return f"logits differ by up to {self.size:.3g}, {how} this model's path noise ({noise:.3g})"

    def lines(self) -> list[str]:
        """The triage in plain lines, the verdict first."""
        cause = f" ({self.cause})" if self.cause else ""
        lines = [f"{self.verdict}{cause}: {self.sentence}", *map(str, self.evidence)]
        if self.verdict != IDENTICAL:
            lines.append(f"size: {self.size_words()}")
        if self.nearer:
            lines.append(f"nearer to float64: {self.nearer}")
        if self.growth:
            lines.append("growth: " + ", ".join(f"{_layer(one.layer)} {one.max_abs:.2g}" for one in _thinned(self.growth)))
        lines += [f"token flip: {flip}" for flip in self.flips[:5]]
        return lines + [f"note: {note}" for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.verdict, "cause": self.cause, "sentence": self.sentence, "size": self.size, "nearer": self.nearer,
            "evidence": [asdict(one) for one in self.evidence],
            "growth": [asdict(one) for one in self.growth],
            "noise": None if self.noise is None else self.noise.to_json(),
            "acceptable": self.is_acceptable,
            "flips": [asdict(flip) | {"near_tie": flip.is_near_tie} for flip in self.flips],
            "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        first, *rest = self.lines()
        items = "".join(f"<li>{html.escape(line)}</li>" for line in rest)
        return f"<p><strong>{html.escape(first)}</strong></p><ul>{items}</ul>"


def _layer(number: int) -> str:
    return f"layer {number}" if number >= 0 else "outside layers"


def _thinned(growth: list[LayerSize], most: int = 12) -> list[LayerSize]:
    if len(growth) <= most:
        return growth
    return [growth[i * (len(growth) - 1) // (most - 1)] for i in range(most)]
