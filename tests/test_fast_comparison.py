"""The comparison in steps against the slow reference, on random small traces: batched, alone, in chunks; with faults."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest

import detlab
from detlab.divergence import rows
from detlab.divergence.rows import CARRIER, IDENTICAL, ORIGIN, compare_traces
from detlab.trace.layout import pair
from detlab.trace.records import Call, ModuleRecord, OpRecord, TensorRecord, Trace, split_keys
from tests import reference_comparison

FORMS = ["tokens"] * 6 + ["copies"] * 3 + ["cache"] * 2 + ["last", "prompts", "shared", "whole", "unlaid"]


def random_program(draw):
    """Ops as (module, op, form of each output, inputs as (name, producer or parameter, relation))."""
    program = [("embed", "embedding", ["tokens"], [("weight", "parameter 0", "whole")])]
    for number in range(1, draw.choice([5, 10, 40])):
        inputs = []
        for k in range(draw.randrange(4)):
            other = draw.choice([f"parameter {draw.randrange(3)}", *range(number), *range(number)])
            relation = draw.choice(["row", "row", "context", "place"]) if isinstance(other, int) else "whole"
            inputs.append((draw.choice(["self", f"arg{k}"]), other, relation))
        outputs = [draw.choice(FORMS) for _ in range(draw.choice([1, 1, 1, 1, 2, 3, 0]))]
        module = draw.choice(["", "layers.0", "layers.0.mlp", "layers.1"])
        program.append((module, draw.choice(["mm", "add", "mul", "softmax"]), outputs, inputs))
    return program


def batches(draw, kind, lengths, steps):
    """Calls as (sequence, step, prompts, positions of all slots, first query slot)."""
    groups = [[p] for p in range(len(lengths))] if kind == "alone" else [[*range(len(lengths)), -1][: len(lengths) + 1]]
    calls = []
    for sequence, group in enumerate(groups):
        group = draw.sample(group, len(group))
        width = max(lengths) + draw.randrange(2)
        table = np.full((len(group), width), -1)
        for row, prompt in enumerate(group):
            length = lengths[max(0, prompt)]
            table[row, width - length :] = np.arange(length)
        cuts = [0, draw.randrange(1, width), width] if kind == "chunks" else [0, width]
        for start, end in zip(cuts, cuts[1:], strict=False):
            calls.append((sequence, 0, group, table[:, :end], start))
        for step in range(1, steps):
            table = np.concatenate([table, table.max(1, keepdims=True) + 1], 1)
            calls.append((sequence, step, group, table, table.shape[1] - 1))
    return calls


def made(draw, program, calls):
    """A trace; a row's digest depends on its op and name alone, as if arithmetic were exact."""
    trace = Trace()
    for number in range(3):
        trace.tensors.append(TensorRecord(number, "parameter", f"p{number}", -1, -1, (4,), "float32", "whole", width=4))
        trace.tensors[-1].digests = np.array([number])
    grown = {}
    for index, (sequence, step, group, table, start) in enumerate(calls):
        query = range(start, table.shape[1])
        tokens = np.where(table[:, start:] >= 0, table[:, start:] + 7, 0)
        call = Call(index, step, np.array(group), table, query, tokens)
        trace.calls.append(call)
        computed = {}
        for number, (module, op, outputs, inputs) in enumerate(program):
            seen = []
            for name, other, relation in inputs:
                if isinstance(other, str):
                    seen.append((name, int(other.split()[1]), relation))
                elif computed[other]:
                    seen.append((name, computed[other][0], relation))
            first_op, numbers = len(trace.ops), []
            for slot, form in enumerate(outputs):
                numbers += collect(trace, draw, call, form, (number, slot), grown.setdefault((sequence, number, slot), []))
            computed[number] = numbers
            trace.ops.append(OpRecord(first_op, index, module, op, number, tuple(seen), tuple(numbers), draw.random() < 0.05))
            if numbers and draw.random() < 0.3:
                trace.modules.append(ModuleRecord(index, module, "M", first_op, first_op + 1, numbers[0]))
    return trace


def collect(trace, draw, call, form, seed, grown):
    """Adds a tensor of a form, and for a cache the part that this call computed; returns the number of the tensor."""
    record = TensorRecord(len(trace.tensors), "op", "", call.index, len(trace.ops), (3,), "float32", "rows", width=4)
    trace.tensors.append(record)
    batch, query = range(len(call.prompts)), call.query
    if form == "copies":
        named = sorted((p, q, b, s) for b, p in enumerate(call.prompts) for s in query if (q := call.positions[b, s]) >= 0)
        copies = [where for where in named for _ in range(hash((*seed, where[1])) % 3)]
        draw.shuffle(copies)  # experts sort tokens
        record.pairs = tuple(pair(b, s) for _, _, b, s in copies)
        names = [(int(p), int(q)) for p, q, _, _ in copies]
    elif form in ("whole", "unlaid"):
        record.status = form
        names = [(0, call.step)] * (1 if form == "whole" else 2)
    else:
        record.batch = None if form == "shared" else batch
        record.slots = None if form == "prompts" else (query.stop - 1,) if form == "last" else query
        prompts, positions = call.row_names(record.batch, record.slots)
        names = list(zip(prompts.tolist(), positions.tolist(), strict=True))
    record.digests = np.array([hash((*seed, q if form == "shared" else (p, q))) for p, q in names], np.int64)
    if form != "cache":
        return [record.number]
    grown.append(record.number)
    whole = replace(record, number=len(trace.tensors), digests=np.zeros(0, np.int64), parts=tuple(grown))
    whole.batch = whole.slots = None
    trace.tensors.append(whole)
    return [whole.number]


def harm(draw, trace):
    """One fault: a changed digest, rows moved, another dtype or width, rows lost, an op or an input missing."""
    tensor = draw.choice(trace.tensors)
    op = draw.choice(trace.ops)
    match draw.choice(["flip", "flip", "flip", "carry", "move", "dtype", "width", "unlaid", "drop", "rename", "weight"]):
        case "flip" if len(tensor.digests):
            tensor.digests[draw.randrange(len(tensor.digests))] ^= 1
        case "carry":
            for later in (t for t in trace.tensors[tensor.number :] if len(t.digests)):
                later.digests[-1] ^= 1
        case "move":
            tensor.digests = np.roll(tensor.digests, 1)
        case "dtype":
            tensor.dtype = "bfloat16"
        case "width":
            tensor.width += 1
        case "unlaid" if not tensor.parts and not any(tensor.number in t.parts for t in trace.tensors):
            tensor.status = "unlaid"
        case "drop":
            trace.ops.remove(op)
            for index, left in enumerate(trace.ops):
                left.index = index
                for number in left.outputs:
                    trace.tensors[number].op = index
        case "rename" if op.inputs:
            op.inputs = (("other", *op.inputs[0][1:]), *op.inputs[1:])
        case "weight":
            trace.tensors[draw.randrange(3)].digests = np.array([99])


def random_pair(seed):
    draw = random.Random(seed)
    lengths = [draw.randrange(2, 6) for _ in range(draw.randrange(1, 4))]
    program = random_program(draw)
    steps = draw.randrange(1, 4)
    kinds = draw.choice(["together", "alone", "chunks"]), draw.choice(["together", "alone", "chunks"])
    a, b = (made(draw, program, batches(draw, kind, lengths, steps)) for kind in kinds)
    if draw.random() < 0.2:
        b = copy.deepcopy(a)
    for _ in range(draw.choice([0, 1, 1, 2, 5, 20])):
        harm(draw, draw.choice([a, b]))
    limits = {0: draw.randrange(5)} if draw.random() < 0.2 else None
    return a, b, limits


def as_reference(found):
    """A comparison's ops in the reference's terms."""
    return [(op.a, op.b, dict(zip(op.keys.tolist(), op.state.tolist(), strict=True)), op.inputs) for op in found.ops]


def assert_agrees(found, expected):
    assert as_reference(found) == expected.ops
    for name in ("only_a", "only_b", "incomparable", "unlaid_differ", "rows_compared", "aligned"):
        assert getattr(found, name) == getattr(expected, name), name
    assert [(d.module, d.a, d.b, d.keys.tolist()) for d in found.outputs] == expected.outputs
    assert list(found.ops.differs) == [any(s > IDENTICAL for s in op[2].values()) for op in expected.ops]
    assert list(found.ops.is_origin) == [ORIGIN in op[2].values() for op in expected.ops]


@pytest.mark.parametrize("seed", range(250))
def test_it_agrees_with_the_reference(seed):
    a, b, limits = random_pair(seed)
    assert_agrees(compare_traces(a, b, limits), reference_comparison.compare(a, b, limits))


def test_the_random_traces_show_everything():
    """The control: states, answers and lists that the test above compares do occur."""
    states, answers, lists = set(), set(), set()
    for seed in range(60):
        expected = reference_comparison.compare(*random_pair(seed))
        states |= {s for op in expected.ops for s in op[2].values()}
        answers |= {answer for op in expected.ops for answer in op[3].values()}
        lists |= {name for name in ("only_a", "only_b", "incomparable", "unlaid_differ", "outputs") if getattr(expected, name)}
    assert states == {IDENTICAL, CARRIER, ORIGIN} and answers == {"matched", "differs", "unknown"}
    assert lists == {"only_a", "only_b", "incomparable", "unlaid_differ", "outputs"}


@pytest.mark.parametrize("seed", range(20))
def test_many_steps_give_what_one_gives(seed, monkeypatch):
    monkeypatch.setattr(rows, "STEP_ROWS", 5)
    a, b, limits = random_pair(seed)
    assert_agrees(compare_traces(a, b, limits), reference_comparison.compare(a, b, limits))


@pytest.mark.parametrize("seed", range(40))
def test_entries_are_those_of_the_reference(seed):
    a, b, _ = random_pair(seed)
    expected = []
    for index, _, state, inputs in reference_comparison.compare(a, b).ops:
        worst = max(state.values())
        if worst > IDENTICAL:
            op = a.ops[index]
            prompt, position = split_keys(np.array([next(key for key, s in state.items() if s == worst)]))
            kind = "origin" if worst == ORIGIN else "carrier"
            where = (op.module, op.op, op.occurrence, a.calls[op.call].step, int(prompt[0]), max(-1, int(position[0])))
            expected.append((kind, *where, inputs, sum(s > IDENTICAL for s in state.values()), index))
    result = detlab.compare(a, b)
    entries = [d for d in result.carriers if d.op != "(call)"]  # bare traces: a cache of another length is told apart
    origins, carriers = ([e for e in expected if e[0] == kind] for kind in ("origin", "carrier"))
    if not expected:  # then an output that an op of one run changed may be the only entry
        assert result.origins == [] and len(entries) <= 1
        return

    def told(entries):
        return [
            (d.kind, d.module, d.op, d.occurrence, d.call, d.prompt, d.position, d.inputs, d.num_rows, d.op_index)
            for d in entries
        ]

    assert told(result.origins) == origins and told(entries) == carriers
    if len(entries) == len(result.carriers):
        assert told([result.first]) == expected[:1] and len(result.to_pandas()) == len(expected)


def test_carriers_are_one_object_each_and_a_sequence():
    a, b, _ = next(found for found in map(random_pair, range(99)) if len(detlab.compare(*found[:2]).carriers) > 3)
    result = detlab.compare(a, b)
    carriers = result.carriers
    assert carriers[0] is carriers[0] and carriers[-1] is carriers[len(carriers) - 1]
    assert carriers == list(carriers) and list(carriers) == carriers and carriers != [] and carriers != list(carriers)[1:]
    assert carriers[1:3] == list(carriers)[1:3] and [*carriers][::-1] == carriers[::-1]
    assert repr(carriers).endswith(f"({len(carriers):,} entries)")
    with pytest.raises(IndexError):
        carriers[len(carriers)]
    assert detlab.compare(a, b).carriers == carriers
