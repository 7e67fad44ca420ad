"""What captures share, and what they keep apart: plans, what is known of tensors, hooks."""

import gc

import pytest
import torch
from torch import nn

import detlab
from detlab.trace import plans
from detlab.trace.hashing import UNFOLDED_ROWS
from detlab.trace.live import LiveTensors
from detlab.trace.records import Trace
from tests.bit_classes import bitwise_equal


def ids(rows=2, length=9):
    return torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(1))


def records(model, level="ops", tokens=None):
    """Everything that a capture records, in comparable form."""
    tokens = ids() if tokens is None else tokens
    with torch.no_grad(), detlab.capture(model, level=level) as trace:
        model(tokens, use_cache=False)
    tensors = [
        (t.kind, t.name, t.op, t.shape, t.dtype, t.status, t.batch, t.slots, t.pairs, t.width, t.parts, t.digests.tolist())
        for t in trace.tensors
    ]
    return trace.ops, trace.modules, tensors


@pytest.fixture
def no_plans(monkeypatch):
    monkeypatch.setattr(plans, "_shared", plans.Plans())


@pytest.fixture
def made(monkeypatch):
    """Counts the plans that are made."""
    count = []
    real = plans.make_plan

    def counted(*args):
        count.append(args[0].name)
        return real(*args)

    monkeypatch.setattr(plans, "make_plan", counted)
    return count


# ------------------------------------------------------------------------------------------------------------- plans
@pytest.mark.parametrize("level", ["ops", "modules"])
def test_the_second_capture_makes_no_plans_and_records_the_same(no_plans, made, level):
    model = detlab.load_model("tiny-llama")[0]
    first = records(model, level)
    assert bool(made) == (level == "ops")
    made.clear()
    assert records(model, level) == first and made == []


def test_plans_of_another_dtype_are_others(no_plans):
    """A mask is hashed flat where it is small, which depends on the size of its elements."""
    single, half = (detlab.load_model("tiny-llama", dtype=dtype)[0] for dtype in ("float32", "bfloat16"))
    alone = records(half)
    plans._shared = plans.Plans()
    records(single)
    assert records(half) == alone
    assert {t[4] for t in alone[2] if t[1] == "lm_head.weight"} == {"bfloat16"}


def test_plans_of_another_batch_are_others(no_plans):
    model = detlab.load_model("tiny-gpt2")[0]
    alone = records(model, tokens=ids(3, 5))
    plans._shared = plans.Plans()
    records(model, tokens=ids(5, 3))
    assert records(model, tokens=ids(3, 5)) == alone


def test_an_output_of_another_dtype_makes_another_plan(no_plans):
    class Factory(nn.Module):
        def forward(self, input_ids):
            return torch.ones(3)  # its dtype follows from no argument

    model, found = Factory(), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found += [t for t in records_of(model) if t.kind == "op"]
        finally:
            torch.set_default_dtype(torch.float32)
    assert [t.dtype for t in found] == ["float32", "float64"]


def records_of(model):
    tokens = ids()
    with torch.no_grad(), detlab.capture(model) as trace:
        model(tokens)
    return trace.tensors


def test_a_process_that_knows_many_plans_starts_anew(no_plans, monkeypatch):
    records(detlab.load_model("tiny-llama")[0])
    before = plans.shared_plans()
    assert before is plans._shared and before.infos
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    assert plans.shared_plans() is not before and not plans.shared_plans().infos


# ----------------------------------------------------------------------------------------------------------- tensors
def test_a_tensor_at_the_address_of_one_that_is_gone_is_another():
    live = LiveTensors(Trace(), [], plans.Plans())
    tensor = torch.ones(3)
    known = live.resolve(tensor)
    assert live.find(tensor) is known and live.current(tensor) is known
    other = torch.zeros(3)
    live.known[id(other)] = known  # as if `tensor` had gone and `other` come in its place
    assert live.find(other) is None and live.current(other) is None
    assert live.resolve(other).root != known.root
    tensor.add_(1)
    assert live.find(tensor) is known and live.current(tensor) is None


def test_a_parameter_is_hashed_once_and_again_when_it_changes():
    model = nn.Linear(3, 2)
    first, again = ([t for t in records_of_linear(model) if t.name == "weight"] for _ in range(2))
    assert first[0].digests is again[0].digests
    with torch.no_grad():
        model.weight.add_(1)
    (changed,) = [t for t in records_of_linear(model) if t.name == "weight"]
    assert changed.digests.tolist() != first[0].digests.tolist()


def records_of_linear(model):
    with torch.no_grad(), detlab.capture(model) as trace:
        model(torch.ones(1, 3))
    return trace.tensors


def test_digests_of_parameters_go_with_them():
    from detlab.trace import hashing

    model = nn.Linear(3, 2)
    records_of_linear(model)
    at = id(model.weight)
    assert at in hashing._stored
    del model
    gc.collect()
    assert at not in hashing._stored


@pytest.mark.parametrize("rows", [1, 7, UNFOLDED_ROWS - 1, UNFOLDED_ROWS, UNFOLDED_ROWS + 1, 3 * UNFOLDED_ROWS])
def test_digests_do_not_depend_on_what_they_are_folded_with(rows):
    """Rows are folded together with what came before, and big tensors alone."""

    class Twice(nn.Module):
        def forward(self, input_ids):
            small = input_ids.double() / 7
            return small.float() * 3 + small.float() * 5

    model, tokens = Twice(), torch.arange(rows)[None]
    with torch.no_grad(), detlab.capture(model, save="full") as trace:
        model(tokens)
    made = [t for t in trace.tensors if t.kind == "op" and t.number in trace.saved]
    assert len(made) >= 5
    for record in made:
        values = trace.saved[record.number].reshape(rows, 1)
        assert record.digests.tolist() == detlab.bits.row_digests(values).tolist()


# ------------------------------------------------------------------------------------------------------------- hooks
def test_hooks_run_after_the_modules_own_and_leave_them_alone():
    model = detlab.load_model("tiny-llama")[0]
    norm = model.model.norm
    returned = []
    handle = norm.register_forward_hook(lambda m, a, out: returned.append(out * 2) or returned[-1])
    early = norm.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    try:
        before = dict(norm._forward_hooks), dict(norm._forward_pre_hooks)
        for level in ("ops", "modules"):
            with torch.no_grad(), detlab.capture(model, save="full", level=level) as trace:
                model(ids())
            (record,) = [m for m in trace.modules if m.module == "model.norm"]
            assert bitwise_equal(trace.saved[record.output], returned[-1])
            assert (dict(norm._forward_hooks), dict(norm._forward_pre_hooks)) == before
    finally:
        handle.remove()
        early.remove()


def test_hooks_go_when_the_model_raises():
    model = detlab.load_model("tiny-llama")[0]
    with pytest.raises(IndexError), torch.no_grad(), detlab.capture(model):
        model(torch.full((1, 3), 10**6))
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_hooks_always_called and not module._forward_pre_hooks_with_kwargs
