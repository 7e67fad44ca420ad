"""Elementary functions of single float64 operations, which IEEE 754 rounds in one way only: the same bits on every machine.

Each addition, multiplication, division and square root is an operation of its own, so that none can be fused with another.
No library's exp, erf or tanh is called: their last bits differ between instruction sets. The argument is converted to float64,
the result rounded to the model's dtype at the end (to float32, and from there to 16 bits).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

from detlab.engine.exact.linear import rounded
from detlab.errors import UsageError

__all__ = ["LOG2E", "activation_of", "exp", "exp2", "exp2_", "softmax"]

#: Added to a float64 below 2**51 it leaves the nearest whole number, ties to even, in the last bits.
MAGIC = 1.5 * 2.0**52
LOG2E = float.fromhex("0x1.71547652b82fep+0")
_LN2 = Fraction(float.fromhex("0x1.62e42fefa39efp-1"))
#: 2**(f / 16) as a polynomial in f: (ln 2 / 16)**n / n!.
EXP2_TERMS = tuple(float((_LN2 / 16) ** n / math.factorial(n)) for n in range(6))
_LIMIT = 1000.0  # of exponents of 2: what lies outside is as good as 0 or infinity


def exp2_(t: Tensor, shift: int = 0) -> Tensor:
    """2**(t + shift), in the memory of t; relative error below 2**-38.

    t = k + f, k whole, -1/2 <= f <= 1/2; the polynomial of 2**(f / 16), of degree 5, is squared four times, and 2**k is
    written as bits.

    Args:
        t: float64, overwritten; finite values within -1000..1000 less the shift. NaN gives NaN.
        shift: a whole number.
    """
    whole = t + MAGIC
    t.sub_(whole - MAGIC)
    p = t * EXP2_TERMS[5]
    for term in EXP2_TERMS[4:0:-1]:
        p.add_(term).mul_(t)
    p.add_(1.0)
    for _ in range(4):
        p.mul_(p)
    bits = whole.view(torch.int64).add_(1023 + shift).bitwise_left_shift_(52)
    return p.mul_(bits.view(torch.float64))


def exp2(t: Tensor) -> Tensor:
    """`exp2_` of a copy, for any values: below -1000 as at -1000, above 1000 as at 1000."""
    return exp2_(t.clamp(-_LIMIT, _LIMIT))


def exp(x: Tensor) -> Tensor:
    """e**x for float64: 2**(x * LOG2E)."""
    return exp2_((x * LOG2E).clamp_(-_LIMIT, _LIMIT))


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / exp(-x).add_(1.0)


def _silu(x: Tensor) -> Tensor:
    return x / exp(-x).add_(1.0)


# 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2 u)), which does not cancel for negative u.
_TANH_SCALE = 2.0 * float.fromhex("0x1.9884533d43651p-1")  # 2 * sqrt(2 / pi)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(-_TANH_SCALE)
    return x / exp(inner).add_(1.0)


def _quick_gelu(x: Tensor) -> Tensor:
    return x / exp(x * -1.702).add_(1.0)


def _tanh(x: Tensor) -> Tensor:
    """(1 - e) / (1 + e) with e = exp(-2 |x|); below 1/8, where that cancels, x times a polynomial in x**2."""
    e = exp(x.abs().mul_(-2.0))
    large = (1.0 - e).div_(e.add_(1.0)).copysign_(x)
    square = x * x
    small = square * TANH_TERMS[-1]
    for term in TANH_TERMS[-2:0:-1]:
        small.add_(term).mul_(square)
    return torch.where(x.abs() < 0.125, small.add_(1.0).mul_(x), large)


#: Of tanh(x) / x in powers of x**2.
TANH_TERMS = tuple(
    float(Fraction(n, d)) for n, d in ((1, 1), (-1, 3), (2, 15), (-17, 315), (62, 2835), (-1382, 155925), (21844, 6081075))
)

#: log(erfc(z) / t) + z**2 with t = 2 / (2 + z), as a Chebyshev series in 2 t - 1 (fitted to 40 digits; see `tests`).
ERFC_TERMS = (
    -0.6513268598908547, 0.6419697923564903, 0.019476473204185826, -0.009561514786808624, -0.0009465953444820422,
    0.000366839497852764, 4.2523324806908196e-05, -2.0278578112537596e-05, -1.6242900046409816e-06, 1.3036558355722257e-06,
    1.562644173202031e-08, -8.523809592582218e-08, 6.52905445015427e-09, 5.059343485128249e-09, -9.913641474473215e-10,
    -2.2736512931626365e-10, 9.646791552191426e-11, 2.394036419215259e-12, -6.8860288126667355e-12, 8.94492063260989e-13,
    3.1308545908256433e-13, -1.1269948508083574e-13,
)  # fmt: skip


def _gelu(x: Tensor) -> Tensor:
    """Returns x * P(X <= x) for a normal X: 0.5 * erfc(-x / sqrt 2) * x, the tail taken at -|x|, where nothing cancels."""
    z = x.abs().mul_(_SQRT_HALF)
    t = 2.0 / (z + 2.0)
    y = (t * 2.0).sub_(1.0)
    twice = y + y
    b1, b2 = torch.zeros_like(y), torch.zeros_like(y)
    for term in ERFC_TERMS[:0:-1]:
        b1, b2 = (twice * b1).sub_(b2).add_(term), b1
    series = (y * b1).sub_(b2).add_(ERFC_TERMS[0])
    tail = exp(series.sub_(z * z)).mul_(t).mul_(0.5)
    return x * torch.where(x > 0, 1.0 - tail, tail)


_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")


def _relu(x: Tensor) -> Tensor:
    return x.clamp_min(0.0)


_PIECE = 1 << 15  # elements computed at a time: what is made on the way stays in the cache


def _of_pieces(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of a tensor of the model's dtype, rounded once; element by element, whatever the shape."""

    def apply(x: Tensor) -> Tensor:
        if x.numel() <= _PIECE:
            return rounded(function(x.double()), x.dtype)
        flat = x.reshape(-1)
        out = torch.empty_like(flat)
        step = _PIECE * max(1, torch.get_num_threads())
        for start in range(0, flat.numel(), step):
            out[start : start + step] = rounded(function(flat[start : start + step].double()), x.dtype)
        return out.view(x.shape)

    return apply


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
}
_MODULES: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
    activations.QuickGELUActivation: "quick_gelu",
    nn.ReLU: "relu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}


def activation_of(module: Any, what: str) -> Callable[[Tensor], Tensor]:
    """The exact function of an activation module, for tensors of the model's dtype.

    Raises:
        UsageError: the activation is not one of those in `FUNCTIONS`.
    """
    name = _MODULES.get(type(module))
    if type(module) is nn.GELU:
        name = "gelu" if module.approximate == "none" else "gelu_tanh"
    if name is None:
        raise UsageError(
            f"{what} is a {type(module).__name__}, which the exact tier has no arithmetic of its own for; it has "
            f"{', '.join(FUNCTIONS)}."
        )
    return _of_pieces(FUNCTIONS[name])


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension: float32 [..., K] with K <= 8192, float32 result.

    p = 2**((x - max) * LOG2E), rounded to a multiple of 2**-40; their sum is exact; p / sum is rounded to float64, then
    to float32. A row with a NaN or +Inf becomes NaN; -Inf counts nothing.
    """
    wide = x.double()
    t = (wide - wide.amax(-1, keepdim=True)).mul_(LOG2E).clamp_(-64.0, 0.0)
    p = exp2_(t, 40).round_()
    return (p / p.sum(-1, keepdim=True)).float()
