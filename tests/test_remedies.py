"""Remedies: each is undone, each says where it applies, and what is said of it is what was measured."""

import json
import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

import detlab
from detlab import Condition
from detlab.bits import digest
from detlab.engine.session import session_of
from detlab.errors import ControlError, UsageError
from detlab.remedies import REMEDIES, Remedy, applied
from detlab.remedies.registry import plan_of
from detlab.remedies.remedy import Setup
from detlab.remedies.serve import Served
from detlab.remedies.table import Difference, difference_of, verdict_of
from detlab.remedies.window import WINDOW, windowed_attention
from tests.bit_classes import bitwise_equal, draw, padded_attention_rows, row_class_equal

PROMPT = [[(7 * i) % 250 + 3 for i in range(24)]]
C1 = {"prompts": PROMPT, "a": "", "b": "batch_size=4", "new_tokens": 2}
HERE = [name for name, remedy in REMEDIES.items() if remedy.switch is not None and "cpu" in remedy.where]
MUST_PART = not row_class_equal(torch.float32, 576, 576, 1, 4)


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama", attention="sdpa")[0]


def state(model):
    """What a remedy may not leave changed: switches, threads, variables, random states, the model's forwards and weights."""
    record = detlab.environment()
    return {
        "fingerprint": record.fingerprint(),
        "flags": record.flags,
        "threads": record.threads,
        "variables": record.variables,
        "precisions": [torch._C._get_fp32_precision_getter(*where) for where in (("generic", "all"), ("mkldnn", "matmul"))],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        # A tier puts weights aside and back: to another address, of the same place modulo a vector's length.
        "places": [p.data_ptr() % 64 for p in model.parameters()],
        "weights": [digest(p.detach()) for p in model.parameters()],
        "attention": model.config._attn_implementation,
        "session": session_of(model),
    }


# -------------------------------------------------------------------------------------------------------- the registry
def test_every_remedy_says_what_it_is():
    table = detlab.remedies()
    assert len(table) == len(REMEDIES) >= 25 and table["seeds"] is REMEDIES["seeds"] and table[0] in table
    hows = {"environment before start", "flag", "condition", "tier", "generation config", "advice"}
    for remedy in table:
        assert remedy.claim and remedy.mechanism and remedy.source and remedy.how in hows
        assert set(remedy.where) <= {"cpu", "cuda", "distributed"} and remedy.where
        assert set(remedy.conflicts) <= set(REMEDIES)
        assert bool(remedy.advice) == (remedy.how == "advice")
        does = remedy.settings or remedy.variables or remedy.change or remedy.switch
        assert bool(does) != (remedy.how == "advice"), remedy.name
        plan_of(remedy.name)
    assert {"claim", "mechanism", "where"} <= set(table.to_pandas().columns)
    assert json.loads(json.dumps(table.to_json()))[0]["remedy"] == table[0].name
    assert "eager-attention" in str(table) and "<table>" in table._repr_html_()


def test_what_cannot_apply_says_why(model):
    reasons = {name: remedy.reason(model) for name, remedy in REMEDIES.items()}
    assert reasons["launch-blocking"].startswith("needs CUDA: ")
    assert reasons["nccl-ring"] == "needs distributed; the model is on cpu, in one process"
    assert reasons["clock-lock"].startswith("advice: detlab never changes a clock")
    assert all(not reasons[name] for name in (*HERE, "tier-invariant", "mkl-compatible", "one-thread"))


def test_unknown_and_conflicting_remedies(model):
    with pytest.raises(UsageError, match="^unknown remedy 'seed'; choose from seeds, greedy, .*, or join some by \\+\\.$"):
        detlab.try_remedies(model, **C1, remedies=["seed"])
    for joined, why in {
        "float64+half-storage": "the remedies 'float64' and 'half-storage' conflict: each decides",
        "tier-invariant+tier-exact": "conflict: the setting tier would be invariant and exact. Try one at a time.",
        "eager-attention+tier-invariant": "conflict: each decides what the other is to decide",
        "static-batch+power-of-two-batch": "conflict",
        "seeds+seeds": "conflict: it is named twice",
    }.items():
        with pytest.raises(UsageError) as caught:
            detlab.try_remedies(model, **C1, remedies=["seeds", joined])
        assert why in str(caught.value)
    for given, why in (([], "needs at least one remedy"), ("seeds", "list of names")):
        with pytest.raises(UsageError, match=why):
            detlab.try_remedies(model, **C1, remedies=given)
    with pytest.raises(UsageError, match="trials=0 is not possible"):
        detlab.try_remedies(model, **C1, trials=0)
    with pytest.raises(UsageError, match="new_tokens=-1 is not possible"):
        detlab.try_remedies(model, **C1 | {"new_tokens": -1})


def test_a_remedy_that_needs_a_restart_is_not_put_in_here(model):
    for name, variable in (("mkl-compatible", "MKL_CBWR=COMPATIBLE"), ("one-thread", "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1")):
        with pytest.raises(UsageError, match=f"'{name}' needs a restart: libraries read {variable} when they start"):
            with applied(model, name):
                pass
    with pytest.raises(UsageError, match="changes the condition, not the process: run with detlab.Condition\\(dtype='float64'"):
        with applied(model, "float64"):
            pass
    with pytest.raises(UsageError, match="use detlab.try_remedies"):
        with applied(model, "static-batch"):
            pass
    with pytest.raises(UsageError, match="cannot be put in here: needs CUDA"):
        with applied(model, "cudnn-deterministic"):
            pass


# ------------------------------------------------------------------------------------------------------- undone on exit
class _Planned(Exception):
    pass


@pytest.mark.parametrize("name", [*HERE, "deterministic-algorithms"])
def test_each_remedy_is_undone_whatever_happens(model, name):
    before = state(model)
    with applied(model, name):
        inside = state(model)
    assert state(model) == before
    with pytest.raises(_Planned):
        with applied(model, name):
            random.random(), np.random.rand(), torch.rand(1)
            raise _Planned
    assert state(model) | {"random": 0} == before | {"random": 0}
    if name in ("tf32-off", "full-reductions", "deterministic-algorithms"):
        assert inside["flags"] != before["flags"]
    if name == "attention-window":
        assert inside["attention"] == "detlab_window" != before["attention"]
    if name == "seeds":
        assert inside["random"] != before["random"]


def test_seeds_give_the_generators_back(model):
    random.seed(5)
    expected = random.getstate()
    with applied(model, "seeds"):
        random.random()
    assert random.getstate() == expected


@pytest.mark.parametrize("setting", [("medium", True), ("highest", False)])
def test_switches_that_the_caller_set_come_back(model, setting):
    precision, reduced = setting
    flags = detlab.environment().flags
    precisions = {where: torch._C._get_fp32_precision_getter(*where) for where in (("cuda", "matmul"), ("mkldnn", "matmul"),
                                                                                  ("mkldnn", "all"))}  # fmt: skip
    kept = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
        mine = state(model)
        with applied(model, "tf32-off", "full-reductions"):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        assert state(model) == mine
    finally:
        torch.set_float32_matmul_precision(kept[0])
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = kept[1]
        for where, value in precisions.items():
            torch._C._set_fp32_precision_setter(*where, value)
    assert detlab.environment().flags == flags


def test_copies_compute_as_they_say(model):
    with applied(model, "aligned") as twin:
        assert twin is not model and all(p.data_ptr() % 64 == 0 for p in twin.parameters())
        assert all(bitwise_equal(x, y) for x, y in zip(model.parameters(), twin.parameters(), strict=True))
    with applied(model, "half-storage") as twin:
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert theirs.dtype == torch.float32 and bitwise_equal(theirs, ours.bfloat16().float())


def test_a_window_sees_its_last_keys_alone():
    """Against a plain softmax in float64; and what lies before the window moves no bit."""
    query, key, value = (draw(2, heads, 100, 16, seed=heads + i) for i, heads in enumerate((6, 2, 2)))
    mask = torch.full((100, 100), torch.finfo(torch.float32).min).triu(1).repeat(2, 1, 1, 1)
    mask[1, :, :, :7] = torch.finfo(torch.float32).min  # the second row begins with padding
    made, _ = windowed_attention(None, query, key, value, mask, scaling=0.25)
    for row, head, at in ((0, 0, 0), (0, 5, 63), (0, 3, 64), (0, 1, 99), (1, 4, 7), (1, 2, 69), (1, 5, 99)):
        seen = slice(max(7 * row, at - WINDOW + 1), at + 1)
        k, v = key[row, head // 3, seen].double(), value[row, head // 3, seen].double()
        expected = (0.25 * k @ query[row, head, at].double()).softmax(-1) @ v
        assert float((made[row, at, head] - expected).abs().max()) < 1e-6
    step = [t[:, :, -1:] for t in (query, mask)]
    alone, _ = windowed_attention(None, step[0], key, value, step[1], scaling=0.25)
    assert step[0].shape[2] == 1 and float((alone[:, 0] - made[:, 99]).abs().max()) < 1e-6
    key[:, :, : 100 - WINDOW], value[:, :, : 100 - WINDOW] = 3.0, float("nan")
    moved, _ = windowed_attention(None, step[0], key, value, step[1], scaling=0.25)
    assert bitwise_equal(moved, alone)
    key[:, :, 100 - WINDOW] += 1.0
    value[:, :, 100 - WINDOW] = 5.0
    assert not bitwise_equal(windowed_attention(None, step[0], key, value, step[1], scaling=0.25)[0], alone)


# ---------------------------------------------------------------------------------------------------------- on a pair
@pytest.fixture(scope="module")
def c1(model):
    before = state(model)
    names = ["seeds", "tier-invariant", "static-batch", "power-of-two-batch", "float64", "tf32-off+full-reductions", "warm-up",
             "locked-memory", "launch-blocking", "power-cap", "eager-attention+tf32-off"]  # fmt: skip
    calls = []
    made = detlab.try_remedies(model, **C1, remedies=names, progress=lambda *call: calls.append(call))
    assert state(model) == before
    assert [call[2] for call in calls] == ["without a remedy", *names, "done"] and calls[-1][:2] == (len(names), len(names))
    return made


def test_the_pair_without_a_remedy(c1):
    assert c1.before.of == 1 and c1.controls == {"a_repeated": True, "b_repeated": True}
    assert c1.before.prompts >= MUST_PART
    if c1.before.prompts:
        assert c1.before.max_ulp > 0 and c1.before.max_abs > 0 and c1.before.bound is None
        own = detlab.load_model("tiny-llama", attention="sdpa")[0]
        run_a, run_b = (detlab.run(own, PROMPT, Condition(batch_size=n), new_tokens=2) for n in (1, 4))
        first = detlab.first_divergence(run_a, run_b)
        assert c1.before.origin == f"{first.module} · {first.op} (decode step 1)"


def test_a_tier_restores_equality_and_seeds_do_nothing(c1):
    for name in ("tier-invariant", "static-batch"):
        found = c1[name]
        assert found.after.prompts == 0 and found.after.max_ulp == 0 and found.after.bound == 1.0 and found.after.origin == ""
        assert found.verdict == ("restores equality" if c1.before.prompts else "no effect")
        assert found.cost > 0 and found.is_interleaved
        assert (name in c1.restoring) == bool(c1.before.prompts)
    for name in ("seeds", "tf32-off+full-reductions", "warm-up", "power-of-two-batch"):  # 1 and 4 are powers of two
        assert c1[name].verdict == "no effect" and c1[name].after == c1.before
        assert "every bit of both is as before" in c1[name].note
    assert c1["locked-memory"].verdict in ("no effect", "not applicable")
    assert "b4" not in c1["static-batch"].a and "mates=repeat" in c1["static-batch"].a


def test_other_arithmetic_is_measured(c1):
    found = c1["float64"]
    assert found.after.prompts == 0 or found.after.max_abs < 1e-10
    if c1.before.prompts and found.after.prompts:
        assert found.verdict == "reduces" and "rounded to float32" in found.note


def test_what_is_not_applicable_is_not_run(c1):
    for name, reason in (("launch-blocking", "needs CUDA"), ("power-cap", "advice: detlab never changes a power limit")):
        found = c1[name]
        assert found.verdict == "not applicable" and found.reason.startswith(reason)
        assert found.after is None and found.cost is None


def test_the_table_in_every_form(c1):
    frame = c1.to_pandas()
    assert list(frame["remedy"]) == [a.remedy for a in c1.attempts]
    assert {"prompts_before", "origin_after", "bound"} <= set(frame)
    data = json.loads(json.dumps(c1.to_json()))
    assert data["attempts"][0]["remedy"] == "seeds" and data["environment"]["schema"] == 1
    text = str(c1)
    assert "tier-invariant" in text and "LlamaForCausalLM: a = default, b = batch_size=4" in text
    hostile = replace(c1, attempts=[replace(c1.attempts[0], note="<script>alert(1)</script>")], a="<b>")
    assert "<script>" not in hostile._repr_html_() and "a = &lt;b&gt;" in hostile._repr_html_()
    with pytest.raises(KeyError, match="was not tried; tried were seeds"):
        c1["float16"]


def test_padding(model):
    made = detlab.try_remedies(model, [PROMPT[0][:21]], "", "padding_side=left,padding=11", new_tokens=1,
                               remedies=["tier-invariant", "eager-attention"])  # fmt: skip
    must_part = bool(padded_attention_rows(torch.float32, 21, 11))
    assert made.before.prompts >= must_part
    assert made["tier-invariant"].after.prompts == 0


@pytest.mark.slow
def test_compiled_once_for_all_runs(model):
    if REMEDIES["compiled"].reason(model):
        pytest.skip(REMEDIES["compiled"].reason(model))
    before = state(model)
    torch._dynamo.utils.counters.clear()
    found = detlab.try_remedies(model, **C1, remedies=["compiled"], trials=2)["compiled"]
    assert found.after is not None and found.cost > 0 and "compile=mlp" in found.a
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 12  # anew for each of the 12 runs of two layers would be 24 at least
    assert state(model) == before


def test_where_nothing_parts_there_is_nothing_to_restore(model):
    made = detlab.try_remedies(model, PROMPT, "batch_size=2", "batch_size=2", new_tokens=1, remedies=["seeds"], trials=2)
    assert made.before.prompts == 0 and made["seeds"].verdict == "no effect" and made["seeds"].after.of == 2
    assert "there is nothing to restore here" in str(made) and made["seeds"].note.startswith("both conditions became the same")


def test_greedy_decoding_removes_the_draw(model):
    """Texts that part are compared as they were run: nothing is executed again once a remedy is out."""
    made = detlab.try_remedies(model, PROMPT, "", "temperature=1.5,seed=3", new_tokens=4, remedies=["greedy", "seeds"])
    assert made.before.token_flips == made.before.prompts == 1
    assert made["greedy"].verdict == "restores equality" and made["greedy"].b == "seed=3"
    assert made["seeds"].after.token_flips == 1 and made["seeds"].b == "temperature=1.5"


def test_a_fresh_process_for_what_is_read_at_start(model):
    before = state(model)
    made = detlab.try_remedies(model, **C1, remedies=["cudnn-variable"])
    found = made["cudnn-variable"]
    assert found.verdict == "no effect" and found.after == made.before and not found.is_interleaved and found.cost > 0
    assert "every bit of both is as before" in found.note and "* measured in another process" in str(made)
    assert state(model) == before


def test_a_contradiction_with_the_condition_is_not_applicable(model):
    made = detlab.try_remedies(model, PROMPT, "attention=eager", "attention=sdpa", new_tokens=0,
                               remedies=["tier-invariant", "eager-attention"])  # fmt: skip
    assert made["tier-invariant"].verdict == "not applicable" and "contradicts tier" in made["tier-invariant"].reason
    found = made["eager-attention"]
    assert found.after.prompts == 0 and found.note.startswith("both conditions became the same")


# -------------------------------------------------------------------------------------------------- controls and errors
@contextmanager
def _noisy(setup: Setup):
    """Moves a weight at every call: no run repeats."""
    weight = setup.model.model.norm.weight
    before = weight.data.clone()
    handle = setup.model.register_forward_pre_hook(lambda *_: weight.data.add_(1e-3).numel() * 0 or None)
    try:
        yield setup.model
    finally:
        handle.remove()
        weight.data.copy_(before)


@contextmanager
def _broken(setup: Setup):
    raise RuntimeError("boom\nsecond line")
    yield setup.model


def _remedy(name, switch):
    return Remedy(name, "a claim", ("cpu",), "flag", "a mechanism", "none", switch=switch)


def test_a_control_that_fails_stops_the_experiment(model):
    before = state(model)
    with _noisy(Setup(model, [], (), 0)):
        with pytest.raises(ControlError, match="^a \\(default\\) does not repeat its own bits without any remedy"):
            detlab.try_remedies(model, **C1, remedies=["seeds"])
    made = detlab.try_remedies(model, **C1, remedies=[_remedy("noisy", _noisy), _remedy("broken", _broken), "seeds"])
    assert made["noisy"].verdict == "control failed" and made["noisy"].reason == "under it, a does not repeat its own bits"
    assert made["broken"].verdict == "not applicable" and made["broken"].reason == "RuntimeError: boom"
    assert made["seeds"].verdict == "no effect"
    assert state(model) == before


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((2, 4, 1, 1.0), (0, 4, 0, 0.0), "restores equality"),
        ((0, 4, 0, 0.0), (0, 4, 0, 0.0), "no effect"),
        ((2, 4, 1, 1.0), (1, 4, 1, 1.0), "reduces"),
        ((2, 4, 1, 1.0), (4, 8, 1, 1.0), "reduces"),
        ((2, 4, 0, 1.0), (2, 4, 1, 0.01), "makes it worse"),
        ((2, 4, 1, 1.0), (2, 4, 1, 0.3), "no effect"),
        ((2, 4, 1, 1.0), (2, 4, 1, 0.1), "reduces"),
        ((2, 4, 1, 1.0), (2, 4, 1, 10.0), "makes it worse"),
        ((0, 4, 0, 0.0), (1, 4, 0, 1.0), "makes it worse"),
        ((4, 4, 4, 0.0), (4, 4, 4, 0.0), "no effect"),  # drawn apart at the first step, from equal logits
    ],
)
def test_verdicts(before, after, verdict):
    made = [Difference(p, of, flips, 1, size) for p, of, flips, size in (before, after)]
    assert verdict_of(*made) == verdict


def test_differences_count_bits_and_stop_where_tokens_part():
    zero = Served([torch.zeros(3, 4)], [[0, 0, 0]], [])
    minus = Served([-torch.zeros(3, 4)], [[0, 0, 0]], [])
    assert difference_of([zero], [zero]).prompts == 0
    assert (difference_of([zero], [minus]).prompts, difference_of([zero], [minus]).max_ulp) == (1, 0)
    late = torch.zeros(3, 4)
    late[1, 2], late[2, 0] = 1.0, 100.0
    found = difference_of([zero], [Served([late], [[0, 2, 0]], [])])
    assert (found.token_flips, found.max_abs) == (1, 1.0)  # what follows the flip answers another question
    other = difference_of([zero], [Served([torch.full((3, 4), float("nan"), dtype=torch.float64)], [[0, 0, 0]], [])])
    assert other.max_ulp is None and json.dumps(other.to_json())
