"""A linear layer whose terms are spread over ranks, as tensor parallelism spreads them, and summed in any order.

    each rank   holds some columns of the weight and the same columns of x
    once        the ranks agree on the exponent of each row of x: the largest of theirs (a maximum has no order)
    each rank   T of its own terms, a whole number below 2**50
    once        the ranks' T are added: whole numbers, so that neither how the terms were dealt out nor who adds first matters

The sum is T of the whole layer, and so is what is made of it. The ranks here are parts of one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from detlab.engine.exact.digits import rows_of
from detlab.engine.exact.linear import ExactLinear, Prepared
from detlab.errors import UsageError

__all__ = ["SplitLinear"]


class SplitLinear:
    """`ExactLinear`, computed in parts.

    Attributes:
        columns: what each rank holds, int64 index tensors that share out all K columns.
    """

    def __init__(self, weight: Prepared, bias: Tensor | None, columns: Sequence[Tensor], kernel: str) -> None:
        """Deals out the columns of a weight.

        Args:
            weight: digits [4, N, K].
            bias: [N] or None; added once, to the sum.
            columns: for each rank, in the order in which their sums are added; every column once.
            kernel: of `detlab.engine.exact.linear.KERNELS`.

        Raises:
            UsageError: a column is missing or there twice.
        """
        size = weight.digits.shape[2]
        dealt = torch.cat(list(columns)).sort().values if columns else torch.empty(0, dtype=torch.int64)
        if not torch.equal(dealt, torch.arange(size)):
            raise UsageError(f"a split deals out each of {size} columns once; got {len(dealt)} in {len(columns)} parts.")
        self.columns = [part for part in columns if len(part)]
        ranks = [Prepared(weight.digits[:, :, part], weight.exponents) for part in self.columns]
        # The bias is of the sum, not of a rank's; the first rank stands for all when the sum is scaled.
        self.ranks = [ExactLinear([rank], [None if at else bias], kernel) for at, rank in enumerate(ranks)]

    def __call__(self, x: Tensor) -> Tensor:
        """As `ExactLinear`: [..., K] to [..., N] in x's dtype."""
        rows = rows_of(x.reshape(-1, x.shape[-1]))
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for rank, part in zip(self.ranks, self.columns, strict=True):
            total = total + rank.sums(rows.digits[:, :, part].contiguous())
        out = self.ranks[0].result(total, rows, x.dtype)
        if rows.bad is not None:
            out.masked_fill_(rows.bad, float("nan"))
        return out.view(*x.shape[:-1], out.shape[-1])
