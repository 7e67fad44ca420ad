"""Layers with a recurrence: what is computed fast is what the references say, and a token's bits are its own context's."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache

import detlab
from detlab.engine import scans
from detlab.engine.elementwise import canonical_elementwise
from detlab.engine.probes import draw
from detlab.engine.scans import Rows
from detlab.errors import CoverageError, UsageError
from tests.bit_classes import bitwise_equal

VOCABULARY = 97
LENGTH = 37
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
#: Model type -> what its tiny model is made with.
FAMILIES = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": {"state_size": 16},
    "falcon_h1": _MAMBA | _ATTENTION | {"mamba_d_ssm": 128},
    "recurrent_gemma": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 8,
        "block_types": ["recurrent", "recurrent", "attention"], "intermediate_size": 192,
    },
    "rwkv": {"attention_hidden_size": 64, "intermediate_size": 96, "rescale_every": 2},
    "olmo_hybrid": _ATTENTION | {
        "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "pad_token_id": 0, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
}  # fmt: skip


def tiny(kind, dtype=torch.float32, **more):
    """A tiny random model, with convolutions and steps far from their initial zeros and ones."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    config = transformers.AutoConfig.for_model(kind, **sizes | FAMILIES.get(kind, {}) | more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                scale = 4.0 if "embed" in name else 0.4 if "conv" in name else 0.7 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape) * scale)
    return model.to(dtype)


IDS = torch.randint(1, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def call(model, ids, mask=None, first=0, **more):
    """Logits of a call; positions count real tokens."""
    mask = torch.ones(len(ids), first + ids.shape[1], dtype=torch.long) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, first:]
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, **more)


def in_pieces(model, ids, sizes, mask=None):
    """Logits of a text in calls of several sizes that go on from each other."""
    mask = torch.ones_like(ids) if mask is None else mask
    kept, first, logits = {"cache": DynamicCache(config=model.config)}, 0, []
    for size in sizes:
        output = call(model, ids[:, first : first + size], mask[:, : first + size], first, use_cache=True, **kept)
        kept = {"state": output.state} if model.config.model_type == "rwkv" else kept
        logits.append(output.logits)
        first += size
    assert first == ids.shape[1]
    return torch.cat(logits, 1)


def pad(ids, left, right):
    """The texts with padding beside all but the first, which is longer instead; and the mask."""
    wide = F.pad(ids, (left, right), value=5)
    mask = F.pad(torch.ones_like(ids), (left, right))
    mask[0] = 1
    return wide, mask


# --------------------------------------------------------------------------------------------------------- references
@pytest.mark.parametrize("terms", [1, 2, 3, 7, 16, 24])
def test_tree_sum(terms):
    x = draw(5, terms, 3, dtype=torch.float32, seed=terms)
    expected = scans.reference_tree_sum(list(x.unbind(1)))
    assert bitwise_equal(scans.tree_sum(x.clone(), 1), expected)
    assert bitwise_equal(scans.tree_sum(x.transpose(0, 1).contiguous(), 0), expected)


def test_causal_convolution():
    window, x = draw(2, 3, 5, dtype=torch.bfloat16, seed=1), draw(2, 9, 5, dtype=torch.bfloat16, seed=2)
    weight, bias = draw(5, 4, dtype=torch.bfloat16, seed=3), draw(5, dtype=torch.bfloat16, seed=4)
    rows = Rows(torch.arange(9) < torch.tensor([[9], [2]]))
    out, after = scans.causal_convolution(window, x, weight, bias, rows)
    for row in range(2):
        assert bitwise_equal(out[row], scans.reference_causal_convolution(window[row], x[row], weight, bias))
    assert bitwise_equal(after[0], x[0, 6:]) and bitwise_equal(after[1], torch.cat([window[1, 2:], x[1, :2]]))
    whole = F.conv1d(torch.cat([window, x], 1).double().mT, weight[:, None].double(), bias.double(), groups=5).mT
    assert (out - whole).abs().max() < 1e-6


@pytest.fixture
def ragged():
    return Rows(torch.arange(11) < torch.tensor([[11], [4], [0]]))


def small(*shape, seed):
    return draw(*shape, dtype=torch.float32, seed=seed)


def test_selective_scan(ragged, monkeypatch):
    drive, steps, rates = small(11, 3, 6, seed=1), small(11, 3, 6, seed=2).abs(), -small(5, 6, seed=3).abs()
    keys, queries, state = small(11, 5, 3, 1, seed=4), small(11, 5, 3, 1, seed=5), small(5, 3, 6, seed=6)
    arguments = (drive[:, None], steps[:, None], rates[:, None], keys, queries, state)
    y, after = scans.selective_scan(*arguments, ragged)
    for row in range(3):
        expected = scans.reference_selective_scan(drive[:, row], steps[:, row], rates, keys[:, :, row], queries[:, :, row],
                                                  state[:, row])  # fmt: skip
        assert bitwise_equal(y[:, row], expected)
    assert bitwise_equal(after[:, 2], state[:, 2])  # the row without real tokens
    four = scans.selective_scan(*(t[:4] for t in arguments[:2]), rates[:, None], keys[:4], queries[:4], state, None)[1]
    assert bitwise_equal(after[:, 1], four[:, 1])
    monkeypatch.setattr(scans, "_ELEMENTS", 3 * state.numel())  # in blocks of three tokens
    again = scans.selective_scan(*arguments, ragged)
    assert bitwise_equal(again[0][:, 0], y[:, 0]) and bitwise_equal(again[0][:4, 1], y[:4, 1])
    assert bitwise_equal(again[1], after)


def test_gated_delta_rule(ragged, monkeypatch):
    decay, rate = small(11, 3, 2, seed=1).abs(), small(11, 3, 2, seed=2).abs()
    keys, queries = small(11, 5, 3, 2, seed=3), small(11, 5, 3, 2, seed=4)
    values, state = small(11, 3, 2, 4, seed=5), small(5, 3, 2, 4, seed=6)
    y, after = scans.gated_delta_rule(decay, rate, keys, values, queries, state, ragged)
    for row in range(3):
        expected = scans.reference_gated_delta_rule(decay[:, row, 1], rate[:, row, 1], keys[:, :, row, 1], values[:, row, 1],
                                                    queries[:, :, row, 1], state[:, row, 1])  # fmt: skip
        assert bitwise_equal(y[:, row, 1], expected)
    monkeypatch.setattr(scans, "_ELEMENTS", 3 * state.numel())
    again = scans.gated_delta_rule(decay, rate, keys, values, queries, state, ragged)
    assert bitwise_equal(again[0][:, 0], y[:, 0]) and bitwise_equal(again[0][:4, 1], y[:4, 1])
    assert bitwise_equal(again[1], after)


def test_wkv(ragged):
    decay, first, state = -small(6, seed=1).abs(), small(6, seed=2), small(3, 3, 6, seed=3).abs()
    keys, values = 4 * small(11, 3, 6, seed=4), small(11, 3, 6, seed=5)
    y, after = scans.wkv(decay, first, keys, values, state, ragged)
    for row in range(3):
        assert bitwise_equal(y[:, row], scans.reference_wkv(decay, first, keys[:, row], values[:, row], state[:, row]))
    assert bitwise_equal(after[:, 2], state[:, 2])


def test_rows_pack_and_unpack():
    real = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    rows, x = Rows(real), torch.arange(12.0).view(3, 4, 1)
    assert rows.pack(x)[:2, :2, 0].tolist() == [[2, 3], [4, 6]] and rows.counts.tolist() == [2, 2, 4]
    assert torch.equal(rows.unpack(rows.pack(x))[real], x[real])


@pytest.mark.parametrize("count", [1, 2])
def test_an_activation_of_every_other_element(count):
    """A flat view of such a tensor has strides, and is computed element by element, by another formula."""
    x = draw(3, 64, 2, dtype=torch.float32, seed=1)[..., 0] * 8
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        assert bitwise_equal(canonical_elementwise(F.silu)(x), F.silu(x.reshape(-1).contiguous()).view(x.shape))
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_bits_are_those_of_the_text_alone(kind, dtype):
    model = tiny(kind, dtype)
    with detlab.deterministic(model):
        alone = torch.cat([call(model, row[None], use_cache=False).logits for row in IDS])
        got = {"batch": call(model, IDS).logits, "order": call(model, IDS.flip(0)).logits.flip(0)}
        for sizes in ([16, 16, 5], [7] * 5 + [2], [1] * LENGTH):
            got[f"pieces of {sizes[0]}"] = in_pieces(model, IDS, sizes)
        for left in (3, 11):
            ids, mask = pad(IDS, left, 0)
            got[f"{left} to the left"] = call(model, ids, mask).logits[:, left:]
            for sizes in ([20, LENGTH + left - 20], [1] * (LENGTH + left)):
                got[f"{left} to the left, pieces of {sizes[0]}"] = in_pieces(model, ids, sizes, mask)[:, left:]
            ids, mask = pad(IDS, 0, left)
            got[f"{left} to the right"] = call(model, ids, mask).logits[:, :LENGTH]
    parted = [name for name, logits in got.items() if not bitwise_equal(logits[1:].contiguous(), alone[1:])]
    assert not parted
    assert all(bitwise_equal(got[name][0].contiguous(), alone[0]) for name in ("batch", "order", "pieces of 1"))
    # The control. Stock RWKV cannot decode more than one row.
    ids = IDS[:1] if kind == "rwkv" else IDS
    assert not bitwise_equal(in_pieces(model, ids, [9] + [1] * 28), call(model, ids).logits) or kind == "rwkv"


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_function_is_the_models_own(kind):
    model = tiny(kind)
    exact = tiny(kind).double()(input_ids=IDS, use_cache=False).logits
    stock = (call(model, IDS, use_cache=False).logits - exact).abs().max()
    with detlab.deterministic(model):
        error = (call(model, IDS, use_cache=False).logits - exact).abs().max()
    assert error <= 2 * stock + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1", "rwkv"])
def test_decoding_goes_on_after_padding_on_the_right(kind):
    """The state is the one after the last real token: a stock one has seen the padding."""
    model = tiny(kind)
    ids = torch.cat([IDS[:, :20], torch.full((3, 6), 5), IDS[:, 20:]], 1)
    mask = torch.ones_like(ids)
    mask[1:, 20:26] = 0
    with detlab.deterministic(model):
        alone = call(model, IDS[1:]).logits
        for sizes in ([26] + [1] * 17, [20] + [1] * 23, [22, 9, 12]):
            logits = in_pieces(model, ids, sizes, mask)[1:]
            assert bitwise_equal(torch.cat([logits[:, :20], logits[:, 26:]], 1), alone)


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_generate(kind):
    model = tiny(kind)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids, mask = pad(IDS, 4, 0)
    options = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    for more in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        with detlab.deterministic(model):
            together = model.generate(ids, attention_mask=mask, **options, **more)
            alone = model.generate(IDS[1:2], attention_mask=torch.ones_like(IDS[1:2]), **options, **more)
        assert torch.equal(together.sequences[1, 4:], alone.sequences[0])
        if "num_beams" not in more:
            assert all(bitwise_equal(a[1], b[0]) for a, b in zip(together.logits, alone.logits, strict=True))


def test_a_changed_parameter_is_seen():
    model = tiny("mamba2")
    with detlab.deterministic(model):
        before = call(model, IDS).logits
        with torch.no_grad():
            model.backbone.layers[0].mixer.A_log += 1
        after = call(model, IDS).logits
    with detlab.deterministic(model):
        assert bitwise_equal(call(model, IDS).logits, after) and not bitwise_equal(after, before)


# ----------------------------------------------------------------------------------------------------------- refusals
def refuses(error, text, call):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_caches_that_do_not_fit_are_refused():
    model = tiny("mamba2")
    filled = call(model, IDS, use_cache=True).cache
    with detlab.deterministic(model):
        refuses(UsageError, "holds tokens that the stock model computed", lambda: call(model, IDS[:, :1], cache=filled))
        refuses(UsageError, "DynamicCache(config=model.config)", lambda: call(model, IDS, cache=DynamicCache()))
        cache = call(model, IDS, use_cache=True).cache
        refuses(UsageError, "holds 3 rows, and the call has 1", lambda: call(model, IDS[:1, :1], cache=cache))
        refuses(UsageError, "cannot be wound back", lambda: cache.crop(-1))
        refuses(UsageError, "assisted decoding", cache.activate_past_recording)
        refuses(UsageError, "take a 2D attention_mask", lambda: model(input_ids=IDS, attention_mask=torch.ones(3, 1, 1, 9)))
    refuses(UsageError, "is used outside: start a new one", lambda: call(model, IDS[:, :1], cache=cache))


def test_a_state_of_the_stock_model_is_refused():
    model = tiny("rwkv")
    state = call(model, IDS, use_cache=True).state
    with detlab.deterministic(model):
        refuses(UsageError, "filled by the stock model", lambda: call(model, IDS[:, :1], state=state))


def test_what_is_not_covered_is_refused_with_the_reason():
    model = tiny("xlstm", num_heads=4, chunk_size=8)
    refuses(UsageError, "is a xLSTMBlock: its matrix memory is computed in chunks", lambda: detlab.coverage(model))
    model = tiny("minimax", num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4, block_size=8)
    refuses(UsageError, "a cache of its own kind. The invariant tier has no part for it", lambda: detlab.coverage(model))
    model = tiny("mamba2", hidden_act="silu")
    model.backbone.layers[0].mixer.act = torch.nn.Softmax(-1)
    refuses((UsageError, CoverageError), "is not known to work element by element", lambda: detlab.coverage(model))
