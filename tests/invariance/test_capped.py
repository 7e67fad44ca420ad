"""Capped scores, as Gemma 2 has them: against the slow twin, against transformers' eager attention, and in every serving."""

import copy
import random

import pytest
import torch
import transformers

import detlab
from detlab.engine.attention import canonical_attention
from detlab.engine.capped import reference_capped_attention
from detlab.engine.probes import draw
from detlab.engine.step import Step
from detlab.errors import UsageError
from detlab.verify.serve import Way, logits_of
from tests.bit_classes import bitwise_equal, row_class_equal

CAP = 4.0


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    """A Gemma 2 of two layers, one with a sliding window, whose caps are low enough to bend most scores."""
    config = transformers.Gemma2Config(
        vocab_size=256, hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=6, head_dim=40,
        num_key_value_heads=2, query_pre_attn_scalar=8, attn_logit_softcapping=CAP, final_logit_softcapping=6.0,
        sliding_window=33, max_position_embeddings=1200, pad_token_id=0,
    )  # fmt: skip
    gemma = transformers.Gemma2ForCausalLM(config).eval().requires_grad_(False)
    for index, parameter in enumerate(gemma.parameters()):
        if parameter.ndim > 1:
            parameter.copy_(draw(*parameter.shape, dtype=torch.float32, seed=index) / 4)
    return gemma.to(request.param)


def text_of(length, seed=0):
    draw_from = random.Random(f"{length} {seed}")
    return [draw_from.randrange(3, 250) for _ in range(length)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 2, 64), (1, 1, 40)])
def test_the_slow_twin(dtype, heads, groups, size):
    for tokens in (1, 5, 530):
        q, k, v = (4 * draw(2, h, tokens, size, dtype=dtype, seed=s) for s, h in ((1, heads), (2, groups), (3, groups)))
        step = Step(2, tokens, 0, None, None, dtype, torch.device("cpu"))
        got = canonical_attention(torch.nn.Identity(), q, k, v, step, softcap=CAP)[0]
        for at in {0, tokens // 2, tokens - 1}:
            for row in range(2):
                expected = reference_capped_attention(q[row, :, at], k[row, :, : at + 1], v[row, :, : at + 1], CAP)
                assert bitwise_equal(got[row, at], expected), (tokens, at, row)


def test_the_same_bits_however_it_is_served(model):
    """Batches, padding, chunks, caches; the stock model's bits part in the same servings."""
    ways = [
        Way(batch=3, rows=(0, 2), mates=1), Way(batch=13, rows=(7,), mates=2), Way(left=7), Way(right=3),
        Way(start=72, cache="dynamic"), Way(batch=3, rows=(1,), start=71, cache="dynamic", is_ragged=True, mates=3),
        Way(chunk=33, cache="dynamic"), Way(start=60, chunk=7, cache="static"),
    ]  # fmt: skip
    text, keep = text_of(75), [0, 1, 31, 32, 33, 63, 70, 71, 72, 73, 74]

    def parted():
        expected = logits_of(model, text, Way(), [], keep)[0]
        return [str(way) for way in ways for got in logits_of(model, text, way, [], keep) if not bitwise_equal(got, expected)]

    with detlab.deterministic(model):
        assert parted() == []
    assert parted() or row_class_equal(model.dtype, 192, 240, 1, 3)  # some machines' bfloat16 products are one class


def test_no_further_from_float64_than_eager_attention(model):
    """The cap counts (without it the logits are others), and what the tier computes is what eager attention means."""
    judge = copy.deepcopy(model).double()
    uncapped = copy.deepcopy(judge)
    for layer in uncapped.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    with torch.no_grad():
        for length in (9, 75, 600):
            ids = torch.tensor([text_of(length)])
            truth, stock = judge(ids).logits, model(ids).logits.double()
            with detlab.deterministic(model):
                tier = model(ids).logits.double()
            error = (stock - truth).abs().max()
            assert (tier - truth).abs().max() <= 1.5 * error  # both round their products; the tier's weights stay in float32
            bend = (uncapped(ids).logits - truth).abs().max()
            assert bend > (100 if model.dtype == torch.float32 else 2) * (tier - truth).abs().max()


def test_generate(model):
    prompts = [text_of(5), text_of(9, 1)]
    with detlab.deterministic(model):
        alone = [model.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False)[0, len(p) :] for p in prompts]
        ids = torch.tensor([[0] * 4 + prompts[0], prompts[1]])
        together = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=8, do_sample=False)[:, 9:]
    assert torch.equal(torch.stack(alone), together)


def test_the_exact_tier_refuses_capped_scores(model):
    with pytest.raises(UsageError, match="softcap is not covered by this tier"):
        with detlab.deterministic(model, tier="exact"):
            model(torch.tensor([text_of(4)]))
