"""What must be called identical: exactly what is identical. Each has a twin with a planted difference of one ULP."""

import copy

import pytest
import torch

import detlab
from detlab import Condition
from tests.bit_classes import first_raw_difference, module_tensors, placed_rows_equal, row_class_equal

SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 1024))


def tokens(length, seed=0):
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(100 * seed + length)).tolist()


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.fixture(scope="module")
def changed(model):
    """The same model, with one weight of the last layer's norm one ULP off."""
    return nudged(model)


def nudged(model):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight = twin.model.layers[1].post_attention_layernorm.weight
        weight[40] = torch.nextafter(weight[40], weight.new_tensor(9.0))
    return twin


def served(model, prompt, condition, new_tokens=0):
    """A run with a trace, and what plain hooks see of the same run without one."""
    run = detlab.run(model, [prompt], condition, new_tokens=new_tokens)
    with module_tensors(model) as calls:
        bare = detlab.run(model, [prompt], condition, new_tokens=new_tokens, trace=False)
    assert bare.md5 == run.md5
    return run, calls


def assert_exact(model, changed, prompt, a, b, pads=(0, 0), new_tokens=0):
    """The verdict is "identical" exactly where no row of any module differs; returns whether that is so."""
    (run_a, raw_a), (run_b, raw_b) = (served(model, prompt, c, new_tokens) for c in (a, b))
    result = detlab.compare(run_a, run_b)
    truth = first_raw_difference(raw_a, raw_b, rows=(a.row, b.row), pads=pads)
    assert (result.verdict == "identical") == (truth is None), (truth, str(result))
    assert result.rows_compared > 1000 and result.controls == {"a_repeated": True, "b_repeated": True}
    if truth is None:
        # The twin: the same comparison sees one ULP of one weight.
        other = detlab.compare(run_a, detlab.run(changed, [prompt], b, new_tokens=new_tokens, force=run_a.tokens))
        assert other.verdict == "diverged" and other.first.module == "model.layers.1.post_attention_layernorm"
        assert not other.first.inputs_matched
        assert other.first.source == "parameter model.layers.1.post_attention_layernorm.weight"
    return truth is None


@pytest.mark.parametrize("batch_size", [2, 3, 4, 8])
def test_prefill_of_24_tokens_at_any_batch_size(model, changed, batch_size):
    is_identical = assert_exact(model, changed, tokens(24), Condition(), Condition(batch_size=batch_size))
    # Attention and norms of equal shapes do not see the batch: only the linear layers' row classes count.
    probed = all(row_class_equal(torch.float32, k, n, 24, 24 * batch_size) for k, n in SHAPES)
    assert is_identical or not probed


@pytest.mark.parametrize("padding", [1, 3, 8, 11])
def test_eager_attention_with_left_padding(model, changed, padding):
    a, b = Condition(attention="eager"), Condition(attention="eager", padding_side="left", padding=padding)
    is_identical = assert_exact(model, changed, tokens(21), a, b, pads=(0, padding))
    places = (21, 0), (21 + padding, padding)
    assert is_identical or not all(placed_rows_equal(torch.float32, k, n, 21, *places) for k, n in SHAPES)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chunks_of_16_against_one_pass(model, changed, attention):
    a, b = Condition(attention=attention), Condition(attention=attention, prefill_chunk=16)
    is_identical = assert_exact(model, changed, tokens(40), a, b)
    if attention == "sdpa":  # chunks of 16, 16 and 8 rows against 40
        chunks = ((16, 0), (16, 16), (8, 32))
        probes = [placed_rows_equal(torch.float32, k, n, m, (m, 0), (40, at)) for k, n in SHAPES for m, at in chunks]
        assert is_identical or not all(probes)


@pytest.mark.parametrize(
    "text",
    ["default", "batch_size=3", "attention=eager", "dtype=bfloat16", "padding_side=left,padding=5", "cache=none,batch_size=2",
     "prefill_chunk=7", "threads=2"],
)  # fmt: skip
def test_the_same_condition_twice(model, changed, text):
    condition = Condition.parse(text)
    runs = [detlab.run(model, [tokens(13)], condition, new_tokens=2) for _ in "ab"]
    result = detlab.compare(*runs)
    assert result.verdict == "identical" and result.notes == []
    again = detlab.compare(runs[0].trace, runs[1].trace)
    assert again.verdict == "identical" and again.rows_compared == result.rows_compared


@pytest.mark.parametrize("text", ["batch_size=4", "batch_size=4,attention=eager", "batch_size=3,row=1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_neighbours_at_equal_shapes(model, text, dtype):
    served_model = model if dtype == "float32" else detlab.load_model("tiny-llama", dtype=dtype)[0]
    a, b = (Condition.parse(f"{text},mates={mates}") for mates in ("prompts", "random"))
    assert assert_exact(served_model, nudged(served_model), tokens(13), a, b, new_tokens=2)
