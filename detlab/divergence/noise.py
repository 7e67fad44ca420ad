"""How far harmless changes move a model: the measure by which the size of a difference is judged.

A condition is harmless where it asks the same question: another number of threads, another batch, another attention
implementation, no cache. What their logits differ by, fed the same tokens, is this model's path noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from detlab.condition import Condition
from detlab.errors import DetlabError
from detlab.runner import Run, execute
from detlab.serving import accepted, config_of, device_of, served_model
from detlab.trace.keep import RowKeeper

#: Changes that ask the same question.
HARMLESS: tuple[dict[str, Any], ...] = (
    {"batch_size": 2, "row": 0}, {"attention": "eager"}, {"attention": "sdpa"}, {"prefill_chunk": 7}, {"threads": 2},
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
        by_step: prompt -> [num_steps, vocab], the largest absolute difference of each logit over the conditions.
    """

    measured: list[Harmless] = field(default_factory=list)
    by_step: dict[int, Tensor] = field(default_factory=dict)

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


def measure_noise(run: Run, *, avoid: Sequence[Run] = (), prompts: Sequence[int] | None = None, most: int = 3) -> Noise:
    """Measures the path noise around a run: harmless conditions, fed what the run was fed.

    Args:
        run: a live run; its condition is the one that is changed.
        avoid: runs whose conditions are the question, and so no part of the measure.
        prompts: numbers of the prompts to measure on; all where not given.
        most: conditions to measure.
    """
    chosen = list(range(len(run.inputs))) if prompts is None else list(prompts)
    noise = Noise(by_step={prompt: torch.zeros(run.logits[prompt].shape, dtype=torch.float64) for prompt in chosen})
    source = run._source
    own = getattr(config_of(source.model()), "_attn_implementation", None) if source is not None else None  # type: ignore[arg-type]
    seen = {str(_named(one.condition, own)) for one in (run, *avoid)}
    for change in HARMLESS:
        if len(noise.measured) == most:
            break
        with suppress(DetlabError):  # a condition that cannot be combined with the run's, or not run here
            condition = replace(run.condition, **({"temperature": 0.0, "top_k": 0} | change))  # the tokens are fed
            if str(_named(condition, own)) in seen:
                continue
            seen.add(str(_named(condition, own)))
            other = again(run, condition, only=chosen)
            largest = 0.0
            for prompt, theirs in zip(chosen, other.logits, strict=True):
                gap = (run.logits[prompt].double() - theirs.double()).abs()
                noise.by_step[prompt] = torch.maximum(noise.by_step[prompt], gap)
                largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
            noise.measured.append(Harmless(_words(change), largest))
    return noise


def _named(condition: Condition, own: str | None) -> Condition:
    """The condition with the attention that the model has by itself written out, so that equal ones are seen to be equal."""
    if condition.tier != "stock":  # a tier has an attention of its own, and takes no other
        return condition
    return replace(condition, attention=condition.attention or own)


def _words(change: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in change.items() if value)


def again(run: Run, condition: Condition, inputs: list[list[int]] | None = None, *, only: Sequence[int] | None = None,
          new_tokens: int | None = None, trace: bool = False, keep: RowKeeper | None = None) -> Run:  # fmt: skip
    """Executes a run's model under another condition.

    Args:
        run: a live run.
        condition: the condition.
        inputs: other tokens for all prompts, which are then not fed what the run was fed.
        only: numbers of the prompts to execute; all where not given.
        new_tokens: the run's own number where not given.
        trace, keep: whether to record, and what to keep.
    """
    source = run._source
    model = source.model() if source is not None else None
    assert source is not None and model is not None
    chosen = range(len(run.inputs)) if only is None else only
    steps = run.num_steps if new_tokens is None else new_tokens
    given = run.inputs if inputs is None else inputs
    fed = run.tokens if run.forced is None else run.forced
    return execute(
        model, [source.prompts[i] for i in chosen], [given[i] for i in chosen], condition, steps, source.tokenizer,
        save="digest", with_trace=trace, force=[fed[i] for i in chosen] if steps and inputs is None else None, progress=None,
        keep=keep,
    )  # fmt: skip


@contextmanager
def in_float64(model: nn.Module, condition: Condition) -> Iterator[tuple[nn.Module, Condition]]:
    """A model's float64 copy, and a condition's float64 form, for as long as the block lasts.

    Experts are computed one by one there: torch has no grouped product in float64.
    """
    wide = replace(condition, dtype="float64", autocast=None, compile=None)
    with served_model(model, wide) as served:
        before = getattr(config_of(served), "_experts_implementation", None)
        swap: Any = getattr(served, "set_experts_implementation", None) if before not in (None, "eager") else None
        if swap is not None:
            swap("eager")
        try:
            yield served, wide
        finally:
            if swap is not None:
                swap(before)


def logits_in_float64(run: Run, prompts: Sequence[int]) -> dict[int, Tensor]:
    """What float64 makes of what a run was fed: prompt -> [num_steps, vocab].

    Each prompt goes through the model once, with all of its tokens: in float64, the path is of no account.

    Raises:
        DetlabError, RuntimeError, ValueError: the model has no float64.
    """
    source = run._source
    model = source.model() if source is not None else None
    assert model is not None
    fed = run.tokens if run.forced is None else run.forced
    made: dict[int, Tensor] = {}
    with torch.no_grad(), in_float64(model, Condition(attention="eager")) as (served, _):
        for prompt in prompts:
            steps = len(run.logits[prompt])
            tokens = [*run.inputs[prompt], *fed[prompt][: steps - 1]]
            ids = torch.tensor([tokens], device=device_of(served))
            arguments = {
                "input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False,
                "position_ids": torch.arange(len(tokens), device=ids.device)[None],
            }  # fmt: skip
            made[prompt] = served(**accepted(served, arguments))["logits"][0, len(run.inputs[prompt]) - 1 :].cpu()
    return made
