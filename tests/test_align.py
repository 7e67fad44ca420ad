"""Alignment: which ops, calls and rows of two traces are held against each other."""

import random

import numpy as np
import pytest

from detlab.divergence.align import Aligner, align, pair_calls
from detlab.trace.records import Call, Trace, row_keys, split_keys


def program(text):
    """ "a.mm b.add" -> [("a", "mm"), ("b", "add")]."""
    return [tuple(word.rsplit(".", 1)) for word in text.split()]


def test_equal_programs_are_paired_one_to_one():
    ops = program("q.mm k.mm attn.softmax attn.bmm o.mm")
    result = align(ops, list(ops))
    assert result.pairs == tuple((i, i) for i in range(5)) and result.only_a == result.only_b == ()


@pytest.mark.parametrize(
    ("a", "b", "pairs", "only_a", "only_b"),
    [
        ("m.add m.mul", "m.mask m.add m.mul", ((0, 1), (1, 2)), (), (0,)),
        ("m.add m.mul", "m.add m.where m.mul", ((0, 0), (1, 2)), (), (1,)),
        ("attn.flash o.mm", "attn.bmm attn.softmax attn.bmm o.mm", ((1, 3),), (0,), (0, 1, 2)),
        ("a.mm b.mm", "b.mm a.mm", ((0, 1), (1, 0)), (), ()),
        ("a.mm a.mm a.mm", "a.mm", ((0, 0),), (1, 2), ()),
        ("a.mm", "b.mm", (), (0,), (0,)),
        ("", "b.mm", (), (), (0,)),
        ("", "", (), (), ()),
        # An extra op of the same name shifts its own neighbours, never those of another module.
        ("r.mul r.mul x.mul", "r.mul r.mul r.mul x.mul", ((0, 0), (1, 1), (2, 3)), (), (2,)),
    ],
)
def test_unequal_programs(a, b, pairs, only_a, only_b):
    result = align(program(a), program(b))
    assert (result.pairs, result.only_a, result.only_b) == (pairs, only_a, only_b)


def test_any_two_programs_are_split_into_pairs_and_rests():
    draw = random.Random(3)
    for _ in range(500):
        a, b = ([(draw.choice("xyz"), draw.choice(["mm", "add", "mul"])) for _ in range(draw.randrange(12))] for _ in "ab")
        result = align(a, b)
        assert all(a[i] == b[j] for i, j in result.pairs)
        assert sorted([i for i, _ in result.pairs] + list(result.only_a)) == list(range(len(a)))
        assert sorted([j for _, j in result.pairs] + list(result.only_b)) == list(range(len(b)))
        for module in "xyz":  # within a module the order is kept
            inside = [j for i, j in result.pairs if a[i][0] == module]
            assert inside == sorted(inside)


def test_exchanged_sides_give_the_same_pairs():
    draw = random.Random(4)
    for _ in range(500):
        a, b = ([(draw.choice("xy"), draw.choice(["mm", "add"])) for _ in range(draw.randrange(14))] for _ in "ab")
        result, back = align(a, b), align(b, a)
        assert sorted((j, i) for i, j in back.pairs) == sorted(result.pairs)
        assert (back.only_a, back.only_b) == (result.only_b, result.only_a)


def test_an_aligner_remembers_programs_not_ops():
    aligner = Aligner()
    ops = (("m", "mm"), ("m", "add"))
    assert aligner(ops, ops) is aligner(tuple(list(ops)), ops)
    assert aligner(ops, ops[:1]).pairs == ((0, 0),)


def trace(*calls):
    """A trace of calls (step, prompts, positions of all slots, first query slot)."""
    made = Trace()
    for index, (step, prompts, positions, start) in enumerate(calls):
        table = np.array(positions)
        made.calls.append(Call(index, step, np.array(prompts), table, range(start, table.shape[1]), table[:, start:]))
    return made


def paired(a, b, limits=None):
    found = []
    for pair in pair_calls(a, b, limits):
        prompt, position = split_keys(pair.keys)
        found.append((pair.a, pair.b, list(zip(prompt.tolist(), position.tolist(), strict=True))))
    return found


WHOLE = trace((0, [0], [[0, 1, 2, 3]], 0), (1, [0], [[0, 1, 2, 3, 4]], 4))


def test_the_same_calls():
    assert paired(WHOLE, WHOLE) == [(0, 0, [(0, i) for i in range(4)]), (1, 1, [(0, 4)])]


def test_a_batch_meets_prompts_served_one_by_one():
    batch = trace((0, [1, -1, 0], [[-1, 0, 1], [0, 1, 2], [-1, -1, 0]], 0))
    alone = trace((0, [0], [[0]], 0), (0, [1], [[0, 1]], 0))
    assert paired(batch, alone) == [(0, 0, [(0, 0)]), (0, 1, [(1, 0), (1, 1)])]
    assert paired(alone, batch) == [(0, 0, [(0, 0)]), (1, 0, [(1, 0), (1, 1)])]


def test_chunks_meet_one_pass():
    chunks = trace((0, [0], [[0, 1, 2]], 0), (0, [0], [[0, 1, 2, 3]], 3), (1, [0], [[0, 1, 2, 3, 4]], 4))
    assert paired(chunks, WHOLE) == [(0, 0, [(0, 0), (0, 1), (0, 2)]), (1, 0, [(0, 3)]), (2, 1, [(0, 4)])]


def test_a_decode_step_meets_a_prefill_of_the_same_text():
    prefill = trace((0, [0], [[0, 1, 2, 3, 4]], 0))
    assert paired(WHOLE, prefill) == [(0, 0, [(0, i) for i in range(4)]), (1, 0, [(0, 4)])]


def test_without_a_cache_rows_meet_step_by_step():
    anew = trace((0, [0], [[0, 1, 2, 3]], 0), (1, [0], [[0, 1, 2, 3, 4]], 0))
    # Position 0 is computed in both steps of `anew`, and in step 0 of WHOLE alone: there it is compared.
    assert paired(WHOLE, anew) == [(0, 0, [(0, i) for i in range(4)]), (1, 1, [(0, 4)])]
    assert paired(anew, anew) == [(0, 0, [(0, i) for i in range(4)]), (1, 1, [(0, i) for i in range(5)])]


def test_limits_leave_positions_out():
    assert paired(WHOLE, WHOLE, {0: 4}) == [(0, 0, [(0, i) for i in range(4)])]
    assert paired(WHOLE, WHOLE, {0: 0}) == [] and len(paired(WHOLE, WHOLE, {1: 0})) == 2


def test_prompts_that_one_side_lacks_are_left_out():
    other = trace((0, [3], [[0, 1]], 0))
    assert paired(WHOLE, other) == [] and paired(WHOLE, trace()) == []


def test_row_keys_sort_by_prompt_then_position():
    prompt, position = np.array([0, 0, 0, 1, 7]), np.array([-2, 0, 5, -2, 2**24 - 3])
    keys = row_keys(prompt, position)
    assert (np.diff(keys) > 0).all()
    back = split_keys(keys)
    assert np.array_equal(back[0], prompt) and np.array_equal(back[1], position)


def test_a_row_without_a_batch_axis_is_named_where_all_prompts_agree():
    same = Call(0, 0, np.array([-1, 4, 5]), np.array([[0, 1], [0, 1], [0, 1]]), range(2), np.zeros((3, 2)))
    assert [part.tolist() for part in same.row_names(None, range(2))] == [[4, 4], [0, 1]]
    apart = Call(0, 0, np.array([4, 5]), np.array([[0, 1], [-1, 0]]), range(2), np.zeros((2, 2)))
    assert [part.tolist() for part in apart.row_names(None, range(2))] == [[-1, -1], [-1, -1]]
    assert [part.tolist() for part in apart.row_names(range(2), range(2))] == [[4, 4, -1, 5], [0, 1, -1, 0]]
    assert [part.tolist() for part in apart.row_names(range(2), None)] == [[4, 5], [-2, -2]]
    assert [part.tolist() for part in apart.row_names(range(2), (1, 7))] == [[4, -1, 5, -1], [1, -1, 0, -1]]
