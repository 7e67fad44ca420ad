"""Scores that a model gives to a fixed set of prompts: how far they spread over conditions, and which decisions flip."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from detlab.condition import Condition
from detlab.environment import Environment, environment
from detlab.errors import MachineError, UsageError
from detlab.models import tokenizer_for
from detlab.prompts import as_prompts
from detlab.remedies.attempt import prepared
from detlab.remedies.registry import plan_of
from detlab.remedies.remedy import Plan, Remedy
from detlab.remedies.serve import serve
from detlab.serving import check_model

__all__ = ["Scores", "score"]


@dataclass(frozen=True)
class Scores:
    """Scores of prompts under conditions.

    Attributes:
        prompt_ids: names of the prompts.
        conditions: as text, with the remedy; the first is the reference.
        remedy: its name; "" for none.
        choices: answer -> what it is worth.
        threshold: a score of at least this is a yes.
        scores: [prompt][condition]; the mean worth of the choices, weighted by the model's probabilities among them.
        environment: the machine's record.
    """

    prompt_ids: list[str]
    conditions: list[str]
    remedy: str
    choices: dict[str, float]
    threshold: float
    scores: list[list[float]]
    environment: Environment = field(repr=False)

    @property
    def spread(self) -> list[float]:
        """Per prompt, largest score less the smallest."""
        return [max(row) - min(row) for row in self.scores]

    @property
    def std(self) -> list[float]:
        """Per prompt, standard deviation over the conditions."""
        return [statistics.pstdev(row) for row in self.scores]

    @property
    def decisions(self) -> list[list[bool]]:
        """[prompt][condition]: whether the score reaches the threshold."""
        return [[value >= self.threshold for value in row] for row in self.scores]

    @property
    def flips(self) -> list[str]:
        """Prompts whose decision is not the same under all conditions."""
        return [name for name, row in zip(self.prompt_ids, self.decisions, strict=True) if len(set(row)) > 1]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("prompt_ids", "conditions", "remedy", "choices", "threshold", "scores", "spread", "std", "decisions", "flips")
        return {name: getattr(self, name) for name in names} | {"environment": self.environment.to_json()}

    def to_pandas(self) -> Any:
        """One row a prompt and condition."""
        import pandas as pd

        return pd.DataFrame(
            {"prompt": name, "condition": condition, "score": value, "decision": value >= self.threshold}
            for name, row in zip(self.prompt_ids, self.scores, strict=True)
            for condition, value in zip(self.conditions, row, strict=True)
        )

    def _head(self) -> str:
        remedy = f" with {self.remedy}" if self.remedy else ""
        flips = f"decisions that flip at {self.threshold:g}: {len(self.flips)}"
        return (
            f"{len(self.scores)} prompts under {len(self.conditions)} conditions{remedy}: the scores of "
            f"{sum(value > 0 for value in self.spread)} spread, by up to {max(self.spread):.3g}; {flips}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows = zip(self.prompt_ids, self.scores, self.spread, strict=True)
        return [(name, f"{row[0]:.6f}", f"{spread:.2g}", "flips" if name in self.flips else "") for name, row, spread in rows]

    def __str__(self) -> str:
        width = max(len(name) for name in self.prompt_ids)
        return "\n".join((self._head(), *(f"{n:<{width}}  {s}  spread {d:<8} {f}".rstrip() for n, s, d, f in self._rows())))

    def _repr_html_(self) -> str:
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>" for cells in self._rows())
        head = "".join(f"<th>{name}</th>" for name in ("prompt", "score", "spread", "decision"))
        return f"<p>{html.escape(self._head())}</p><table><tr>{head}</tr>{rows}</table>"


def score(model: nn.Module, prompts: Any, choices: Mapping[str, float], conditions: Sequence[Condition | str], *,
          remedy: str | Remedy | None = None, threshold: float | None = None, tokenizer: Any = None) -> Scores:  # fmt: skip
    """Scores each prompt under each condition, from the logits of the first token of the answer.

    The score is the mean worth of the choices, weighted by the model's probabilities among them, in float64: equal logits have
    equal scores, to the last bit.

    Args:
        model: a transformers causal language model in eval mode; it is left as it was.
        prompts: what `load_prompts` returns, or strings, or lists of token ids.
        choices: answer -> what it is worth: ``{"approve": 1, "reject": 0}``. Their first tokens must differ.
        conditions: ways to serve the prompts; the first is the reference.
        remedy: put in for all of them (see `detlab.remedies`): a name, or several joined by "+".
        threshold: a score of at least this is a yes; None takes the middle between the least and the largest worth.
        tokenizer: needed where the model was not loaded by `load_model`.

    Returns:
        `Scores`: spread, and decisions that flip.

    Raises:
        UsageError: fewer than two choices, two that begin alike, a worth or a threshold that is no number, no condition, or
            one that cannot be used.
        MachineError: the remedy cannot be had on this machine.
    """
    if isinstance(conditions, str) or not conditions:
        raise UsageError(f'score needs a list of conditions, such as ["batch_size=1", "batch_size=4"]; got {conditions!r}.')
    chosen = [Condition.parse(c) if isinstance(c, str) else c for c in conditions]
    check_model(model)
    if not all(map(_is_number, getattr(choices, "values", lambda: [None])())):
        raise UsageError(f'score needs choices, each with its worth, such as {{"approve": 1, "reject": 0}}; got {choices!r}.')
    if threshold is not None and not _is_number(threshold):
        raise UsageError(f"threshold={threshold!r} is not possible; give a number, or None for the middle of the worths.")
    prompts = as_prompts(prompts)
    tokenizer = tokenizer_for(model) if tokenizer is None else tokenizer
    first = {text: tokenizer.encode(text, add_special_tokens=False)[:1] for text in choices}
    if len(choices) < 2 or [] in first.values() or len({tokens[0] for tokens in first.values()}) < len(choices):
        raise UsageError(f"score needs two or more choices whose first tokens differ; got {first} (text: first token).")
    plan = Plan(()) if remedy is None else plan_of(remedy)
    if why := plan.reason(model):
        raise MachineError(f"the remedy {plan.name!r} cannot be had here: {why}.")
    inputs = prepared(model, prompts, 0, tokenizer)
    largest = max(chosen, key=lambda c: c.batch_size)
    changed = [plan.changed(condition, largest)[0] for condition in chosen]
    served = serve(model, inputs, changed, 0, plan)
    at = [tokens[0] for tokens in first.values()]
    worth = torch.tensor(list(choices.values()), dtype=torch.float64)
    scores = [[float(one.logits[p][-1, at].double().softmax(-1) @ worth) for one in served] for p in range(len(inputs))]
    middle = (min(choices.values()) + max(choices.values())) / 2
    return Scores(
        [prompt.id for prompt in prompts], [str(c) for c in changed], plan.name, dict(choices),
        middle if threshold is None else threshold, scores, environment(),
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False
