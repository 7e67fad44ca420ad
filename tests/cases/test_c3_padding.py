"""Case C3 (transformers 29029): 21 tokens, left padding 3 and 11 with a right mask and right positions.

Attention by sdpa parts in the rows of the last partial query tile; eager attention does not, and must not be reported.
"""

import pytest
import torch

import detlab
from detlab import Condition
from tests.bit_classes import differing, first_raw_difference, maker, module_tensors, padded_attention_rows, placed_rows_equal
from tests.bit_classes import rows_by_position as by_position

LENGTH = 21
PADS = (3, 11)
TOKENS = torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 1024))


@pytest.fixture(scope="module")
def models():
    return {kind: detlab.load_model("tiny-llama", attention=kind)[0] for kind in ("sdpa", "eager")}


def serve(model, pad):
    ids = torch.tensor([[256] * pad + TOKENS])
    mask = torch.tensor([[0] * pad + [1] * LENGTH])
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))


def seen(model, pad):
    with module_tensors(model) as calls:
        serve(model, pad)
    return calls


def captured(model, pad):
    with detlab.capture(model) as trace:
        serve(model, pad)
    return trace


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pads", [(0, 3), (0, 11), PADS])
def test_bare_captures(models, attention, pads):
    model = models[attention]
    raw = [seen(model, pad) for pad in pads]
    truth = first_raw_difference(*raw, pads=pads)
    result = detlab.compare(*(captured(model, pad) for pad in pads))
    assert_right_answer(result, truth, raw, pads, attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pad", PADS)
def test_runs(models, attention, pad):
    model = models[attention]
    padded = Condition(padding_side="left", padding=pad)
    runs = [detlab.run(model, [TOKENS], c, new_tokens=0) for c in (Condition(), padded)]
    raw = []
    for condition in (Condition(), padded):
        with module_tensors(model) as calls:
            detlab.run(model, [TOKENS], condition, new_tokens=0, trace=False)
        raw.append(calls)
    result = detlab.compare(*runs)
    assert_right_answer(result, first_raw_difference(*raw, pads=(0, pad)), raw, (0, pad), attention)
    assert result.controls == {"a_repeated": True, "b_repeated": True}
    assert result.logits_equal == (result.verdict == "identical")
    if attention == "sdpa" and result.first is not None:
        first = result.first
        assert 1 <= first.max_ulp < 1 << 40 and first.max_abs < 1e-5
        if first.module == "model.layers.0.self_attn":  # sized over the rows that differ, and over no others
            name = "in model.layers.0.self_attn.o_proj"
            ours, theirs = (by_position(calls, name, pad=p) for calls, p in zip(raw, (0, pad), strict=True))
            bad = differing(ours, theirs)
            a, b = (torch.stack([rows[i] for i in bad]) for rows in (ours, theirs))
            assert 0 < len(bad) < LENGTH and first.num_rows == len(bad)
            assert first.max_abs == float((a.double() - b.double()).abs().max())
            assert first.share == pytest.approx(float((a != b).double().mean()))


def assert_right_answer(result, truth, raw, pads, attention):
    assert result.rows_compared > 1500
    places = [(LENGTH + pad, pad) for pad in pads]
    linear_is_equal = all(placed_rows_equal(torch.float32, k, n, LENGTH, *places) for k, n in SHAPES)
    if truth is None:
        assert result.verdict == "identical" and result.first is None
        # The control: attention must part here where the probe says so.
        assert attention == "eager" or pads[0] or not padded_attention_rows(torch.float32, LENGTH, pads[1])
        return
    name, _, position = truth
    assert result.verdict == "diverged" and result.first.inputs_matched
    assert (result.first.module, result.first.position) == (maker(name), position)
    if attention == "sdpa" and linear_is_equal:
        assert result.first.module == "model.layers.0.self_attn"
        assert result.first.op == "_scaled_dot_product_flash_attention_for_cpu"
        rows = [by_position(calls, "in model.layers.0.self_attn.o_proj", pad=pad) for calls, pad in zip(raw, pads, strict=True)]
        (found,) = [f for f in result.detail.ops if f.a == result.first.op_index]
        assert [i for i, state in enumerate(found.state.tolist()) if state == 3] == differing(*rows)
        assert result.first.inputs == expected_inputs(pads)
        assert all("flash" in d.op for d in result.origins if d.module.startswith("model.layers.0."))
    if attention == "eager" and linear_is_equal:
        pytest.fail(f"eager attention of {LENGTH} tokens was found to depend on padding {pads}: {truth}")


def expected_inputs(pads):
    """Queries, keys and values matched; the mask is an input of the padded side alone, or of both."""
    if 0 in pads:
        return {"query": "matched", "key": "matched", "value": "matched", "attn_mask": "unknown"}
    return {"query": "matched", "key": "matched", "value": "matched", "attn_mask": "matched"}
