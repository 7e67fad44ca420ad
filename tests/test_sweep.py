"""Sweeps: one line per condition, with the verdict that `compare` gives, and what could not be tested says so."""

import copy

import pytest
import torch

import detlab
from detlab import Condition
from detlab.errors import ConditionError, UsageError

PROMPTS = [[11, 12, 13, 14, 15, 16, 17], [21, 22, 23]]
COLUMNS = [
    "condition", "verdict", "module", "op", "call", "prompt_id", "position", "inputs_matched", "max_ulp", "max_abs",
    "token_flips", "cosine", "rows_compared", "reason",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.fixture(scope="module")
def switched(model):
    """A model that one flag changes: the last layer's feed-forward output is scaled where the flag is set."""
    twin = copy.deepcopy(model)

    def scale(module, args, output):
        return output * (1.5 if torch.are_deterministic_algorithms_enabled() else 1.0)

    twin.model.layers[1].mlp.down_proj.register_forward_hook(scale)
    return twin


def test_one_line_per_condition(switched):
    conditions = ["default", Condition(deterministic_algorithms=True), "attention=eager"]
    seen = []
    table = detlab.sweep(switched, PROMPTS, conditions, new_tokens=2, progress=lambda *what: seen.append(what[2]))
    assert list(table.columns) == COLUMNS and len(table) == 3
    assert table.condition.tolist() == ["default", "deterministic_algorithms=True", "attention=eager"]
    same, other, eager = (line for _, line in table.iterrows())
    assert same.verdict == "identical" and same.token_flips == 0 and same.rows_compared > 1000
    assert same[["module", "op", "call", "position", "max_ulp", "reason"]].isna().all()
    assert (other.verdict, other.module, other.op) == ("diverged", "model.layers.1.mlp.down_proj", "mul")
    assert (other.call, other.prompt_id, other.position, other.inputs_matched) == (0, "prompt-0", 0, True)
    assert other.max_ulp >= 1 << 21 and other.max_abs > 0.01 and other.cosine < 1
    assert eager.verdict == "control_flow" and set(seen) == set(table.condition)
    # The same words as a single comparison has.
    runs = [detlab.run(switched, PROMPTS, Condition.parse(c), new_tokens=2) for c in ("", "deterministic_algorithms=True")]
    result = detlab.compare(*runs)
    assert other.max_abs == result.first.max_abs and other.max_ulp == result.first.max_ulp
    assert other.rows_compared == result.rows_compared and other.token_flips == len(result.token_flips)
    assert other.cosine == result.cosine


def test_the_baseline_is_what_the_others_are_held_against(switched):
    table = detlab.sweep(switched, PROMPTS, ["", "deterministic_algorithms=True"], baseline="deterministic_algorithms=True",
                         new_tokens=0)  # fmt: skip
    assert table.condition.tolist() == ["default", "deterministic_algorithms=True"]
    assert table.verdict.tolist() == ["diverged", "identical"]
    same = detlab.sweep(switched, PROMPTS, [Condition()], baseline=Condition(deterministic_algorithms=True), new_tokens=0)
    assert same.verdict.tolist() == ["diverged"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_the_machine_lacks_is_no_verdict(model):
    table = detlab.sweep(model, PROMPTS, ["device=cuda", "default"], new_tokens=0)
    assert table.verdict.tolist() == ["not on this machine", "identical"]
    assert table.reason[0].startswith("device='cuda' is not to be had on this machine: ")
    assert table.loc[0, ["module", "rows_compared", "token_flips", "cosine"]].isna().all()


def test_a_control_that_fails_is_no_verdict(model):
    restless = copy.deepcopy(model)
    count = iter(range(1, 10**6))

    def drift(module, args, output):
        return output * (1.0 + next(count) * 2**-8 if torch.are_deterministic_algorithms_enabled() else 1.0)

    restless.model.layers[0].mlp.register_forward_hook(drift)
    table = detlab.sweep(restless, PROMPTS, ["deterministic_algorithms=True", "default"], new_tokens=1)
    assert table.verdict.tolist() == ["control failed", "identical"]
    assert table.reason[0] == (
        "the control failed: b (deterministic_algorithms=True) gave other bits when it was repeated, first in "
        "model.layers.0.mlp · mul. The difference is run-to-run, so comparing conditions would show nothing."
    )
    assert table.loc[0, ["module", "max_ulp", "rows_compared"]].isna().all()


def test_what_a_sweep_refuses(model):
    with pytest.raises(UsageError) as caught:
        detlab.sweep(model, PROMPTS, [])
    assert str(caught.value) == "sweep needs at least one condition; got none. Try Condition.grid(batch_size=[2, 4, 8])."
    with pytest.raises(ConditionError, match=r"^unknown condition key 'batch'\. Did you mean batch_size\?"):
        detlab.sweep(model, PROMPTS, ["batch=3"])
    with pytest.raises(UsageError, match=r"^compile='nothing': no module of LlamaForCausalLM has this name; "):
        detlab.sweep(model, PROMPTS, ["compile=nothing"], new_tokens=0)  # a mistake is no verdict
