"""`capture(level="modules")`: what each module returns, with the digests that the op level gives."""

import copy

import numpy as np
import pytest
import torch

import detlab
from detlab.errors import UsageError
from detlab.trace.records import MODULE

NAMES = ("tiny-llama", "tiny-gpt2", "tiny-gemma3", "tiny-qwen3-moe")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return detlab.load_model(request.param)[0]


def arguments():
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[1, :3] = 256
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}


def captured(model, level):
    with torch.no_grad(), detlab.capture(model, level=level) as trace:
        out = model(**arguments(), use_cache=True)
        mask = torch.ones(2, 10, dtype=torch.long)
        mask[1, :3] = 0
        model(torch.tensor([[7], [8]]), attention_mask=mask, position_ids=torch.tensor([[9], [6]]), cache=out.cache)
    return trace


def test_every_module_call_is_there_once(model):
    ran = []
    handles = [m.register_forward_hook(lambda m, a, out, name=name: ran.append(name)) for name, m in model.named_modules()]
    try:
        trace = captured(model, "modules")
    finally:
        for handle in handles:
            handle.remove()
    assert [m.module for m in trace.modules] == ran and len(ran) > 50
    assert [op.module for op in trace.ops] == ran and {op.op for op in trace.ops} == {MODULE}
    assert [op.call for op in trace.ops] == [0] * (len(ran) // 2) + [1] * (len(ran) // 2)
    # Nine heads and nine tokens: a shape alone does not tell which is which.
    lost = {op.module.rpartition(".")[2] for op in trace.unlaid}
    expected = {"Gemma3ForCausalLM": {"q_norm"}, "Qwen3MoeForCausalLM": {"q_norm", "gate", "experts", "act_fn"}}
    assert lost == expected.get(type(model).__name__, set())
    assert not [op for op in trace.unlaid if op.call == 1 and op.module.endswith("q_norm")]
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_digests_are_those_of_the_ops(model):
    modules, ops = captured(model, "modules"), captured(model, "ops")
    num_rows = 0
    for record, of_ops in zip(modules.modules, ops.modules, strict=True):
        assert (record.call, record.module) == (of_ops.call, of_ops.module)
        number, other = record.output, of_ops.output
        if number < 0 or other < 0:
            continue
        keys, digests = modules.rows(number)
        keys_of_ops, digests_of_ops = ops.rows(other)
        if modules.tensors[number].status != "rows" or ops.tensors[other].status != "rows":
            continue
        if modules.tensors[number].width != ops.tensors[other].width:  # heads apart, or joined
            continue
        assert np.array_equal(keys, keys_of_ops), record.module
        assert np.array_equal(digests, digests_of_ops), record.module
        num_rows += len(keys)
    assert num_rows > 300


def test_outputs_are_those_without_capture(model):
    with torch.no_grad():
        expected = model(**arguments()).logits
        with detlab.capture(model, level="modules") as trace:
            actual = model(**arguments()).logits
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))
    assert trace.saved == {} and len(trace.calls) == 1


def test_two_traces_are_compared(model):
    a, b = captured(model, "modules"), captured(model, "modules")
    result = detlab.compare(a, b)
    assert result.verdict == "identical" and result.first is None and result.rows_compared > 300
    # The other model: one norm's weight is off; the first module that returns something else is that norm.
    twin = copy.deepcopy(model)
    name, norm = [(n, m) for n, m in twin.named_modules() if n.endswith(("post_attention_layernorm", "ln_2"))][-1]
    with torch.no_grad():
        norm.weight[40] += 0.5
    other = captured(twin, "modules")
    for x, y in ((a, other), (other, a)):
        result = detlab.compare(x, y)
        assert result.verdict == "diverged"
        assert (result.first.module, result.first.op, result.first.call, result.first.position) == (name, MODULE, 0, 0)
        earlier = [op.module for op in a.ops[: result.first.op_index] if op.call == 0]
        assert len(earlier) > 10 and name not in earlier
    ops = detlab.compare(captured(model, "ops"), captured(twin, "ops"))
    assert ops.first.module == name


def test_full_tensors_are_kept_where_asked_for():
    model = detlab.load_model("tiny-llama")[0]
    with torch.no_grad(), detlab.capture(model, save="full", level="modules") as trace:
        logits = model(**arguments()).logits
    (head,) = [op for op in trace.ops if op.module == "lm_head"]
    assert torch.equal(trace.saved[head.outputs[0]].view(torch.int32), logits.view(torch.int32))


def test_a_level_that_is_none():
    model = detlab.load_model("tiny-llama")[0]
    with pytest.raises(UsageError) as caught, detlab.capture(model, level="layers"):
        pass
    assert str(caught.value) == "capture: level is \"ops\" or \"modules\"; got 'layers'."
