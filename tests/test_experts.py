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
    """(place, (prompt, position), digest, value) of every named row of an op's output, in the order in which it holds them."""
    number = op.outputs[0]
    record, value = trace.tensors[number], trace.saved[number]
    assert record.status == "rows"
    keys, at = trace.calls[record.call].keys(record.batch, record.slots, record.pairs)
    flat = value.reshape(-1, record.width)
    prompt, position = split_keys(keys)
    for i in np.argsort(at):
        place = int(at[i])
        yield place, (int(prompt[i]), int(position[i])), record.digests[place], flat[place]


@pytest.fixture(scope="module")
def hand(case):
    """(token of the flattened batch, expert) -> what the expert makes of the token by itself."""
    model, _, _, (states, chosen, _) = case
    with torch.no_grad():
        return {(t, e): by_hand(model, states[t : t + 1], e) for t in range(len(states)) for e in chosen[t].tolist()}


def places(trace, op, hand):
    """The (expert, token) behind each row of a product inside the experts, told by the row's values alone."""
    experts = sorted(e for _, e in hand)
    weight = next((trace.tensors[n].name for _, n, _ in op.inputs if trace.tensors[n].name.endswith("]")), None)
    value = trace.saved[op.outputs[0]]
    value = value.reshape(-1, value.shape[-1])
    which = 2 if value.shape[-1] == 576 else 0
    found = []
    for place, row in enumerate(value):
        expert = experts[place] if weight is None else int(weight.rpartition("[")[2].rstrip("]"))
        apart = {t: float((row - made[which][0]).abs().max()) for (t, e), made in hand.items() if e == expert}
        token = min(apart, key=apart.__getitem__)
        assert apart[token] < 1e-4 < 1e-2 < min([v for t, v in apart.items() if t != token and not is_padding(t)], default=1.0)
        found.append((expert, token))
    return found


def is_padding(flat):
    return named(flat) is None


def test_every_row_of_the_experts_is_the_token_that_it_is_named_after(case, hand):
    _, way, trace, (states, chosen, _) = case
    products = ops_of(trace, "_grouped_mm" if way == "grouped_mm" else "mm")
    assert len(products) == (2 if way == "grouped_mm" else 2 * len(set(chosen.flatten().tolist())))
    num_rows = 0
    for op in products:
        if way == "eager":
            (weight,) = [trace.tensors[n].name for _, n, _ in op.inputs if trace.tensors[n].kind == "parameter"]
            assert weight.startswith((f"{EXPERTS}.gate_up_proj[", f"{EXPERTS}.down_proj["))
        behind = places(trace, op, hand)
        rows = list(rows_of(trace, op))
        assert [place for place, *_ in rows] == [i for i, (_, t) in enumerate(behind) if not is_padding(t)]
        for place, name, digest, value in rows:
            expert, token = behind[place]
            assert name == named(token)
            assert digest == bits.row_digests(value.reshape(1, -1))[0]
            alone = hand[token, expert][2 if value.shape[0] == 576 else 0][0]
            assert (digest == bits.row_digests(alone.reshape(1, -1))[0]) == bitwise_equal(value, alone)
            num_rows += 1
    assert num_rows == 2 * sum(LENGTHS) * chosen.shape[1]


def test_the_layer_gives_each_token_its_own_sum(case):
    model, _, trace, (states, chosen, weights) = case
    (record,) = [m for m in trace.modules if m.module == EXPERTS]
    keys, digests = trace.rows(record.output)
    value = trace.saved[record.output].reshape(-1, states.shape[1])
    expected = {}
    with torch.no_grad():
        for t in range(len(states)):
            if named(t) is not None:
                parts = zip(chosen[t].tolist(), weights[t], strict=True)
                mix = sum(w * by_hand(model, states[t : t + 1], e)[2][0] for e, w in parts)
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
def test_a_fault_in_one_expert_is_named_at_its_token(case, hand, pick):
    model, way, clean, _ = case
    name = "_grouped_mm" if way == "grouped_mm" else "mm"
    down = [op for op in ops_of(clean, name) if clean.tensors[op.outputs[0]].width == 576]
    rows = [(op, place, token) for op in down for place, (_, token) in enumerate(places(clean, op, hand))]
    real = [row for row in rows if not is_padding(row[2])]
    target, place, token = real[pick]
    occurrence = [op.index for op in clean.ops if op.op == name].index(target.index)
    fault, twin = Fault(name, occurrence, place), Fault(name, occurrence, place, ulps=0)
    result = detlab.compare(clean, captured(model, fault))
    assert fault.hit is not None and result.verdict == "diverged"
    first = result.first
    assert (first.kind, first.module, first.op, first.occurrence) == ("origin", EXPERTS, name, target.occurrence)
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


@pytest.mark.parametrize(
    "text", ["batch_size=3,mates=random", "batch_size=3,mates=repeat,row=2", "batch_size=2,padding_side=left"]
)
def test_the_order_in_which_experts_hold_tokens_is_no_origin(subject, text):
    """Other rows of the batch move a token's place among its expert's rows; reported is what module outputs show."""
    model, _ = subject
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
        # What is said of the first prompt's last row is what the run's logits are.
        assert bitwise_equal(runs[0].logits[0], runs[1].logits[0]) or any(d.module == "lm_head" for d in mine)
    else:  # experts' inner products may part where no module's output does, and nowhere else
        assert bitwise_equal(runs[0].logits[0], runs[1].logits[0])
        assert {d.module for d in mine} <= {f"model.layers.{i}.mlp.experts{tail}" for i in (0, 1) for tail in ("", ".act_fn")}
    for entry in result.origins:
        assert entry.op not in ("sort", "index", "index_select", "gather", "split", "embedding"), str(entry)
