"""LoRA adapters of PEFT: the wrapped model is covered, and its bits do not depend on the batch."""

import warnings

import pytest
import torch

import detlab
from detlab.engine.probes import draw
from detlab.verify.serve import Way, logits_of
from tests.bit_classes import bitwise_equal

peft = pytest.importorskip("peft", reason="PEFT is not among detlab's dependencies")

TEXT = [(7 * i) % 240 + 3 for i in range(40)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    base = detlab.load_model("tiny-llama", dtype=request.param)[0]
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT uses a name that transformers has given up
        wrapped = peft.get_peft_model(base, config).eval()
    for index, (name, weight) in enumerate(wrapped.named_parameters()):
        if "lora_" in name:
            weight.data.copy_(draw(*weight.shape, dtype=weight.dtype, seed=index) / 8)
    return wrapped.base_model.model


def test_an_active_adapter_is_covered_and_invariant(model):
    assert detlab.coverage(model).holds
    ways = [Way(batch=3, rows=(2,), mates=1), Way(left=5), Way(start=36, cache="dynamic"), Way(chunk=7, cache="dynamic")]
    with detlab.deterministic(model):
        expected = logits_of(model, TEXT, Way())[0]
        for way in ways:
            assert bitwise_equal(logits_of(model, TEXT, way)[0], expected), str(way)
    bare = detlab.load_model("tiny-llama", dtype=next(model.parameters()).dtype)[0]
    with detlab.deterministic(bare):
        assert not bitwise_equal(logits_of(bare, TEXT, Way())[0], expected)  # the adapter does something
