"""Case C7 (MemOS 2301): the same call twice with the same cache object: the second finds what the first left in it."""

import copy

import pytest
import torch

import detlab

TOKENS = torch.randint(3, 250, (1, 16), generator=torch.Generator().manual_seed(3))
PREFIX = 10


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


def filled(model):
    with torch.no_grad():
        cache = model(TOKENS[:, :PREFIX], use_cache=True).cache
    assert cache.get_seq_length() == PREFIX
    return cache


def captured(model, cache):
    with torch.no_grad(), detlab.capture(model) as trace:
        model(TOKENS[:, PREFIX:], cache=cache)
    return trace


def test_the_same_cache_object_twice(model):
    cache = filled(model)
    a, b = captured(model, cache), captured(model, cache)
    assert cache.get_seq_length() == PREFIX + 12
    result = detlab.compare(a, b)
    first = result.first
    assert result.verdict == "diverged" and first.kind == "carrier" and not first.inputs_matched
    assert first.inputs == {"input_ids": "matched", "cache": "differs"}
    assert first.source == "an earlier call: the cache held 10 tokens in a, 16 in b"
    assert str(first) == (
        "(model) · (call) at prompt 0, position 10, prefill: cache already differed "
        "(from an earlier call: the cache held 10 tokens in a, 16 in b)"
    )
    assert result.carriers[0] is first and result.origins == []
    assert detlab.compare(b, a).first.source == "an earlier call: the cache held 16 tokens in a, 10 in b"
    assert result.to_json()["first"]["source"] == first.source
    assert len(result.to_pandas()) == 1 and detlab.first_divergence(a, b).source == first.source


def test_generate_with_the_same_cache_object_twice(model):
    """The second time, ``generate`` takes other tokens for the new ones: no row is left in common."""
    cache = filled(model)
    ids = TOKENS[:, : PREFIX + 4]
    options = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3, "attention_mask": torch.ones_like(ids)}
    traces = []
    for _ in range(2):
        with detlab.capture(model) as trace:
            model.generate(ids, cache=cache, **options)
        traces.append(trace)
    assert [t.calls[0].query.start for t in traces] == [PREFIX, PREFIX + 6]
    result = detlab.compare(*traces)
    assert result.verdict == "diverged" and result.origins == [] and not result.first.inputs_matched
    assert result.first.source == "an earlier call: the cache held 10 tokens in a, 16 in b"
    assert result.first.inputs["cache"] == "differs" and result.first.position == PREFIX

    fresh = []
    for _ in range(2):  # the twin
        with detlab.capture(model) as trace:
            model.generate(ids, cache=filled(model), **options)
        fresh.append(trace)
    assert detlab.compare(*fresh).verdict == "identical"


def test_a_fresh_copy_each_time(model):
    """The twin: each call gets its own copy, made inside the capture or before it."""
    cache = filled(model)
    inside = []
    for _ in range(2):
        with torch.no_grad(), detlab.capture(model) as trace:
            model(TOKENS[:, PREFIX:], cache=copy.deepcopy(cache))
        inside.append(trace)
    before = [captured(model, copy.deepcopy(cache)) for _ in range(2)]
    for pair in (inside, before, (inside[0], before[0])):
        result = detlab.compare(*pair)
        assert result.verdict == "identical" and result.first is None and result.rows_compared > 500
        assert pair[0].unlaid == []


def test_a_copy_with_other_contents_is_an_input_that_differs(model):
    """Equal lengths, one cached value off: no state of an earlier call, but no origin either."""
    cache, other = filled(model), filled(model)
    other.layers[1].values[0, 2, 4] += 1.0
    result = detlab.compare(captured(model, cache), captured(model, other))
    assert result.verdict == "diverged" and result.origins == []
    first = result.first
    assert first.kind == "carrier" and first.module == "model.layers.1.self_attn" and first.position == PREFIX
    assert first.inputs["value"] == "differs" and first.inputs["query"] == first.inputs["key"] == "matched"
    assert first.source == "cache cache.layers.1.values"


def test_the_part_of_a_cache_that_differs_is_named(model):
    """Equal prefills, another first token to decode: the second decode step's keys differ since that call, not before."""
    traces = []
    for token in (77, 78):
        with torch.no_grad(), detlab.capture(model) as trace:
            cache = model(TOKENS, use_cache=True).cache
            model(torch.tensor([[token]]), cache=cache)
            model(torch.tensor([[5]]), cache=cache)
        traces.append(trace)
    result = detlab.compare(*traces)
    assert result.verdict == "different_inputs" and result.origins == [] and result.first.source == "input input_ids"
    found = next(d for d in result.carriers if d.call == 2 and d.module == "model.layers.0.self_attn")
    assert found.inputs["query"] == "matched" and found.inputs["key"] == "differs"
    assert found.source == "model.layers.0.self_attn · add in call 1"


def test_a_longer_prompt_is_not_state(model):
    """Other tokens on top of a longer cache are another question: nothing is said to be carried over."""
    cache = filled(model)
    short = captured(model, copy.deepcopy(cache))
    with torch.no_grad():
        model(TOKENS[:, PREFIX : PREFIX + 2], cache=cache)
    with torch.no_grad(), detlab.capture(model) as late:
        model(TOKENS[:, PREFIX + 2 :], cache=cache)
    result = detlab.compare(short, late)
    assert result.first is None or "earlier call: the cache held" not in result.first.source
