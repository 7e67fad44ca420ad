"""Case C6 (transformers 30709): all parameters equal, a buffer rounded: loading in bfloat16 against casting to it."""

import copy

import pytest
import torch

import detlab
from tests.bit_classes import bitwise_equal

TOKENS = torch.randint(3, 250, (17,), generator=torch.Generator().manual_seed(5)).tolist()
BUFFER = "model.rotary_emb.inv_freq"
NOTE = f"buffer {BUFFER} is float32 in a, bfloat16 in b"


@pytest.fixture(scope="module")
def loaded():
    return detlab.load_model("tiny-llama", dtype="bfloat16")[0]


@pytest.fixture(scope="module")
def cast():
    return copy.deepcopy(detlab.load_model("tiny-llama")[0]).to(torch.bfloat16)


def test_the_models_differ_in_buffers_alone(loaded, cast):
    for (name, ours), (other, theirs) in zip(loaded.named_parameters(), cast.named_parameters(), strict=True):
        assert name == other and bitwise_equal(ours, theirs)
    assert dict(loaded.named_buffers())[BUFFER].dtype == torch.float32
    assert dict(cast.named_buffers())[BUFFER].dtype == torch.bfloat16


def test_the_buffer_is_named(loaded, cast):
    a, b = (detlab.run(model, [TOKENS], new_tokens=2) for model in (loaded, cast))
    result = detlab.compare(a, b)
    first = result.first
    assert result.verdict == "diverged" and result.controls == {"a_repeated": True, "b_repeated": True}
    assert first.kind == "carrier" and first.module == "model.rotary_emb" and first.position == 1  # position 0 is no angle
    assert first.source == f"buffer {BUFFER}"
    assert f"already differed (from buffer {BUFFER})" in str(first)
    assert NOTE in result.notes and f"note: {NOTE}" in str(result)
    assert not [note for note in result.notes if note.startswith("parameter")]
    back = detlab.compare(b, a)
    # Seen from the other side, the buffer reaches the product through a cast that only this model runs.
    assert back.verdict == "diverged" and (back.first.module, back.first.op) == (first.module, first.op)
    assert back.first.source == f"buffer {BUFFER}"
    assert f"buffer {BUFFER} is bfloat16 in a, float32 in b" in back.notes


def test_a_buffer_of_the_same_dtype_and_other_values_is_named(loaded):
    """One ULP of one frequency, planted."""
    nudged = copy.deepcopy(loaded)
    frequencies = nudged.model.rotary_emb.inv_freq
    frequencies[9] = torch.nextafter(frequencies[9], frequencies.new_tensor(9.0))
    a, b = (detlab.run(model, [TOKENS], new_tokens=1) for model in (loaded, nudged))
    result = detlab.compare(a, b)
    assert result.verdict == "diverged" and result.first.source == f"buffer {BUFFER}"
    assert f"buffer {BUFFER} differs between a and b" in result.notes
    assert not [note for note in result.notes if "parameter" in note]


def test_two_loads_and_the_condition_are_the_same_model(loaded):
    """The twins: the model loaded twice; and `Condition(dtype=...)`, which casts as loading does."""
    again = detlab.load_model("tiny-llama", dtype="bfloat16")[0]
    wide = detlab.load_model("tiny-llama")[0]
    a, b = (detlab.run(model, [TOKENS], new_tokens=2) for model in (loaded, again))
    c = detlab.run(wide, [TOKENS], detlab.Condition(dtype="bfloat16"), new_tokens=2)
    for other in (b, c):
        result = detlab.compare(a, other)
        assert result.verdict == "identical" and result.first is None and result.notes == []
        assert a.md5 == other.md5
