"""The real model: one prompt at a time against a left-padded batch of six. Slow: seconds a case."""

import pytest
import torch

import detlab
from detlab import Condition
from tests.bit_classes import bitwise_equal, maker, module_tensors

PROMPTS = [
    "The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):",
    "Water boils at", "The three laws of robotics are as follows. First,", "In 1969, people first",
]  # fmt: skip
ALONE, TOGETHER = Condition(), Condition(batch_size=6, padding_side="left")


def first_raw(alone, together, inputs, new_tokens):
    """Where the bits first part, by hooks: (module in which, step, prompt, position), in the order of ``alone``'s calls."""
    width = max(map(len, inputs))
    names = [n for n, t in alone[0].items() if t.ndim > 2 and t.is_floating_point() and "rotary" not in n]
    assert len(names) > 500
    for index, tokens in enumerate(inputs):
        for step in range(new_tokens):
            a, b = alone[index * new_tokens + step], together[step]
            pad = width - len(tokens) if step == 0 else 0
            for name in names:
                for slot in range(a[name].shape[1]):
                    if not bitwise_equal(a[name][0, slot], b[name][index, slot + pad]):
                        return maker(name), step, index, slot if step == 0 else len(tokens) + step - 1
    return None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_solo_against_a_left_padded_batch(dtype):
    model, tokenizer = detlab.load_model("smollm2-135m", dtype=dtype)
    new_tokens = 3
    a, b = (detlab.run(model, PROMPTS, c, new_tokens=new_tokens) for c in (ALONE, TOGETHER))
    result = detlab.compare(a, b)
    assert result.controls == {"a_repeated": True, "b_repeated": True}
    assert result.rows_compared > 50_000 and not any("unlaid" in note for note in result.notes)

    seen = []
    for condition in (ALONE, TOGETHER):
        with module_tensors(model) as calls:
            bare = detlab.run(model, PROMPTS, condition, new_tokens=new_tokens, trace=False, force=a.tokens)
        seen.append((calls, bare))
    truth = first_raw(seen[0][0], seen[1][0], a.inputs, new_tokens)
    logits_equal = all(bitwise_equal(x, y) for x, y in zip(seen[0][1].logits, seen[1][1].logits, strict=True))
    assert result.logits_equal == logits_equal
    flips = [(p, next(i for i in range(new_tokens) if x[i] != y[i])) for p, (x, y) in
             enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y]  # fmt: skip
    assert [(f.prompt, f.step) for f in result.token_flips] == flips
    if truth is None:  # no machine that we know of
        assert result.verdict == "identical" and logits_equal
        return
    first = result.first
    assert result.verdict == "diverged" and first.inputs_matched and first.max_ulp >= 1 and first.max_abs > 0
    assert (first.module, first.call, first.prompt, first.position) == truth
    assert str(first) in str(result) and torch.isfinite(torch.tensor(result.cosine))
    assert a.texts is not None and len(a.texts) == 6 and a.texts[0] == tokenizer.decode(a.tokens[0])
