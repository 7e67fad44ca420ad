"""A slow, simple comparison of traces, row by row with dictionaries: what `detlab.divergence.rows` must agree with."""

from dataclasses import dataclass, field

import numpy as np

from detlab.divergence.align import align, pair_calls
from detlab.trace.records import split_keys, without_copy

IDENTICAL, CARRIER, ORIGIN = 1, 2, 3


@dataclass
class Reference:
    """Attributes: ops: (op of a, op of b, {row key: state}, {input: answer}); the others as in `TraceComparison`."""

    ops: list = field(default_factory=list)
    only_a: list = field(default_factory=list)
    only_b: list = field(default_factory=list)
    incomparable: list = field(default_factory=list)
    unlaid_differ: list = field(default_factory=list)
    rows_compared: int = 0
    aligned: dict = field(default_factory=dict)
    outputs: list = field(default_factory=list)


def compare(a, b, limits=None):
    """Compares every op that two traces have in common."""
    result = Reference()
    seen = set()
    for pair in pair_calls(a, b, limits):
        ops_a, ops_b = computing(a, pair.a), computing(b, pair.b)
        found = align([(op.module, op.op) for op in ops_a], [(op.module, op.op) for op in ops_b])
        for side, call, ops, only, into in (
            ("a", pair.a, ops_a, found.only_a, result.only_a),
            ("b", pair.b, ops_b, found.only_b, result.only_b),
        ):
            if (side, call) not in seen:
                into += [ops[i].index for i in only]
            seen.add((side, call))
        partner = {ops_a[i].index: ops_b[j].index for i, j in found.pairs}
        for i, j in found.pairs:
            result.aligned.setdefault(ops_a[i].index, ops_b[j].index)
            compare_op(result, a, b, pair, ops_a[i], ops_b[j])
        compare_outputs(result, a, b, pair, partner)
    result.ops.sort(key=lambda op: op[0])
    return result


def computing(trace, call):
    return [op for op in trace.ops if op.call == call and not op.is_view and op.module != "(outside)"]


def rows(trace, number):
    """Row key -> digest."""
    keys, digests = trace.rows(number)
    return dict(zip(keys.tolist(), digests.tolist(), strict=True))


def equal_rows(a, b, ours, theirs):
    """Row key -> whether the row is the same in both; None where the tensors' rows cannot be compared."""
    ta, tb = a.tensors[ours], b.tensors[theirs]
    if not (ta.status == tb.status == "rows" and (ta.dtype, ta.width) == (tb.dtype, tb.width)):
        return None
    of_a, of_b = rows(a, ours), rows(b, theirs)
    return {key: of_a[key] == of_b[key] for key in sorted(of_a.keys() & of_b.keys())}


def name(key):
    """(prompt, position) of a row key."""
    prompt, position = split_keys(np.array([key]))
    return int(prompt[0]), int(position[0])


def token(key):
    return int(without_copy(np.array([key]))[0])


def belongs(key, pair):
    prompt, position = name(key)
    return token(key) in pair.keys.tolist() or (position == -2 and prompt in pair.prompts.tolist())


def compare_op(result, a, b, pair, op_a, op_b):
    equal = None
    for ours, theirs in zip(op_a.outputs, op_b.outputs, strict=False):
        ta, tb = a.tensors[ours], b.tensors[theirs]
        found = equal_rows(a, b, ours, theirs)
        if found is None:
            if ta.status == tb.status == "rows":
                differs = f"{ta.dtype} against {tb.dtype}", f"rows of {ta.width} against {tb.width} elements"
                result.incomparable.append((op_a.index, op_b.index, differs[ta.dtype == tb.dtype]))
            elif "unlaid" in (ta.status, tb.status) and one_call(a.calls[pair.a], b.calls[pair.b]):
                if whole_equal(ta, tb) is False:
                    result.unlaid_differ.append(op_a.index)
            continue
        mine = {key: same for key, same in found.items() if belongs(key, pair)}
        result.rows_compared += len(mine)
        if equal is None:
            equal = mine
        elif list(equal) == list(mine):
            equal = {key: equal[key] and mine[key] for key in equal}
    if not equal:
        return
    state, answers = {}, {}
    for key, same in equal.items():
        answers[key], matched = ({}, True) if same else judge(a, b, op_a, op_b, key)
        state[key] = IDENTICAL if same else ORIGIN if matched else CARRIER
    first = next((k for k, s in state.items() if s == ORIGIN), next((k for k, s in state.items() if s == CARRIER), None))
    result.ops.append((op_a.index, op_b.index, state, answers.get(first, {})))


def judge(a, b, op_a, op_b, key):
    """(input -> what is known of it as the row sees it, whether all inputs that both sides have matched)."""
    of_b = {n: number for n, number, _ in op_b.inputs}
    answers, matched = {}, True
    for n, number, relation in op_a.inputs:
        answers[n] = "unknown"
        if n in of_b and relation != "place":
            answers[n] = answer(a, b, number, of_b[n], relation, key)
            matched = matched and answers[n] == "matched"
    return answers | {n: "unknown" for n in of_b if n not in answers}, matched


def answer(a, b, ours, theirs, relation, key):
    whole = whole_equal(a.tensors[ours], b.tensors[theirs])
    if whole is not None:
        return "matched" if whole else "differs"
    found = equal_rows(a, b, ours, theirs)
    if not found:
        return "unknown"
    prompt, position = name(key)
    broken = [name(other)[1] for other, same in found.items() if not same and name(other)[0] == prompt]
    if relation == "row":
        own = [same for other, same in found.items() if token(other) == token(key)]
        if own:
            matched = all(own)
        elif position == -2:
            matched = not broken
        else:
            matched = -2 not in broken
    else:
        matched = not broken or 0 <= position < min(broken)
    return "matched" if matched else "differs"


def whole_equal(ta, tb):
    if ta.status == "rows" or tb.status == "rows":
        return None
    if len(ta.digests) == len(tb.digests) == 1 and (ta.width, ta.dtype) == (tb.width, tb.dtype):
        return bool(ta.digests[0] == tb.digests[0])
    if {ta.kind, tb.kind} <= {"parameter", "buffer"}:
        return False
    if (ta.shape, ta.dtype, len(ta.digests)) != (tb.shape, tb.dtype, len(tb.digests)):
        return None
    return ta.digests.tolist() == tb.digests.tolist()


def one_call(a, b):
    tables = (a.prompts, b.prompts), (a.positions, b.positions), (a.tokens, b.tokens)
    return a.query == b.query and all(np.array_equal(x, y) for x, y in tables)


def compare_outputs(result, a, b, pair, partner):
    of_b = returned(b, pair.b)
    for at, ours in returned(a, pair.a).items():
        if at in of_b and partner.get(a.tensors[ours].op) != b.tensors[of_b[at]].op:
            found = equal_rows(a, b, ours, of_b[at]) or {}
            parted = [key for key, same in found.items() if not same and belongs(key, pair)]
            if parted:
                result.outputs.append((at[0], a.tensors[ours].op, b.tensors[of_b[at]].op, parted))


def returned(trace, call):
    """(module, how often it was called before) -> the tensor that it returned in a call."""
    found, times = {}, {}
    for record in trace.modules:
        if record.call == call and record.output >= 0 and trace.tensors[record.output].op >= 0:
            occurrence = times.setdefault(record.module, 0)
            times[record.module] += 1
            found[record.module, occurrence] = record.output
    return found
