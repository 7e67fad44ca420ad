"""Linear layers as exact sums: ``y[m, n] = round(2**(E[m] + E[n] - 33) * T[m, n])``, T a whole number.

    T = sum over k, and over i + j <= 3, of x_i[k] * w_j[k] * 128**(3 - i - j)

of the digits of `detlab.engine.exact.digits`. The other six products of digits, below 2**-27 of the largest terms, are left
out by the spec. T is below 2**50, and what three kernels compute on the way to it are whole numbers that their arithmetic
holds exactly, so that they agree with each other, and each with itself in any order, number of threads, and batch:

    packed   oneDNN's int8 product with weights in its own layout; its float32 sums stay within 2**24
    int8     torch._int_mm, int32
    float64  a float64 product of digits of w with prefixes of x, below 2**53

On CPUs without VNNI an int8 product is a sum of two 16-bit products of an unsigned and a signed number, saturated at 32767.
Digits are shifted by 64 (packed: 0..128) or 128 (oneDNN's own: 64..192) to be unsigned, and 2 * 192 * 64 = 24576.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab.engine.canonical import unobserved
from detlab.engine.exact import compiled
from detlab.engine.exact.constants import DIGITS, MOST_TERMS
from detlab.engine.exact.digits import Rows, pow2, rows_of, signed, weight_digits
from detlab.engine.exact.shown import shown
from detlab.errors import UsageError

__all__ = ["KERNELS", "SPEC", "ExactLinear", "Prepared", "Unprepared", "int_products", "prepare", "rounded"]

#: Names the function that is computed: other specs have other bits.
SPEC = "tri4"
KERNELS = ("packed", "int8", "float64")
_FLOAT32_INTEGERS = 1 << 24  # float32 holds every whole number up to it
_WIDEST = 8192  # columns of one product
_ROWS = 128  # rows of one product, times four digits
_CACHED = 1 << 20  # results of one product: they stay in the cache until they are put together


@dataclass(frozen=True)
class Prepared:
    """A weight in digits.

    Attributes:
        digits: int8 [4, N, K], the most significant first.
        exponents: int32 [N].
    """

    digits: Tensor
    exponents: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.digits.shape[1], self.digits.shape[2]

    def rows(self, start: int, stop: int) -> Prepared:
        """The weight's rows start..stop."""
        return Prepared(self.digits[:, start:stop], self.exponents[start:stop])


class Unprepared:
    """A weight, [N, K], that is cut into digits a few rows at a time, so that all its digits are never there at once."""

    def __init__(self, weight: Tensor, what: str = "linear") -> None:
        """Looks at the weight.

        Raises:
            UsageError: it has a NaN or an infinity, or more columns than the bits allow.
        """
        if weight.shape[1] > MOST_TERMS:
            raise UsageError(
                f"{what} sums over {weight.shape[1]} terms; the exact tier's integers hold {MOST_TERMS}. Split the layer."
            )
        if not bool(torch.isfinite(weight).all()):
            count = int((~torch.isfinite(weight)).sum())
            raise UsageError(f"{what}: the weight has {count} NaN or infinite values; the exact tier needs finite weights.")
        self.weight = weight.detach()

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.weight.shape[0], self.weight.shape[1]

    def rows(self, start: int, stop: int) -> Prepared:
        """The weight's rows start..stop, in digits."""
        return Prepared(*weight_digits(self.weight[start:stop]))


def prepare(weight: Tensor, what: str = "linear") -> Prepared:
    """Cuts a weight, [N, K], into digits.

    Raises:
        UsageError: it has a NaN or an infinity, or more columns than the bits allow.
    """
    return Unprepared(weight, what).rows(0, len(weight))


def _rows_of_all(weights: Sequence[Prepared | Unprepared], start: int, stop: int) -> Prepared:
    """Rows start..stop of weights, one after the other."""
    found, first = [], 0
    for weight in weights:
        last = first + weight.shape[0]
        if first < stop and start < last:
            found.append(weight.rows(max(start - first, 0), min(stop, last) - first))
        first = last
    if len(found) == 1:
        return found[0]
    return Prepared(torch.cat([w.digits for w in found], 1), torch.cat([w.exponents for w in found]))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 as the model's dtype: rounded to float32, and from there to 16 bits."""
    return x.float() if dtype == torch.float32 else x.float().to(dtype)


# ------------------------------------------------------------------------------------------------------------ kernels
def int_products(digits: Tensor, weight: Sequence[Tensor]) -> Tensor:
    """Sums of digit products by ``torch._int_mm``.

    Args:
        digits: int8 [4 M, K], digit by digit.
        weight: four int8 [N, K].

    Returns:
        int32 [4 M, N]; block d is the sum over i + j = d of x_i . w_j.
    """
    rows = digits.shape[0] // DIGITS
    sums = torch._int_mm(digits, weight[0].t())
    for j in range(1, DIGITS):
        sums[j * rows :] += torch._int_mm(digits[: (DIGITS - j) * rows], weight[j].t())
    return sums


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed


def packed_products(digits: Tensor, weight: Sequence[Tensor], ones: Tensor, zeros: Tensor) -> Tensor:
    """`int_products` of digits + 64, uint8 [4 M, K], with packed weights; float32 [4 M, N]."""
    rows = digits.shape[0] // DIGITS
    sums: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        digits, 1.0, 64, weight[0], ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    product = torch.ops.onednn.qlinear_pointwise.binary
    for j in range(1, DIGITS):
        product(digits[: (DIGITS - j) * rows], 1.0, 64, weight[j], ones, zeros, sums[j * rows :], None, 1.0, 0, torch.float32,
                1.0, 0, "sum", 1.0, "none", [], "")  # fmt: skip
    return sums


def float_products(digits: Tensor, weight: Sequence[Tensor]) -> Tensor:
    """T itself: digits of w times prefixes of x, as one float64 product; every sum on the way is below K * 2**34.

    Args:
        digits: uint8 [4, M, K].
        weight: four int8 [N, K].
    """
    prefixes = [signed(digits[0]).double()]
    for digit in digits[1:]:
        prefixes.append(prefixes[-1] * 128.0 + signed(digit).double())
    return torch.cat(prefixes[::-1], 1) @ torch.cat([w.double() for w in weight], 1).t()


@lru_cache(maxsize=8)
@unobserved
def _places(device: torch.device) -> Tensor:
    """What a digit is worth, float64 [1, 4]."""
    return torch.tensor([[128.0**3, 128.0**2, 128.0, 1.0]], dtype=torch.float64, device=device)


def _together(sums: Tensor) -> Tensor:
    """T, float64 [M, N], from its four blocks; T itself stays as it is."""
    if sums.dtype == torch.float64:
        return sums
    total = _places(sums.device) @ sums.double().view(DIGITS, -1)  # whole numbers below 2**50, in any order
    return total.view(-1, sums.shape[1])


# -------------------------------------------------------------------------------------------------------------- layer
class ExactLinear:
    """One weight, prepared for one kernel; or several weights that take the same input, one after the other.

    Attributes:
        kernel: of `KERNELS`.
    """

    def __init__(self, weights: Sequence[Prepared | Unprepared], biases: Sequence[Tensor | None], kernel: str) -> None:
        """Lays the weights out.

        Args:
            weights: of one K.
            biases: one for each weight, [N] or None.
            kernel: of `KERNELS`; what it computes is the same.
        """
        self.kernel = kernel
        self.sizes = [weight.shape[0] for weight in weights]
        self.num_out, self.num_in = sum(self.sizes), weights[0].shape[1]
        self._blocks: list[tuple[int, int, Callable[[Tensor], Tensor]]] = []
        exponents = []
        for start in range(0, self.num_out, _WIDEST):
            stop = min(self.num_out, start + _WIDEST)
            block = _rows_of_all(weights, start, stop)
            self._blocks.append((start, stop, self._product(block.digits)))
            exponents.append(block.exponents)
        self.scale = pow2(torch.cat(exponents) - 6)  # 2**(E - 6): the rest of 33
        self.bias = None
        if any(bias is not None for bias in biases):
            none = self.scale.new_zeros
            parts = [none(n) if b is None else b.detach().double() for n, b in zip(self.sizes, biases, strict=True)]
            self.bias = torch.cat(parts)

    def _product(self, digits: Tensor) -> Callable[[Tensor], Tensor]:
        """What computes of digits + 64, uint8 [4, M, K], T, float64 [M, N], or its four blocks, float32 or int32 [4 M, N]."""
        if self.kernel == "packed":
            return _packed(digits)
        planes = list(digits.unbind(0))
        if self.kernel == "int8" and digits.shape[2] == 1:  # torch._int_mm mistakes one column, transposed
            planes = [F.pad(plane, (0, 1)) for plane in planes]
            return lambda x: int_products(F.pad(signed(x).view(-1, 1), (0, 1)), planes)
        if self.kernel == "int8":
            return lambda x: int_products(signed(x).view(-1, x.shape[2]), planes)
        return lambda x: float_products(x, planes)

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the layer to [..., K]; returns [..., N] in x's dtype. A row with a NaN or an infinity becomes NaN."""
        return shown("linear", self._apply, x)

    def _apply(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.num_in)
        out = x.new_empty(len(flat), self.num_out)
        step = max(8, min(_ROWS, _CACHED // self.num_out))
        for start in range(0, len(flat), step):
            self._write(flat[start : start + step], out[start : start + step])
        return out.view(*x.shape[:-1], self.num_out)

    def _write(self, x: Tensor, out: Tensor) -> None:
        rows = rows_of(x)
        wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        for start, stop, product in self._blocks:
            sums = product(rows.digits)
            if sums.dtype != torch.float64 and compiled.serves(sums):
                bias = None if self.bias is None else self.bias[start:stop]
                compiled.put_together(sums, rows.scale, self.scale[start:stop], bias, rows.bad, wide, start)
            else:
                wide[:, start:stop] = self.result(_together(sums), rows, torch.float32, start, stop)
                if rows.bad is not None:
                    wide[:, start:stop].masked_fill_(rows.bad, float("nan"))
        if wide is not out:
            out.copy_(wide)

    def sums(self, digits: Tensor) -> Tensor:
        """T, float64 [M, N], of digits + 64, uint8 [4, M, K]: whole numbers, which may be added to those of other terms."""
        pieces = [_together(product(digits)) for _, _, product in self._blocks]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def result(self, total: Tensor, rows: Rows, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """What columns start..stop of T, which is overwritten, come to: scaled, with the bias, rounded to the dtype."""
        total.mul_(rows.scale).mul_(self.scale[start:stop])
        if self.bias is not None:
            total.add_(self.bias[start:stop])
        return rounded(total, dtype)


def _packed(digits: Tensor) -> Callable[[Tensor], Tensor]:
    """The blocks of a packed product, or T, its terms cut in two where their sum could leave the whole numbers of float32."""
    size = digits.shape[2]
    sizes = torch.stack([plane.abs().sum(1, dtype=torch.int32) for plane in digits.unbind(0)])
    largest = 64 * int(sizes.sum(0).max())  # no sum of products with digits of x is larger
    if largest > _FLOAT32_INTEGERS:
        half = size // 2
        left, right = _packed(digits[:, :, :half]), _packed(digits[:, :, half:])
        return lambda x: _together(left(x[:, :, :half].contiguous())) + _together(right(x[:, :, half:].contiguous()))
    planes = [_pack(plane) for plane in digits.unbind(0)]
    ones = torch.ones(digits.shape[1], dtype=torch.float32, device=digits.device)
    zeros = torch.zeros(digits.shape[1], dtype=torch.int32, device=digits.device)
    return lambda x: packed_products(x.view(-1, size), planes, ones, zeros)
