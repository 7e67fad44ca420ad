"""Mixtures of experts: tokens are sorted by expert inside the layer, and followed there.

Which token goes to which experts is read off the router by a hook; every row that the trace names is held against the
same token's computation by hand.
"""

import copy
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import detlab
from detlab import Condition, bits
from detlab.trace.records import split_keys
from tests.bit_classes import bitwise_equal, differing, laid_out, module_tensors, rows_by_position

SPARSE = ("tiny-qwen3-moe", "tiny-mixtral")
LENGTHS = (11, 7)
WIDTH = 12
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module", params=[(name, way) for name in SPARSE for way in ("grouped_mm", "eager")], ids="-".join)
def subject(request):
    name, way = request.param
    model = detlab.load_model(name)[0]
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation(way)
    return model, way


def batch():
    generator = torch.Generator().manual_seed(12)
    ids, mask = torch.full((2, WIDTH), 256), torch.zeros(2, WIDTH, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, WIDTH - length :] = torch.randint(3, 250, (length,), generator=generator)
        mask[row, WIDTH - length :] = 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}


def named(flat):
    """(prompt, position) of a row of the flattened batch; None for padding."""
    row, slot = divmod(flat, WIDTH)
    position = slot - (WIDTH - LENGTHS[row])
    return (row, position) if position >= 0 else None


@contextmanager
def routes(model):
    """What layer 0's experts are called with: hidden states [tokens, d_model], experts and weights [tokens, top_k]."""
    seen = []
    module = model.get_submodule(EXPERTS)
    handle = module.register_forward_pre_hook(lambda m, args: seen.append([a.detach().clone() for a in args]))
    try:
        yield seen
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def case(subject):
    model, way = subject
    with torch.no_grad(), routes(model) as seen:
        model(**batch())
    with torch.no_grad(), detlab.capture(model, save="full") as trace:
        model(**batch())
    return model, way, trace, seen[0]


def by_hand(model, state, expert):
    """One expert's answer for one token [1, d_model], unweighted, and the products on the way."""
    experts = model.get_submodule(EXPERTS)
    first = F.linear(state, experts.gate_up_proj[expert])
    gate, up = first.chunk(2, dim=-1)
    inner = experts.act_fn(gate) * up
    return first, inner, F.linear(inner, experts.down_proj[expert])


def ops_of(trace, *names):
    return [op for op in trace.ops if op.module == EXPERTS and op.op in names and not op.is_view]


def rows_of(trace, op):
    """(prompt, position, digest, value) of every named row of an op's output, in the order in which it holds them."""
    number = op.outputs[0]
    record, value = trace.tensors[number], trace.saved[number]
    assert record.status == "rows"
    keys, at = trace.calls[record.call].keys(record.batch, record.slots, record.pairs)
    flat = value.reshape(-1, record.width)
    prompt, position = split_keys(keys)
    order = np.argsort(at)
    for p, t, digest, row in zip(prompt[order], position[order], record.digests[at[order]], at[order], strict=True):
        yield int(p), int(t), digest, flat[int(row)]


def test_every_row_of_the_experts_is_the_token_that_it_is_named_after(case):
    model, way, trace, (states, chosen, _) = case
    with torch.no_grad():
        hand = {(t, e): by_hand(model, states[t : t + 1], e) for t in range(len(states)) for e in chosen[t].tolist()}
    if way == "grouped_mm":
        found = ops_of(trace, "_grouped_mm")
        assert len(found) == 2
        # Sorted by expert, and by token within an expert.
        pairs = sorted(((e, t) for t in range(len(states)) for e in chosen[t].tolist()))
        for which, op in ((0, found[0]), (2, found[1])):
            rows = list(rows_of(trace, op))
            expected = [(named(t), hand[t, e][which][0]) for e, t in pairs if named(t) is not None]
            assert len(rows) == len(expected) == sum(LENGTHS) * chosen.shape[1]
            assert_rows(rows, expected)
        return
    products = ops_of(trace, "mm")
    assert len(products) == 2 * len(set(chosen.flatten().tolist()))
    for op in products:
        (weight,) = [trace.tensors[n].name for _, n, _ in op.inputs if trace.tensors[n].kind == "parameter"]
        expert = int(weight.rpartition("[")[2].rstrip("]"))
        assert weight.startswith((f"{EXPERTS}.gate_up_proj[", f"{EXPERTS}.down_proj["))
        which = 0 if "gate_up_proj" in weight else 2
        mine = [t for t in range(len(states)) if expert in chosen[t].tolist()]
        expected = [(named(t), hand[t, expert][which][0]) for t in mine if named(t) is not None]
        # Which of a token's experts comes first is another order: the rows of one expert are a set of tokens.
        assert_rows(sorted(rows_of(trace, op), key=lambda r: r[:2]), sorted(expected, key=lambda r: r[0]))


def assert_rows(rows, expected):
    num_bitwise = 0
    for (prompt, position, digest, value), (name, hand) in zip(rows, expected, strict=True):
        assert (prompt, position) == name
        assert digest == bits.row_digests(value.reshape(1, -1))[0]
        assert float((value - hand).abs().max()) < 1e-4 < 1e-2 < float(value.abs().max())
        same = bitwise_equal(value, hand)
        assert (digest == bits.row_digests(hand.reshape(1, -1))[0]) == same
        num_bitwise += same
    return num_bitwise


def test_the_layer_gives_each_token_its_own_sum(case):
    model, _, trace, (states, chosen, weights) = case
    (record,) = [m for m in trace.modules if m.module == EXPERTS]
    keys, digests = trace.rows(record.output)
    value = trace.saved[record.output].reshape(-1, states.shape[1])
    expected = {}
    with torch.no_grad():
        for t in range(len(states)):
            if named(t) is not None:
                mix = sum(w * by_hand(model, states[t : t + 1], e)[2][0] for e, w in zip(chosen[t].tolist(), weights[t], strict=True))
                assert float((value[t] - mix).abs().max()) < 1e-4
                expected[named(t)] = bits.row_digests(value[t].reshape(1, -1))[0]
    found = dict(zip(zip(*(part.tolist() for part in split_keys(keys)), strict=True), digests, strict=True))
    assert found == expected and len(found) == sum(LENGTHS)


class Fault(TorchDispatchMode):
    """Moves one element of one row of an op's output, counted among the calls of that op, by one ULP."""

    def __init__(self, name, occurrence, row, ulps=1):
        super().__init__()
        self.name, self.left, self.row, self.ulps, self.hit = name, occurrence, row, ulps, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name == f"aten::{self.name}":
            if self.left == 0:
                self.hit = tuple(result.shape)
                result[self.row].view(torch.int32)[5] += self.ulps
            self.left -= 1
        return result


def captured(model, *modes):
    with torch.no_grad():
        for mode in modes:
            mode.__enter__()
        try:
            with detlab.capture(model) as trace:
                model(**batch())
        finally:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
    return trace


@pytest.mark.parametrize("pick", [0, 5, -1])
def test_a_fault_in_one_expert_is_named_at_its_token(case, pick):
    model, way, clean, (states, chosen, _) = case
    if way == "grouped_mm":
        pairs = sorted((e, t) for t in range(len(states)) for e in chosen[t].tolist())
        op, occurrence = "_grouped_mm", 1  # layer 0's second product
        row = [i for i, (_, t) in enumerate(pairs) if named(t) is not None][pick]
        token, expert = pairs[row][1], None
    else:
        # The last expert's second product, among all products of its kind in the pass.
        expert = max(e for t in range(len(states)) for e in chosen[t].tolist() if named(t) is not None)
        mine = [t for t in range(len(states)) if expert in chosen[t].tolist()]
        real = [i for i, t in enumerate(mine) if named(t) is not None]
        row = real[pick % len(real)]
        token = mine[row]
        (target,) = [o for o in ops_of(clean, "mm") if any(
            clean.tensors[n].name == f"{EXPERTS}.down_proj[{expert}]" for _, n, _ in o.inputs)]  # fmt: skip
        op, occurrence = "mm", [o.index for o in clean.ops if o.op == "mm"].index(target.index)
    fault, twin = Fault(op, occurrence, row), Fault(op, occurrence, row, ulps=0)
    result = detlab.compare(clean, captured(model, fault))
    assert fault.hit is not None and result.verdict == "diverged"
    first = result.first
    assert (first.kind, first.module, first.op) == ("origin", EXPERTS, op)
    assert (first.prompt, first.position) == named(token)
    assert len(result.origins) == 1 and first.num_rows == 1
    # The twin goes the same way and changes nothing.
    same = detlab.compare(clean, captured(model, twin))
    assert twin.hit == fault.hit and same.verdict == "identical" and same.origins == same.carriers == []


def test_a_fault_planted_by_a_hook_is_named_at_its_token(subject):
    model, _ = subject
    changed = copy.deepcopy(model)
    slot = 2 * WIDTH - 3  # prompt 1, third token from its end

    def scale(by):
        factors = torch.ones(2 * WIDTH, 1)
        factors[slot] = by
        return lambda m, args, out: out * factors

    traces = []
    for by in (1.0, 1.0, 1.5):
        handle = changed.get_submodule(EXPERTS).register_forward_hook(scale(by))
        with torch.no_grad(), detlab.capture(changed) as trace:
            changed(**batch())
        handle.remove()
        traces.append(trace)
    assert detlab.compare(traces[0], traces[1]).verdict == "identical"
    result = detlab.compare(traces[0], traces[2])
    differing_ops = [d for d in (*result.origins, *result.carriers) if d.module in (EXPERTS, EXPERTS.rpartition(".")[0])]
    assert {(d.prompt, d.position) for d in differing_ops} == {named(slot)} == {(1, LENGTHS[1] - 3)}
    assert result.verdict == "diverged" and (result.first.module, result.first.op) == (EXPERTS, "mul")


@pytest.mark.parametrize("text", ["batch_size=3,mates=random", "batch_size=3,mates=repeat,row=2", "batch_size=2,padding_side=left"])
def test_the_order_in_which_experts_hold_tokens_is_no_origin(subject, text):
    """Other rows of the batch move a token's place among its expert's rows; reported is what module outputs show."""
    model, way = subject
    prompts = [[11, 12, 13, 14, 15, 16, 17, 18, 19], [31, 32, 33, 34, 35, 36, 37, 38, 39]]
    sizes = {"batch_size=3,mates=random": "batch_size=3,mates=repeat", "batch_size=3,mates=repeat,row=2": "batch_size=3",
             "batch_size=2,padding_side=left": "batch_size=2,padding_side=left,row=1"}  # fmt: skip
    runs, raw = [], []
    for condition in (Condition.parse(text), Condition.parse(sizes[text])):
        runs.append(detlab.run(model, prompts, condition, new_tokens=0))
        with module_tensors(model) as calls:
            detlab.run(model, prompts, condition, new_tokens=0, trace=False)
        raw.append(calls)
    result = detlab.compare(*runs, controls=False, measure=False)
    at = [r.condition.row for r in runs]
    (first, second) = (calls[0] for calls in raw)
    names = [n for n in laid_out([first]) if n in laid_out([second])]
    parted = [n for n in names if differing(rows_by_position([first], n, at[0]), rows_by_position([second], n, at[1]))]
    assert len(names) > 40 and result.rows_compared > 500
    mine = [d for d in (*result.origins, *result.carriers) if d.prompt == 0]
    if parted:
        assert result.verdict == "diverged" and mine
    else:  # experts' inner products may part where no module's output does, and nowhere else
        assert {d.module for d in mine} <= {f"model.layers.{i}.mlp.experts{tail}" for i in (0, 1) for tail in ("", ".act_fn")}
    for entry in result.origins:
        assert entry.op not in ("sort", "index", "index_select", "gather", "split", "embedding"), str(entry)
    if way == "grouped_mm" and all(a == b for a, b in zip(at, at[::-1], strict=True)) and not parted:
        assert result.logits_equal
