"""Families whose parts bear other names, or that compute attention themselves: held bit by bit, or truly refused."""

import pytest
import torch
import transformers
from torch import nn
from transformers.cache_utils import DynamicCache

import detlab
from detlab import bits
from detlab.engine.alibi import with_slopes
from detlab.engine.experts import has_own_gate
from detlab.engine.install import is_plain_linear
from detlab.engine.own_ops import calls_by_name
from detlab.engine.step import Step, checked_step
from detlab.errors import CoverageError, UsageError
from tests.bit_classes import row_classes

SIZES = {"vocab_size": 260, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SIZES | {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 100}
LLAMA = DECODER | {"num_key_value_heads": 2, "max_position_embeddings": 128}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"intermediate_size": 104, "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = LLAMA | MLA | {
    "num_key_value_heads": 4, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip

#: Kind -> class of the model, and its config.
KINDS = {
    "ALiBi": ("Bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4} | SIZES),
    "ALiBi, heads no power of two": ("Mpt", {"d_model": 48, "n_layers": 2, "n_heads": 3, "max_seq_len": 128} | SIZES),
    "own attention with a window": (
        "GPTNeo",
        SIZES | {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                 "window_size": 9, "max_position_embeddings": 128},
    ),
    "linear under another name, rotary": ("Falcon", DECODER | {"num_kv_heads": 1, "max_position_embeddings": 128}),
    "two softmaxes": ("DiffLlama", LLAMA),
    "sinks, experts with biases": ("GptOss", LLAMA | EXPERTS | {"head_dim": 12, "sliding_window": 9}),
    "latents in the cache, sigmoid in the router": ("DeepseekV3", DEEPSEEK),
    "softplus in the activation": ("Apertus", LLAMA),
    "sigmoid in the attention": ("Beam", LLAMA | {"head_dim": 12}),
    "attention in chunks, all experts": (
        "Llama4",
        LLAMA | EXPERTS | {"head_dim": 12, "attention_chunk_size": 16, "intermediate_size_mlp": 64, "num_experts_per_tok": 1},
    ),
    "experts of one matrix": (
        "Dbrx",
        SIZES | {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
                 "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
                 "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "attention of experts": (
        "JetMoe", DECODER | EXPERTS | {"num_key_value_heads": 2, "kv_channels": 12, "max_position_embeddings": 128},
    ),
    "no padding as positions": ("RoFormer", DECODER | {"is_decoder": True, "embedding_size": 48}),
}  # fmt: skip


def small(name, config, dtype=torch.float32):
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForCausalLM")
    with torch.no_grad():
        model = cls(cls.config_class(**config)).eval().requires_grad_(False)
        for parameter in model.parameters():  # biases, sinks and norms start at constants
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype)


IDS = torch.randint(3, 250, (3, 41), generator=torch.Generator().manual_seed(1))


def serve(model, ids, mask=None, cache=None, **more):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=positions, cache=cache, **more).logits


@torch.no_grad()
def ways(model):
    """The second text's logits: alone, and in all other ways."""
    text = IDS[1:2]
    alone = serve(model, text, use_cache=False)[0]
    found = {"batch": serve(model, IDS, use_cache=False)[1]}
    for left, right in ((7, 0), (0, 5)):
        ids = nn.functional.pad(IDS, (left, right))
        mask = torch.ones_like(ids)
        mask[1, :left] = 0
        mask[1, left + 41 :] = 0
        found[f"padded {left}, {right}"] = serve(model, ids, mask, use_cache=False)[1, left : left + 41]
    for name, sizes in {"chunks": [7] * 6, "decoded": [30] + [1] * 11}.items():
        cache, at, parts = DynamicCache(config=model.config), 0, []
        for size in sizes:
            parts.append(serve(model, text[:, at : at + size], cache=cache, use_cache=True)[0])
            at += size
        found[name] = torch.cat(parts)
    return alone, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_text_has_the_same_bits_in_all_ways_and_the_same_meaning(kind, dtype):
    model = small(*KINDS[kind], dtype)
    twin = small(*KINDS[kind])
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    if twin._can_set_experts_implementation():
        twin.set_experts_implementation("eager")
    with torch.no_grad():
        exact = serve(twin.double(), IDS[1:2], use_cache=False)[0]
        stock, control = ways(model)
    with detlab.deterministic(model):
        alone, found = ways(model)
    for way, logits in found.items():
        assert bits.equal(alone.contiguous(), logits.contiguous()), way
    # By token, but for few: a rounding may choose another expert where two scores are nearly equal.
    errors = ((x.double() - exact).norm(dim=-1) / exact.norm(dim=-1) for x in (alone, stock))
    error, allowed = (by_token.quantile(0.9) for by_token in errors)
    assert error <= 3 * allowed + (1e-5 if dtype == torch.float32 else 1e-2)
    if dtype == torch.float32 and len(row_classes(dtype, 48, 48)) > 1:
        assert any(not bits.equal(stock.contiguous(), logits.contiguous()) for logits in control.values())


def test_a_model_without_a_cache():
    config = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 260}
    torch.manual_seed(0)
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**config)).eval()
    mask = torch.ones(3, 48, dtype=torch.long)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with detlab.deterministic(model), torch.no_grad():
        alone = model(IDS[1:2]).logits[0]
        padded = model(nn.functional.pad(IDS, (7, 0)), attention_mask=mask, position_ids=positions).logits[1, 7:]
        first = model(IDS[1:2, :20]).logits[0]
        out = model.generate(IDS[1:2, :20], max_new_tokens=3, do_sample=False, pad_token_id=0)
        chosen = model(out[:, :-1]).logits[0, -3:].argmax(-1)
    assert bits.equal(alone.contiguous(), padded.contiguous()) and bits.equal(alone[:20].contiguous(), first.contiguous())
    assert torch.equal(chosen, out[0, -3:])
    with torch.no_grad():
        assert torch.allclose(model(IDS[1:2]).logits[0], alone, atol=1e-5)


def test_alibi_is_slope_times_position():
    query, keys = torch.randn(2, 4, 5, 12), torch.randn(2, 2, 5, 12)
    slopes = torch.tensor([0.3, 2**-0.5, 0.7, 1 / 3])
    positions = torch.tensor([[0, 1, 2, 3, 4], [700, 701, 702, 703, 60_001]])
    for dtype in (torch.float32, torch.bfloat16):
        q, k = with_slopes(query.to(dtype), keys.to(dtype), slopes, positions, 0.37)
        assert q.shape[-1] == k.shape[-1] and q.shape[-1] % 8 == 0 and q.dtype == k.dtype == dtype
        added = 0.37 * (q[..., 12:].double() @ k.repeat_interleave(2, 1)[..., 12:].double().transpose(2, 3))
        expected = (slopes.double()[None, :, None] * positions[:, None].double())[:, :, None]
        assert torch.allclose(added, expected.expand_as(added), rtol=2**-22, atol=0)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.001


class Renamed(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 300, 3000])
def test_a_linear_layer_of_another_name_is_seen_to_be_one(dtype, size):
    assert is_plain_linear(Renamed(size, 40).to(dtype)) and is_plain_linear(nn.Linear(size, 40).to(dtype))
    assert not is_plain_linear(Pair(size, 40).to(dtype)) and not is_plain_linear(nn.LayerNorm(size))
    if dtype == torch.float32:
        assert not is_plain_linear(Scaled(size, 40))


def test_which_modules_call_functions_by_name():
    from transformers.models.afmoe.modeling_afmoe import AfmoeAttention, AfmoeRMSNorm
    from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel, LlamaRMSNorm

    assert all(map(calls_by_name, (AfmoeAttention, Dots1TopkRouter)))
    plain = (LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel, LlamaRMSNorm, AfmoeRMSNorm, nn.Linear, nn.SiLU)
    assert not any(map(calls_by_name, plain))


def test_what_a_module_calls_by_name_is_covered_and_what_else_it_calls_is_not():
    model = small("Llama", LLAMA)

    class Mixed(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return super().forward(x) * torch.sigmoid(x) + x.sum(0, keepdim=True)

    model.model.layers[0].mlp.__class__ = Mixed
    found = detlab.coverage(model)
    assert {(op.module, op.op) for op in found.uncovered} == {("model.layers.0.mlp", "aten::sum")}
    mine = {op.op: op.reason for op in found.ops if op.module == "model.layers.0.mlp"}
    assert mine["aten::sigmoid"] == "computed by the tier (operation)"


REFUSED = {
    "CpmAnt": (SIZES | {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "dim_head": 12, "dim_ff": 64},
               "CpmAntAttention computes its attention itself, not through transformers' AttentionInterface"),
    "Falcon": (DECODER | {"alibi": True}, "the model makes use of its attention mask itself"),
    "BigBird": (DECODER | {"is_decoder": True, "attention_type": "original_full"},
                "the model makes use of its attention mask itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_was_met(name):
    config, words = REFUSED[name]
    with pytest.raises((UsageError, CoverageError)) as caught:
        with detlab.deterministic(small(name, config)):
            pass
    assert words in str(caught.value)


def test_a_gate_of_experts_own_is_seen():
    from types import SimpleNamespace

    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"num_local_experts": 2, "hidden_size": 8, "intermediate_size": 8, "hidden_act": "silu"}
    config = SimpleNamespace(**sizes, swiglu_limit=7.0, swiglu_alpha=1.7)
    assert has_own_gate(MiniMaxM3VLExperts(config)) and not has_own_gate(MixtralExperts(config))


def test_attention_that_is_given_a_tensor_that_no_tier_knows_is_refused():
    step = Step(1, 3, 0, None, None, torch.float32, torch.device("cpu"))
    assert checked_step(nn.Linear(1, 1), step, 0.0, {"position_ids": IDS, "indices": None}) is step
    with pytest.raises(UsageError, match="Linear: attention that is given indices is not covered"):
        checked_step(nn.Linear(1, 1), step, 0.0, {"position_ids": IDS, "indices": IDS})


def test_an_encoder_and_weights_are_refused():
    model = small("MegatronBert", DECODER | {"is_decoder": True, "add_cross_attention": True})
    with detlab.deterministic(model, strict=False), pytest.raises(UsageError, match="attention to another sequence"):
        model(IDS, encoder_hidden_states=torch.zeros(3, 5, 48))
    model = small(*KINDS["ALiBi"])
    with detlab.deterministic(model), pytest.raises(UsageError, match="output_attentions is not available"):
        model(IDS, output_attentions=True)
