"""Faults planted where we know: found at the right op, prompt and token, and nothing found where the fault is nothing.

A fault sits in a dispatch mode below the capture, as a faulty kernel would: the op is given the same inputs and returns
other bits. Each fault has a twin that goes the same way and changes nothing.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import detlab
from detlab import Condition
from detlab.errors import ControlError
from tests.bit_classes import bitwise_equal, module_tensors

PROMPTS = [[11, 12, 13, 14, 15, 16, 17], [21, 22, 23], [31, 32, 33, 34, 35]]
ALONE, PADDED = Condition(), Condition(batch_size=3, padding_side="left", padding=1)


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


class Fault(TorchDispatchMode):
    """Tampers with the output of one op of one module in one call; it knows where it is by its own hooks."""

    def __init__(self, model, module, op, tamper, call=0, occurrence=0):
        super().__init__()
        self.at, self.tamper = (call, module, op, occurrence), tamper
        self.call, self.stack, self.seen, self.num_hits = -1, [], {}, 0
        self.handles = []
        for name, part in model.named_modules():
            self.handles.append(part.register_forward_pre_hook(lambda m, a, name=name: self.enter(name)))
            self.handles.append(part.register_forward_hook(lambda m, a, out: (self.stack.pop(), None)[1]))

    def enter(self, name):
        if name == "":
            self.call += 1
            self.seen.clear()
        self.stack.append(name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        module = self.stack[-1] if self.stack else None
        occurrence = self.seen.get((module, name), 0)
        self.seen[module, name] = occurrence + 1
        if (self.call, module, name, occurrence) == self.at:
            self.tamper(result[0] if isinstance(result, tuple) else result)
            self.num_hits += 1
        return result

    def __exit__(self, *exc):
        for handle in self.handles:
            handle.remove()
        return super().__exit__(*exc)


def run(model, condition=ALONE, new_tokens=2, **fault):
    with Fault(model, **fault) as mode:
        made = detlab.run(model, PROMPTS, condition, new_tokens=new_tokens, force=FORCED if new_tokens else None)
    assert mode.num_hits == 1
    return made


FORCED = [[7, 8], [7, 8], [7, 8]]


def element(tensor, row, slot, at):
    """One element of a row of [batch, token, ...], [batch * token, ...] or [batch, heads, token, head_dim]: an index."""
    if tensor.ndim == 4:
        return (row, at % tensor.shape[1], slot, at // tensor.shape[1])
    return (row, slot, at) if tensor.ndim == 3 else (slot, at)


def nothing(tensor, row, slot):
    tensor[element(tensor, row, slot, 3)] += 0


def one_ulp(tensor, row, slot):
    at = element(tensor, row, slot, 3)
    tensor[at] = torch.nextafter(tensor[at], tensor.new_tensor(100.0))


def exchange(tensor, row, slot):
    """Two elements change places: sums, norms and XORs of the row stay."""
    one, two = element(tensor, row, slot, 3), element(tensor, row, slot, 40)
    tensor[one], tensor[two] = tensor[two].clone(), tensor[one].clone()


def negate_two(tensor, row, slot):
    for at in (5, 6):
        tensor[element(tensor, row, slot, at)] *= -1


def payload(tensor, row, slot):
    tensor[element(tensor, row, slot, 3)] = float("nan")


FAULTS = [one_ulp, exchange, negate_two, payload]
PLACES = [
    ("model.embed_tokens", "embedding", 0),
    ("model.layers.0.input_layernorm", "mul", 1),
    ("model.layers.0.self_attn.q_proj", "mm", 0),
    ("model.layers.0.self_attn", "add", 0),  # rotary embedding
    ("model.layers.1.self_attn", "_scaled_dot_product_flash_attention_for_cpu", 0),
    ("model.layers.1", "add", 1),  # the residual stream
    ("model.layers.1.mlp.act_fn", "silu", 0),
    ("model.layers.1.mlp", "mul", 0),
    ("lm_head", "mm", 0),
]


@pytest.fixture(scope="module")
def sound(model):
    return {c: detlab.run(model, PROMPTS, c, new_tokens=2, force=FORCED) for c in (ALONE, PADDED)}


def assert_found(result, module, op, occurrence, prompt, position, step, leaks=False):
    first = result.first
    assert result.verdict == "diverged" and first.kind == "origin" and first.inputs_matched
    assert (first.module, first.op, first.occurrence) == (module, op, occurrence)
    assert (first.prompt, first.position, first.call, first.num_rows) == (prompt, position, step, 1)
    assert set(first.inputs.values()) <= {"matched"} and first.source == ""
    assert all(d.prompt == prompt for d in result.carriers)
    if not leaks:
        assert len(result.origins) == 1  # everything after it only carries the difference on
        assert all(d.position >= position for d in result.carriers)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("module", "op", "occurrence"), PLACES)
def test_a_faulty_kernel_is_found(model, sound, module, op, occurrence, fault):
    # The second prompt's prefill is call 2 (three prompts, two calls each): its token 1.
    faulty = run(model, module=module, op=op, occurrence=occurrence, call=2, tamper=lambda t: fault(t, 0, 1))
    result = detlab.compare(sound[ALONE], faulty, controls=False, measure=False)
    # A NaN among the keys or values may reach earlier tokens through a kernel's 0 x NaN: an origin of its own, rightly.
    assert_found(result, module, op, occurrence, prompt=1, position=1, step=0, leaks=fault is payload)


@pytest.mark.parametrize(("module", "op", "occurrence"), PLACES)
def test_a_kernel_with_nothing_wrong_is_not(model, sound, module, op, occurrence):
    twin = run(model, module=module, op=op, occurrence=occurrence, call=2, tamper=lambda t: nothing(t, 0, 1))
    result = detlab.compare(sound[ALONE], twin, controls=False, measure=False)
    assert result.verdict == "identical" and result.first is None and result.logits_equal


@pytest.mark.parametrize(("module", "op"), [("model.layers.1.self_attn.k_proj", "mm"), ("model.layers.0.mlp.down_proj", "mm")])
def test_a_fault_while_decoding_is_found(model, sound, module, op):
    faulty = run(model, module=module, op=op, call=3, tamper=lambda t: one_ulp(t, 0, 0))
    result = detlab.compare(sound[ALONE], faulty, controls=False, measure=False)
    assert_found(result, module, op, 0, prompt=1, position=len(PROMPTS[1]), step=1)
    assert result.first.phase == "decode step 1"


@pytest.mark.parametrize(("prompt", "position"), [(0, 0), (1, 2), (2, 4)])
def test_a_fault_in_a_padded_batch_is_found(model, sound, prompt, position):
    slot = 8 - len(PROMPTS[prompt]) + position
    place = {"module": "model.layers.0.self_attn.o_proj", "op": "mm"}
    faulty = run(model, PADDED, **place, tamper=lambda t: exchange(t, 0, prompt * 8 + slot))  # mm sees [batch * token, ...]
    result = detlab.compare(sound[PADDED], faulty, controls=False, measure=False)
    assert_found(result, place["module"], "mm", 0, prompt, position, 0)
    # The twin: what happens to padding is nobody's row.
    padding = run(model, PADDED, **place, tamper=lambda t: exchange(t, 0, 8))
    result = detlab.compare(sound[PADDED], padding, controls=False, measure=False)
    assert result.verdict == "identical" and result.logits_equal


def test_the_sign_of_a_zero_is_found(model):
    def zero(sign):
        def tamper(tensor):
            tensor[element(tensor, 0, 1, 3)] = sign * 0.0

        return tamper

    place = {"module": "model.layers.0.mlp.act_fn", "op": "silu", "call": 2}
    plus, again, minus = (run(model, **place, tamper=zero(sign)) for sign in (1, 1, -1))
    assert detlab.compare(plus, again, controls=False, measure=False).verdict == "identical"
    result = detlab.compare(plus, minus, controls=False, measure=False)
    assert_found(result, "model.layers.0.mlp.act_fn", "silu", 0, prompt=1, position=1, step=0)
    assert result.logits_equal  # adding a zero of either sign changes nothing further on: found all the same


def test_rows_that_change_places_are_found(model, sound):
    def exchange_rows(one, two):
        def tamper(tensor):
            tensor[0, [one, two]] = tensor[0, [two, one]]

        return tamper

    place = {"module": "model.layers.0.mlp", "op": "mul", "call": 0}
    moved, unmoved = (run(model, **place, tamper=exchange_rows(2, other)) for other in (4, 2))
    result = detlab.compare(sound[ALONE], moved, controls=False, measure=False)
    assert result.first.inputs_matched and (result.first.module, result.first.op) == ("model.layers.0.mlp", "mul")
    (found,) = [f for f in result.detail.ops if f.a == result.first.op_index]
    assert found.state.tolist() == [1, 1, 3, 1, 3, 1, 1] and result.first.num_rows == 2
    assert detlab.compare(sound[ALONE], unmoved, controls=False, measure=False).verdict == "identical"


def test_a_fault_that_comes_and_goes_fails_the_control(model, sound):
    """A kernel that is right when the run is repeated is a run-to-run difference, and no matter of conditions."""
    place = {"module": "model.layers.1.self_attn.v_proj", "op": "mm", "call": 0}
    faulty = run(model, **place, tamper=lambda t: one_ulp(t, 0, 2))
    message = r"b \(default\) gave other bits when .*, first in model\.layers\.1\.self_attn\.v_proj · mm\."
    with pytest.raises(ControlError, match=message):
        detlab.compare(sound[ALONE], faulty)
    twin = run(model, **place, tamper=lambda t: nothing(t, 0, 2))
    assert detlab.compare(sound[ALONE], twin).controls == {"a_repeated": True, "b_repeated": True}


# ----------------------------------------------------------------------------------------------------- weights
def with_changed_weight(model, name, index):
    """A copy of the model with one element of a parameter one ULP up."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight = twin.get_parameter(name)
        weight[index] = torch.nextafter(weight[index], weight.new_tensor(100.0))
    return twin


def outputs(model, module):
    with module_tensors(model) as calls:
        detlab.run(model, PROMPTS[:1], new_tokens=0, trace=False)
    return calls[0][f"out {module}"][0]


@pytest.mark.parametrize(
    ("name", "op", "argument"),
    [
        ("model.embed_tokens.weight", "embedding", "weight"),
        ("model.layers.0.self_attn.q_proj.weight", "mm", "mat2"),
        ("model.layers.0.post_attention_layernorm.weight", "mul", "self"),
        ("model.layers.1.mlp.down_proj.weight", "mm", "mat2"),
        ("lm_head.weight", "mm", "mat2"),
    ],
)
def test_one_ulp_of_one_weight_is_found_and_named(model, name, op, argument):
    module = name.rpartition(".")[0]
    expected = outputs(model, module)
    changed = None
    for column in range(60):  # one ULP of a weight may drown in the rounding of its product: take one that does not
        if "embed" in name:
            index = (PROMPTS[0][2], column)
        else:
            index = (40, column) if model.get_parameter(name).ndim == 2 else (column,)
        changed = with_changed_weight(model, name, index)
        found = outputs(changed, module)
        rows = [slot for slot in range(len(found)) if not bitwise_equal(found[slot], expected[slot])]
        if rows:
            break
    equal = copy.deepcopy(model)
    a, b, twin = (detlab.run(m, PROMPTS[:1], new_tokens=0) for m in (model, changed, equal))
    result = detlab.compare(a, b)
    first = result.first
    assert result.verdict == "diverged" and first.kind == "carrier" and not first.inputs_matched
    assert (first.module, first.op, first.position, first.num_rows) == (module, op, rows[0], len(rows))
    assert first.inputs[argument] == "differs" and [v for k, v in first.inputs.items() if k != argument] == ["matched"]
    assert first.source == f"parameter {name}" and f"parameter {name} differs between a and b" in result.notes
    assert f"{argument} already differed (from parameter {name})" in str(first)
    assert first.max_ulp >= 1 and first.max_abs > 0 and result.origins == []
    same = detlab.compare(a, twin)
    assert same.verdict == "identical" and same.notes == []


def test_a_weight_that_nobody_reads_changes_no_verdict(model):
    unread = with_changed_weight(model, "model.embed_tokens.weight", (500, 3))
    a, b = (detlab.run(m, PROMPTS[:1], new_tokens=0) for m in (model, unread))
    result = detlab.compare(a, b)
    assert result.verdict == "identical" and result.notes == ["parameter model.embed_tokens.weight differs between a and b"]


# ------------------------------------------------------------------------------------------------- changes in place
@pytest.mark.parametrize("way", ["select", "data", "slice"])
def test_a_value_changed_in_place_is_no_origin(model, way):
    """Something writes into a layer's output after the op that made it: its consumer is given other inputs."""
    def write(amount):
        def hook(module, args, out):
            if out.shape[1] != len(PROMPTS[0]):
                return
            where = out.data if way == "data" else out
            if way == "slice":
                where[:, 4:5].mul_(1.0 + amount)
            else:
                where[0, 4, 3].add_(amount)

        return hook

    runs = []
    for amount in (0.0, 0.0, 2.0**-10):
        handle = model.model.layers[0].mlp.register_forward_hook(write(amount))
        runs.append(detlab.run(model, PROMPTS[:1], new_tokens=0))
        handle.remove()
    assert detlab.compare(runs[0], runs[1], controls=False).verdict == "identical"
    result = detlab.compare(runs[0], runs[2], controls=False, measure=False)
    assert result.verdict == "diverged" and result.first.position == 4 and result.first.num_rows == 1
    add = next(d for d in (*result.origins, *result.carriers) if (d.module, d.op) == ("model.layers.0", "add"))
    assert add.kind == "carrier" and add.position == 4 and "changed in place" in add.source
    assert all(d.position >= 4 for d in (*result.origins, *result.carriers))
    if way == "slice":  # the write itself is a row's op: made from matching rows, with another factor
        assert (result.first.module, result.first.op, result.first.kind) == ("model.layers.0.mlp", "mul_", "origin")
