"""Sizes that fall beside the tiles, long prompts, float16: the same claim, on models made for the purpose."""

import math
import random

import pytest
import torch
import transformers

import detlab
from detlab.engine.probes import draw
from detlab.verify.serve import Way, generated, logits_of
from tests.bit_classes import bitwise_equal

SIZES = {
    "odd": {"hidden_size": 200, "intermediate_size": 541, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 40},
    "head 80, biases": {
        "hidden_size": 300, "intermediate_size": 1000, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80,
        "attention_bias": True, "mlp_bias": True,
    },
    "head 96, vocabulary 50257": {
        "hidden_size": 128, "intermediate_size": 333, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 96,
        "vocab_size": 50257,
    },
}  # fmt: skip


def llama(sizes, dtype):
    """A llama of these sizes whose weights have the same bits everywhere."""
    config = transformers.LlamaConfig(**{"vocab_size": 777, "num_hidden_layers": 2, "max_position_embeddings": 4200} | sizes)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for index, parameter in enumerate(model.parameters()):
        if parameter.ndim > 1:
            parameter.copy_(draw(*parameter.shape, dtype=torch.float32, seed=index) * math.sqrt(3 / parameter.shape[1]))
        elif parameter.shape[0] != config.hidden_size:
            parameter.copy_(draw(*parameter.shape, dtype=torch.float32, seed=index) / 8)
    return model.to(dtype)


def text_of(length, seed=0):
    draw_from = random.Random(f"{length} {seed}")
    return [draw_from.randrange(3, 250) for _ in range(length)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_odd_sizes(name, dtype):
    model = llama(SIZES[name], dtype)
    text, keep = text_of(75), [0, 1, 31, 32, 33, 63, 64, 70, 71, 72, 73, 74]
    ways = [
        Way(batch=3, rows=(0, 2), mates=1), Way(batch=13, rows=(7,), mates=2), Way(left=7), Way(right=3),
        Way(start=72, cache="dynamic"), Way(batch=3, rows=(1,), start=71, cache="dynamic", is_ragged=True, mates=3),
        Way(chunk=33, cache="dynamic"), Way(start=60, chunk=7, cache="static"),
    ]  # fmt: skip

    def parted():
        expected = logits_of(model, text, Way(), [], keep)[0]
        found = []
        for way in ways:
            for logits in logits_of(model, text, way, [], keep):
                found += [str(way)] * (not bitwise_equal(logits, expected))
        return found

    try:
        with detlab.deterministic(model):
            assert parted() == []
            if name == "odd":  # the smallest: rules are measured anew for each number of threads
                torch.set_num_threads(3)
                assert parted() == []
    finally:
        torch.set_num_threads(1)
    assert parted()  # these sizes part on every machine known


@pytest.mark.parametrize("length", [1, 511, 2048])
def test_single_mixed_prefix(length):
    """A prompt alone; among ragged others; and after a prefix that was computed before: one text, in tokens and logits."""
    model = detlab.load_model("tiny-llama", dtype="float32")[0]
    prompt = text_of(length)

    def texts():
        made = [generated(model, prompt, Way(generates=True), [], 2)]
        made.append(generated(model, prompt, Way(generates=True, batch=2, rows=(1,), is_ragged=length < 600, mates=1), [], 2))
        if length > 1:
            made.append(generated(model, prompt, Way(generates=True, chunk=max(1, length - 37)), [], 2))
        return [tokens for tokens, _ in made], [logits for _, logits in made]

    with detlab.deterministic(model):
        tokens, logits = texts()
    assert all(torch.equal(t[0], tokens[0][0]) for t in tokens)
    assert all(bitwise_equal(x[0], logits[0][0]) for x in logits)
    if length > 1:
        _, logits = texts()
        assert any(not bitwise_equal(x[0], logits[0][0]) for x in logits)


@pytest.mark.slow  # float16 has no fast kernel on most CPUs
def test_float16():
    model = detlab.load_model("tiny-llama", dtype="float16")[0]
    text, keep = text_of(40), [0, 1, 31, 32, 37, 38, 39]
    ways = [Way(batch=3, rows=(2,), mates=1), Way(left=5), Way(start=38, cache="dynamic"), Way(chunk=7, cache="dynamic")]
    with detlab.deterministic(model):
        expected = logits_of(model, text, Way(), [], keep)[0]
        for way in ways:
            assert bitwise_equal(logits_of(model, text, way, [], keep)[0], expected), str(way)
