"""A model that is changed while it is under a tier: what the tier packed is made anew, or the change is refused."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

import detlab
from detlab import bits
from detlab.errors import CoverageError, UsageError

IDS = torch.arange(3, 27)[None]


def small(kind="Qwen2", **more):
    """A small model with random weights; Qwen2 has biases in its projections."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes | more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def mixture():
    return small("Mixtral", num_local_experts=4, num_experts_per_tok=2)


@torch.no_grad()
def logits(model, ids=IDS, **more):
    return model(ids, use_cache=False, **more).logits


CHANGES = {
    "weight": ("Qwen2", lambda m: m.model.layers[0].self_attn.q_proj.weight.mul_(1.5)),
    "bias": ("Qwen2", lambda m: m.model.layers[0].self_attn.q_proj.bias.add_(1.5)),
    "bias replaced": ("Qwen2", lambda m: setattr(m.model.layers[0].self_attn.v_proj, "bias", nn.Parameter(torch.ones(32)))),
    "through .data": ("Qwen2", lambda m: m.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)),
    "data replaced": ("Qwen2", lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data * 1.5)),
    "experts": ("mixture", lambda m: m.model.layers[0].mlp.experts.gate_up_proj.mul_(1.7)),
    "router": ("mixture", lambda m: m.model.layers[0].mlp.gate.weight.mul_(-1.7)),
    "rotary": ("Qwen2", lambda m: m.model.rotary_emb.inv_freq.mul_(0.5)),
    "state dict": ("mixture", lambda m: m.load_state_dict({k: v * 1.1 for k, v in m.state_dict().items()})),
    "assigned": ("mixture", lambda m: m.load_state_dict({k: v * 1.1 for k, v in m.state_dict().items()}, assign=True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_inside_is_the_model_from_then_on(name):
    kind, change = CHANGES[name]
    model = mixture() if kind == "mixture" else small(kind)
    with detlab.deterministic(model), torch.no_grad():
        before = logits(model)
        change(model)
        inside = logits(model)
        alone = logits(model, IDS[:, :7])
    with detlab.deterministic(model):
        again = logits(model)
    assert not bits.equal(before, inside)
    assert bits.equal(inside, again)
    assert bits.equal(inside[:, :7], alone)
    assert torch.allclose(inside, logits(model), atol=1e-4)


def test_other_shapes_and_modules_are_refused():
    for change in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.resize_token_embeddings(104),
        lambda m: setattr(m.model.layers[0].mlp, "down_proj", nn.Linear(128, 64, bias=False)),
    ):
        model = small()
        with detlab.deterministic(model):
            change(model)
            with pytest.raises(UsageError, match="enter it again"):
                logits(model)


def test_copies_are_refused():
    model = small()
    with detlab.deterministic(model):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="cannot be copied"):
                copied(model)
    assert bits.equal(logits(copy.deepcopy(model)), logits(model))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x / x.abs().max(), lambda x: x.amax(0, keepdim=True) + x, lambda x: x - x.min(),
        lambda x: torch.roll(x, 1, 0),
        lambda x: x.flip(0), lambda x: x[:1] + 0 * x, lambda x: x.sort(0).values, lambda x: x * (1 + 1e-3 * x.shape[0]),
        lambda x: torch.nn.functional.dropout(x, 0.1, training=True), lambda x: x + x.amax(1, keepdim=True),
    ],
)  # fmt: skip
def test_rows_that_are_mixed_are_not_covered(mix):
    model = small()
    plain = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: mix(plain(x))
    with pytest.raises(CoverageError, match="is not covered by tier"):
        with detlab.deterministic(model):
            pass


def test_coverage_is_asked_again_where_a_hook_was_added():
    model = small()
    with detlab.deterministic(model):
        pass
    handle = model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out + out.mean((0, 1), keepdim=True))
    with pytest.raises(CoverageError):
        with detlab.deterministic(model):
            pass
    handle.remove()
    with detlab.deterministic(model):
        pass


def test_a_functional_gelu_that_follows_the_threads_is_not_covered():
    """Or it does not follow them on this machine: then it is covered, and the bits say so."""
    model = small()
    plain = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: torch.nn.functional.gelu(plain(x), approximate="tanh")
    ids = (torch.arange(1021)[None] * 7) % 96
    model.config.max_position_embeddings = 2048
    try:
        with detlab.deterministic(model):
            results = []
            for threads in (1, 3, 5):
                torch.set_num_threads(threads)
                results.append(logits(model, ids))
        assert all(bits.equal(results[0], other) for other in results)
    except CoverageError as error:
        assert "threads" in str(error) or "rows" in str(error)
    finally:
        torch.set_num_threads(1)


def test_masks_that_do_not_fit_are_refused():
    model = small()
    with detlab.deterministic(model), torch.no_grad():
        with pytest.raises(UsageError, match="must cover"):
            logits(model, attention_mask=torch.ones(1, 12, dtype=torch.long))
        mask = torch.ones(1, 24, dtype=torch.long)
        mask[0, :5] = 0
        cache = DynamicCache(config=model.config)
        model(IDS, attention_mask=mask, cache=cache)
        moved = torch.cat([mask.flip(1), torch.ones(1, 1, dtype=torch.long)], 1)
        with pytest.raises(UsageError, match="other of the cached tokens"):
            model(IDS[:, :1], attention_mask=moved, cache=cache)
    window = small("Mistral", sliding_window=8)
    holes = torch.ones(1, 24, dtype=torch.long)
    holes[0, 5] = 0
    with detlab.deterministic(window), pytest.raises(UsageError, match="zeros between ones"):
        logits(window, attention_mask=holes)


def test_a_static_cache_of_a_model_whose_layers_all_slide():
    model = small("Mistral", sliding_window=8)
    settings = {"max_new_tokens": 6, "do_sample": False}
    with detlab.deterministic(model):
        static = model.generate(IDS, cache_implementation="static", **settings)
        dynamic = model.generate(IDS, **settings)
    assert torch.equal(static, dynamic)


def test_a_cache_in_its_place_among_the_arguments():
    model = detlab.load_model("tiny-gpt2")[0]
    cache = DynamicCache(config=model.config)
    with detlab.deterministic(model), torch.no_grad():
        assert bits.equal(model(IDS, cache).logits, logits(model))
    assert cache.get_seq_length() == 24


def test_a_model_of_another_make_is_refused_with_the_reason():
    config = transformers.BigBirdConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, is_decoder=True,
        attention_type="original_full",
    )  # fmt: skip
    model = transformers.BigBirdForCausalLM(config).eval()
    with pytest.raises(UsageError, match="tier"):
        with detlab.deterministic(model):
            pass
    logits(model)


def test_models_without_a_head_and_other_options_are_refused():
    with pytest.raises(UsageError, match="makes no tokens"):
        detlab.apply(small().model)
    with pytest.raises(UsageError, match="options must be"):
        detlab.apply(small(), options=3)


def test_a_stock_condition_inside_a_block_is_refused():
    model = small()
    with detlab.deterministic(model), pytest.raises(UsageError, match="name the tier"):
        detlab.run(model, [[5, 6, 7]], new_tokens=1, trace=False)
