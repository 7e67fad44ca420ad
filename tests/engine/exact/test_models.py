"""The exact tier in whole models: coverage, invariance, hostile values, accuracy, and what it refuses."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from torch import nn

import detlab
from detlab.engine import session
from detlab.engine.exact import attention, experts, install, store
from detlab.engine.exact.functions import activation_of
from detlab.engine.exact.install import prepared_weights
from detlab.engine.exact.linear import ExactLinear, prepare
from detlab.engine.session import Options
from detlab.errors import CoverageError, UsageError
from detlab.models import FAMILIES
from detlab.verify.serve import Way, generated, logits_of
from tests.bit_classes import bitwise_equal, draw, row_class_equal

TEXT = [(index * 7919 + 11) % 250 for index in range(45)]
WAYS = (
    Way(batch=4, rows=(0, 3), mates=1), Way(left=9), Way(right=3), Way(batch=2, rows=(1,), is_ragged=True, mates=2),
    Way(chunk=7, cache="dynamic"), Way(start=42, cache="dynamic"), Way(start=42, cache="static", left=3),
    Way(batch=3, rows=(2,), start=40, cache="dynamic", is_ragged=True, mates=4),
)  # fmt: skip


def parted(model, ways=WAYS, text=TEXT):
    expected = logits_of(model, text, Way())[0]
    return [str(way) for way in ways if not all(bitwise_equal(row, expected) for row in logits_of(model, text, way))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, dtype):
    model = detlab.load_model(name, dtype=dtype)[0]
    stock = parted(model, WAYS[5:6])
    with detlab.deterministic(model, tier="exact") as under:  # strict: every op is covered or safe
        assert set(under.parts.values()) >= {"linear", "norm", "attention"}
        assert parted(model, WAYS if "moe" not in name and "mix" not in name else WAYS[3::2]) == []
    if dtype == "float32":  # in 16 bits the few elements that differ may round away on their way to the logits
        assert stock or row_class_equal(torch.float32, 576, 576, 1, 45, draws=1)
    assert not any("forward" in vars(module) for module in model.modules())


def test_generate():
    model = detlab.load_model("tiny-qwen3", dtype="float32")[0]
    with detlab.deterministic(model, tier="exact"):
        tokens, logits = generated(model, TEXT[:20], Way(generates=True), [], 4)
        for way in (Way(generates=True, batch=3, rows=(2,), is_ragged=True, mates=3), Way(generates=True, cache="static")):
            other, values = generated(model, TEXT[:20], way, [], 4)
            assert torch.equal(other[0], tokens[0]) and bitwise_equal(values[0], logits[0])


def test_coverage_is_stricter_than_on_one_machine():
    """What is stable here by measurement may differ elsewhere: a softmax that the tier did not replace is uncovered."""
    model = detlab.load_model("tiny-llama", dtype="float32")[0]

    class Odd(nn.Module):
        def forward(self, x):
            return torch.softmax(x, -1) + torch.add(x, x, alpha=0.3)

    model.model.norm = Odd()
    assert detlab.coverage(model, "invariant").holds
    found = detlab.coverage(model, "exact")
    assert [(op.module, op.op) for op in found.uncovered] == [("model.norm", "aten::_softmax"), ("model.norm", "aten::add")]
    why = "model.norm · aten::_softmax is not covered by tier 'exact': its last bit may follow the instruction set"
    with pytest.raises(CoverageError, match=why), detlab.deterministic(model, "exact"):
        pass


# -------------------------------------------------------------------------------------------------------- hostile values
@pytest.fixture(scope="module")
def tiny():
    return detlab.load_model("tiny-llama", dtype="float32")[0]


def test_inference_mode_and_threads_of_python(tiny):
    with session.applied(tiny, "exact"):
        expected = [logits_of(tiny, TEXT[:n], Way()) for n in (9, 10, 11, 12)]
        with torch.inference_mode():
            assert bitwise_equal(logits_of(tiny, TEXT[:9], Way()), expected[0].clone())
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda n: logits_of(tiny, TEXT[:n], Way()), (9, 10, 11, 12) * 4))
    assert all(bitwise_equal(logits, expected[index % 4]) for index, logits in enumerate(found))


def test_length_one(tiny):
    with session.applied(tiny, "exact"):
        alone = logits_of(tiny, [65], Way())[0]
        assert bitwise_equal(logits_of(tiny, [65], Way(batch=3, rows=(1,), mates=1))[0], alone)
        assert bitwise_equal(logits_of(tiny, [65], Way(left=4))[0], alone)


def test_a_neighbour_that_is_not_finite():
    """NaN, infinity, huge and tiny embeddings of another row, of padding and of later tokens: this row does not notice."""
    model = detlab.load_model("tiny-llama", dtype="float32")[0]
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[900], embedding[901], embedding[902] = float("nan"), float("inf"), 1e38
        embedding[903], embedding[904, ::7], embedding[905], embedding[906] = 1e-42, 1e4, 0.0, -0.0
    text = TEXT[:12]
    with session.applied(model, "exact"), torch.no_grad():
        alone = model(input_ids=torch.tensor([text])).logits[0]
        for bad in range(900, 907):
            rows = torch.tensor([[bad] * 12, text, [*text[:6], bad, *text[7:]]])
            logits = model(input_ids=rows).logits
            assert bitwise_equal(logits[1], alone)
            assert bitwise_equal(logits[2, :6], alone[:6])  # a later token changes nothing
            assert bool(logits[2, 6:].isnan().all()) == (bad in (900, 901))
            padded = torch.tensor([[bad] * 3 + text])
            mask = torch.tensor([[0] * 3 + [1] * 12])
            places = (mask.cumsum(1) - 1).clamp_min(0)
            assert bitwise_equal(model(input_ids=padded, attention_mask=mask, position_ids=places).logits[0, 3:], alone)


def test_outliers_and_extremes_in_the_weights():
    model = detlab.load_model("tiny-llama", dtype="float32")[0]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] = 1000.0
            layer.mlp.up_proj.weight[3] = 0.0
            layer.mlp.gate_proj.weight[7] = 1e-41
            layer.self_attn.k_proj.weight[9] *= 1000.0
        model.lm_head.weight[11] = 3e38
    with session.applied(model, "exact"):
        assert parted(model) == []


def test_any_split_of_a_sum():
    """Tensor parallel by hand: columns of a weight in parts, added in any order, are the whole."""
    x, weight = draw(6, 300, seed=1), draw(40, 300, seed=2)
    for kernel in ("packed", "int8", "float64"):
        whole = ExactLinear([prepare(weight)], [None], kernel)(x)
        together = ExactLinear([prepare(weight[:7]), prepare(weight[7:])], [None, None], kernel)(x)
        assert bitwise_equal(whole, together)
        assert bitwise_equal(whole, ExactLinear([prepare(weight)], [None], "int8")(x))


# -------------------------------------------------------------------------------------------------------------- accuracy
def test_accuracy_on_a_tiny_model(tiny):
    wide = detlab.load_model("tiny-llama", dtype="float32")[0].double()
    truth, stock = logits_of(wide, TEXT, Way()), logits_of(tiny, TEXT, Way())
    with session.applied(tiny, "exact"):
        exact = logits_of(tiny, TEXT, Way())
    assert float((exact - truth).abs().max()) <= 2 * float((stock - truth).abs().max())
    assert torch.equal(exact.argmax(-1), truth.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2(dtype):
    """Coverage and invariance on a real model; in float32 an error within twice that of stock, and the same next tokens."""
    model, tokenizer = detlab.load_model("smollm2-135m", dtype=dtype)
    prompts = detlab.load_prompts("data/prompts/assistant.jsonl")[::12]
    texts = [tokenizer.apply_chat_template(p.messages, add_generation_prompt=True, return_dict=False) for p in prompts]
    stock = [logits_of(model, text, Way()) for text in texts]
    with detlab.deterministic(model, tier="exact"):
        exact = [logits_of(model, text, Way()) for text in texts]
        for way in (Way(batch=2, rows=(1,), is_ragged=True, mates=1), Way(start=len(texts[0]) - 2, cache="dynamic")):
            assert bitwise_equal(logits_of(model, texts[0], way)[0], exact[0][0])
    if dtype == "float32":
        wide = model.double()
        truth = [logits_of(wide, text, Way()) for text in texts]
        worst = [max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True)) for found in (exact, stock)]
        assert worst[0] <= 2 * worst[1]
        assert all(torch.equal(a.argmax(-1), b.argmax(-1)) for a, b in zip(exact, truth, strict=True))


# --------------------------------------------------------------------------------------------------------------- refused
def test_a_context_that_is_too_long(tiny, monkeypatch):
    monkeypatch.setattr(attention, "MOST_TOKENS", 40)
    with session.applied(tiny, "exact"):
        logits_of(tiny, TEXT[:40], Way())
        with pytest.raises(UsageError, match="a context of 41 tokens is longer than the 40 that the exact tier"):
            logits_of(tiny, TEXT[:41], Way())


def test_a_weight_that_is_not_finite():
    model = detlab.load_model("tiny-llama", dtype="float32")[0]
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    before = model.config._attn_implementation
    with pytest.raises(UsageError, match="layers.1.mlp.down_proj: the weight has 1 NaN or infinite values"):
        session.apply(model, "exact")
    assert model.config._attn_implementation == before and "forward" not in vars(model.lm_head)
    with pytest.raises(UsageError, match="sums over 65537 terms"):
        prepare(torch.zeros(1, 65537))


def test_unsupported_modules():
    with pytest.raises(UsageError, match="act is a Mish, which the exact tier has no arithmetic of its own for; it has silu"):
        activation_of(nn.Mish(), "act")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, vocab_size=32,
        hidden_act="mish",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(UsageError, match="is a Mish"), detlab.deterministic(model, tier="exact"):
        pass
    with pytest.raises(UsageError, match="under tier 'exact' already"):
        other = detlab.load_model("tiny-llama", dtype="float32")[0]
        with session.applied(other, "exact"), session.applied(other, "invariant"):
            pass


def test_float16():
    """Half precision has no stock int8 or packed path of its own; here it is rounded to at the end, like bfloat16."""
    model = detlab.load_model("tiny-gemma3", dtype="float16")[0]
    with detlab.deterministic(model, tier="exact"):
        assert logits_of(model, TEXT, Way()).dtype == torch.float16
        assert parted(model, WAYS[::3]) == []


def test_a_weight_changed_in_place_is_prepared_anew():
    model = detlab.load_model("tiny-llama", dtype="float32")[0]
    with session.applied(model, "exact", Options(release=False)):
        before = logits_of(model, TEXT[:9], Way())
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        after = logits_of(model, TEXT[:9], Way())
        assert not bitwise_equal(before, after)
    with session.applied(model, "exact"):
        assert bitwise_equal(logits_of(model, TEXT[:9], Way()), after)


# ----------------------------------------------------------------------------------------------------------------- store
def test_prepared_weights_on_disk(tiny, tmp_path):
    prepared = store.prepare_model(tiny)
    store.save_prepared(tmp_path, prepared, tiny)
    loaded = store.load_prepared(tmp_path, tiny)
    assert loaded.keys() == prepared.keys()
    for name, weight in prepared.items():
        assert torch.equal(loaded[name].digits, weight.digits) and torch.equal(loaded[name].exponents, weight.exponents)
    with session.applied(tiny, "exact"):
        expected = logits_of(tiny, TEXT[:9], Way())
    with prepared_weights(loaded), session.applied(tiny, "exact"):
        assert bitwise_equal(logits_of(tiny, TEXT[:9], Way()), expected)
    about = json.loads((tmp_path / "prepared.json").read_text())
    assert about["format"] == 1 and about["spec"] == "tri4"
    with pytest.raises(UsageError, match="of another model: model.layers.0.self_attn.q_proj"):
        store.load_prepared(tmp_path, detlab.load_model("tiny-qwen3", dtype="float32")[0])
    with pytest.raises(UsageError, match="holds no prepared weights"):
        store.load_prepared(tmp_path / "nowhere")
    content = bytearray((tmp_path / "prepared.safetensors").read_bytes())
    content[-5] ^= 1
    (tmp_path / "prepared.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="its checksum differs"):
        store.load_prepared(tmp_path, tiny)
    (tmp_path / "prepared.json").write_text(json.dumps(about | {"format": 2}))
    with pytest.raises(UsageError, match="has format 2, spec 'tri4'; this version reads format 1"):
        store.load_prepared(tmp_path)


def test_prepared_experts_on_disk(tmp_path, monkeypatch):
    model = detlab.load_model("tiny-mixtral", dtype="float32")[0]
    prepared = store.prepare_model(model)
    names = {"model.layers.1.mlp.experts.down_proj.7", "model.layers.0.mlp.gate", "lm_head"}
    assert names <= prepared.keys()
    loaded = store.load_prepared(store.save_prepared(tmp_path, prepared, model), model)
    with session.applied(model, "exact"):
        expected = logits_of(model, TEXT[:9], Way())
    for module in (install, experts):  # nothing is left to prepare
        monkeypatch.setattr(module, "Unprepared", None)
    with prepared_weights(loaded), session.applied(model, "exact"):
        assert bitwise_equal(logits_of(model, TEXT[:9], Way()), expected)
    monkeypatch.undo()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[7, 0, 0] += 1
    with pytest.raises(UsageError, match="of another model: model.layers.1.mlp.experts.down_proj.7 is not the layer"):
        store.load_prepared(tmp_path, model)
