"""Layouts: which element belongs to which row. The tensors here hold their own row numbers, so that a wrong layout shows.

Every element of a *coded* tensor spells its batch row, its token slot and its place among the features. Whatever
happens to the tensor, the rows that a layout cuts out of it must spell the row they are said to be. A layout may be given
up (None: unlaid); it must not be wrong.
"""

import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from detlab.trace.layout import (
    Atom,
    broadcast,
    cut_of,
    dim_size,
    feature,
    has_rows,
    join,
    labelled,
    merge,
    plain,
    reshape,
    rows_of,
    shift,
    take,
    unpair,
)
from detlab.trace.plans import _keeps_rows
from detlab.trace.rules import MOVES, propagate

# code = CODED + (batch row * SLOTS + slot) * FEATURES + feature; what is below CODED is no coded value.
CODED, FEATURES, SLOTS = 10**9, 10_000, 100


def batch(*index):
    return (Atom("batch", range(*index) if len(index) < 3 else tuple(index)),)


def token(*index):
    return (Atom("token", range(*index) if len(index) < 3 else tuple(index)),)


def coded(num_batch, slots, *features):
    """int64 [batch, token, *features] that spells its rows, and its layout."""
    rows = torch.arange(num_batch)[:, None] * SLOTS + torch.tensor(list(slots))[None]
    places = torch.arange(math.prod(features)).reshape(features)
    tensor = CODED + rows.reshape(num_batch, -1, *[1] * len(features)) * FEATURES + places
    return tensor, (batch(num_batch), (Atom("token", slots),), *plain(features))


def assert_rows_spell_themselves(tensor, layout):
    """Every row holds only elements of the batch row and slot that it is said to be."""
    assert tuple(dim_size(dim) for dim in layout) == tuple(tensor.shape)
    rows = rows_of(tensor, layout)
    assert rows.columns is None
    if not tensor.numel():
        return
    row = (rows.grid - CODED) // FEATURES
    pairs = cut_of(layout).pairs
    if pairs is not None:
        assert rows.batch is None and rows.slots is None  # picked rows say both
        claimed = torch.tensor([b * SLOTS + s for b, s in map(unpair, pairs)])[:, None]
    else:
        # What has no batch axis is taken for batch row 0, whose bits every prompt shares.
        claimed_batch = torch.tensor([0] if rows.batch is None else list(rows.batch))
        assert rows.slots is not None or not (row % SLOTS != row.flatten()[0] % SLOTS).any(), "the token axis was lost"
        claimed_slots = row.flatten()[:1] % SLOTS if rows.slots is None else torch.tensor(list(rows.slots))
        claimed = (claimed_batch[:, None] * SLOTS + claimed_slots[None]).reshape(-1, 1)
    assert rows.grid.shape[0] == len(claimed)
    assert (row == claimed).all(), f"rows {claimed.flatten().tolist()} hold {row.tolist()}"


def spelled_rows(tensor, layout):
    """Row number -> its elements in the order of the digest."""
    grid = rows_of(tensor, layout).grid - CODED
    return {row[0] // FEATURES: row for row in grid.tolist()}


class Follow(TorchDispatchMode):
    """Propagates layouts as a capture does, with nothing else around it."""

    def __init__(self):
        super().__init__()
        self.known = {}
        self.ops = []  # (name, first input, its layout, outputs, their layouts)

    def know(self, tensor, layout):
        self.known[id(tensor)] = (tensor, layout)
        return tensor

    def layout_of(self, tensor):
        found = self.known.get(id(tensor))
        return found[1] if found is not None else plain(tensor.shape)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else [result]
        outputs = [t for t in results if isinstance(t, torch.Tensor)]
        layouts = propagate(func, args, kwargs, outputs, self.layout_of)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        before = self.layout_of(first) if first is not None else None
        for tensor, layout in zip(outputs, layouts, strict=True):
            self.know(tensor, layout)
        self.ops.append((func._schema.name.removeprefix("aten::"), first, before, outputs, layouts))
        return result


# ----------------------------------------------------------------------------------------------------- by example
@pytest.mark.parametrize(
    ("before", "shape", "after"),
    [
        # merging and splitting rows and features
        ((batch(2), token(3), *plain([20])), (6, 20), (batch(2) + token(3), feature(20))),
        ((batch(2) + token(3), feature(20)), (2, 3, 20), (batch(2), token(3), feature(20))),
        ((batch(2), token(3), feature(20)), (2, 3, 4, 5), (batch(2), token(3), feature(4), feature(5))),
        ((batch(2), token(3), feature(4), feature(5)), (2, 3, 20), (batch(2), token(3), feature(4) + feature(5))),
        ((batch(2), token(3), feature(4), feature(5)), (2, 3, 2, 10),
         (batch(2), token(3), feature(2), feature(2) + feature(5))),
        ((batch(2), token(3), feature(4)), (24,), (batch(2) + token(3) + feature(4),)),
        # heads folded into batch rows, as bmm wants them
        ((batch(2), feature(4), token(3), feature(5)), (8, 3, 5), (batch(2) + feature(4), token(3), feature(5))),
        ((batch(2) + feature(4), token(3), feature(5)), (2, 4, 3, 5), (batch(2), feature(4), token(3), feature(5))),
        # one row: axes of size 1 must find their meaning again
        ((batch(1), token(1), feature(5)), (1, 5), (batch(1) + token(1), feature(5))),
        ((batch(1) + token(1), feature(5)), (1, 1, 5), (batch(1), token(1), feature(5))),
        ((batch(1), token(3), feature(5)), (3, 5), (batch(1) + token(3), feature(5))),
        ((batch(1) + token(3), feature(5)), (1, 3, 5), (batch(1), token(3), feature(5))),
        ((batch(2), token(1), feature(5)), (2, 5), (batch(2) + token(1), feature(5))),
        ((batch(2) + token(1), feature(5)), (2, 1, 5), (batch(2), token(1), feature(5))),
        ((batch(1), token(1), feature(20)), (1, 1, 4, 5), (batch(1), token(1), feature(4), feature(5))),
        ((batch(2), token(3), feature(4)), (2, 3, 1, 4), (batch(2), token(3), (), feature(4))),
        # cuts through rows, and element counts that do not fit
        ((batch(2), token(3), feature(4)), (3, 2, 4), None),
        ((batch(2), token(4), feature(4)), (4, 2, 4), None),
        ((batch(2), token(4), feature(4)), (2, 2, 2, 4), None),
        ((batch(2), token(3), feature(4)), (2, 12), (batch(2), token(3) + feature(4))),
        ((batch(2), token(3), feature(4)), (2, 3, 3), None),
        ((batch(2), token(3), feature(4)), (2, 3, 4, 2), None),
        ((feature(6), batch(2)), (4, 3), None),
    ],
)  # fmt: skip
def test_reshape(before, shape, after):
    assert reshape(before, shape) == after


def test_reshape_keeps_odd_slots():
    before = (batch(2), token(5, 2, 9), feature(4))
    assert reshape(before, (6, 4)) == (batch(2) + token(5, 2, 9), feature(4))


@pytest.mark.parametrize(
    ("dim", "where", "after"),
    [
        (token(-3, 4), slice(1, 5), token(-2, 2)),
        (token(0, 8), slice(1, 8, 3), (Atom("token", range(1, 8, 3)),)),
        (token(0, 8), [5, 5, 0], token(5, 5, 0)),
        (token(9, 4, 7), slice(1, None), (Atom("token", (4, 7)),)),
        (feature(8), slice(2, 5), feature(3)),
        (feature(8), [7, 1], feature(2)),
        (feature(8), slice(2, 3), ()),
        (batch(1), slice(0, 1), batch(1)),
        (batch(1), slice(0, 0), None),
        ((), [0], ()),
        ((), [0, 0], None),
        (batch(1) + token(0, 4), slice(0, 2), batch(1) + token(0, 2)),
        (batch(2) + token(0, 4), slice(0, 8), batch(2) + token(0, 4)),
        (batch(2) + token(0, 4), slice(0, 4), batch(1) + token(0, 4)),
        (batch(2) + token(0, 4), [0], batch(1) + token(0, 1)),
        (batch(2) + feature(4), slice(0, 4), None),
        (feature(9) + feature(64), slice(288, 576), feature(288)),
        (token(5, 6) + feature(9) + feature(64), slice(0, 288), token(5, 6) + feature(288)),
        (token(5, 7) + feature(9) + feature(64), slice(0, 288), None),
        (token(5, 6) + feature(9) + feature(64), [7], token(5, 6)),
    ],
)
def test_take(dim, where, after):
    assert take(dim, where) == after


def test_join_makes_a_range_where_it_can():
    assert join([range(-3, 0), range(0, 2)]) == range(-3, 2)
    assert join([range(0, 2), range(3, 4)]) == (0, 1, 3)
    assert join([(4, 1), range(2)]) == (4, 1, 0, 1)


def test_merge_and_broadcast_refuse_to_choose_between_rows():
    assert merge([batch(3), feature(3)], 3) == batch(3)
    assert merge([feature(3), ()], 3) == feature(3)
    assert merge([batch(3), token(3)], 3) is None
    assert merge([token(0, 3), token(1, 4)], 3) is None
    assert merge([(), ()], 1) == ()
    assert broadcast([(token(3), feature(4)), (batch(2), token(3), feature(4))], (2, 3, 4)) == (
        batch(2), token(3), feature(4),
    )  # fmt: skip
    assert broadcast([(batch(3), token(3)), (token(3), batch(3))], (3, 3)) is None


def test_a_row_of_one_that_is_broadcast_stays_that_row():
    # hidden[2:3].expand(4, ...) shows batch row 2 four times; nameless, it would be taken for batch row 0.
    tensor, layout = coded(3, range(2), 5)
    with Follow() as follow:
        follow.know(tensor, layout)
        expanded = tensor[2:3].expand(4, -1, -1)
        added = tensor[2:3] + torch.zeros(4, 1, 1, dtype=torch.int64)
    for value in (expanded, added):
        layout = follow.layout_of(value)
        assert layout is not None and has_rows(layout)
        assert_rows_spell_themselves(value, layout)


def test_shift_moves_token_slots_only():
    layout = (batch(2), token(-3, 4) + feature(5), token(4, 1, 2))
    assert shift(layout, 3) == (batch(2), token(0, 7) + feature(5), token(7, 4, 5))
    assert shift(plain([3]), 3) == plain([3])
    assert shift(shift(layout, 3), -3) == layout


@pytest.mark.parametrize("slots", [range(-2, 3), (5, 1, 4)])
def test_rows_come_batch_major_with_features_in_order(slots):
    tensor, layout = coded(2, slots, 4, 5)
    rows = rows_of(tensor, layout)
    assert rows.batch == range(2) and rows.slots == slots and rows.grid.shape == (2 * len(slots), 20)
    for i in range(2):
        for j in range(len(slots)):
            assert torch.equal(rows.grid[i * len(slots) + j], tensor[i, j].flatten())
    # [batch, heads, token, head_dim] and [batch * token, heads * head_dim] hold the same rows.
    heads = rows_of(tensor.permute(0, 2, 1, 3), (layout[0], layout[2], layout[1], layout[3]))
    flat = rows_of(tensor.reshape(-1, 20), (layout[0] + layout[1], feature(20)))
    token_first = rows_of(tensor.permute(1, 0, 3, 2), (layout[1], layout[0], layout[3], layout[2]))
    assert torch.equal(heads.grid, rows.grid) and torch.equal(flat.grid, rows.grid)
    assert token_first.batch == range(2) and token_first.slots == slots
    assert torch.equal(token_first.grid.reshape(-1, 5, 4).mT.reshape(-1, 20), rows.grid)
    assert cut_of(layout).is_flat and not cut_of((layout[0], layout[2], layout[1], layout[3])).is_flat


def test_a_second_token_axis_becomes_named_columns():
    scores = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    layout = (batch(2), feature(3), token(2, 6), token(0, 6))
    rows = rows_of(scores, layout)
    assert (rows.batch, rows.slots, rows.columns) == (range(2), range(2, 6), range(6))
    assert rows.grid.shape == (8, 3, 6)
    for i in range(2):
        for j in range(4):
            assert torch.equal(rows.grid[i * 4 + j], scores[i, :, j])


def test_tensors_without_rows_or_elements():
    assert rows_of(torch.zeros(3, 4), plain([3, 4])).grid.shape == (1, 12)
    assert rows_of(torch.zeros(2, 0, 4), (batch(2), token(0, 0), feature(4))).grid.shape == (0, 0)
    assert rows_of(torch.zeros(2, 3, 0), (batch(2), token(0, 3), (Atom("feature", range(0)),))).grid.shape == (6, 0)
    assert not has_rows(None) and not has_rows(plain([2, 3])) and labelled(token(1))


# ------------------------------------------------------------------------------- by chance: sequences of views
def random_shape(draw, tensor):
    """Another shape for the same elements: neighbours merged, axes split, axes of size 1 put in or left out."""
    sizes = [s for s in tensor.shape if s > 1 or draw.random() < 0.5]
    for _ in range(draw.randrange(3)):
        if len(sizes) > 1 and draw.random() < 0.6:
            at = draw.randrange(len(sizes) - 1)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif sizes:
            at = draw.randrange(len(sizes))
            divisors = [d for d in range(1, sizes[at] + 1) if sizes[at] % d == 0]
            first = draw.choice(divisors)
            sizes[at : at + 1] = [first, sizes[at] // first]
        if draw.random() < 0.3:
            sizes.insert(draw.randrange(len(sizes) + 1), 1)
    return sizes


def random_step(draw, x):
    """One random op that moves elements about, but never makes new ones: (name, results)."""
    axis = draw.randrange(x.ndim)
    size = x.shape[axis]
    other = draw.randrange(x.ndim)
    steps = {
        "reshape": lambda: x.reshape(random_shape(draw, x)),
        "permute": lambda: x.permute(draw.sample(range(x.ndim), x.ndim)),
        "transpose": lambda: x.transpose(axis, other - x.ndim),
        "slice": lambda: x.narrow(axis, start := draw.randrange(size), draw.randint(1, size - start)),
        "strided": lambda: x[(slice(None),) * axis + (slice(draw.randrange(size), None, draw.randint(1, 3)),)],
        "select": lambda: x.select(axis, draw.randrange(-size, size)) if x.ndim > 1 else x,
        "unsqueeze": lambda: x.unsqueeze(draw.randrange(-x.ndim - 1, x.ndim + 1)),
        "squeeze": lambda: x.squeeze(),
        "squeeze_dim": lambda: x.squeeze(axis),
        "expand": lambda: x.expand([draw.randint(2, 3) if s == 1 and draw.random() < 0.5 else -1 for s in x.shape]),
        "expand_new": lambda: x.expand(2, *x.shape),
        "split": lambda: x.split(draw.randint(1, size), axis),
        "chunk": lambda: x.chunk(draw.randint(1, 3), axis),
        "unbind": lambda: x.unbind(axis) if x.ndim > 1 else x,
        "cat": lambda: torch.cat([x.narrow(axis, i, 1) for i in draw.choices(range(size), k=3)], axis),
        "cat_parts": lambda: torch.cat([x.narrow(axis, cut := size // 2, size - cut), x.narrow(axis, 0, cut)], axis),
        "stack": lambda: torch.stack([x, x], axis),
        "flip": lambda: x.flip(axis),
        "roll": lambda: x.roll(1, axis),
        "repeat": lambda: x.repeat([draw.randint(1, 2) for _ in x.shape]),
        "repeat_interleave": lambda: x.repeat_interleave(2, axis),
        "index_select": lambda: x.index_select(axis, torch.tensor(draw.choices(range(size), k=draw.randint(1, 4)))),
        "index": lambda: x[torch.tensor(draw.choices(range(x.shape[0]), k=3))],
        "index_grid": lambda: x[
            torch.tensor(draw.choices(range(x.shape[0]), k=2))[:, None], torch.tensor(draw.choices(range(x.shape[1]), k=3))
        ] if x.ndim > 1 else x,
        "index_pairs": lambda: x[
            torch.tensor(draw.choices(range(x.shape[0]), k=3)), torch.tensor(draw.choices(range(x.shape[1]), k=3))
        ] if x.ndim > 1 else x,
        "index_inner": lambda: x[:, torch.tensor(draw.choices(range(x.shape[1]), k=3))] if x.ndim > 1 else x,
        "gather": lambda: x.gather(axis, torch.stack([torch.randperm(size)] * 1)[0].reshape(
            [size if a == axis else 1 for a in range(x.ndim)]).expand(x.shape)),
        "sort": lambda: x.sort(axis, descending=draw.random() < 0.5).values,
        "topk": lambda: x.topk(draw.randint(1, size), axis).values,
        "clone": lambda: x.clone(),
        "contiguous": lambda: x.contiguous(),
        "movedim": lambda: x.movedim(axis, other),
        "diagonal": lambda: x.diagonal(0, 0, 1) if x.ndim > 1 else x,
        "unfold": lambda: x.unfold(axis, min(2, size), 1),
        "as_strided": lambda: x.contiguous().as_strided((2, 2), (1, 2)) if x.numel() > 5 else x,
        "add": lambda: x + torch.zeros(x.shape[axis:], dtype=torch.int64),
        "where": lambda: torch.where(torch.ones(x.shape, dtype=torch.bool), x, x),
        "masked_select": lambda: x.masked_select(torch.ones(x.shape, dtype=torch.bool)),
        "pad": lambda: torch.nn.functional.pad(x, (0, 0)),
    }  # fmt: skip
    name = draw.choice(list(steps))
    result = steps[name]()
    return name, list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.fixture(scope="module")
def walks():
    """Thousands of random sequences of ops, each step checked: (op -> how often it was laid, op -> unlaid, moves)."""
    draw = random.Random(20)
    torch.manual_seed(0)
    laid, unlaid, kept = {}, {}, {}
    for walk in range(2500):
        num_batch, num_slots = draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 4])
        slots = draw.choice([range(num_slots), range(7, 7 + num_slots), tuple(draw.sample(range(20), num_slots))])
        tensor, layout = coded(num_batch, slots, *draw.choice([(6,), (4, 3), (1, 6), (2, 3, 2)]))
        history = [f"walk {walk}: {layout}"]
        made = []  # (how many steps were taken, and the ops of the step)
        with Follow() as follow:
            follow.know(tensor, layout)
            x = tensor
            for step in range(draw.randint(1, 7)):
                follow.ops = []
                name, results = random_step(draw, x)
                history.append(f"{name}: {tuple(x.shape)} -> {[tuple(r.shape) for r in results]}")
                made.append((step + 2, follow.ops))
                last = follow.layout_of(results[-1])
                counts = laid if has_rows(last) else unlaid
                counts[name] = counts.get(name, 0) + 1
                if counts is unlaid or results[-1].numel() > 600 or not results[-1].numel():
                    break
                x = results[-1]
        for step, ops in made:
            try:
                for op, first, before, outputs, layouts in ops:
                    check_op(op, first, before, outputs, layouts, kept)
            except AssertionError as error:
                raise AssertionError("\n".join([*history[:step], str(error)])) from None
    return laid, unlaid, kept


def is_coded(value):
    return value is not None and value.dtype == torch.int64 and value.numel() > 0 and bool(value.min() >= CODED)


def check_op(op, first, before, outputs, layouts, kept):
    for value, layout in zip(outputs, layouts, strict=True):
        if not (is_coded(value) and has_rows(layout)):
            continue
        assert_rows_spell_themselves(value, layout)
        if op in MOVES and is_coded(first) and has_rows(before) and _keeps_rows(before, layout):
            # The capture takes the digests of ``first`` for those of ``value``: they must be the very same rows.
            rows = spelled_rows(first, before)
            if len(rows) < rows_of(first, before).grid.shape[0]:
                continue  # several copies of a row: which is which is not what this test can tell
            kept[op] = kept.get(op, 0) + 1
            for number, elements in spelled_rows(value, layout).items():
                assert elements == rows[number], f"{op}: row {number} of {before} is not that of {layout}"


def test_no_random_sequence_of_ops_puts_an_element_in_another_row(walks):
    laid, _, kept = walks
    assert sum(laid.values()) > 4000
    assert min(kept[op] for op in ("view", "permute", "transpose", "slice", "select", "clone", "unsqueeze", "squeeze")) > 50


def test_common_ops_are_followed(walks):
    # A layout that is given up is honest, but useless: what models do all the time must be followed.
    laid, unlaid, _ = walks
    for name in ("permute", "transpose", "unsqueeze", "stack", "clone", "contiguous", "where", "unbind", "expand", "add",
                 "repeat_interleave", "movedim"):  # fmt: skip
        assert laid[name] > 30 and name not in unlaid, name
    assert laid["flip"] > 30  # not of picked rows that share their dimension with features
    for name in ("reshape", "slice", "select", "squeeze", "split", "chunk", "cat"):
        assert laid[name] > 30 and unlaid.get(name, 0) < 0.1 * laid[name], name


def test_what_cannot_be_followed_is_given_up(walks):
    laid, unlaid, _ = walks
    for name in ("roll", "masked_select", "index_pairs", "unfold"):
        assert unlaid[name] > 30, name
    assert laid.get("roll", 0) == laid.get("masked_select", 0) == 0


@pytest.mark.parametrize(
    ("before", "after", "is_kept"),
    [
        ((batch(2), token(3), feature(4), feature(5)), (batch(2) + token(3), feature(4) + feature(5)), True),
        ((batch(2), token(3), feature(4), feature(5)), (batch(2), feature(4), token(3), feature(5)), True),
        ((batch(2), token(3), feature(4), feature(5)), (batch(2), token(3), feature(5), feature(4)), False),
        ((batch(2), token(3), feature(4), feature(4)), (batch(2), token(3), feature(4), feature(4)), False),  # exchanged?
        ((batch(2), token(3), feature(4)), (batch(2), token(3), feature(2)), False),
        ((batch(2), token(3), ()), (batch(2), token(3), feature(2)), False),
        ((batch(2), token(3), feature(4)), (batch(2), token(2), feature(4)), True),
        ((batch(2), token(3), feature(20)), (batch(2), token(3), feature(4), feature(5)), True),
        (None, (batch(2),), False),
        ((batch(2),), None, False),
    ],
)  # fmt: skip
def test_which_moves_leave_rows_as_they_are(before, after, is_kept):
    assert _keeps_rows(before, after) == is_kept


def test_sequences_of_empties_can_be_joined():
    with Follow() as follow:
        empty = follow.know(torch.zeros(2, 0, 4), (batch(2), token(0, 0), feature(4)))
        filled = follow.know(torch.zeros(2, 3, 4), (batch(2), token(0, 3), feature(4)))
        assert follow.layout_of(torch.cat([empty, empty], 1)) == (batch(2), token(0, 0), feature(4))
        assert follow.layout_of(torch.cat([empty, filled], 1)) == (batch(2), token(0, 3), feature(4))
