"""Keeping rows so that differences can be sized: the rows asked for, within a budget, here or in a fresh process."""

import copy
import json

import numpy as np
import pytest
import torch

import detlab
from detlab import Condition
from detlab.trace.keep import RowKeeper
from detlab.trace.records import split_keys
from tests.bit_classes import bitwise_equal

PROMPTS = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]]
PADDED = Condition(batch_size=3, padding_side="left", padding=1)


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama", attention="eager")[0]


@pytest.fixture(scope="module")
def run(model):
    return detlab.run(model, PROMPTS, PADDED, new_tokens=2, save="full")


def kept(run, **options):
    keep = RowKeeper(**options)
    run.replay(keep=keep)
    return keep


def every(run):
    return {op.index for op in run.trace.ops if not op.is_view}


@pytest.mark.parametrize("prompts", [[0], [1], [0, 2], [0, 1, 2]])
def test_rows_are_those_of_the_tensors(run, prompts):
    keep = kept(run, ops=every(run), prompts=prompts)
    assert len(keep.kept) > 100 and not keep.is_full
    num_rows = 0
    for index, (keys, values) in keep.kept.items():
        number = run.trace.ops[index].outputs[0]
        record, whole = run.trace.tensors[number], run.trace.saved[number]
        assert np.all(np.diff(keys) > 0) and len(keys) == len(values)
        prompt, position = split_keys(keys)
        assert set(prompt.tolist()) <= set(prompts)
        assert values.shape[1] == record.width and values.dtype == whole.dtype
        if record.batch is None or record.slots is None or whole.shape[:2] != (len(record.batch), len(record.slots)):
            continue
        call = run.trace.calls[record.call]
        for p, at, row in zip(prompt.tolist(), position.tolist(), values, strict=True):
            batch = call.prompts.tolist().index(p)
            slot = call.positions[batch].tolist().index(at) - record.slots[0]
            assert bitwise_equal(whole[batch, slot].reshape(-1), row)
            num_rows += 1
    assert num_rows > 50 * len(prompts)


def test_only_what_is_asked_for_is_kept(run):
    heads = {op.index for op in run.trace.ops if op.module == "lm_head" and op.op == "mm"}
    keep = kept(run, ops=heads, prompts=[1])
    assert set(keep.kept) == heads and len(heads) == 2
    positions = [split_keys(keys)[1].tolist() for keys, _ in keep.kept.values()]
    assert positions == [[0, 1, 2], [3]]
    assert kept(run, ops=set(), prompts=[0]).kept == {}
    assert kept(run, ops=heads, prompts=[]).kept == {}
    assert kept(run, ops=heads, prompts=[7]).kept == {}


def test_scores_and_integers_are_not_kept(run):
    """Columns of scores are token positions, of which another run may hold more."""
    scores = {op.index for op in run.trace.ops if op.op == "_softmax"}
    integers = {op.index for op in run.trace.ops if not op.is_view and op.outputs
                and not run.trace.saved[op.outputs[0]].is_floating_point()}  # fmt: skip
    assert len(scores) == 4 and integers
    assert kept(run, ops=scores | integers, prompts=[0, 1, 2]).kept == {}


def test_the_budget_is_kept(run):
    whole = kept(run, ops=every(run), prompts=[0])
    sizes = [values.numel() * values.element_size() for _, values in whole.kept.values()]
    for budget in (0, 3000, sum(sizes) // 2, sum(sizes)):
        keep = kept(run, ops=every(run), prompts=[0], budget=budget)
        used = sum(values.numel() * values.element_size() for _, values in keep.kept.values())
        assert used <= budget and keep.is_full == (budget < sum(sizes))
        first = list(whole.kept)[: len(keep.kept)]
        assert list(keep.kept) == first  # the earliest ops, without a gap


def test_kept_rows_are_copies(model):
    """Ops that overwrite their input must not change what was kept before."""
    changing = copy.deepcopy(model)
    changing.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, a, out: out.mul_(0.0))
    run = detlab.run(changing, PROMPTS[:1], new_tokens=0)
    (product,) = [op for op in run.trace.ops if op.module == "model.layers.0.mlp.down_proj" and op.op == "mm"]
    keep = kept(run, ops={product.index}, prompts=[0])
    assert float(keep.kept[product.index][1].abs().max()) > 0.01


def test_a_request_survives_the_way_to_another_process(run):
    keep = RowKeeper({5, 3, 80}, [0, 2], budget=12345)
    request = json.loads(json.dumps(keep.request()))
    assert request == {"ops": [3, 5, 80], "prompts": [0, 2], "budget": 12345}
    again = RowKeeper.from_request(request)
    assert (again.ops, again.prompts, again.budget, again.kept) == (keep.ops, keep.prompts, keep.budget, {})


def test_sizes_say_where_memory_ran_out(model, monkeypatch):
    twin = copy.deepcopy(model)
    twin.model.layers[0].input_layernorm.register_forward_hook(
        lambda m, a, out: out * (1.5 if torch.are_deterministic_algorithms_enabled() else 1.0)
    )
    runs = [detlab.run(twin, PROMPTS[:1], c, new_tokens=1) for c in (Condition(), Condition(deterministic_algorithms=True))]
    full = detlab.compare(*runs)
    note = "differences were sized until the memory set aside for it was full"
    assert full.verdict == "diverged" and note not in full.notes
    monkeypatch.setattr(RowKeeper.__init__, "__defaults__", tuple(
        30_000 if default == 512 << 20 else default for default in RowKeeper.__init__.__defaults__))  # fmt: skip
    some = detlab.compare(*runs)
    assert note in some.notes and some.first.max_ulp == full.first.max_ulp
    entries = sorted([*some.origins, *some.carriers], key=lambda d: d.op_index)
    sized = [d.max_ulp is not None for d in entries]
    assert True in sized and False in sized
    whole = {d.op_index: d for d in (*full.origins, *full.carriers)}
    for entry in entries:
        assert entry.max_abs in (None, whole[entry.op_index].max_abs)
