"""Recovered trees: equal to planted ones, replayed bit by bit on what kernels do, and refused where there is none."""

import itertools
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import detlab
from detlab.divergence import accumulation, summands
from detlab.divergence.accumulation import Probe, recover
from detlab.divergence.accumulation_replay import Arithmetic, Trials, fused_multiply_add
from detlab.divergence.summands import Summands, draw
from detlab.divergence.trees import AccumulationTree
from detlab.errors import AccumulationError, UsageError
from tests.bit_classes import bitwise_equal, row_classes
from tests.bit_classes import draw as draw_uniform
from tests.planted_sums import add_in_order, bottom_up, planted, random_nodes

ROOT = Path(__file__).resolve().parent.parent


def tree_of(*args, **kwargs) -> AccumulationTree:
    return detlab.accumulation_tree(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------------ planted trees
@pytest.mark.parametrize("seed", range(60))
def test_a_planted_tree_is_recovered_exactly(seed):
    n = random.Random(seed).choice([2, 3, 4, 5, 7, 8, 13, 24, 33, 57])
    nodes = random_nodes(n, seed)
    tree = tree_of(planted(nodes), n, trials=10)
    assert tree == AccumulationTree.from_nodes(n, nodes)
    assert (tree.reproduced, tree.trials, tree.arity) == (10, 10, 2)
    assert tree.is_confirmed == (tree.control is None or tree.control < 10)
    assert tree.is_confirmed or n < 8


@pytest.mark.parametrize("seed", range(30))
def test_nodes_that_add_several_terms_at_once_are_recovered(seed):
    n = random.Random(seed).choice([3, 5, 8, 16, 31])
    nodes = random_nodes(n, seed, widest=5)
    tree = tree_of(planted(nodes), n, trials=0)
    assert tree == AccumulationTree.from_nodes(n, nodes)
    assert tree.arity == max(map(len, nodes))


@pytest.mark.parametrize("seed", range(30))
def test_a_planted_tree_of_terms_that_are_never_negative_is_recovered(seed):
    n = random.Random(seed).choice([2, 3, 5, 8, 16, 31, 64])
    nodes = random_nodes(n, seed)

    def exceeds(terms: Tensor, largest: int) -> bool:
        assert terms[largest] == terms.max() == 1 and (terms >= 0).all()
        return add_in_order(nodes, terms.tolist()) > 1

    def none(count: int, seed: int) -> Trials:
        raise AssertionError

    probe = Probe(Summands(n, "planted", torch.float32, none, exceeds=exceeds))
    assert AccumulationTree.from_nodes(n, recover(n, probe.sizes)) == AccumulationTree.from_nodes(n, nodes)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("widest", [2, 4])
def test_terms_are_put_in_order_where_few_units_can_be_counted(seed, widest, monkeypatch):
    """As outputs of 16 bits allow: the same tree, whether units are counted on all terms or on a few of them."""
    n = random.Random(seed).choice([8, 16, 31, 64])
    nodes = random_nodes(n, seed, widest)
    few = random.Random(seed).choice([1, 2, 3, 7])
    monkeypatch.setitem(accumulation._MASKS, torch.float32, ((2.0**100, 1.0, few),))
    assert tree_of(planted(nodes), n, trials=0) == AccumulationTree.from_nodes(n, nodes)


def test_an_order_that_changes_is_refused_where_few_units_can_be_counted():
    calls = []

    def turning(x: Tensor) -> Tensor:
        calls.append(1)
        return one_by_one(x, list(range(600)) if len(calls) % 2 else list(range(599, -1, -1)))

    with pytest.raises(AccumulationError, match="do not line up|sizes of a tree"):
        tree_of(turning, 600, dtype=torch.bfloat16, trials=0)


@pytest.mark.parametrize("op", ["attention", "mm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_1024_terms_of_sixteen_bits_take_few_queries(op, dtype):
    tree = tree_of(op, 1024, dtype=dtype)
    assert tree.is_confirmed and tree.queries < 20_000


@pytest.mark.parametrize("factor", [-1.0, 0.5, 3.0, 0.1])
def test_a_fixed_multiple_of_a_sum_is_replayed(factor):
    tree = tree_of(lambda x: factor * x.sum(), 24)
    assert tree.is_confirmed and tree == tree_of(torch.sum, 24) and f"times {factor:g}" in tree.describe()


@pytest.mark.parametrize("op", ["mean", "cumsum", "attention", "softmax", "rms_norm"])
def test_no_terms_where_there_must_be_one(op):
    with pytest.raises(UsageError, match=f"^{op} has no output where there is nothing to add"):
        tree_of(op, 0)


def test_few_queries_are_enough():
    chain = tree_of(lambda x: x.cumsum(0)[-1], 1000, trials=0)
    assert chain.depth == 999 and chain.queries < 2100  # one for each pair on the path, and the checks of a user's function
    assert tree_of(planted(random_nodes(57, 1)), 57, trials=0).queries < 57 * 56 / 2


@pytest.mark.parametrize("order", ["forwards", "backwards", "from the middle"])
def test_a_chain_of_2048_terms_needs_no_recursion(order):
    n = 2048
    index = {
        "forwards": torch.arange(n), "backwards": torch.arange(n).flip(0), "from the middle": torch.arange(n).roll(n // 2),
    }[order]  # fmt: skip
    limit = sys.getrecursionlimit()
    tree = tree_of(lambda x: x[index].cumsum(0)[-1], n)
    nodes = [(int(index[0]), int(index[1])), *((n + i, int(index[i + 2])) for i in range(n - 2))]
    assert tree == AccumulationTree.from_nodes(n, nodes)
    assert tree.depth == n - 1 and tree.is_confirmed and sys.getrecursionlimit() == limit
    assert AccumulationTree.from_json(tree.to_json()) == tree and "chain of 2048" in tree.describe()
    assert len(str(tree).splitlines()) < 5
    assert tree.replay(torch.ones(n)) == n


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 33, 100, 1000])
def test_any_number_of_terms(n):
    tree = tree_of(torch.sum, n)
    assert (tree.n, len(tree.nodes) > 0) == (n, n > 1)
    assert tree.is_confirmed and tree.arity == (2 if n > 1 else 0)
    assert (tree.control is None) == (n < 3)
    assert tree.root == (n + len(tree.nodes) - 1 if n else -1)
    assert tree_of("sum(-1)", n).is_confirmed and tree_of("mm", n, rows=2).is_confirmed
    assert tree_of("cumsum", max(1, n)).depth == max(1, n) - 1


def test_the_smallest_trees_in_words():
    assert tree_of("sum(-1)", 0).describe().startswith("no terms, nothing is added")
    assert tree_of("sum(-1)", 1).describe().startswith("one term, nothing is added")
    assert tree_of("sum(-1)", 2).nodes == ((0, 1),)


# ------------------------------------------------------------------------------------------------------- what kernels do
@pytest.mark.parametrize(
    ("op", "n", "shape"),
    [
        ("mm", 512, {"rows": 1}),
        ("mm", 512, {"rows": 8}),
        ("mm", 512, {"rows": 8, "row": 5, "column": 63}),
        ("mm", 193, {"rows": 8, "columns": 33, "column": 28}),
        ("linear", 512, {"rows": 1}),
        ("linear", 512, {"rows": 8}),
        ("sum(-1)", 512, {}),
        ("sum(-1)", 500, {"rows": 3, "row": 1}),
        ("sum(0)", 512, {}),
        ("sum(0)", 100, {"columns": 65, "column": 64}),
        ("mean", 500, {}),
        ("rms_norm", 512, {}),
        ("rms_norm", 100, {"rows": 4, "row": 2}),
        ("index_add", 100, {"rows": 3, "row": 1}),
        ("cumsum", 100, {}),
        ("softmax", 512, {}),
        ("softmax", 100, {"rows": 8, "row": 3}),
        ("attention", 512, {"rows": 1}),
        ("attention", 512, {"rows": 8, "row": 7}),
    ],
)
def test_a_kernel_is_replayed_bit_by_bit_and_a_wrong_tree_is_not(op, n, shape):
    tree = tree_of(op, n, **shape)
    assert (tree.reproduced, tree.trials) == (30, 30), tree.describe()
    assert "30 of 30" in tree.describe()
    assert tree_of(op, n, **shape, trials=0) == tree
    assert len(tree.controls()) == 3 and tree not in tree.controls()
    assert tree.control < 30, "the control: with its terms in other places the same tree must not give the op's bits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("op", "shape"), [("sum(-1)", {}), ("mean", {}), ("linear", {"rows": 4}), ("mm", {"rows": 1})])
def test_sixteen_bit_outputs_are_counted_in_parts(op, shape, dtype):
    tree = tree_of(op, 600, dtype=dtype, **shape)
    assert len(tree.nodes) == 599 and tree.depth < 600
    assert tree.is_confirmed or "NOT CONFIRMED" in tree.describe()
    if op in ("sum(-1)", "mean"):
        assert tree.is_confirmed


def test_a_scaled_float16_output_that_cannot_be_counted_is_refused():
    with pytest.raises(AccumulationError, match="torch.float16 is too coarse to count such steps. Ask for the sum instead"):
        tree_of("mean", 1500, dtype=torch.float16)
    assert tree_of("sum(-1)", 1500, dtype=torch.float16).is_confirmed


def test_float64_and_a_float64_accumulator():
    assert tree_of("mm", 100, dtype=torch.float64).arithmetic.accumulator == "float64"
    tree = tree_of(lambda x: x.double().cumsum(0)[-1].float(), 64)
    assert tree.is_confirmed and tree.arithmetic.accumulator == "float64"


def test_fused_and_rounded_products_are_told_apart():
    """Units cannot see a fused multiply-add; the replay can, and says which it was."""
    nodes = [(0, 1), (40, 2)] + [(40 + i, i + 2) for i in range(1, 38)]
    chain = AccumulationTree.from_nodes(40, nodes)
    a, b = (draw((30, 40), torch.float32, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    rounded = chain.replay(a, b, Arithmetic(products="rounded"))
    fused = chain.replay(a, b, Arithmetic(products="fused"))
    assert not bitwise_equal(rounded, fused)
    total = (a * b)[:, 0]
    for at in range(1, 40):
        total = total + (a * b)[:, at]
    assert bitwise_equal(rounded, total)


def test_fused_multiply_add_rounds_once():
    generator = torch.Generator().manual_seed(3)
    a, b, c = (draw((4000,), torch.float32, generator) for _ in range(3))
    c[::2] = -(a * b)[::2]  # cancellation: what is left is the product's rounding error
    c[1::4] *= 2.0**-20  # far apart: the second rounding of a naive emulation goes wrong here
    found = fused_multiply_add(a, b, c)
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        steps = [torch.nextafter(torch.tensor(result), torch.tensor(end)).item() for end in (-math.inf, math.inf)]
        assert all(abs(exact - Fraction(result)) <= abs(exact - Fraction(other)) for other in steps)
    # (1 + 2^-12)^2 + 2^-60: rounded twice it would be a tie, and go to even.
    tie = [torch.tensor([value]) for value in (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60)]
    assert float(fused_multiply_add(*tie)) == 1 + 2.0**-11 + 2.0**-23


# --------------------------------------------------------------------------------------- row counts and instruction sets
def first_difference(k: int, columns: int, small: int, large: int) -> tuple[int, int, int] | None:
    """An output element in which a product of ``small`` rows differs: (its row there, its row among ``large``, column)."""
    weight = draw_uniform(columns, k, seed=1) / math.sqrt(k)
    for seed in range(40):
        x = draw_uniform(large, k, seed=100 + seed)
        whole = F.linear(x, weight)
        for start in range(0, large - small + 1, small):
            part = F.linear(x[start : start + small].clone(), weight)
            rows, cols = (part != whole[start : start + small]).nonzero(as_tuple=True)
            if len(rows):
                return int(rows[0]), start + int(rows[0]), int(cols[0])
    return None


def test_row_counts_of_another_bit_class_have_another_tree_and_of_the_same_class_the_same():
    k, columns = 512, 64
    classes = row_classes(torch.float32, k, columns, 9)
    assert sum(map(len, classes)) == 9

    def order(rows: int, row: int, column: int) -> tuple:
        tree = tree_of("linear", k, rows=rows, row=row, columns=columns, column=column)
        assert tree.is_confirmed, tree.describe()
        return tree, tree.arithmetic

    for members in classes:
        small, large = members[0], members[-1]
        assert order(small, small - 1, 3) == order(large, small - 1, 3)
    compared = 0
    for first, second in itertools.combinations(classes, 2):
        at = first_difference(k, columns, first[0], second[0])
        if at is None:
            continue  # the two agree where both have a row; what parted them stands elsewhere
        compared += 1
        assert order(first[0], at[0], at[2]) != order(second[0], at[1], at[2])
    assert compared > 0 or len(classes) == 1


SIGNATURE = """
import torch, detlab
torch.set_num_threads(1)
tree = detlab.accumulation_tree("softmax", 512, trials=3)
print(torch.backends.cpu.get_cpu_capability(), tree.signature)
"""


def softmax_under(capability: str | None) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    variables = kept | {"PYTHONPATH": str(ROOT)} | ({"ATEN_CPU_CAPABILITY": capability} if capability else {})
    done = subprocess.run([sys.executable, "-c", SIGNATURE], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_softmax_adds_in_another_order_under_another_instruction_set():
    best = softmax_under(None)
    assert softmax_under(None) == best
    others = {tuple(softmax_under(name)) for name in ("avx2", "default")} - {tuple(best)}
    if not others:
        pytest.skip(f"this machine offers one instruction set only: {best[0]}")
    for other in others:
        assert other[0] != best[0] and other[1] != best[1]


def test_calls_have_the_shape_that_was_asked_for(monkeypatch):
    seen = set()
    real = torch.mm

    def watched(a, b):
        seen.add((tuple(a.shape), tuple(b.shape), a.dtype))
        return real(a, b)

    monkeypatch.setattr(summands.torch, "mm", watched)
    tree_of("mm", 48, rows=3, row=2, columns=5, column=4)
    assert seen == {((3, 48), (48, 5), torch.float32)}


# --------------------------------------------------------------------------------------------------------------- split-K
def test_the_order_of_four_parts_is_seen_and_of_two_is_none():
    def split(num_parts: int, order: list[int]) -> AccumulationTree:
        return tree_of(lambda x: bottom_up(x.view(num_parts, -1), order), 24, trials=5)

    forwards = split(4, [0, 1, 2, 3])
    assert split(4, [3, 1, 0, 2]) != forwards and split(4, [0, 1, 3, 2]) != forwards
    assert split(4, [1, 0, 2, 3]) == forwards  # the first two may change places
    assert split(2, [0, 1]) == split(2, [1, 0])
    assert len({forwards.signature, split(4, [3, 1, 0, 2]).signature, split(4, [1, 0, 2, 3]).signature}) == 2
    assert forwards.is_confirmed and len({forwards, split(4, [1, 0, 2, 3])}) == 1


# ------------------------------------------------------------------------------------------------------------ what is refused
class Noisy:
    """Adds in another order on each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.calls))
        return x[order].cumsum(0, dtype=torch.float32)[-1].clone() + 0 * x[0]


def one_by_one(x: Tensor, order: list[int]) -> Tensor:
    total = x[order[0]]
    for at in order[1:]:
        total = total + x[at]
    return total


class Forgetful:
    """Adds from either end by turns, but alike while it is asked with masks: the second call on a random input differs."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, x: Tensor) -> Tensor:
        order = list(range(len(x)))
        if float(x.abs().max()) < 100 and float(x.abs().min()) > 0 and len(x.unique()) > 2:
            self.turn += 1
            random.Random(self.turn).shuffle(order)
        return one_by_one(x, order)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (F.layer_norm, "layer_norm is no sum of its inputs: its mean and variance"),
        ("layer_norm", "layer_norm is no sum of its inputs"),
        (lambda x: F.layer_norm(x, (len(x),))[0], "no sum|do not weigh the same|not linear"),
        (torch.max, "max is no sum of its inputs: a maximum adds nothing"),
        (lambda x: x.max(), "it is not linear|no sum of its terms"),
        (torch.prod, "a product adds nothing"),
        (lambda x: x.prod(), "one term of 1.0 among zeros gives 0.0: this is no sum"),
        (lambda x: x.sum() + 1, "for terms that are all 0: this is no sum"),
        (lambda x: x.sum() ** 3, "for 2 units: it is not linear"),
        (lambda x: (x * x).sum(), "for -1 units: it is not linear"),
        (lambda x: x.abs().sum(), "for -1 units: it is not linear"),
        (lambda x: (x * torch.arange(1, len(x) + 1)).sum(), "do not weigh the same"),
        (lambda x: x[1:].sum(), "one term of 1.0 among zeros gives 0.0"),
        (lambda x: x[:-1].sum(), "do not weigh the same"),
        (lambda x: x.clamp(-5, 5).sum(), "no sum that swallows|not the sizes of a tree"),
        (lambda x: torch.tensor(math.fsum(x.tolist())), "not the sizes of a tree|no sum that swallows"),
        (lambda x: x.to(torch.int32).sum(), "returned torch.int64, and sums of integers have no order"),
        (lambda x: x.sum() * float("nan"), "one term of 1.0 among zeros gives nan"),
        (Noisy(), "not the sizes of a tree|not run-to-run"),
        (Forgetful(), "not run-to-run deterministic and has no one order"),
    ],
)
def test_what_is_no_sum_tree_is_refused(fn, says):
    with pytest.raises(AccumulationError, match=says):
        tree_of(fn, 16)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (("sum", -1), {}, "n to be a whole number of at least 0; got n=-1"),
        (("sum", 2.0), {}, "got n=2.0"),
        (("sum", 4), {"trials": -1}, "trials to be a whole number"),
        (("sum", 4), {"dtype": torch.int32}, "torch.bfloat16, torch.float64, torch.float16; got dtype=torch.int32"),
        (("conv", 4), {}, "knows no op 'conv'. Choose from sum, "),
        ((7, 4), {}, "needs a function or the name of an op; got 7"),
        (("sum(-1)", 4), {"columns": 3}, r"sum\(-1\) does not read columns; it reads rows, row"),
        ((torch.sum, 4), {"rows": 3}, "a function of n terms does not read rows: it fixes its own shape"),
        (("mm", 4), {"rows": 2, "row": 2}, "row must be from 0 to rows - 1; got row=2, rows=2"),
        (("mm", 4), {"columns": 2, "column": 5}, "column must be from 0 to columns - 1"),
        (("mm", 4), {"rows": 1.5}, "rows must be whole numbers of at least 0"),
        (("softmax", 4), {"dtype": torch.bfloat16}, "reads softmax in float32 only; got bfloat16"),
        (("rms_norm", 4), {"dtype": torch.float16}, "reads rms_norm in float32 only"),
        (("softmax", 10000), {}, "told apart up to n=8192; got n=10000"),
        ((lambda x: x * 2, 4), {}, r"needs a function that returns one number; <lambda> returned \[4\]"),
        ((lambda x: None, 4), {}, "needs a function that returns one number; <lambda> returned None"),
        ((torch.dot, 4), {}, "calls a function with one tensor of n terms, which dot did not take"),
        (("sum", 4), {"dtype": "float32"}, "got dtype='float32'"),
        (("sum", 4), {"seed": "a"}, "seed to be a whole number of at least 0; got seed='a'"),
        ((torch.nn.Linear(8, 3), 4), {}, "this linear layer adds in_features=8 terms; got n=4"),
    ],
)
def test_arguments_that_cannot_be_right(args, kwargs, says):
    with pytest.raises(UsageError, match=says):
        tree_of(*args, **kwargs)


def test_a_linear_layer_is_asked_in_its_own_shape():
    layer = torch.nn.Linear(96, 24, bias=False, dtype=torch.bfloat16)
    before = layer.weight.detach().clone()
    tree = tree_of(layer, 96, rows=3, row=1, column=23)
    assert "bfloat16 [3, 96] x [24, 96]" in tree.op and "row 1, column 23" in tree.op
    assert tree == tree_of("linear", 96, rows=3, row=1, columns=24, column=23, dtype=torch.bfloat16)
    assert bitwise_equal(layer.weight.detach(), before)


@pytest.mark.parametrize(
    ("fn", "name"), [(torch.mm, "mm"), (F.linear, "linear"), (F.softmax, "softmax"), (F.rms_norm, "rms_norm")]
)
def test_functions_of_torch_are_known_by_name(fn, name):
    assert tree_of(fn, 32, rows=2).op == tree_of(name, 32, rows=2).op


# ------------------------------------------------------------------------------------------------- what does not replay
def other_order_for_small_numbers(x: Tensor) -> Tensor:
    order = list(range(len(x)))
    return one_by_one(x, order if float(x.abs().max()) > 2.0**50 or len(x.unique()) < 4 else order[::-1])


def compensated(x: Tensor) -> Tensor:
    """Kahan's sum, which is no tree: each addition mends the last one's rounding."""
    total, lost = x[0] * 0, x[0] * 0
    for term in x:
        mended = term - lost
        new = total + mended
        lost = (new - total) - mended
        total = new
    return total


def test_a_tree_that_does_not_replay_is_labelled():
    tree = tree_of(other_order_for_small_numbers, 32)
    assert not tree.is_confirmed and tree.reproduced < tree.trials == 30
    words = f"NOT CONFIRMED: replayed on random inputs, it gives the op's bits in {tree.reproduced} of 30"
    assert words in tree.describe() and words in str(tree)
    assert "<strong>not confirmed</strong>" in tree._repr_html_()
    assert tree.to_json()["reproduced"] == tree.reproduced
    assert "not confirmed" in detlab.viz.draw_tree(tree).layout.title.text


@pytest.mark.parametrize("fn", [compensated, lambda x: one_by_one(x.sort().values, list(range(len(x))))])
def test_what_only_looks_like_a_tree_is_not_confirmed(fn):
    """Kahan's sum, and a sum in the order of size: masks see a tree, the replay sees that it is none."""
    tree = tree_of(fn, 24)
    assert not tree.is_confirmed and "NOT CONFIRMED" in tree.describe()


def test_bits_that_do_not_show_the_order_confirm_nothing():
    tree = tree_of("sum(-1)", 24)
    blind = replace(tree, control=tree.trials)
    assert not blind.is_confirmed and "these bits do not show the order" in blind.describe()


# ------------------------------------------------------------------------------------------------------------- the type
def test_trees_are_equal_up_to_an_exchange_of_children():
    a = AccumulationTree.from_nested(((0, 1), (2, (3, 4))))
    b = AccumulationTree.from_nested((((4, 3), 2), (1, 0)), op="another", trials=3)
    assert a == b and hash(a) == hash(b) and a.signature == b.signature and a.nodes == b.nodes
    assert a != AccumulationTree.from_nested(((0, 2), (1, (3, 4))))
    assert a != AccumulationTree.from_nested((0, 1)) and a != "a tree"
    assert (a.depth, a.arity, a.n) == (3, 2, 5)
    assert AccumulationTree.from_nested(((0, 1, 2), 3)) != AccumulationTree.from_nested((((0, 1), 2), 3))


def test_json_comes_back_and_a_changed_tree_is_refused():
    tree = tree_of("mm", 40, rows=2)
    data = tree.to_json()
    back = AccumulationTree.from_json(data)
    assert back == tree and (back.arithmetic, back.reproduced, back.op) == (tree.arithmetic, 30, tree.op)
    data["nodes"][0] = [0, 2]
    with pytest.raises(UsageError, match="belongs to one parent|it was changed|one root"):
        AccumulationTree.from_json(data)
    data = tree.to_json() | {"signature": "n40-d1-0000000000"}
    with pytest.raises(UsageError, match="its signature is n40-d1-0000000000, and its nodes give"):
        AccumulationTree.from_json(data)
    with pytest.raises(UsageError, match="needs 'n' and 'nodes'"):
        AccumulationTree.from_json({"n": 3})


@pytest.mark.parametrize(
    ("n", "nodes", "says"),
    [
        (2, [(0,)], "adds at least two children"),
        (3, [(0, 1)], r"one root; these have no parent: \[2, 3\]"),
        (3, [(0, 1), (0, 3)], "belongs to one parent"),
        (2, [(0, 5)], "has the child 5"),
        (2, [(0, -1)], "has the child -1"),
        (-1, [], "at least 0; got n=-1"),
    ],
)
def test_nodes_that_are_no_tree_are_refused(n, nodes, says):
    with pytest.raises(UsageError, match=says):
        AccumulationTree.from_nodes(n, nodes)


def test_replay_takes_rows_and_refuses_other_shapes():
    tree = AccumulationTree.from_nested((2, (0, 1)))
    rows = draw((4, 3), torch.float32, torch.Generator().manual_seed(0))
    assert bitwise_equal(tree.replay(rows), rows[:, 2] + (rows[:, 0] + rows[:, 1]))
    assert tree.replay(rows[0]).shape == () and tree.replay(rows, rows).shape == (4,)
    assert tree.replay(rows, arithmetic=Arithmetic("bfloat16")).dtype == torch.bfloat16
    assert tree.replay(torch.tensor([1.0, -math.inf, math.inf])).isnan()
    assert AccumulationTree.from_nodes(0, []).replay(torch.zeros(0)) == 0
    for wrong in (torch.zeros(4), torch.zeros(1, 1, 3)):
        with pytest.raises(UsageError, match="replay needs 3 terms on the last axis"):
            tree.replay(wrong)
    with pytest.raises(UsageError, match="got accumulator='int8'"):
        Arithmetic("int8")


# ----------------------------------------------------------------------------------------------------------- words, drawings
def lanes(count: int, ways: int, length: int) -> AccumulationTree:
    """``count`` lanes of ``ways`` unrolled ways, each a strided chain; ways and lanes are added one after another."""

    def chain(items: list) -> object:
        made = items[0]
        for item in items[1:]:
            made = (made, item)
        return made

    def way(lane: int, at: int) -> object:
        return chain([lane + count * at + count * ways * i for i in range(length)])

    return AccumulationTree.from_nested(chain([chain([way(lane, at) for at in range(ways)]) for lane in range(count)]))


def test_lanes_and_blocks_in_words():
    assert lanes(8, 4, 16).describe() == (
        "8 strided lanes added one after another, each of 4 unrolled ways (8 apart) added one after another, "
        "each a chain of 16 terms 32 apart"
    )
    nested: object = None
    for start, length in ((0, 192), (192, 192), (384, 128)):
        block: object = start
        for term in range(start + 1, start + length):
            block = (block, term)
        nested = block if nested is None else (nested, block)
    blocks = AccumulationTree.from_nested(nested)
    assert blocks.describe() == "blocks of 192+192+128, each a chain of consecutive terms, added one after another"
    level: list = list(range(16))
    while len(level) > 1:
        level = [(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    assert AccumulationTree.from_nested(level[0]).describe() == "16 terms added in pairs (1, 2, 4, then 8 apart)"
    assert "4 terms added at once" in AccumulationTree.from_nested(((0, 1, 2, 3), (4, 5, 6, 7))).describe()


def test_equal_subtrees_are_drawn_once():
    tree = lanes(8, 4, 32)
    assert tree.n == 1024
    assert str(tree).splitlines()[2:] == [
        "sum of 1024 terms, one after another",
        "└─ 8 × sum of 128 terms, one after another · from 0, 1, 2, … 7",
        "   └─ 4 × chain of 32: 0, 32, 64, … 992 · from 0, 8, 16, 24",
    ]
    for n in (16, 300, 1024):
        shapeless = AccumulationTree.from_nodes(n, random_nodes(n, 5))
        assert len(str(shapeless).splitlines()) <= 43 and len(shapeless.describe()) < 4000
    for seed in range(40):  # every tree has words, and a drawing that holds all of its terms
        n = seed + 1
        tree = AccumulationTree.from_nodes(n, random_nodes(n, seed, widest=2 + seed % 3))
        assert tree.describe() and str(tree)


def test_names_are_escaped_in_html():
    def fn(x):
        return x.sum()

    fn.__name__ = "<b>&"
    page = tree_of(fn, 4)._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;&amp;" in page


@pytest.mark.parametrize("op", ["sum(-1)", "sum(0)", "mm", "linear", "attention"])
def test_1024_terms_take_less_than_ten_seconds(op):
    start = time.perf_counter()
    tree = tree_of(op, 1024)
    assert tree.is_confirmed and time.perf_counter() - start < 10  # a fraction of a second where nothing else runs
