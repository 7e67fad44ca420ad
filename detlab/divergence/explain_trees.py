"""The accumulation trees of an op as it was really called: same shapes, same strides, the same place in the output."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from detlab.divergence.accumulation import accumulation_tree, replayed
from detlab.divergence.accumulation_replay import BLOCKS, FUSED, ROUNDED, Trials
from detlab.divergence.explain_attention import Attention
from detlab.divergence.explain_factors import group_of
from detlab.divergence.replay_op import Operation, Row, realigned
from detlab.divergence.summands import draw_many, plain
from detlab.divergence.trees import AccumulationTree
from detlab.errors import DetlabError

#: Seconds that the recovery of one tree may take, by the time of one call.
MOST_SECONDS = 6.0
#: Random inputs on which a tree is replayed.
NUM_TRIALS = 10

Terms = tuple[int, torch.dtype, Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor] | None]


def tree_of(op: Operation, row: Row, element: int) -> tuple[AccumulationTree | None, str]:
    """Recovers the order in which one output element of a call is added up.

    Args:
        op: the call.
        row: the output's row.
        element: number of the element within the row.

    Returns:
        The tree, or None with the reason: the op is no sum, or it would take too long.
    """
    with op.settings():  # once: changing the number of threads for every call is slow
        return _tree_of(replace(op, settings=nullcontext), row, element)


def _tree_of(op: Operation, row: Row, element: int) -> tuple[AccumulationTree | None, str]:
    found = _terms(op, row, int(row.at[element]))
    if found is None:
        return None, f"{op.name} is not a sum whose terms can be set"
    n, dtype, fn, products = found
    if n < 2:
        return None, "there is one term only"
    terms = torch.ones(n, dtype=dtype)
    with torch.no_grad():
        seconds = min(_seconds(fn, terms) for _ in range(5)) * 4 * n
    if seconds > MOST_SECONDS:
        return None, f"recovering {n} terms would take about {seconds:.0f} s"
    try:
        tree = accumulation_tree(fn, n, dtype=dtype, trials=NUM_TRIALS)
    except DetlabError as error:
        return None, str(error)
    if products is not None:  # both factors at random: only then can rounded and fused products be told apart
        with torch.no_grad():
            known = replayed(tree, _trials(n, dtype, products))
        tree = known if known.is_confirmed else tree
    return tree, ""


def _trials(n: int, dtype: torch.dtype, products: Callable[[Tensor, Tensor], Tensor]) -> Trials:
    pairs = draw_many(NUM_TRIALS, [(n,), (n,)], [0, 0], dtype, torch.Generator().manual_seed(0))
    actual, again = (torch.stack([products(x, y) for x, y in pairs]) for _ in range(2))
    return Trials(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]), actual, again, {"": plain})


def _seconds(fn: Callable[[Tensor], Tensor], terms: Tensor) -> float:
    started = time.perf_counter()
    fn(terms)
    return time.perf_counter() - started


def _terms(op: Operation, row: Row, at: int) -> Terms | None:
    """(number of terms, their dtype, a function that adds them in this call, one that adds products of two factors)."""
    where = [int(c) for c in torch.unravel_index(torch.tensor(at), list(op.shape))]
    name = op.name
    if name == "_grouped_mm" and op.args[0].is_floating_point():
        found = group_of(op, row)
        if found is None:
            return None
        expert, count, place = found
        x, w = (_zeros_like(t) for t in (op.args[0][:count], op.args[1][expert : expert + 1]))  # the other experts' take time
        ends = torch.tensor([count], dtype=torch.int32)
        base = replace(op, args=(x, w), kwargs={"offs": ends}, shape=(count, op.shape[1]))
        return _product_terms(base, x[place], w[0, :, where[1]], place * op.shape[1] + where[1])
    if name in ("mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn._linear_pointwise"):
        shift = int(name in ("addmm", "baddbmm"))
        x, w = op.args[shift], op.args[shift + 1]
        if not isinstance(w, Tensor) or w.is_mkldnn or not x.is_floating_point():
            return None
        lines = tuple(where[:-1])
        column = (*where[:-2], slice(None), where[-1]) if "mm" in name else (where[-1], slice(None))
        base = op.with_tensors(lambda place, t: _zeros_like(t))
        return _product_terms(base, base.args[shift][lines], base.args[shift + 1][column], at)
    if name in ("sum", "mean"):
        x = op.args[0]
        dims = op.named("dim")
        if not isinstance(dims, (list, tuple)) or [d % x.ndim for d in dims] != [x.ndim - 1] or not x.is_floating_point():
            return None
        base = op.with_tensors(lambda place, t: _zeros_like(t))
        lines = tuple(where[: x.ndim - 1])
        return x.shape[-1], x.dtype, _setting(base, base.args[0][lines], at), None
    foreign = [t for _, t in op.tensors()]
    if "." in name and len(foreign) == 1 and foreign[0].is_floating_point():  # another library's sum over its last axis
        x = foreign[0]
        if x.ndim - 1 <= len(op.shape) <= x.ndim and (*x.shape[:-1], 1)[: len(op.shape)] == op.shape:
            base = op.with_tensors(lambda place, t: _zeros_like(t))
            (terms,) = [t for _, t in base.tensors()]
            return x.shape[-1], x.dtype, _setting(base, terms[tuple(where[: x.ndim - 1])], at), None
    attention = Attention.of(op, row)
    if attention is not None:
        mask = op.named("attn_mask")
        base = op.with_tensors(lambda place, t: t if t is mask else _zeros_like(t))
        batch, head, _, dim = where
        visible = attention.visible
        shared = op.shape[1] // base.args[2].shape[1]  # query heads that share one head of values
        values = base.args[2][batch, head // shared, int(visible[0]) : int(visible[-1]) + 1, dim]
        return len(visible), values.dtype, _setting(base, values, at), None
    return None


def _product_terms(op: Operation, terms: Tensor, weights: Tensor, at: int) -> Terms:
    """Of a product of matrices: a row of one and a column of the other, which is 1 for the sum alone."""
    weights.fill_(1.0)
    added = _setting(op, terms, at)

    def products(first: Tensor, second: Tensor) -> Tensor:
        weights.copy_(second)
        return added(first)

    return len(terms), terms.dtype, added, products


def _setting(op: Operation, place: Tensor, at: int) -> Callable[[Tensor], Tensor]:
    def added(terms: Tensor) -> Tensor:
        place.copy_(terms)
        return op.run().reshape(-1)[at]

    return added


def _zeros_like(tensor: Tensor) -> Tensor:
    """Zeros with the same strides and alignment; what an expanded tensor repeats is one element still."""
    if tensor.layout != torch.strided:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
    return realigned(made, tensor.data_ptr() % 64)


def step_of(tree: AccumulationTree) -> int:
    """How far apart terms lie that are added one after another, most often: 1 for a chain, the lanes of a vector else."""
    last: list[int | None] = list(range(tree.n))
    steps: Counter[int] = Counter()
    for children in tree.nodes:
        leaves = [child for child in children if child < tree.n]
        inner = [child for child in children if child >= tree.n]
        before = last[inner[0]] if len(inner) == 1 else None
        if len(leaves) == 1 and before is not None:
            steps[abs(leaves[0] - before)] += 1
        elif len(leaves) >= 2:
            steps[abs(leaves[1] - leaves[0])] += 1
        last.append(leaves[-1] if leaves and len(inner) < 2 else None)
    return steps.most_common(1)[0][0] if steps else 0


def products_of(tree: AccumulationTree) -> str:
    """How the kernel behind a confirmed tree multiplies and adds, in words; "" where that was not told."""
    if tree.arithmetic is None or not tree.is_confirmed:
        return ""
    fused = "adds each product unrounded (fused multiply-add)"
    return {ROUNDED: "rounds each product, then adds it", FUSED: fused, BLOCKS: fused}.get(tree.arithmetic.products, "")
