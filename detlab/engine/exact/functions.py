"""Elementary functions of single float64 operations, which IEEE 754 rounds in one way only: the same bits on every machine.

Each addition, multiplication, division and square root is an operation of its own, so that none can be fused with another.
No library's exp, erf or tanh is called: their last bits differ between instruction sets. The argument is converted to float64,
the result rounded to the model's dtype at the end (to float32, and from there to 16 bits).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

from detlab.engine.canonical import unobserved
from detlab.engine.exact import compiled
from detlab.engine.exact.constants import EXP2_TERMS, FAR, GELU_CUBE, GELU_UNIT, MAGIC, STEPS, UNIT, powers
from detlab.engine.exact.linear import rounded
from detlab.engine.exact.shown import shown
from detlab.errors import UsageError

__all__ = ["FUNCTIONS", "activation_of", "evaluate", "exp", "exp2_", "softmax"]



@lru_cache(maxsize=16)
@unobserved
def _table(shift: int, device: torch.device) -> Tensor:
    """The bits of 2**(j / 1024 + shift) less j << 42, so that adding n << 42 gives those of 2**(n / 1024 + shift)."""
    bits = torch.tensor(powers(), dtype=torch.float64).view(torch.int64)
    return (bits - (torch.arange(STEPS) << 42) + (shift << 52)).to(device)


def exp2_(t: Tensor, shift: int = 0) -> Tensor:
    """2**(t / 1024 + shift), in the memory of t; relative error below 2**-37.

    t = n + f, n whole, -1/2 <= f <= 1/2: the power of n / 1024 is read from a table and its exponent added to the bits, that of
    f is a polynomial of degree 2.

    Args:
        t: float64, overwritten; within -1000 * 1024 and 1000 * 1024. NaN gives NaN.
        shift: a whole number; the result's exponent must lie within -1022..1023.
    """
    whole = t + MAGIC
    t.sub_(whole - MAGIC)
    p = (t * EXP2_TERMS[2]).add_(EXP2_TERMS[1]).mul_(t).add_(1.0)
    n = whole.view(torch.int64)
    bits = _table(shift, t.device).take(n & (STEPS - 1)).add_(n.bitwise_left_shift_(42))
    return p.mul_(bits.view(torch.float64))


def _exp2(t: Tensor) -> Tensor:
    """`exp2_` of any values: below -1000 octaves as there, above 1000 as there."""
    return exp2_(t.clamp_(-FAR, FAR))


def exp(x: Tensor) -> Tensor:
    """e**x for float64."""
    return _exp2(x * UNIT)


def _sigmoid(x: Tensor) -> Tensor:
    return _exp2(x * -UNIT).add_(1.0).reciprocal_()


def _silu(x: Tensor) -> Tensor:
    return x / _exp2(x * -UNIT).add_(1.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    """1 / (1 + exp(-2 u)) for 0.5 * (1 + tanh(u)), which does not cancel for negative u."""
    return x / _exp2((x * x).mul_(GELU_CUBE).add_(1.0).mul_(x).mul_(GELU_UNIT)).add_(1.0)


def _quick_gelu(x: Tensor) -> Tensor:
    return x / _exp2(x * (-1.702 * UNIT)).add_(1.0)


def _tanh(x: Tensor) -> Tensor:
    """(1 - e) / (1 + e) with e = exp(-2 |x|); below 1/8, where that cancels, x times a polynomial in x**2."""
    e = _exp2(x.abs().mul_(-2.0 * UNIT))
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
    tail = _exp2(series.sub_(z * z).mul_(UNIT)).mul_(t).mul_(0.5)
    return x * torch.where(x > 0, 1.0 - tail, tail)


_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")


def _relu(x: Tensor) -> Tensor:
    return x.clamp_min(0.0)


_PIECE = 1 << 15  # elements computed at a time: what is made on the way stays in the cache


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


def evaluate(name: str, x: Tensor) -> Tensor:
    """An activation of `FUNCTIONS`, of a tensor of the model's dtype, rounded once; element by element, whatever the shape."""
    if name in compiled.ACTIVATIONS and compiled.serves_rows(x):
        return compiled.activation(name, x)
    function = FUNCTIONS[name]
    if x.numel() <= _PIECE:
        return rounded(function(x.double()), x.dtype)
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    step = _PIECE * max(1, torch.get_num_threads())
    for start in range(0, flat.numel(), step):
        out[start : start + step] = rounded(function(flat[start : start + step].double()), x.dtype)
    return out.view(x.shape)


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
    return lambda x: shown("activation", partial(evaluate, name), x)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension: float32 [..., K] with K <= 8192, float32 result.

    p = exp(x - max), with x - max >= -44.4, rounded to a multiple of 2**-40; their sum is exact; p / sum is rounded to
    float64, then to float32. A row with a NaN or +Inf becomes NaN; -Inf counts nothing.
    """
    return shown("softmax", _softmax, x)


def _softmax(x: Tensor) -> Tensor:
    wide = x.double()
    t = (wide - wide.amax(-1, keepdim=True)).mul_(UNIT).clamp_(-64.0 * STEPS, 0.0)
    p = exp2_(t, 40).round_()
    return (p / p.sum(-1, keepdim=True)).float()
