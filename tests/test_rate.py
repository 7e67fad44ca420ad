"""Divergence rates: counted by hand, bounded, and zero under a remedy that holds."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch

import detlab
from detlab.errors import MachineError, UsageError
from detlab.remedies.rates import upper_bound
from tests.bit_classes import row_class_equal

PROMPTS = [[(7 * i + 13 * j) % 250 + 3 for i in range(12)] for j in range(2)]
MIXED = ["batch_size=1", "batch_size=4", "batch_size=8,padding_side=left"]


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama", attention="sdpa")[0]


@pytest.fixture(scope="module")
def stock(model):
    return detlab.rate(model, PROMPTS, MIXED, runs=24, new_tokens=2)


def test_what_is_counted(model, stock):
    assert (len(stock.runs), stock.outputs) == (24, 48)
    expected = detlab.run(model, PROMPTS, detlab.Condition(), new_tokens=2, trace=False)
    assert stock.reference.logits_md5 == expected.md5
    other = detlab.run(model, PROMPTS, detlab.Condition(batch_size=4), new_tokens=2, trace=False)
    fours = [run for run in stock.runs if run.condition == "batch_size=4"]
    assert fours and all(run.logits_md5 == other.md5 for run in fours)
    ones = [run for run in stock.runs if run.condition == "default"]
    assert ones and all(run.logits_md5 == expected.md5 for run in ones)  # the control: one condition, one answer
    by_hand = sum(run.logits_md5 != expected.md5 for run in stock.runs)
    assert stock.divergent_runs == by_hand and stock.rate == by_hand / 24
    assert all(1 <= count <= 3 for count in stock.distinct)
    if not row_class_equal(torch.float32, 576, 576, 1, 4):
        assert stock.rate >= len(fours) / 24 and max(stock.distinct) >= 2


def test_a_tier_has_one_answer(model):
    made = detlab.rate(model, PROMPTS, MIXED, runs=24, remedy="tier-invariant", new_tokens=2)
    assert made.divergent_runs == made.logits_differ == made.tokens_differ == 0 and made.distinct == [1, 1]
    assert made.bound == 3 / 24 and made.remedy == "tier-invariant"
    assert made.batch_sizes["variation"] > 0.2  # and yet the batch size moved
    assert "divergent runs: 0 (0.0 %; at most 12.5 % at 95 %)" in str(made)


def test_a_static_batch_does_not_move(model):
    calls = []
    made = detlab.rate(model, PROMPTS, MIXED[:2], runs=10, remedy="static-batch", new_tokens=2,
                       progress=lambda *call: calls.append(call))  # fmt: skip
    assert made.batch_sizes == {"min": 4, "max": 4, "mean": 4.0, "std": 0.0, "variation": 0.0}
    assert made.divergent_runs == 0 and calls[-1] == (10, 10, "static-batch")


def test_batch_stability_and_the_draw(model, stock):
    sizes = [run.batch_size for run in stock.runs]
    mean = sum(sizes) / 24
    assert set(sizes) == {1, 4, 8} and stock.batch_sizes["mean"] == mean
    assert math.isclose(stock.batch_sizes["std"], math.sqrt(sum((s - mean) ** 2 for s in sizes) / 24))
    again = detlab.rate(model, PROMPTS, MIXED, runs=24, new_tokens=2)
    assert [(r.condition, r.logits_md5) for r in again.runs] == [(r.condition, r.logits_md5) for r in stock.runs]
    other = detlab.rate(model, PROMPTS, MIXED, runs=24, new_tokens=0, seed=1)
    assert [r.condition for r in other.runs] != [r.condition for r in stock.runs]


def test_each_run_says_when_it_was_and_how_busy_the_machine(stock):
    started = [run.started for run in stock.runs]
    assert started == sorted(started) and started[0] > 0 == stock.reference.started
    assert all(run.seconds > 0 for run in stock.runs)
    for name, of in stock.utilisation.items():
        values = [run.machine[name] for run in stock.runs if name in run.machine]
        assert stock.sensors[name].startswith("read") and of["min"] == min(values) and of["max"] == max(values)
    assert all(how.startswith(("read", "absent: ")) for how in stock.sensors.values())
    if sys.platform == "linux":
        assert {"cpu_busy", "memory_mib", "process_cores"} <= set(stock.utilisation)
        assert stock.utilisation["memory_mib"]["min"] > 1 and "utilisation: cpu_busy" in str(stock)
    if not torch.cuda.is_available():
        assert "gpu absent: torch sees no GPU" in str(stock)


def test_a_fresh_process_counts_by_the_same_clock(model):
    made = detlab.rate(model, PROMPTS[:1], ["", "batch_size=4"], runs=4, new_tokens=0, remedy="cudnn-variable")
    assert made.reference.started == 0 < made.runs[0].started < made.runs[-1].started
    assert made.remedy == "cudnn-variable" and all(run.machine for run in made.runs)


def test_the_result_in_every_form(stock):
    data = json.loads(json.dumps(stock.to_json()))
    assert data["outputs"] == 48 and len(data["runs"]) == 24 and len(stock.to_pandas()) == 48
    assert stock.to_pandas()["logits_differ"].sum() == stock.logits_differ
    hostile = replace(stock, runs=[replace(stock.runs[0], condition="<script>")])
    assert "<script>" not in hostile._repr_html_()


def test_percentages_have_no_exponent(stock):
    assert "at most 100 % at 95 %" in str(replace(stock, runs=stock.runs[:1]))


def test_the_bound_is_the_exact_one():
    assert upper_bound(0, 100) == 0.03 and upper_bound(0, 2) == 1.0 and upper_bound(7, 7) == 1.0
    for count, of in ((1, 100), (5, 40), (99, 100)):
        share = upper_bound(count, of)
        tail = sum(math.comb(of, i) * share**i * (1 - share) ** (of - i) for i in range(count + 1))
        assert count / of < share < 1 and math.isclose(tail, 0.05, rel_tol=1e-6)
    with pytest.raises(UsageError, match="got 3 of 2"):
        upper_bound(3, 2)


def test_what_cannot_be_measured(model):
    for conditions in ([], "batch_size=4"):
        with pytest.raises(UsageError, match="rate needs a list of conditions"):
            detlab.rate(model, PROMPTS, conditions)
    with pytest.raises(UsageError, match="runs=0 is not possible"):
        detlab.rate(model, PROMPTS, MIXED, runs=0)
    with pytest.raises(UsageError, match="unknown remedy 'sedes'"):
        detlab.rate(model, PROMPTS, MIXED, remedy="sedes")
    with pytest.raises(MachineError, match="'launch-blocking' cannot be had here: needs CUDA"):
        detlab.rate(model, PROMPTS, MIXED, remedy="launch-blocking")
