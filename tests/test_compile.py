"""Compiled modules: run for real, recorded as one op, held against the eager module, and undone afterwards."""

import shutil

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

import detlab
from detlab import Condition
from detlab.serving import served_model
from detlab.trace.records import REGION
from tests.bit_classes import bitwise_equal, module_tensors

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler; none is on PATH"
)
PROMPTS = [list(range(11, 28))]
NORM = "input_layernorm"
COMPILED = Condition(compile=NORM)


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama", dtype="bfloat16")[0]


@pytest.fixture(scope="module")
def runs(model):
    """Eager, compiled, and what the compiled modules return when nobody watches."""
    eager = detlab.run(model, PROMPTS, new_tokens=2, force=[[5, 6]])
    compiled = detlab.run(model, PROMPTS, COMPILED, new_tokens=2, force=[[5, 6]], save="full")
    bare = detlab.run(model, PROMPTS, COMPILED, new_tokens=2, force=[[5, 6]], trace=False)
    return eager, compiled, bare


def test_the_region_is_one_op_that_ran_for_real(model, runs):
    eager, compiled, bare = runs
    assert compiled.md5 == bare.md5  # watched or not, the compiled code ran
    for a, b in zip(compiled.logits, bare.logits, strict=True):
        assert bitwise_equal(a, b)
    regions = [op for op in compiled.trace.ops if op.op == REGION]
    assert [(op.module, op.call) for op in regions] == [(f"model.layers.{i}.{NORM}", call) for call in (0, 1) for i in (0, 1)]
    assert not [op for op in compiled.trace.ops if op.module.endswith(NORM) and op.op != REGION]
    assert [op for op in eager.trace.ops if op.module.endswith(NORM)] and not [o for o in eager.trace.ops if o.op == REGION]
    assert compiled.trace.unlaid == []
    for op in regions:
        record = compiled.trace.tensors[op.outputs[0]]
        assert record.status == "rows" and record.width == 576
        assert [(name, relation) for name, _, relation in op.inputs] == [("0", "row"), ("weight", "whole")]
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_region_is_held_against_the_eager_module(model, runs):
    eager, compiled, _ = runs
    result = detlab.compare(eager, compiled, controls=False, measure=False)
    # The truth: each norm's output on the same input, eager against compiled, in a model of one forward each.
    with module_tensors(model) as calls:
        detlab.run(model, PROMPTS, new_tokens=2, force=[[5, 6]], trace=False)
    name = f"model.layers.0.{NORM}"
    kept = [compiled.trace.saved[op.outputs[0]] for op in compiled.trace.ops if op.op == REGION and op.module == name]
    parted = [(step, at) for step, (ours, theirs) in enumerate(zip(calls, kept, strict=True))
              for at in range(ours[f"out {name}"].shape[1])
              if not bitwise_equal(ours[f"out {name}"][0, at], theirs[0, at])]  # fmt: skip
    found = [(d.call, d.position) for d in result.origins if d.module == name]
    if not parted:
        assert found == []
        return
    first_of = {step: min(at for s, at in parted if s == step) for step in {s for s, _ in parted}}
    positions = {step: at + (17 if step else 0) for step, at in first_of.items()}
    assert found == sorted(positions.items())
    assert result.verdict == "diverged" and result.first.module == name and result.first.inputs_matched
    assert result.first.num_rows == sum(1 for step, _ in parted if step == result.first.call)
    other_way = detlab.compare(compiled, eager, controls=False, measure=False)
    assert other_way.first.op == REGION and other_way.first.module == name and other_way.first.inputs_matched
    assert other_way.first.position == result.first.position


def test_the_same_compiled_condition_twice(model, runs):
    """The twin."""
    again = detlab.run(model, PROMPTS, COMPILED, new_tokens=2, force=[[5, 6]])
    result = detlab.compare(runs[1], again, controls=False)
    assert result.verdict == "identical" and result.first is None and result.rows_compared > 1000


def test_a_module_of_too_many_shapes_does_not_fall_back_to_eager_code(model):
    norm = model.model.layers[0].input_layernorm
    with torch.no_grad(), served_model(model, COMPILED) as served:
        assert served is model and "forward" in vars(norm)
        assert torch._dynamo.config.recompile_limit == 64
        with torch._dynamo.config.patch(recompile_limit=1):
            norm(torch.ones(1, 4, 576, dtype=torch.bfloat16))
            with pytest.raises(FailOnRecompileLimitHit):
                norm(torch.ones(4, 576))  # another rank and dtype: another graph
    assert "forward" not in vars(norm) and torch._dynamo.config.recompile_limit != 64
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


def test_an_interruption_takes_the_compiled_forward_away(model):
    def stop(*what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        detlab.run(model, PROMPTS, COMPILED, new_tokens=1, progress=stop)
    assert not any("forward" in vars(module) for module in model.modules())
