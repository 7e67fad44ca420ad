"""The whole question in one call: run two conditions, find where they part, keep the evidence."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from detlab.condition import Condition
from detlab.divergence.compare import compare
from detlab.divergence.explain import explain
from detlab.divergence.explain_result import Explanation
from detlab.divergence.result import IDENTICAL_VERDICT, Comparison
from detlab.divergence.triage import triage
from detlab.divergence.triage_result import SAMPLING, Triage
from detlab.environment import Environment
from detlab.errors import DetlabError
from detlab.runner import Progress, Run, run


@dataclass
class Investigation:
    """Two runs of one question, compared.

    Attributes:
        a, b: the runs.
        comparison: where they part; its controls were run first.
        environment: the machine's record.
        call: the Python call that reproduces it.
        triage: what kind of difference it is; None where it was not asked.
        explanation: why the first divergence's op gave other bits; None where there is none, or it was not asked.
    """

    a: Run
    b: Run
    comparison: Comparison
    environment: Environment
    call: str
    triage: Triage | None = field(default=None, repr=False)
    explanation: Explanation | None = field(default=None, repr=False)

    @property
    def verdict(self) -> str:
        """"identical", "diverged" or "control_flow"."""
        return self.comparison.verdict

    def to_json(self) -> dict[str, Any]:
        """Plain values, for machines; `detlab investigate --json` prints them."""
        return self.comparison.to_json(most=200) | {
            "md5": {"a": self.a.md5, "b": self.b.md5},
            "texts": {"a": self.a.texts, "b": self.b.texts},
            "why": {
                "triage": self.triage.to_json() if self.triage is not None else None,
                "explanation": self.explanation.to_json() if self.explanation is not None else None,
            },
            "call": self.call,
            "environment": self.environment.to_json(),
        }

    def __str__(self) -> str:
        why = ""
        if self.triage is not None and self.comparison.verdict != IDENTICAL_VERDICT:
            why = f"\nwhy: {self.triage.lines()[0]}\nsize: {self.triage.size_words()}"
            if self.explanation is not None and self.explanation.factors:
                why += f"\nmechanism: {self.explanation.mechanism}"
        return f"{self.comparison}{why}\nreproduce: {self.call}"

    def _repr_html_(self) -> str:
        why = self.triage._repr_html_() if self.triage is not None else ""
        why += self.explanation._repr_html_() if self.explanation is not None and self.explanation.factors else ""
        return f"{self.comparison._repr_html_()}{why}<pre>{html.escape(self.call)}</pre>"


def investigate(model: nn.Module, prompts: Any, a: Condition | str = "", b: Condition | str = "batch_size=4", *,
                new_tokens: int = 8, tokenizer: Any = None, controls: bool = True, measure: bool = True,
                why: bool = True, progress: Progress | None = None) -> Investigation:  # fmt: skip
    """Runs the same prompts under two conditions and finds where they stop being bit-identical.

    Args:
        model: a transformers causal language model in eval mode.
        prompts: what `load_prompts` returns, or strings, or lists of token ids.
        a, b: conditions, as objects or as text: "batch_size=8,padding_side=left".
        new_tokens: tokens to decode greedily after prefill.
        tokenizer: needed for text where the model was not loaded by `load_model`.
        controls: repeat each condition first: the same condition must give the same bits.
        measure: size the differences.
        why: explain the first divergence, and say what kind of difference it is (`explain` and `triage` say more).
        progress: called with (calls done, calls in all, what).

    Returns:
        An `Investigation`: runs, comparison, environment, and the call that reproduces it.

    Raises:
        UsageError: a condition or prompt cannot be used.
        ControlError: a condition does not repeat its own bits.
    """
    conditions = [Condition.parse(c) if isinstance(c, str) else c for c in (a, b)]
    first = run(model, prompts, conditions[0], new_tokens=new_tokens, tokenizer=tokenizer, progress=progress)
    second = run(model, prompts, conditions[1], new_tokens=new_tokens, tokenizer=tokenizer, progress=progress)
    comparison = compare(first, second, controls=controls, measure=measure, progress=progress)
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    texts = [_text(condition) for condition in conditions]
    ids = ", ".join(first.prompt_ids[:6]) + (" ..." if len(first.prompt_ids) > 6 else "")
    call = (
        f"detlab.investigate(model, prompts, a={texts[0]!r}, b={texts[1]!r}, new_tokens={new_tokens})"
        f"  # model: {name}, {len(first.inputs)} prompts: {ids}"
    )
    made = Investigation(first, second, comparison, first.environment, call)
    if why:
        explain_why(made)
    return made


def explain_why(made: Investigation) -> None:
    """Adds the answer to "why" to an investigation; where it cannot be had, the triage's notes say so."""
    made.triage = triage(made.comparison)
    if made.comparison.first is None or made.comparison.first.kind != "origin":
        return
    if made.triage.verdict == SAMPLING:  # an op that also rounds otherwise is not what the user sees
        return
    try:
        made.explanation = explain(made.comparison, processes=False)
    except DetlabError as error:
        made.triage.notes.append(f"the op was not executed alone: {error}")


def _text(condition: Condition) -> str:
    text = str(condition)
    return "" if text == "default" else text
