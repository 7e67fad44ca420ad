"""Two-stage generation: a greedy outline first, then the text, drawn; both from one seed, whoever else is in the batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from detlab.condition import Condition
from detlab.errors import UsageError
from detlab.prompts import Prompt, as_prompts
from detlab.runner import run

__all__ = ["TwoStages", "two_stages"]

OUTLINE = "Write only an outline of your answer: three short points."
DETAIL = "Now write the whole answer, following this outline."


@dataclass(frozen=True)
class TwoStages:
    """One prompt's outline and text.

    Attributes:
        prompt_id: the prompt's name.
        seed: from which the text was drawn.
        outline, text: decoded, cut at the end token; None without a tokenizer.
        outline_tokens, text_tokens: the tokens of both.
    """

    prompt_id: str
    seed: int
    outline: str | None
    text: str | None
    outline_tokens: list[int]
    text_tokens: list[int]

    @property
    def md5(self) -> str:
        """MD5 of both stages' tokens."""
        return hashlib.md5(repr((self.outline_tokens, self.text_tokens)).encode(), usedforsecurity=False).hexdigest()

    def __str__(self) -> str:
        shown = (self.outline, self.text) if self.text is not None else (self.outline_tokens, self.text_tokens)
        return f"{self.prompt_id}, seed {self.seed}\n{shown[0]}\n---\n{shown[1]}"


def two_stages(model: nn.Module, prompts: Any, seed: int = 0, *, condition: Condition | str = "tier=invariant",
               outline_tokens: int = 48, text_tokens: int = 96, temperature: float = 0.8, top_k: int = 0,
               tokenizer: Any = None) -> list[TwoStages]:  # fmt: skip
    """Writes a greedy outline for each prompt, then draws the text that follows it.

    Under a tier the whole is a function of prompt and seed: the outline's logits do not depend on the batch, and each token of
    the text is drawn from (seed, prompt and outline, position). Under "stock" the same seed gives another text as soon as the
    batch is another one.

    Args:
        model: a transformers causal language model in eval mode.
        prompts: what `load_prompts` returns, or strings, or lists of token ids. A chat is asked for the outline, and then for
            the text; plain text and token ids are continued twice.
        seed: of the text; 0 to 2**63 - 1.
        condition: how the prompts are served, greedily: the second stage sets temperature, ``top_k`` and seed itself.
        outline_tokens, text_tokens: tokens of each stage, at least 1.
        temperature, top_k: of the second stage.
        tokenizer: needed for text where the model was not loaded by `load_model`.

    Returns:
        One for each prompt.

    Raises:
        UsageError: a number of tokens is not possible, or the condition draws by itself, or cannot be used.
    """
    served = Condition.parse(condition) if isinstance(condition, str) else condition
    if served.temperature or served.seed:
        raise UsageError(
            f"condition={str(served)!r} draws or has a seed of its own; two_stages draws the second stage alone: give seed, "
            "temperature and top_k to it, and leave them out of the condition."
        )
    if outline_tokens < 1 or text_tokens < 1:
        raise UsageError(f"outline_tokens={outline_tokens!r}, text_tokens={text_tokens!r}: give at least 1 of each.")
    drawn = replace(served, seed=seed, temperature=temperature, top_k=top_k)
    asked = as_prompts(prompts)
    first = run(model, [_asked(p) for p in asked], served, new_tokens=outline_tokens, tokenizer=tokenizer, trace=False)
    outlines: list[str] | list[None] = first.texts or [None] * len(asked)
    follow = [_followed(p, text, tokens) for p, text, tokens in zip(asked, outlines, first.tokens, strict=True)]
    second = run(model, follow, drawn, new_tokens=text_tokens, tokenizer=tokenizer, trace=False)
    texts: list[str] | list[None] = second.texts or [None] * len(asked)
    return [TwoStages(p.id, seed, outlines[i], texts[i], first.tokens[i], second.tokens[i]) for i, p in enumerate(asked)]


def _asked(prompt: Prompt) -> Prompt:
    if prompt.messages is None:
        return prompt
    *before, last = prompt.messages
    return Prompt(prompt.id, messages=(*before, {**last, "content": f"{last['content']}\n\n{OUTLINE}"}))


def _followed(prompt: Prompt, outline: str | None, tokens: list[int]) -> Prompt:
    """The second stage's prompt: the first one's, its answer, and the wish for the text."""
    if prompt.tokens is not None:
        return Prompt(prompt.id, tokens=(*prompt.tokens, *tokens))
    if prompt.text is not None:
        return Prompt(prompt.id, text=prompt.text + (outline or ""))
    answer = {"role": "assistant", "content": outline or " "}
    return Prompt(prompt.id, messages=(*(_asked(prompt).messages or ()), answer, {"role": "user", "content": DETAIL}))
