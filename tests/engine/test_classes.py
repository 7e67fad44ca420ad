"""Class maps against planted kernels: orders that differ at one count, place, column or block, or with a bias alone."""

import json
from functools import partial

import pytest
import torch

from detlab.engine.class_map import SMALL, ClassMap, cheapest
from detlab.engine.classes import Probe, RowClasses
from detlab.engine.ledger import Ledger
from detlab.engine.probes import cancelling, cancelling_rows, draw, powers, summands
from tests.bit_classes import bitwise_equal

K, N = 70, 37
MACHINE = {"cpu": "one"}


# ------------------------------------------------------------------------------------------------------ planted kernels
def in_chains(x, weight, bias=None, chains=1, bias_first=False):
    """x @ W.T in float32, term by term in each chain; the chains' sums are added one after the other."""
    total = torch.zeros(len(x), len(weight))
    for part in range(chains):
        chain = torch.zeros(len(x), len(weight))
        if bias is not None and bias_first and not part:
            chain = chain + bias.float()
        for k in range(part, x.shape[1], chains):
            chain = chain + x[:, k : k + 1].float() * weight[:, k].float()
        total = total + chain
    if bias is not None and not bias_first:
        total = total + bias.float()
    return total.to(x.dtype)


def at_the_end(x, weight, last):
    """As one chain, but the last terms are summed apart first."""
    wide, weight = x.float(), weight.float()
    return (in_chains(wide[:, :-last], weight[:, :-last]) + in_chains(wide[:, -last:], weight[:, -last:])).to(x.dtype)


class Planted:
    """A kernel whose order follows where(rows) -> mask of elements that are added in another order."""

    def __init__(self, where, usual=in_chains, other=None):
        other = other or partial(in_chains, chains=2)
        self.where, self.usual, self.other, self.counts = where, usual, other, []

    def probe(self, seed, dtype=torch.float32, has_bias=False):
        x, weight, bias = cancelling(Probe.ROWS, K, N, dtype, has_bias=has_bias, seed=seed)
        extra = () if bias is None else (bias,)
        known = {usual: usual(x, weight, *extra) for usual in (self.usual, self.other)}

        def call(rows):
            # Looked up by row: each row's result under an order is its own, whatever is around it.
            self.counts.append(len(rows))
            if not len(rows):
                return rows.new_zeros(0, N)
            number = (rows[:, None, :] == x[None]).all(-1)
            at = torch.where(number.any(1), number.int().argmax(1), 0)
            result = known[self.usual][at].clone()
            result[~number.any(1)] = 0
            mask = torch.zeros(len(rows), N, dtype=torch.bool)
            self.where(mask)
            return torch.where(mask, known[self.other][at], result)

        return Probe(call, x)


def classes_of(tmp_path, planted, dtype=torch.float32, has_bias=False, name="planted"):
    make = partial(planted.probe, dtype=dtype, has_bias=has_bias)
    return RowClasses(name, dtype, (K, N), make, work=K * N, row_bytes=4 * K, book=Ledger(tmp_path, MACHINE))


def rows_of(*counts):
    def where(mask):
        if len(mask) in counts:
            mask[:] = True

    return where


def last_row_of(count):
    def where(mask):
        if len(mask) == count:
            mask[-1] = True

    return where


def last_column_of(*counts):
    def where(mask):
        if len(mask) in counts:
            mask[:, -1] = True

    return where


def corner_of(count):
    def where(mask):
        if len(mask) == count:
            mask[-1, -1] = True

    return where


def beyond(row):
    def where(mask):
        mask[row:] = True

    return where


def large(least):
    def where(mask):
        if len(mask) >= least:
            mask[:] = True

    return where


def odd_tail(mask):
    """The tail of a tile of four rows."""
    if len(mask) % 4:
        mask[len(mask) // 4 * 4 :] = True


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("where", "refused"),
    [
        (rows_of(16), (16,)), (last_row_of(12), (12,)), (last_column_of(8), (8,)), (corner_of(20), (20,)),
        (odd_tail, (1, 2, 3)), (rows_of(1), (1,)), (rows_of(2, 3), (2, 3)),
    ],
)  # fmt: skip
def test_a_small_count_of_another_order_is_left_out(tmp_path, where, refused, dtype):
    found = classes_of(tmp_path, Planted(where), dtype)
    assert found.map.others == refused
    assert set(found.map.members) == set(SMALL) - set(refused)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [rows_of(256), last_row_of(256), last_column_of(256), corner_of(256), beyond(32)])
def test_a_large_count_of_another_order_is_left_out(tmp_path, where, dtype):
    planted = Planted(where)
    found = classes_of(tmp_path, planted, dtype)
    assert found.map.others == ()
    plan = found.plan(250)
    assert 256 in found.map.others and 256 not in plan and sum(plan) >= 250
    assert set(plan) <= set(found.map.members)


@pytest.mark.parametrize("last", [2, 6])
def test_another_order_of_the_last_terms_alone_is_found(tmp_path, last):
    planted = Planted(rows_of(4), other=partial(at_the_end, last=last))
    assert classes_of(tmp_path, planted).map.others == (4,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_that_is_added_at_another_place_is_found(tmp_path, dtype):
    planted = Planted(rows_of(4), other=partial(in_chains, bias_first=True))
    assert classes_of(tmp_path, planted, dtype, has_bias=True).map.others == (4,)


def test_an_order_that_differs_with_a_bias_alone_is_found(tmp_path):
    planted = Planted(rows_of(4), other=lambda x, w, b=None: in_chains(x, w, b, chains=1 if b is None else 2))
    assert classes_of(tmp_path, planted, name="plain").map.others == ()
    assert classes_of(tmp_path, planted, has_bias=True, name="bias").map.others == (4,)


def test_a_count_that_moves_nothing_is_a_member(tmp_path):
    found = classes_of(tmp_path, Planted(lambda mask: None))
    assert found.map.members == SMALL and found.map.others == ()
    for rows in (5, 33, 250, 600, 5000):
        found.plan(rows)
    assert found.map.others == ()


def test_classes_that_come_back_are_used(tmp_path):
    """Forty to 512 rows are another kernel, as bfloat16 on a CPU with AMX has it."""

    def where(mask):
        if 32 < len(mask) <= 512:
            mask[:] = True

    found = classes_of(tmp_path, Planted(where))
    for rows in (33, 100, 500, 512, 700, 2048, 3000):
        plan = found.plan(rows)
        assert sum(plan) >= rows and not any(32 < count <= 512 for count in plan)
    assert {640, 768, 2048} <= set(found.map.members)  # large calls are of the class again
    assert set(found.map.others) and all(32 < count <= 512 for count in found.map.others)


def test_the_class_that_serves_decoding_best_is_chosen(tmp_path):
    found = classes_of(tmp_path, Planted(large(4)))  # {1, 2, 3} and {4, ...}
    assert found.map.members == tuple(c for c in SMALL if c >= 4) and found.map.others == (1, 2, 3)
    assert found.plan(1) == (4,) and found.plan(30) == (32,)


def test_a_kernel_whose_bits_follow_the_place_is_called_row_by_row(tmp_path):
    def alternating(mask):
        if len(mask) > 1:
            mask[::2] = True

    found = classes_of(tmp_path, Planted(alternating))
    assert found.map.members == (1,)  # one row at a time is a class, and the only one
    assert found.plan(3) == (1, 1, 1)


def test_no_class_at_all_is_said(tmp_path):
    calls = iter(range(10**9))

    def where(mask):  # a kernel that is not repeatable
        mask[:, next(calls) % N] = True

    with pytest.raises(LookupError, match="no number of rows gives planted float32 70x37 stable bits"):
        classes_of(tmp_path, Planted(where))


# ---------------------------------------------------------------------------------------------------------- no shape unseen
def test_no_count_is_called_before_it_was_probed(tmp_path):
    planted = Planted(lambda mask: None)
    found = classes_of(tmp_path, planted)
    kernel = planted.probe(0).call
    for rows in (1, 5, 32, 33, 100, 250, 600, 2049, 5000):
        plan = found.plan(rows)
        planted.counts.clear()
        found.run(kernel, torch.zeros(rows, K))
        assert planted.counts == list(plan)
        assert all(found.map.knows(count) for count in plan) and found.ran >= set(plan)


def test_what_was_probed_is_kept(tmp_path):
    planted = Planted(lambda mask: None)
    first = classes_of(tmp_path, planted)
    first.plan(600)
    first._book.flush()
    again = Planted(lambda mask: None)
    second = classes_of(tmp_path, again)
    assert second.map == first.map and second.plan(600) == first.plan(600) and second.seconds == 0.0
    assert again.counts == []


@pytest.mark.parametrize("change", [{"members": [1, 2], "micros": [1.0]}, {"unit": -4}, {"members": "1..32"}, {"digest": None}])
def test_a_map_that_makes_no_sense_is_measured_again(tmp_path, change):
    known = classes_of(tmp_path, Planted(lambda mask: None))
    rewrite(known, **change)
    again = Planted(lambda mask: None)
    found = classes_of(tmp_path, again)
    found.plan(40)
    assert again.counts and found.map.members[: len(SMALL)] == SMALL


def rewrite(known, **change):
    """Plants a map in the ledger's file as if it had been measured."""
    known._book.flush()
    book = Ledger(known._book.path.parent, MACHINE)
    for name in list(book.measured):
        book.measured[name] = book.measured[name] | json.loads(json.dumps(change))
    book._write()


def test_bits_that_are_not_the_ledgers_are_noticed_when_a_count_is_added(tmp_path):
    known = classes_of(tmp_path, Planted(lambda mask: None))
    rewrite(known, digest="0" * 32, members=[1, 2], micros=[1.0, 1.0])
    found = classes_of(tmp_path, Planted(rows_of(2)))
    assert found.map.members == (1, 2)  # believed until a count is needed that is not known
    found.plan(40)
    assert found.map.others == (2,) and found.map.digest != "0" * 32


def test_a_wrong_map_in_the_ledger_is_found_by_a_second_look(tmp_path):
    planted = Planted(rows_of(2))
    known = classes_of(tmp_path, planted)
    assert known.map.others == (2,)
    rewrite(known, members=list(SMALL), micros=[1.0] * len(SMALL), others=[])
    found = classes_of(tmp_path, Planted(rows_of(2)))
    assert found.plan(2) == (2,)  # the file is believed
    found.plan(3)
    assert {(f.shape, f.holds) for f in found.recheck()} == {("2 rows", False), ("3 rows", True)}


def test_a_right_map_holds_at_a_second_look(tmp_path):
    found = classes_of(tmp_path, Planted(rows_of(2)))
    for rows in (1, 2, 33, 100):
        found.plan(rows)
    assert found.recheck() and all(finding.holds for finding in found.recheck())


# ------------------------------------------------------------------------------------------------------------- planning
def test_a_plan_takes_what_was_measured_to_be_cheapest():
    def plan(rows, **costs):
        counts = {int(name[1:]): cost for name, cost in costs.items()}
        return cheapest(ClassMap(32, tuple(counts), tuple(counts.values()), (), ""), rows, 4 * K)

    assert plan(256, m32=10.0, m224=1e6, m256=1e6) == (32,) * 8
    assert plan(250, m32=10.0, m224=1e6, m256=50.0) == (256,)
    assert plan(1000, m32=10.0, m224=1e6, m256=50.0) == (256,) * 4
    assert plan(1, m1=9.0, m4=5.0) == (4,) and plan(1, m1=4.0, m4=5.0) == (1,)
    assert plan(3, m1=1.0) == (1, 1, 1)


def test_rows_come_back_in_their_places(tmp_path):
    found = classes_of(tmp_path, Planted(rows_of(64, 80)))
    x = draw(75, K, dtype=torch.float32)
    assert bitwise_equal(found.run(lambda rows: rows * 2, x), x * 2)
    assert found.run(lambda rows: rows * 2, x[:0]).shape == (0, K)


# ----------------------------------------------------------------------------------------------------------------- data
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "has_bias"), [(70, False), (71, False), (70, True), (71, True), (2, False), (1, True)])
def test_products_cancel(dtype, width, has_bias):
    x, weight, bias = cancelling(8, width, 600, dtype, has_bias=has_bias)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert exact.abs().max() < 1e-9 and weight.shape == (600, width) and x.abs().sum() > 0
    assert (bias is None) != has_bias


def test_rows_cancel_and_powers_are_powers():
    assert cancelling_rows(9, 31, torch.bfloat16).double().sum(1).abs().max() == 0
    made = powers(1000, least=-3, most=2, seed=1)
    assert sorted(set(made.tolist())) == [2.0**e for e in range(-3, 3)]


def test_sums_of_summands_tell_their_order():
    rows = summands(32, 300)
    in_order = rows[:, 0].clone()
    for k in range(1, 300):
        in_order = in_order + rows[:, k]
    in_lanes = sum((rows[:, k::8].cumsum(1)[:, -1] for k in range(8)), torch.zeros(32))
    assert int((in_order != in_lanes).sum()) >= 30


@pytest.mark.parametrize("dtype", DTYPES)
def test_orders_agree_on_an_element_as_seldom_as_the_docstring_says(dtype):
    x, weight, _ = cancelling(Probe.ROWS, 576, 64, dtype)
    one = in_chains(x, weight)
    agree = {n: float((in_chains(x, weight, chains=n) == one).float().mean()) for n in (2, 16)}
    last = {n: float((at_the_end(x, weight, n) == one).float().mean()) for n in (6, 16)}
    assert max(agree.values()) < 0.02 and last[16] < 0.20 and last[6] < 0.60, (agree, last)
