"""generate in its other modes, under the tier: beams, several sequences, a cache that goes on, crop, reorder."""

import random

import pytest
import torch
from transformers import DynamicCache

import detlab
from tests.bit_classes import bitwise_equal


def text_of(length, seed=0):
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, 250) for _ in range(length)]


def batch_of(*texts):
    """Left-padded token ids and mask."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(t)) + t for t in texts])
    return {"input_ids": ids, "attention_mask": torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts])}


@pytest.fixture(scope="module", params=[("tiny-llama", "float32"), ("tiny-gemma3", "bfloat16")], ids="-".join)
def model(request):
    return detlab.load_model(request.param[0], dtype=request.param[1])[0]


A, B, C = text_of(21), text_of(30, 1), text_of(9, 2)
PLAIN = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}


def new(model, inputs, **more):
    """The tokens that generate adds, [rows, new]."""
    return model.generate(**inputs, **PLAIN, **more)[:, inputs["input_ids"].shape[1] :]


def test_beams_do_not_see_the_batch(model):
    def texts(inputs):
        return new(model, inputs, num_beams=3, num_return_sequences=2, do_sample=False)

    with detlab.deterministic(model):
        alone, together = texts(batch_of(A)), texts(batch_of(B, A, C))
    assert torch.equal(together[2:4], alone)


def test_several_sampled_sequences_of_one_prompt(model):
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    with detlab.deterministic(model, seed=3):
        alone = new(model, batch_of(A), num_return_sequences=3, **sampling)
        together = new(model, batch_of(C, A), num_return_sequences=3, **sampling)
    assert torch.equal(together[3:], alone)
    assert len({tuple(row) for row in alone.tolist()}) > 1


def test_ragged_prompts(model):
    with detlab.deterministic(model):
        alone = [new(model, batch_of(text), do_sample=False)[0] for text in (A, B, C)]
        for order in ((0, 1, 2), (2, 0, 1)):
            texts = new(model, batch_of(*((A, B, C)[i] for i in order)), do_sample=False)
            assert all(torch.equal(row, alone[i]) for row, i in zip(texts, order, strict=True))


def test_a_cache_goes_on_and_is_cropped(model):
    """A conversation's second turn finds the first in its cache: the bits are those of one prefill of all of it."""
    with torch.no_grad(), detlab.deterministic(model):
        whole = model(input_ids=torch.tensor([A + B])).logits[0]
        cache = DynamicCache(config=model.config)
        first = model(input_ids=torch.tensor([A]), cache=cache).logits[0]
        second = model(input_ids=torch.tensor([B]), cache=cache).logits[0]
        assert cache.get_seq_length() == len(A + B)
        assert bitwise_equal(torch.cat([first, second]), whole)
        cache.crop(-(len(B) - 4))
        assert cache.get_seq_length() == len(A) + 4
        again = model(input_ids=torch.tensor([B[4:]]), cache=cache).logits[0]
        assert bitwise_equal(again, whole[len(A) + 4 :])


def test_generate_goes_on_with_a_cache(model):
    with detlab.deterministic(model):
        cache = DynamicCache(config=model.config)
        start = torch.tensor([A])
        turn = model.generate(input_ids=start, attention_mask=torch.ones_like(start), cache=cache, do_sample=False,
                              **PLAIN)  # fmt: skip
        more = torch.cat([turn, torch.tensor([C])], 1)
        inputs = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        warm = model.generate(**inputs, cache=cache, do_sample=False, **PLAIN)
        cold = model.generate(**inputs, do_sample=False, **PLAIN)
    assert torch.equal(warm, cold)


def test_rows_of_a_cache_change_places(model):
    inputs = batch_of(A, C)
    with torch.no_grad(), detlab.deterministic(model):
        cache = DynamicCache(config=model.config)
        places = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        model(**inputs, position_ids=places, cache=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        mask = torch.cat([inputs["attention_mask"].flip(0), torch.ones(2, 1, dtype=torch.long)], 1)
        positions = mask.sum(1, keepdim=True) - 1
        got = model(input_ids=torch.tensor([[5], [5]]), attention_mask=mask, position_ids=positions, cache=cache).logits
        for row, text in enumerate((C, A)):
            assert bitwise_equal(got[row, -1], model(input_ids=torch.tensor([text + [5]])).logits[0, -1])
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(3)
        mask = torch.cat([mask[1:], torch.ones(1, 1, dtype=torch.long)], 1).repeat(3, 1)
        got = model(
            input_ids=torch.full((3, 1), 7), attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, cache=cache
        ).logits
        expected = model(input_ids=torch.tensor([A + [5, 7]])).logits[0, -1]
        assert all(bitwise_equal(row[-1], expected) for row in got)
