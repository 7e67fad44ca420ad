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

from detlab.engine.exact import compiled
from detlab.engine.exact.constants import LEAST, MOST_TERMS, NORM_GRID
from detlab.engine.exact.linear import rounded
from detlab.engine.exact.shown import shown
from detlab.errors import UsageError

__all__ = ["is_norm", "layer_norm", "norm_of", "rms_norm"]

def _up(x: Tensor) -> Tensor:
    """2**(18 - E) of float64 rows, [..., 1], with |x| < 2**E and E at least -98; any number where a row is not finite."""
    e = (x.abs().amax(-1, keepdim=True).view(torch.int64) >> 52).clamp_min_(LEAST + 1022)
    return ((NORM_GRID // 2 + 1022 + 1023 - e) << 52).view(torch.float64)


def _standard(x: Tensor, eps: float) -> Tensor:
    """Returns x * r for float64 rows; all are scaled by 2**(18 - E) on the way, eps by its square, which changes no bit."""
    up = _up(x)
    z = x * up
    total = (z * z).round_().sum(-1, keepdim=True)
    r = (up * up).mul_(eps).add_(total.mul_(1.0 / x.shape[-1])).sqrt_().reciprocal_()
    return z.mul_(r.masked_fill_(total.isinf(), float("nan")))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension of x, in x's dtype; weight: float64 [K] or None."""
    if compiled.serves_rows(x, weight):
        return compiled.norm(x, weight, None, eps, is_centred=False)
    if x.numel() > _PIECE:
        return _of_pieces(lambda piece: rms_norm(piece, weight, eps), x)
    y = _standard(x.double(), eps)
    return rounded(y if weight is None else y.mul_(weight), x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension of x, in x's dtype; weight, bias: float64 [K] or None."""
    if compiled.serves_rows(x, weight, bias):
        return compiled.norm(x, weight, bias, eps, is_centred=True)
    if x.numel() > _PIECE:
        return _of_pieces(lambda piece: layer_norm(piece, weight, bias, eps), x)
    wide = x.double()
    up = _up(wide)
    fine = up * 2.0 ** (NORM_GRID // 2)
    total = (wide * fine).round_().sum(-1, keepdim=True)
    mean = total.div_(fine).mul_(1.0 / x.shape[-1])
    y = _standard(wide - mean, eps)
    if weight is not None:
        y.mul_(weight)
    if bias is not None:
        y.add_(bias)
    return rounded(y, x.dtype)


_PIECE = 1 << 16  # elements computed at a time: what is made on the way stays in the cache


def _of_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    step = max(1, _PIECE // x.shape[-1])
    for start in range(0, len(rows), step):
        out[start : start + step] = function(rows[start : start + step])
    return out.view(x.shape)


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
        weight, bias = _Wide(module, "weight", 0.0), _Wide(module, "bias", 0.0)
        return lambda x: shown("norm", lambda rows: layer_norm(rows, weight(), bias(), module.eps), x)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    given = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(given, Tensor) or given.ndim != 1 or given.shape[0] > MOST_TERMS:
        raise UsageError(f"{what} is a {name} without an epsilon and a weight of one dimension; the exact tier needs both.")
    known = {n for n, _ in module.named_parameters(recurse=False)} == {"weight"} and not list(module.children())
    if not known:
        raise UsageError(f"{what} is a {name} with more than a weight; the exact tier does not know what it computes.")
    scale = _Wide(module, "weight", 1.0 if _adds_one(module) else 0.0)
    return lambda x: shown("norm", lambda rows: rms_norm(rows, scale(), eps), x)


class _Wide:
    """A parameter in float64, plus a number; made anew when the parameter was changed."""

    def __init__(self, module: nn.Module, name: str, plus: float) -> None:
        self.module, self.name, self.plus = module, name, plus
        self.seen: tuple[Any, int] | None = None
        self.made: Tensor | None = None
        self()  # once before the first call, which a trace sees

    def __call__(self) -> Tensor | None:
        given = getattr(self.module, self.name)
        if given is None:
            return None
        if self.seen is None or self.seen[0] is not given or self.seen[1] != given._version:
            self.seen, self.made = (given, given._version), given.detach().double() + self.plus
        return self.made


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
