"""Adds numbers in the order of a tree, with the roundings of a stated arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from detlab.errors import UsageError

NONE, ROUNDED, FUSED, BLOCKS = "none", "rounded", "fused", "blocks"
_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


@dataclass(frozen=True)
class Arithmetic:
    """How a tree's sums and products are rounded.

    Attributes:
        accumulator: dtype in which sums are kept: "float16", "bfloat16", "float32" or "float64".
        products: "none" (terms are added as they are), "rounded" (each product is rounded, then added) or "fused" (a product
            that meets a running sum is added to it unrounded, by one fused multiply-add; the first product of a chain is
            rounded) or "blocks" (fused, but a product that is added to a sum of blocks is a block of its own, and rounded).
        starts_last: in a fused sum of two products, the later term is the one that is rounded.
        finish: what the op does with the sum: "", "divided by n", "times 1/n", ...
    """

    accumulator: str = "float32"
    products: str = NONE
    starts_last: bool = False
    finish: str = ""

    def __post_init__(self) -> None:
        if self.accumulator not in _DTYPES or self.products not in (NONE, ROUNDED, FUSED, BLOCKS):
            raise UsageError(
                f"an arithmetic has an accumulator of {', '.join(_DTYPES)} and products none, rounded, fused or blocks; got "
                f"accumulator={self.accumulator!r}, products={self.products!r}."
            )

    @property
    def words(self) -> str:
        """One phrase: "float32 adds of rounded products"."""
        what = {
            NONE: "adds", ROUNDED: "adds of rounded products", FUSED: "fused multiply-adds",
            BLOCKS: "fused multiply-adds, a lone product after blocks rounded",
        }[self.products]  # fmt: skip
        return f"{self.accumulator} {what}" + (f", {self.finish}" if self.finish else "")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def evaluate(n: int, nodes: Sequence[Sequence[int]], how: Arithmetic, terms: Tensor, others: Tensor | None) -> Tensor:
    """Evaluates a tree on many rows at once.

    Args:
        n, nodes: as in `AccumulationTree`.
        how: the roundings.
        terms: [num_rows, n].
        others: [num_rows, n], second factors, or None.

    Returns:
        [num_rows] in the accumulator's dtype. A node of more than two children is rounded once, from its exact sum.
    """
    kind = _DTYPES[how.accumulator]
    if n == 0:
        return torch.zeros(len(terms), dtype=kind)
    left, right = terms.detach().cpu().T, None if others is None else others.detach().cpu().T
    if right is None or how.products == NONE:
        values: list[Tensor] = list(left.to(kind))
    else:
        values = list((left.double() * right.double()).to(kind))  # products of up to 26 bits each are exact in float64
    for children in nodes:
        if len(children) > 2:
            values.append(_exact_sum([values[child] for child in children]))
            continue
        a, b = children
        product = _fused_product(n, nodes, a, b, how) if right is not None else -1
        if product < 0 or right is None:
            values.append(values[a] + values[b])
        else:
            values.append(fused_multiply_add(left[product], right[product], values[a if product == b else b]))
    return values[-1]


def _fused_product(n: int, nodes: Sequence[Sequence[int]], a: int, b: int, how: Arithmetic) -> int:
    """Which of two children is a product that is added unrounded; -1 where neither is.

    A product is fused into a running sum. Where two products meet, one of them, rounded, was the running sum.
    """
    if how.products not in (FUSED, BLOCKS) or min(a, b) >= n:
        return -1
    if max(a, b) < n:
        return min(a, b) if how.starts_last else max(a, b)
    if how.products == BLOCKS and min(nodes[max(a, b) - n]) >= n:
        return -1
    return min(a, b)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c``, rounded once to the dtype of ``c`` (float32 or narrower; factors of at most 26 bits).

    The product is exact in float64. Its sum with ``c`` is rounded to odd there, so that the second rounding, to at most 24
    bits, gives what one rounding would have given. NaN and Inf follow IEEE 754.

    Source: S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE Trans. Computers 57 (2008).
    """
    product, start = a.double() * b.double(), c.double()
    total = product + start
    moved = total - product
    error = (product - (total - moved)) + (start - moved)  # exact: Knuth's two-sum
    pattern = total.view(torch.int64)
    is_even = (pattern & 1) == 0
    step = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & is_even & total.isfinite(), pattern + step, pattern)
    result: Tensor = odd.view(torch.float64).to(c.dtype)
    return result


def _exact_sum(parts: list[Tensor]) -> Tensor:
    columns = torch.stack(parts, 1).double().tolist()
    return torch.tensor([_fsum(column) for column in columns], dtype=torch.float64).to(parts[0].dtype)


def _fsum(column: list[float]) -> float:
    return math.fsum(column) if all(map(math.isfinite, column)) else sum(column)


#: What is done with the sum of each row: takes the totals [num_rows], gives the op's outputs [num_rows].
Finish = Callable[[Tensor], Tensor]


@dataclass
class Trials:
    """Random inputs of an op, and what it made of them.

    Attributes:
        terms: [num_trials, n], the summands or first factors.
        others: [num_trials, n] or None.
        actual, again: [num_trials], the op's outputs, and those of a second call on the same inputs.
        finishes: what the op may do with the sum, by name; tried in order.
    """

    terms: Tensor
    others: Tensor | None
    actual: Tensor
    again: Tensor
    finishes: dict[str, Finish]
