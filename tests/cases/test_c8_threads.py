"""Case C8 (pytorch 88718): one thread against two, decoding over 300 keys.

On the reference, attention in float32 is the origin, and linear layers, eager attention and bfloat16 are equal. On another
CPU other kernels split their work: what is reported must be what plain hooks see.
"""

import pytest
import torch

import detlab
from detlab import Condition
from detlab.errors import UsageError
from tests.bit_classes import first_raw_difference, maker, module_tensors

PROMPT = torch.randint(3, 250, (299,), generator=torch.Generator().manual_seed(6)).tolist()
CASES = [(dtype, attention) for dtype in ("float32", "bfloat16") for attention in ("sdpa", "eager")]


@pytest.fixture(scope="module")
def models():
    return {dtype: detlab.load_model("tiny-llama", dtype=dtype)[0] for dtype in ("float32", "bfloat16")}


def served(model, condition):
    run = detlab.run(model, [PROMPT], condition, new_tokens=2)
    with module_tensors(model) as calls:
        bare = detlab.run(model, [PROMPT], condition, new_tokens=2, trace=False)
    assert bare.md5 == run.md5
    return run, calls


@pytest.mark.parametrize(("dtype", "attention"), CASES)
def test_one_thread_against_two(models, dtype, attention):
    before = torch.get_num_threads()
    (a, raw_a), (b, raw_b) = (served(models[dtype], Condition(threads=n, attention=attention)) for n in (1, 2))
    assert torch.get_num_threads() == before
    truth = first_raw_difference(raw_a, raw_b)
    result = detlab.compare(a, b, measure=False)
    assert result.controls == {"a_repeated": True, "b_repeated": True} and result.rows_compared > 20000
    if truth is None:  # this machine's kernels do not depend on the thread count here
        assert result.verdict == "identical" and result.first is None and result.logits_equal
        return
    name, call, position = truth
    first = result.first
    assert result.verdict == "diverged" and first.inputs_matched
    assert (first.module, first.call, first.position) == (maker(name), call, position)
    if maker(name).endswith("_proj") or maker(name) == "lm_head":
        assert first.op == "mm"
    elif maker(name).endswith("self_attn") and attention == "sdpa":
        assert first.op == "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(("dtype", "attention"), CASES[1:3])
def test_the_same_thread_count_twice(models, dtype, attention):
    """The twin."""
    runs = [detlab.run(models[dtype], [PROMPT], Condition(threads=2, attention=attention), new_tokens=1) for _ in "ab"]
    result = detlab.compare(*runs, controls=False)
    assert result.verdict == "identical" and result.notes == ["controls were not run"] and runs[0].md5 == runs[1].md5


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [None, Stop, KeyboardInterrupt])
def test_threads_are_set_and_given_back(models, error):
    counts = []

    def look(done, total, what):
        counts.append(torch.get_num_threads())
        if error is not None:
            raise error

    before = torch.get_num_threads()
    wanted = 3 - min(before, 2)  # another count than the process has
    if error is None:
        run = detlab.run(models["float32"], [PROMPT[:5]], Condition(threads=wanted), new_tokens=2, progress=look)
        assert counts == [wanted, wanted]
        assert dict(run.environment.to_json())["threads"]["intra_op"] == wanted
    else:
        with pytest.raises(error):
            detlab.run(models["float32"], [PROMPT[:5]], Condition(threads=wanted), new_tokens=2, progress=look)
        assert counts == [wanted]
    assert torch.get_num_threads() == before


def test_threads_are_given_back_where_the_model_cannot_be_served(models):
    before = torch.get_num_threads()
    with pytest.raises(UsageError):
        detlab.run(models["float32"], [PROMPT[:5]], Condition(threads=2, compile="nothing"), new_tokens=1)
    assert torch.get_num_threads() == before
