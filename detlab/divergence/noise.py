"""How far harmless changes move a model: the measure by which the size of a difference is judged.

A condition is harmless where it asks the same question: another number of threads, another batch, another attention
implementation, no cache. What their logits differ by, fed the same tokens, is this model's path noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from detlab.condition import Condition
from detlab.errors import DetlabError
from detlab.runner import Run, execute

#: Changes that ask the same question.
HARMLESS: tuple[dict[str, Any], ...] = (
    {"batch_size": 3, "row": 0}, {"attention": "eager"}, {"attention": "sdpa"}, {"prefill_chunk": 7}, {"threads": 2},
)  # fmt: skip


@dataclass(frozen=True)
class Harmless:
    """One harmless condition: the largest difference of its logits from a's, and what it was."""

    condition: str
    max_abs: float


@dataclass
class Noise:
    """The path noise of a model on some prompts.

    Attributes:
        measured: each harmless condition with what it moved.
        by_step: per prompt [num_steps, vocab], the largest absolute difference of each logit over the conditions.
    """

    measured: list[Harmless] = field(default_factory=list)
    by_step: list[Tensor] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """The largest absolute difference of a logit; 0 where no harmless condition moved a bit."""
        return max((one.max_abs for one in self.measured), default=0.0)

    @property
    def words(self) -> str:
        """What was measured, in one line."""
        if not self.measured:
            return "no harmless condition could be measured"
        worst = max(self.measured, key=lambda one: one.max_abs)
        return f"{len(self.measured)} harmless conditions move the logits by up to {self.largest:.3g} ({worst.condition})"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"largest": self.largest, "measured": {one.condition: one.max_abs for one in self.measured}}


def measure_noise(run: Run, *, avoid: Sequence[Run] = (), most: int = 4) -> Noise:
    """Measures the path noise around a run: harmless conditions, fed what the run was fed.

    Args:
        run: a live run; its condition is the one that is changed.
        avoid: runs whose conditions are the question, and so no part of the measure.
        most: conditions to measure.
    """
    noise = Noise(by_step=[torch.zeros(logits.shape, dtype=torch.float64) for logits in run.logits])
    seen = {str(run.condition), *(str(other.condition) for other in avoid)}
    for change in HARMLESS:
        if len(noise.measured) == most:
            break
        with suppress(DetlabError):  # a condition that cannot be combined with the run's, or not run here
            condition = replace(run.condition, **({"temperature": 0.0, "top_k": 0} | change))  # the tokens are fed
            if str(condition) in seen:
                continue
            seen.add(str(condition))
            other = again(run, condition)
            largest = 0.0
            for at, (ours, theirs) in enumerate(zip(run.logits, other.logits, strict=True)):
                gap = (ours.double() - theirs.double()).abs()
                noise.by_step[at] = torch.maximum(noise.by_step[at], gap)
                largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
            noise.measured.append(Harmless(_words(change), largest))
    return noise


def _words(change: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in change.items() if value)


def again(run: Run, condition: Condition, inputs: list[list[int]] | None = None, *, new_tokens: int | None = None,
          trace: bool = False) -> Run:  # fmt: skip
    """Executes a run's model under another condition, fed what the run was fed; or on other tokens, prefill alone."""
    source = run._source
    model = source.model() if source is not None else None
    assert source is not None and model is not None
    steps = run.num_steps if new_tokens is None else new_tokens
    fed = run.tokens if run.forced is None else run.forced
    return execute(
        model, source.prompts, run.inputs if inputs is None else inputs, condition, steps, source.tokenizer,
        save="digest", with_trace=trace, force=fed if steps and inputs is None else None, progress=None, keep=None,
    )  # fmt: skip
