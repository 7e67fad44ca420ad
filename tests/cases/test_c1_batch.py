"""Case C1 (transformers 26869, pytorch 136338): one decode step at batch 1 against batch 4.

On the reference map (row classes {1}, {2, 3}, {4, ...}) the prefill of 24 tokens is identical, and decoding parts at the
first linear layer, from matching inputs. Another machine may have another map: what is reported must then agree with it.
"""

import pytest
import torch

import detlab
from detlab import Condition
from tests.bit_classes import first_raw_difference, maker, module_tensors, row_class_equal

LENGTH = 24
SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 1024))
PREFILL_EQUAL = all(row_class_equal(torch.float32, k, n, LENGTH, 4 * LENGTH) for k, n in SHAPES)
DECODE_EQUAL = row_class_equal(torch.float32, 576, 576, 1, 4)


def tokens(seed):
    return torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


def serve(model, batch_size):
    """Prefills 24 tokens, then decodes one, with the same row first."""
    ids = torch.tensor([tokens(seed) for seed in range(batch_size)])
    with torch.no_grad():
        out = model(ids, use_cache=True)
        model(torch.full((batch_size, 1), 77), cache=out.cache)


@pytest.fixture(scope="module")
def raw(model):
    """What plain hooks saw, at batch 1 and at batch 4."""
    found = []
    for batch_size in (1, 4):
        with module_tensors(model) as calls:
            serve(model, batch_size)
        found.append(calls)
    return found


@pytest.fixture(scope="module")
def truth(raw):
    return first_raw_difference(*raw)


def test_the_control_diverges_where_the_probe_says_so(raw, truth):
    assert (truth is not None) >= (not DECODE_EQUAL)
    prefill = first_raw_difference(raw[0][:1], raw[1][:1])
    if PREFILL_EQUAL and prefill is None and not DECODE_EQUAL:  # the reference map
        assert truth == ("out model.layers.0.self_attn.q_proj", 1, LENGTH)


def assert_right_answer(result, truth):
    """What is reported is what the hooks saw; on the reference map that is the case's right answer."""
    if truth is None:  # this machine has another map: nothing parts
        assert result.verdict == "identical" and result.first is None and result.origins == []
        return
    name, call, position = truth
    first = result.first
    assert result.verdict == "diverged" and first.inputs_matched
    assert (first.module, first.call, first.position, first.prompt) == (maker(name), call, position, 0)
    assert set(first.inputs.values()) == {"matched"}
    if not DECODE_EQUAL and PREFILL_EQUAL:
        assert (first.module, first.op, first.call) == ("model.layers.0.self_attn.q_proj", "mm", 1)
        assert {d.op for d in result.origins} == {"mm"}  # the only origin class is the linear layer
        assert {d.call for d in (*result.origins, *result.carriers)} == {1}  # and prefill is identical
        assert position == LENGTH


def test_bare_captures(model, truth):
    traces = []
    for batch_size in (1, 4):
        with detlab.capture(model) as trace:
            serve(model, batch_size)
        traces.append(trace)
    result = detlab.compare(*traces)
    assert_right_answer(result, truth)
    assert result.rows_compared > 1000 and traces[0].unlaid == traces[1].unlaid == []
    assert_right_answer(detlab.compare(*reversed(traces)), truth)
    if result.verdict == "diverged":
        assert {d.module for d in result.origins} >= {"model.layers.0.self_attn.q_proj"}


def test_runs(model, truth):
    """The same with the runner: mates of the same length, and the token that greedy decoding chooses."""
    runs, seen = [], []
    for condition in (Condition(), Condition(batch_size=4)):
        runs.append(detlab.run(model, [tokens(0)], condition, new_tokens=2))
        with module_tensors(model) as calls:
            detlab.run(model, [tokens(0)], condition, new_tokens=2, trace=False)
        seen.append(calls)
    result = detlab.compare(*runs)
    assert_right_answer(result, first_raw_difference(*seen))
    assert result.controls == {"a_repeated": True, "b_repeated": True}
    if result.first is not None:
        assert result.first.max_ulp >= 1 and 0 < result.first.max_abs < 1e-4


@pytest.mark.parametrize("row", [0, 3])
def test_the_row_in_the_batch_does_not_change_the_answer(model, row):
    """The twin: four neighbours against four others, the question in another row, are no batch size question."""
    a = detlab.run(model, [tokens(0)], Condition(batch_size=4), new_tokens=2)
    with module_tensors(model) as first:
        detlab.run(model, [tokens(0)], Condition(batch_size=4), new_tokens=2, trace=False)
    with module_tensors(model) as second:
        detlab.run(model, [tokens(0)], Condition(batch_size=4, row=row, mates="random"), new_tokens=2, trace=False)
    b = detlab.run(model, [tokens(0)], Condition(batch_size=4, row=row, mates="random"), new_tokens=2)
    truth = first_raw_difference(first, second, rows=(0, row))
    result = detlab.compare(a, b)
    assert (result.verdict == "identical") == (truth is None)
    if row == 0:
        assert truth is None  # other contents at equal shapes: never a difference
