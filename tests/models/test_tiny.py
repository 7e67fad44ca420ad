"""Tiny models: weights whose bits are the same everywhere, every family, every dtype, and their tokenizer."""

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from detlab.errors import MachineError, UsageError
from detlab.models import DTYPES, FAMILIES, load_model, tiny, tiny_tokenizer
from tests.models.pins import TINY_SHA256, digest, is_bitwise_equal

# --- models ---


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_weights_are_pinned_and_every_family_runs(name):
    model, tokenizer = load_model(name)
    assert digest(model) == TINY_SHA256[name]
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    logits = model(torch.tensor([tokenizer("Hello, world")["input_ids"]])).logits
    assert logits.shape == (1, 12, 1024) and torch.isfinite(logits).all()
    assert model.config._name_or_path == name


@pytest.mark.slow
def test_tiny_weights_do_not_depend_on_the_isa():
    script = (
        "import detlab.models as m; print(*(n for n in pinned if digest(m.load_model(n)[0]) != pinned[n]))"
    )
    source = f"import hashlib, torch\npinned = {TINY_SHA256}\n{inspect.getsource(digest)}\n{script}"
    lowest = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | lowest,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == ""


def test_weights_are_uniform_with_the_stated_deviation(llama):
    state = llama[0].state_dict()
    assert state["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(1536**-0.5, rel=0.01)
    assert state["model.layers.1.self_attn.q_proj.weight"].std().item() == pytest.approx(576**-0.5, rel=0.01)
    assert state["model.embed_tokens.weight"].std().item() == pytest.approx(1, rel=0.01)
    assert (state["model.layers.0.input_layernorm.weight"] == 1).all()
    gpt2 = load_model("tiny-gpt2")[0].state_dict()
    assert gpt2["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(1536**-0.5, rel=0.01)
    assert gpt2["transformer.h.0.mlp.c_fc.bias"].std().item() == pytest.approx(576**-0.5, rel=0.1)


def test_weight_is_one_rounded_product_of_an_odd_integer():
    weight = tiny._random_weight("any", torch.Size([64, 3]), std=0.04)
    scale = np.float32(0.04 * 3**0.5 / 2**17)
    integers = np.rint(weight.numpy().astype(np.float64) / np.float64(scale)).astype(np.int64)
    assert (integers % 2 == 1).all() and np.abs(integers).max() < 2**17
    assert (integers.astype(np.float32) * scale).tobytes() == weight.numpy().tobytes()
    assert not is_bitwise_equal(weight, tiny._random_weight("other", torch.Size([64, 3]), std=0.04))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3", "tiny-qwen3-moe"])
def test_tiny_bfloat16_is_what_saving_and_loading_in_bfloat16_gives(name, tmp_path):
    # `.to(bfloat16)` would round the rotary frequencies too, and be another model.
    load_model(name)[0].save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    actual, _ = load_model(name, "bfloat16")
    for kind in ("parameters", "buffers"):
        left, right = (dict(getattr(model, f"named_{kind}")()) for model in (actual, expected))
        assert left.keys() == right.keys()
        assert [key for key in left if not is_bitwise_equal(left[key], right[key])] == []


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3-moe"])
def test_every_dtype_runs(name):
    ids = torch.tensor([[1, 2, 3]])
    exact = load_model(name, torch.float64)[0](ids).logits
    for dtype, torch_dtype in DTYPES.items():
        logits = load_model(name, dtype)[0](ids).logits
        assert logits.dtype == torch_dtype
        assert (logits.double() - exact).abs().max() < (1e-4 if dtype in ("float32", "float64") else 0.2)


def test_attention_is_the_one_asked_for():
    assert load_model("tiny-llama", attention="eager")[0].config._attn_implementation == "eager"
    assert load_model("tiny-llama", attention="sdpa")[0].config._attn_implementation == "sdpa"


def test_attention_that_a_family_or_this_machine_lacks():
    with pytest.raises(UsageError, match="tiny-gpt2 does not know attention 'flex_attention': "):
        load_model("tiny-gpt2", attention="flex_attention")
    if not transformers.utils.is_flash_attn_2_available():
        with pytest.raises(MachineError, match="attention 'flash_attention_2' cannot run here: "):
            load_model("tiny-llama", attention="flash_attention_2")


# --- the tokenizer ---


def test_tiny_tokenizer_is_one_token_a_byte():
    tokenizer = tiny_tokenizer()
    text = "".join(map(chr, range(1, 300))) + " héllo 中文 😀 <bos"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 1024
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer.decode([72, 700, 258]) == "H<700><eos>"
    assert tokenizer("<700>")["input_ids"] == list(b"<700>")
