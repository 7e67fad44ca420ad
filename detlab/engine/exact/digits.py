"""Rows of floats as whole numbers: one power of two a row, 27 bits, four digits.

    E = exponent of the row's largest magnitude: all |x| < 2**E; at least -98
    q = x * 2**(27 - E), rounded to the nearest whole number, ties to even: |q| <= 2**27
    q = d0 * 128**3 + d1 * 128**2 + d2 * 128 + d3, digits within -64..64 (d1, d2, d3 within -64..63)

A row's scale depends on the row alone. It is read off the bits of its largest element, and all steps are exact but the one
rounding, which is at most half of 2**(E - 27). Below 2**-125 everything is rounded to zero, subnormal numbers among it, so
that a machine which flushes them computes the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from detlab.engine.canonical import unobserved
from detlab.engine.exact import compiled
from detlab.engine.exact.constants import DIGIT_OFFSET, DIGITS, LEAST_FIELD, NOT_FINITE, ROW_BITS

__all__ = ["Rows", "pow2", "rows_of", "signed", "weight_digits"]



@lru_cache(maxsize=8)
@unobserved
def _cutters(device: torch.device) -> tuple[Tensor, Tensor]:
    """What cuts the digits out of a number: shifts, and the masks after them."""
    shifts = torch.tensor([21, 14, 7, 0], dtype=torch.int32, device=device).view(DIGITS, 1, 1)
    masks = torch.tensor([255, 127, 127, 127], dtype=torch.uint8, device=device).view(DIGITS, 1, 1)
    return shifts, masks


def pow2(exponents: Tensor) -> Tensor:
    """2**e as float64, from whole numbers -1022..1023, by writing the exponent's bits."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


class Rows:
    """Rows in digits, made once for all products that take them.

    Attributes:
        digits: uint8 [4, M, K]; digit + 64, the most significant first.
        scale: float64 [M, 1], 2**(E - 27): what the sum of digit products is multiplied by, beside the weight's.
        bad: bool [M, 1], rows with a NaN or an infinity, whose digits are those of zeros; None where there is none.
    """

    __slots__ = ("bad", "digits", "scale")

    def __init__(self, digits: Tensor, scale: Tensor, bad: Tensor | None) -> None:
        self.digits, self.scale, self.bad = digits, scale, bad


def _quantise(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Float32 [M, K] as float32 whole numbers, with 2**(27 - E) of the rows, float32 [M, 1], and bad rows."""
    largest = x.abs().amax(-1, keepdim=True).view(torch.int32) & 0x7FFFFFFF  # a NaN, which may come out negative, is largest
    field = (largest >> 23).clamp_(LEAST_FIELD)
    bad = None
    if int(field if len(field) == 1 else field.max()) == NOT_FINITE:
        bad = field == NOT_FINITE
        x = x.masked_fill(bad, 0.0)  # before any cast to integers
        field = field.masked_fill(bad, LEAST_FIELD)
    scale = ((ROW_BITS + 126 + 127 - field) << 23).view(torch.float32)
    return (x * scale).round_(), scale, bad


def rows_of(x: Tensor) -> Rows:
    """Cuts rows into digits.

    Args:
        x: [M, K], float32, bfloat16 or float16; M and K at least 1.
    """
    if compiled.serves_rows(x):
        digits, scale, bad = compiled.cut(x)
        return Rows(digits, scale, bad if bool(bad.any()) else None)
    q, scale, bad_rows = _quantise(x.float().contiguous())
    shifts, masks = _cutters(x.device)
    digits = (q.to(torch.int32).add_(DIGIT_OFFSET) >> shifts).to(torch.uint8).bitwise_and_(masks)
    return Rows(digits, scale.double().reciprocal_(), bad_rows)


def signed(digits: Tensor) -> Tensor:
    """Digits of `Rows` as int8 numbers within -64..64."""
    return digits.view(torch.int8) - 64  # 128 is -128 as int8, and -192 wraps to 64


def weight_digits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Digits of a weight's rows.

    Args:
        weight: [N, K]; all finite.

    Returns:
        int8 [4, N, K], and the rows' exponents E, int32 [N].
    """
    digits = torch.empty(DIGITS, *weight.shape, dtype=torch.int8, device=weight.device)
    exponents = torch.empty(weight.shape[0], dtype=torch.int32, device=weight.device)
    step = max(1, (1 << 20) // weight.shape[1])  # a piece at a time: what is made on the way is several times the digits
    for start in range(0, weight.shape[0], step):
        rows = rows_of(weight[start : start + step])
        digits[:, start : start + step] = signed(rows.digits)
        exponents[start : start + step] = ROW_BITS - 1023 + (rows.scale[:, 0].view(torch.int64) >> 52)
    return digits, exponents
