"""The assertion for other projects' tests: it passes, or its message says where and how to see it again."""

import copy

import pytest
import torch

import detlab
from detlab import Condition
from detlab.errors import ControlError, PromptError
from detlab.testing import assert_bitwise_equal

PROMPTS = [[11, 12, 13, 14, 15], [21, 22, 23]]


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


def with_hook(model, factor):
    twin = copy.deepcopy(model)
    hook = lambda m, a, out: out * (factor() if torch.are_deterministic_algorithms_enabled() else 1.0)  # noqa: E731
    twin.model.layers[1].input_layernorm.register_forward_hook(hook)
    return twin


def test_equal_conditions_pass(model):
    assert assert_bitwise_equal(model, PROMPTS, "", "deterministic_algorithms=True", new_tokens=2) is None
    assert_bitwise_equal(model, PROMPTS, Condition(alignment=16), Condition(alignment=16), new_tokens=0)


def test_the_message_names_the_first_origin(model):
    changed = with_hook(model, lambda: 1.25)
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(changed, PROMPTS, Condition(), "deterministic_algorithms=True", new_tokens=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == "default and deterministic_algorithms=True do not give the same bits"
    assert "verdict: diverged" in lines
    (first,) = [line for line in lines if line.startswith("first: ")]
    assert first.startswith(
        "first: model.layers.1.input_layernorm · mul at prompt prompt-0, position 0, prefill: inputs matched; up to "
    )
    assert lines[-1] == (
        "reproduce: detlab.investigate(model, prompts, a='', b='deterministic_algorithms=True', new_tokens=2)"
        "  # model: tiny-llama, 2 prompts: prompt-0, prompt-1"
    )
    # Under pytest the failure points at the caller's line: this frame asks to be left out.
    frames = [entry.frame for entry in caught.traceback]
    assert frames[-1].code.name == "assert_bitwise_equal" and frames[-1].f_locals["__tracebackhide__"] is True


def test_a_drawn_token_is_a_difference(model):
    with pytest.raises(AssertionError, match="the random draws differ, not the arithmetic"):
        assert_bitwise_equal(model, PROMPTS, "temperature=1.0,seed=1", "temperature=1.0,seed=2", new_tokens=4)


def test_a_condition_that_does_not_repeat_itself_is_no_failure(model):
    count = iter(range(1, 10**6))
    restless = with_hook(model, lambda: 1.0 + next(count) / 256)
    with pytest.raises(ControlError, match=r"^the control failed: b \(deterministic_algorithms=True\) gave other bits"):
        assert_bitwise_equal(restless, PROMPTS, "", "deterministic_algorithms=True", new_tokens=1)


def test_no_prompts(model):
    with pytest.raises(PromptError, match="at least one prompt is needed"):
        assert_bitwise_equal(model, [], "", "")
