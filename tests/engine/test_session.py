"""Entering and leaving a tier: nothing is left behind, whatever happened; what is not covered is refused by name."""

import random
import threading

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, StaticCache

import detlab
from detlab.engine import session as engine
from detlab.engine.probes import draw
from detlab.errors import CoverageError, UsageError
from tests.bit_classes import bitwise_equal


def text_of(length, seed=0):
    draw_from = random.Random(f"{length} {seed}")
    return [draw_from.randrange(3, 250) for _ in range(length)]


IDS = torch.tensor([text_of(12)])


@pytest.fixture
def model():
    return detlab.load_model("tiny-llama")[0]


def snapshot(model):
    """All that a tier could leave behind: attributes, hooks, config, and the identity and address of each weight."""
    config = {key: str(value) for key, value in vars(model.config).items()}
    kept = {}
    for name, module in model.named_modules():
        state = {key: value for key, value in vars(module).items() if not isinstance(value, dict)}
        kept[name] = {key: (id(value), str(value)[:80]) for key, value in state.items() if key != "_modules"}
        kept[name]["hooks"] = (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._state_dict_hooks))
        kept[name]["weights"] = {key: id(value) for key, value in module._parameters.items()}
    values = {name: bits_of(weight) for name, weight in model.state_dict().items()}
    return config, kept, values


def bits_of(tensor):
    return detlab.bits.md5(tensor)


def logits(model, ids=IDS, **more):
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


# ---------------------------------------------------------------------------------------------------------- leaving
class Planted(Exception):
    pass


@pytest.mark.parametrize("where", ["after nothing", "in the block", "in a layer", "interrupted"])
def test_nothing_is_left_behind(model, where):
    before, stock = snapshot(model), logits(model)

    def fail(*_):
        raise (KeyboardInterrupt if where == "interrupted" else Planted)

    try:
        with detlab.deterministic(model):
            if where == "in the block":
                raise Planted
            if where != "after nothing":
                handle = model.model.layers[1].register_forward_pre_hook(fail)
                try:
                    model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, pad_token_id=0)
                finally:
                    handle.remove()
    except (Planted, KeyboardInterrupt):
        assert where != "after nothing"
    assert snapshot(model) == before
    assert engine.session_of(model) is None
    assert bitwise_equal(logits(model), stock)


def test_a_refused_model_is_left_as_it_was(model):
    model.model.layers[1].mlp.down_proj.forward = lambda x: x  # another tool's
    before = snapshot(model)
    with pytest.raises(UsageError, match="the forward of model.layers.1.mlp.down_proj was replaced already"):
        with detlab.deterministic(model):
            pass
    assert snapshot(model) == before


# ---------------------------------------------------------------------------------------------------------- nesting
def test_nested_blocks_count(model):
    before = snapshot(model)
    with detlab.deterministic(model) as outer:
        first = logits(model)
        with detlab.deterministic(model) as inner:
            assert inner is outer
            assert bitwise_equal(logits(model), first)
        assert engine.session_of(model) is outer
        assert bitwise_equal(logits(model), first)
    assert snapshot(model) == before


def test_another_tier_is_refused(model, monkeypatch):
    with pytest.raises(UsageError, match="tier='exakt' is not known; choose from invariant"):
        with detlab.deterministic(model, tier="exakt"):
            pass
    monkeypatch.setitem(engine.TIERS, "other", engine.TIERS["invariant"])
    with detlab.deterministic(model):
        with pytest.raises(UsageError, match="under tier 'invariant' already; leave that context"):
            with detlab.deterministic(model, tier="other"):
                pass
        assert engine.session_of(model).tier == "invariant"


def test_apply_and_restore(model):
    before = snapshot(model)
    detlab.apply(model)
    detlab.apply(model)
    detlab.restore(model)
    assert engine.session_of(model) is not None
    detlab.restore(model)
    assert snapshot(model) == before
    with pytest.raises(UsageError, match=r"under no tier that apply\(\) put it under"):
        detlab.restore(model)


def test_two_threads_generate_at_once(model):
    def texts(row):
        ids = torch.tensor([text_of(20, row)])
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, pad_token_id=0,
            do_sample=True, top_k=0,
        )  # fmt: skip

    with detlab.deterministic(model, seed=5):
        alone = [texts(row) for row in range(2)]
        found = [[], []]
        workers = [threading.Thread(target=lambda row=row: found[row].extend(texts(row) for _ in range(3))) for row in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for row in range(2):
        assert len(found[row]) == 3 and all(torch.equal(text, alone[row]) for text in found[row])


# ---------------------------------------------------------------------------------------------------------- weights
def test_saving_inside_gives_the_stock_files(model, tmp_path):
    stock = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path / "outside")
    with detlab.deterministic(model):
        inside = model.state_dict()
        assert list(inside) == list(stock)
        assert all(bitwise_equal(inside[name], weight) for name, weight in stock.items())
        model.save_pretrained(tmp_path / "inside")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "inside" / name).read_bytes() == (tmp_path / "outside" / name).read_bytes(), name


def test_a_weight_changed_inside_is_packed_anew(model):
    weight = model.model.layers[0].mlp.down_proj.weight
    change = draw(*weight.shape, dtype=weight.dtype, seed=1) / 64
    with detlab.deterministic(model):
        before = logits(model)
        with torch.no_grad():
            weight.add_(change)
        inside = logits(model)
        assert not bitwise_equal(inside, before)
    with detlab.deterministic(model):
        assert bitwise_equal(logits(model), inside)
    assert bitwise_equal(weight.detach(), (detlab.load_model("tiny-llama")[0].model.layers[0].mlp.down_proj.weight + change))


# ---------------------------------------------------------------------------------------------------------- refusals
def test_a_cache_from_outside_is_refused(model):
    cache = DynamicCache(config=model.config)
    logits(model, cache=cache)
    with detlab.deterministic(model):
        with pytest.raises(UsageError, match="holds tokens that the stock model computed.*Fill a new cache inside"):
            logits(model, cache=cache)


def test_a_cache_from_inside_is_refused_outside(model):
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=40)):
        with detlab.deterministic(model):
            logits(model, cache=cache)
        with pytest.raises(UsageError, match="filled inside detlab.deterministic.*start a new one"):
            logits(model, cache=cache)


def test_masks_of_another_form_are_refused(model):
    square = torch.zeros(1, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1) > 0, float("-inf"))
    with detlab.deterministic(model):
        with pytest.raises(UsageError, match=r"2D attention_mask of ones and zeros; got a mask of shape \[1, 1, 12, 12\]"):
            logits(model, attention_mask=square)
        with pytest.raises(UsageError, match="neither causal nor a causal sliding window"):
            logits(model, position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]), use_cache=False)


def test_autocast_and_training_are_refused(model):
    with detlab.deterministic(model):
        with pytest.raises(UsageError, match="autocast is on"), torch.autocast("cpu", torch.bfloat16):
            logits(model)
        model.train()
        with pytest.raises(UsageError, match="put in training mode inside"):
            logits(model)
    with pytest.raises(UsageError, match=r"in training mode, where dropout.*Call model.eval\(\)"):
        with detlab.deterministic(model):
            pass


def test_what_is_not_covered_is_refused_by_name():
    with pytest.raises(UsageError, match="needs a transformers model; got Linear"):
        with detlab.deterministic(nn.Linear(2, 2).eval()):
            pass
    model = detlab.load_model("tiny-llama", dtype="float64")[0]
    with pytest.raises(UsageError, match="covers float32, bfloat16 and float16; the model has torch.float64"):
        with detlab.deterministic(model):
            pass

    class Quantised(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.round(decimals=2))

    model = detlab.load_model("tiny-llama")[0]
    layer = model.model.layers[0].mlp
    layer.up_proj.__class__ = Quantised
    with pytest.raises(CoverageError, match=r"model\.layers\.0\.mlp\.up_proj · aten::mm is not covered by tier 'invariant'"):
        with detlab.deterministic(model):
            pass


def small(config):
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_tables_that_depend_on_history_are_refused():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = small(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    with pytest.raises(UsageError, match="rotary embeddings of type 'dynamic' depend on the longest text seen"):
        with detlab.deterministic(model):
            pass


def test_encoder_decoders_are_refused():
    config = transformers.T5Config(d_model=32, d_ff=32, d_kv=16, num_heads=2, num_layers=1, vocab_size=64)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(UsageError, match="T5ForConditionalGeneration is an encoder-decoder"):
        with detlab.deterministic(model):
            pass
