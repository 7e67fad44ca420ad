"""Data that show the order of additions itself, where random data would hide it.

Two kernels that add the same terms in two orders agree on nearly every element of random data in 16 bits: the sum is large,
what the orders do to it is small, and rounding hides it. Here the exact sum is zero: every term comes a second time with the
other sign, at another place. All that is left of such a sum is what the additions rounded away, in the order in which they were
made. Data of this kind are drawn from integers, so that they have the same bits on every machine.

How often two different orders agree on an element by accident depends on how much of the order differs. Measured for sums of
576 terms, in float32 and in bfloat16 (whose products have 16 bits): two chains for one, 0.1 % and 1 %; the last 16 terms
apart, 3 % and 19 %; the last six, 8 % and 57 %; the last two, 47 % and 97 %. A class is therefore tried with many rows at
every place of a call (`classes`): an order that differs in all columns cannot be missed, and two chains for one in a single
element of a call of up to 32 rows are missed with a probability of 0.05 ** 32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Product", "cancelling", "cancelling_rows", "draw", "norm_rows", "powers", "summands"]

_COLUMNS = 509  # columns of a weight that are drawn; a larger weight repeats them. A prime, so that no tile repeats with them
_SPREADS = (8, 10, 12, 6)  # magnitudes of a probe's rows reach over 2**-s .. 2**s: orders show at various widths


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Uniform numbers in (-1, 1) whose bits are the same on every machine; float32 first, then rounded to the dtype."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
    return ((2 * integers + 1).float() / 2**16).to(device=device, dtype=dtype)


def powers(*shape: int, least: int, most: int, seed: int) -> Tensor:
    """Powers of two, float32, with exponents drawn from least..most; made of their bits, so that no function is called."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(least, most + 1, shape, generator=generator, dtype=torch.int32)
    return ((exponents + 127) << 23).view(torch.float32)


class Product(NamedTuple):
    """A product whose exact result is zero.

    Attributes:
        x: [rows, K].
        weight: [N, K].
        bias: [N], undone by one term of the product; None where none was asked for.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None


def cancelling_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows whose terms cancel in pairs at scattered places, [rows, width]; of an odd width one term is zero."""
    half = width // 2
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed + 3))
    v = _spread(rows, half, dtype, seed)
    mirror = torch.randperm(half, generator=torch.Generator().manual_seed(seed + 4))
    return torch.cat([v, -v[:, mirror], v.new_zeros(rows, width - 2 * half)], 1)[:, order]


def _spread(rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers whose magnitudes reach over more powers of two in some rows than in others."""
    spreads = [min(s, 6) if dtype == torch.float16 else s for s in _SPREADS]
    v = draw(rows, width, dtype=torch.float32, seed=seed)
    for number, s in enumerate(spreads):
        part = v[number :: len(spreads)]
        part *= powers(*part.shape, least=-s, most=s, seed=seed + 7 + number)
    return v.to(dtype)


def cancelling(rows: int, width: int, outputs: int, dtype: torch.dtype, *, has_bias: bool = False, seed: int = 0) -> Product:
    """A product x @ W.T + b whose exact result is zero in every element.

    Args:
        rows: of x; they differ in how far their magnitudes reach.
        width: K.
        outputs: N.
        dtype: of all three.
        has_bias: adds a bias as large as the terms; one term of the product is its negative.
        seed: of the numbers.
    """
    half = (width - has_bias) // 2
    columns = min(outputs, _COLUMNS)
    v = _spread(rows, half, dtype, seed)
    w = draw(columns, half, dtype=dtype, seed=seed + 1)
    mirror = torch.randperm(half, generator=torch.Generator().manual_seed(seed + 2))
    x, weight = torch.cat([v, -v[:, mirror]], 1), torch.cat([w, w[:, mirror]], 1)
    spare = width - 2 * half
    bias = None
    if spare:
        more_x, more_w = x.new_zeros(rows, spare), weight.new_zeros(columns, spare)
        if has_bias:
            bias = draw(columns, dtype=torch.float32, seed=seed + 5) * powers(columns, least=-2, most=2, seed=seed + 6)
            bias = bias.to(dtype)
            more_x[:, 0], more_w[:, 0] = 1, -bias
        x, weight = torch.cat([x, more_x], 1), torch.cat([weight, more_w], 1)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed + 3))
    copies = -(-outputs // columns)
    weight = weight[:, order].repeat(copies, 1)[:outputs].contiguous()
    if bias is not None:
        bias = bias.repeat(copies)[:outputs].contiguous()
    return Product(x[:, order].contiguous(), weight, bias)


def summands(rows: int, width: int, *, seed: int = 0) -> Tensor:
    """Non-negative float32 rows whose sum shows its order: one 1 at any place, the others under half a unit of its last bit.

    Each of these is lost where it is added to the 1, and counts where it meets others first: the sum tells how many did.
    """
    generator = torch.Generator().manual_seed(seed)
    small = 2.0**-25 * (1 + torch.randint(0, 2**15, (rows, width), generator=generator, dtype=torch.int32).float() / 2**16)
    places = torch.randint(0, max(1, width), (rows,), generator=generator)
    small[torch.arange(rows), places] = 1.0
    return small


def norm_rows(rows: int, width: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Rows whose mean and whose sum of squares show their order, [rows, width]: of three kinds, in turn.

    Sums of the first kind are zero, sums of squares of the second are those of `summands`; the third is uniform.
    """
    made = draw(rows, width, dtype=torch.float32, seed=seed + 8)
    made[0::3] = cancelling_rows(len(made[0::3]), width, torch.float32, seed=seed)
    made[1::3] = summands(len(made[1::3]), width, seed=seed).sqrt() * made[1::3].sign()
    return made.to(dtype)
