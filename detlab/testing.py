"""For other projects' tests: bitwise equality of two ways to serve a model, with the first divergence in the message."""

from __future__ import annotations

from typing import Any

from torch import nn

from detlab.condition import Condition
from detlab.investigate import investigate


def assert_bitwise_equal(model: nn.Module, prompts: Any, a: Condition | str, b: Condition | str, *, new_tokens: int = 8,
                         tokenizer: Any = None) -> None:  # fmt: skip
    """Asserts that two conditions give the same bits, and the same tokens, on these prompts.

    Args:
        model, prompts, tokenizer: as for `investigate`.
        a, b: conditions, as objects or text.
        new_tokens: tokens to decode after prefill.

    Raises:
        AssertionError: they part; the message names the first op, layer and token, and the call that reproduces it. Under
            pytest it reads like any failed assertion.
        ControlError: a condition does not repeat its own bits, so the question has no answer.
    """
    __tracebackhide__ = True
    result = investigate(model, prompts, a, b, new_tokens=new_tokens, tokenizer=tokenizer)
    if result.verdict != "identical":
        raise AssertionError(f"{result.a.condition} and {result.b.condition} do not give the same bits\n{result}")
    if not result.comparison.rows_compared:
        raise AssertionError("no row was compared, so nothing is shown: were there any prompts?")
