"""RMSNorm and LayerNorm whose sums are exact: squares on a grid that follows the row's largest element.

RMSNorm of a row of K elements, in float64, with E the row's exponent (`digits`):

    S = sum of round(x**2 * 2**(36 - 2 E)), whole numbers of at most 2**36, exact for K <= 2**16
    r = 1 / sqrt(S * 2**(2 E - 36) * (1 / K) + eps)
    y = round(x * r * w)

LayerNorm first takes off the mean, ``round(x * 2**(36 - E))`` summed and scaled, then does the same with what is left, on the
grid of the largest of what is left. Each operation is rounded once to float64, the result to the model's dtype. A row with a
NaN or an infinity becomes NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from detlab.engine.exact.digits import LEAST, MOST_TERMS
from detlab.engine.exact.linear import rounded
from detlab.errors import UsageError

__all__ = ["is_norm", "layer_norm", "norm_of", "rms_norm"]

GRID = 36


def _exponent(x: Tensor) -> Tensor:
    """E of float64 rows, int64 [..., 1]: |x| < 2**E, at least -98; 1025 for a row that is not finite."""
    top = x.abs().amax(-1, keepdim=True)
    return (top.view(torch.int64) >> 52).sub_(1022).clamp_min_(LEAST)


def _power(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def _mean_square(x: Tensor) -> Tensor:
    """The mean of the squares, float64 [..., 1]; NaN for a row that is not finite."""
    e = _exponent(x)
    z = x * _power(GRID // 2 - e)
    total = z.mul_(z).round_().sum(-1, keepdim=True)
    mean = total.mul_(_power(2 * e - GRID)).mul_(1.0 / x.shape[-1])
    return mean.masked_fill_(e > 1000, float("nan"))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension of x, in x's dtype; weight: float64 [K] or None."""
    wide = x.double()
    scale = 1.0 / (_mean_square(wide) + eps).sqrt_()
    wide = wide.mul_(scale)
    return rounded(wide if weight is None else wide.mul_(weight), x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension of x, in x's dtype; weight, bias: float64 [K] or None."""
    wide = x.double()
    e = _exponent(wide)
    total = (wide * _power(GRID - e)).round_().sum(-1, keepdim=True)
    mean = total.mul_(_power(e - GRID)).mul_(1.0 / x.shape[-1]).masked_fill_(e > 1000, float("nan"))
    wide = wide - mean
    wide.mul_(1.0 / (_mean_square(wide) + eps).sqrt_())
    if weight is not None:
        wide.mul_(weight)
    if bias is not None:
        wide.add_(bias)
    return rounded(wide, x.dtype)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a LayerNorm, or an RMSNorm by its name."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")


def norm_of(module: Any, what: str) -> Callable[[Tensor], Tensor]:
    """The exact forward of a norm; its weight is read at each call.

    Raises:
        UsageError: it is a norm of another form than those of the families the tier knows.
    """
    name = type(module).__name__
    if isinstance(module, nn.LayerNorm):
        if len(module.normalized_shape) != 1 or module.normalized_shape[0] > MOST_TERMS:
            over = list(module.normalized_shape)
            raise UsageError(f"{what}: a LayerNorm over {over}; the exact tier covers the last dimension.")
        return lambda x: layer_norm(x, _wide(module.weight), _wide(module.bias), module.eps)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.ndim != 1 or weight.shape[0] > MOST_TERMS:
        raise UsageError(f"{what} is a {name} without an epsilon and a weight of one dimension; the exact tier needs both.")
    known = {n for n, _ in module.named_parameters(recurse=False)} == {"weight"} and not list(module.children())
    if not known:
        raise UsageError(f"{what} is a {name} with more than a weight; the exact tier does not know what it computes.")
    if _adds_one(module):
        return lambda x: rms_norm(x, module.weight.double() + 1.0, eps)
    return lambda x: rms_norm(x, module.weight.double(), eps)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def _adds_one(module: Any) -> bool:
    """Whether the norm multiplies by 1 + weight, as Gemma's do: asked of the module itself, on numbers that show it."""
    was = module.weight
    probe = torch.full_like(was, 2.0)
    x = torch.ones(1, was.shape[0], dtype=was.dtype, device=was.device)
    with torch.no_grad():
        ratio = float(torch.func.functional_call(module, {"weight": probe}, (x,))[0, 0])
    if not 1.5 < ratio < 3.5:
        name = type(module).__name__
        raise UsageError(f"{name} multiplies by neither its weight nor 1 + weight; the exact tier covers both.")
    return ratio > 2.5
