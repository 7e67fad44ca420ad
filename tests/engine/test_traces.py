"""Traces under the invariant tier: rows are followed through padded calls, caches and experts; faults are found there."""

import copy

import pytest
import torch

import detlab
from detlab import Condition
from detlab.models.tiny import FAMILIES

PROMPTS = [[(5 * i + 11 * j) % 250 + 3 for i in range(length)] for j, length in enumerate((21, 9, 34))]
TOGETHER = {"batch_size": 3, "padding_side": "left", "row": 1}
# Experts sort the rows of a whole batch: these whole numbers are no row's own.
# A window asks how often a row of the mask begins.
NOT_ROWS = {"sort", "bincount", "floor_divide", "sum", "add", "bitwise_and", "any", "gt"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_op_is_laid_out_and_identical(name):
    model = detlab.load_model(name)[0]
    alone = detlab.run(model, PROMPTS, Condition(tier="invariant"), new_tokens=2)
    together = detlab.run(model, PROMPTS, Condition(tier="invariant", **TOGETHER), new_tokens=2)
    result = detlab.compare(alone, together)
    assert result.verdict == "identical"
    assert alone.md5 == together.md5
    for run in (alone, together):
        unlaid = {record.op for record in run.trace.unlaid}
        assert unlaid <= NOT_ROWS, (name, unlaid)


@pytest.mark.parametrize("change", [{"cache": "none"}, {"cache": "static"}, {"prefill_chunk": 7}], ids=str)
def test_other_calls_of_the_same_bits_are_identical(change):
    """Attention's rows are folded otherwise in them, and cannot be compared; what they feed can."""
    model = detlab.load_model("tiny-llama")[0]
    runs = [detlab.run(model, PROMPTS, Condition(tier=tier, **how), new_tokens=2)
            for tier in ("invariant", "stock") for how in ({}, change)]  # fmt: skip
    assert detlab.compare(*runs[:2]).verdict == "identical"
    assert detlab.compare(*runs[2:]).verdict != "identical" or change == {"cache": "static"}


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral"])
def test_a_weight_off_by_one_ulp_is_found_at_its_module(name):
    model = detlab.load_model(name)[0]
    faulty = copy.deepcopy(model)
    where = "model.layers.1.mlp.down_proj" if name == "tiny-llama" else "model.layers.1.mlp.experts"
    weight = dict(faulty.named_parameters())[where + (".weight" if name == "tiny-llama" else ".down_proj")]
    with torch.no_grad():
        flat = weight.view(-1).view(torch.int32)
        flat += 1
    result = detlab.compare(
        detlab.run(model, PROMPTS, Condition(tier="invariant"), new_tokens=1),
        detlab.run(faulty, PROMPTS, Condition(tier="invariant"), new_tokens=1),
    )
    assert result.verdict == "diverged"
    assert result.first.module.startswith(where)
