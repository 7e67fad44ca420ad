"""Asks a machine whether its arithmetic is exact, at the worst case, before anything is computed with it."""

from __future__ import annotations

import time
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from detlab import bits
from detlab.engine.canonical import unobserved
from detlab.engine.exact import compiled
from detlab.engine.exact.attention import attend, encoded, numbers, query_bits
from detlab.engine.exact.constants import DIGITS, UNIT
from detlab.engine.exact.digits import rows_of
from detlab.engine.exact.functions import evaluate
from detlab.engine.exact.linear import KERNELS, ExactLinear, Prepared, prepare
from detlab.engine.exact.norms import layer_norm, rms_norm
from detlab.errors import MachineError, UsageError

__all__ = ["check_arithmetic", "choose_kernel", "is_exact", "steps_agree"]

_SLOW = 30.0  # times the float64 product: an int8 product that slow is emulated


def _extremes(rows: int, terms: int, seed: int) -> Tensor:
    """Digits at their limits, int8 [4, rows, terms]: all +64, all -64, alternating, and at random."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(-64, 65, (DIGITS, rows, terms), generator=generator, dtype=torch.int8)
    digits[:, 0], digits[:, 1] = 64, -64
    digits[:, 2, 0::2], digits[:, 2, 1::2] = 64, -64
    digits[1:].clamp_(-64, 63)  # only the first digit reaches +64
    return digits


def _layer(digits: Tensor, kernel: str) -> ExactLinear:
    exponents = torch.zeros(digits.shape[1], dtype=torch.int32, device=digits.device)
    return ExactLinear([Prepared(digits, exponents)], [None], kernel)


def _products(digits: Tensor, weight: Tensor, kernel: str) -> Tensor:
    """T of digits within -64..64, int8 [4, M, K] and [4, N, K]: float64 [M, N]."""
    return _layer(weight, kernel).sums((digits.to(torch.int16) + 64).to(torch.uint8))


def _expected(digits: Tensor, weight: Tensor) -> Tensor:
    """T in int64, term by term: no product of matrices takes part."""
    total = torch.zeros(digits.shape[1], weight.shape[1], dtype=torch.int64, device=digits.device)
    for i in range(DIGITS):
        for j in range(DIGITS - i):
            terms = digits[i].long()[:, None, :] * weight[j].long()[None, :, :]
            total += terms.sum(-1) << 7 * (DIGITS - 1 - i - j)
    return total


#: Rows, outputs and terms: long and short sums, then each number of rows near the edges of known tiles.
_SHAPES = (
    (4, 16, 1), (5, 33, 67), (1, 48, 576), (17, 32, 1024), (64, 16, 300), (3, 16, 8192),
    *((rows, outputs, terms) for rows in (1, 2, 3, 4, 6, 7, 8, 12, 15, 16, 20, 24, 31, 32, 33, 40, 48, 63, 65, 100, 127, 128)
      for outputs, terms in ((17, 67), (64, 130))),
)  # fmt: skip


def is_exact(kernel: str, device: torch.device | str = "cpu") -> bool:
    """Whether a kernel gives the exact sums of the largest digits, at every place, for sums and rows of all lengths."""
    for rows, outputs, terms in _SHAPES:
        digits, weight, expected = _case(max(rows, 3), outputs, terms)
        digits, expected = digits[:, :rows].contiguous().to(device), expected[:rows].to(device)
        try:
            found = _products(digits, weight.to(device), kernel)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        if not torch.equal(found, expected):
            return False
    return True


@lru_cache(maxsize=128)
def _case(rows: int, outputs: int, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Digits at their limits and what their product is: int8 [4, rows, terms], [4, outputs, terms], float64 [rows, outputs]."""
    digits, weight = _extremes(rows, terms, terms), _extremes(outputs, terms, terms + 1)
    return digits, weight, _expected(digits, weight).double()


def check_arithmetic(device: torch.device | str = "cpu") -> None:
    """Asks for what the tier takes for granted of floating point.

    Raises:
        MachineError: subnormal numbers are flushed, rounding is not to nearest even, or float64 products are not exact.
    """

    def number(*values: float) -> Tensor:
        return torch.tensor(values * 9, dtype=torch.float64, device=device)

    if bool((number(2.0**-1060) * number(2.0**-10) == 0).any()):
        raise MachineError("subnormal numbers are flushed to zero; the exact tier needs them: torch.set_flush_denormal(False).")
    half = number(2.0**-53)
    if bool((number(1.0) + half != 1.0).any()) or bool((number(1.0 + 2.0**-52) + half != 1.0 + 2.0**-51).any()):
        raise MachineError("float64 additions are not rounded to nearest, ties to even, here; the exact tier needs that.")
    large = torch.full((8, 64), 2.0**23 - 1, dtype=torch.float64, device=device)
    if bool((large @ large.t() != 64 * (2.0**23 - 1) ** 2).any()):
        raise MachineError("a float64 product of matrices of whole numbers is not exact here; the exact tier needs that.")


# --------------------------------------------------------------------------------------------------- the compiled steps
def _all_kinds(rows: int, size: int, seed: int) -> Tensor:
    """Float32 rows: plain, large beside small, tiny, subnormal, zero, near the largest, ties of a rounding, not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**20), 2**20, (rows, size), generator=generator).float() / 2**17
    for row, scale in enumerate((1.0, 1.0, 2.0**-110, 2.0**-140, 0.0, 2.0**124)):
        x[row] *= scale
    x[1, ::7] *= 1000.0
    x[6] = x[6].round() + 0.5
    x[7, 3], x[8, 5] = float("nan"), float("-inf")
    return x


def _steps() -> list[Tensor]:
    """What the steps that can be compiled make of such rows."""
    x, size = _all_kinds(24, 67, 1), 67
    weight, bias = x[9].double(), x[10].double()
    rows = rows_of(x)
    weights = prepare(_all_kinds(24, size, 2)[9:])
    layers = [ExactLinear([weights], [x[11, :15]], kernel) for kernel in KERNELS if is_exact(kernel)]
    query, keys, values = numbers(x[None, None, 9:], query_bits(size)), encoded(x[None, None]), encoded(x[None, None] * 3.0)
    finite = torch.ones(24, dtype=torch.bool).index_fill_(0, torch.tensor([7, 8]), value=False)
    hidden = torch.ones(15, 15, dtype=torch.bool).triu_(1)[None, None]
    seen = [attend(query, keys[:, :, part], values[:, :, part], mask, UNIT / 8.0)
            for part, mask in ((finite, hidden), (finite, None), (slice(None), hidden))]  # fmt: skip
    return [
        rows.digits, rows.scale, *(layer(x) for layer in layers), rms_norm(x, weight, 1e-6), layer_norm(x, weight, bias, 1e-5),
        *(evaluate(name, x) for name in compiled.ACTIVATIONS), *query, keys, *seen,
    ]  # fmt: skip


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Bitwise equal, but that a NaN is a NaN."""
    return bits.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)) and torch.equal(found.isnan(), expected.isnan())


@lru_cache(maxsize=1)
@unobserved
def steps_agree() -> bool:
    """Whether the compiled steps are there, and give the bits of the functions of tensors, on rows of all kinds.

    All that is ever compiled is compiled here. What goes wrong then (a full disk, a damaged cache) costs time, not the tier: a
    warning says so.
    """
    with compiled.allowed(False):
        expected = _steps()
    try:
        with compiled.allowed(True):
            found = _steps() if compiled.is_installed() else None
    except Exception as error:  # Numba's errors have no root of their own, and its cache's are of many kinds
        return _not_compiled(f"{type(error).__name__}: {error}. If files named kernels.*.nbi or .nbc are damaged, delete them")
    if found is None:
        return _not_compiled("Numba is not installed, or NUMBA_DISABLE_JIT is set")
    if not all(_alike(a, b) for a, b in zip(found, expected, strict=True)):
        return _not_compiled("what Numba compiled gives other bits on this machine")
    return True


def _not_compiled(why: str) -> bool:
    warnings.warn(f"the exact tier's steps are not compiled: {why}. The bits are the same, the model is slower.", stacklevel=4)
    return False


@lru_cache(maxsize=64)
@unobserved
def _seconds(kernel: str, device: torch.device, threads: int) -> float:
    digits, weight = _extremes(16, 512, 1).to(device), _extremes(256, 512, 2).to(device)
    layer = _layer(weight, kernel)
    shifted = (digits.to(torch.int16) + 64).to(torch.uint8)
    spent = []
    for _ in range(3):
        start = time.perf_counter()
        layer.sums(shifted).sum().item()
        spent.append(time.perf_counter() - start)
    return min(spent)


@lru_cache(maxsize=64)
@unobserved
def _choice(device: torch.device, only: str | None) -> str:
    asked = [only] if only else list(KERNELS if device.type == "cpu" else KERNELS[-1:])
    exact = [kernel for kernel in asked if is_exact(kernel, device)]
    if not exact:
        raise MachineError(
            f"the {' and '.join(asked)} product is not exact on this machine: sums of digits of +-64 came out wrong (an int8 "
            "product that saturates at 16 bits?). Use a machine with AVX512-VNNI, or another kernel of "
            f"{', '.join(KERNELS)}; all give the same bits where they are exact."
        )
    threads = torch.get_num_threads()
    slowest = _SLOW * _seconds("float64", device, threads) if "float64" in exact else float("inf")
    return next(kernel for kernel in exact if kernel == exact[-1] or _seconds(kernel, device, threads) < slowest)


def choose_kernel(device: Any = "cpu", only: str | None = None) -> str:
    """The first kernel that is exact here, and not emulated. Allows the compiled steps where they agree with the others.

    Args:
        device: where the model is.
        only: the one kernel to use, of `KERNELS`; None chooses.

    Raises:
        MachineError: none is exact.
    """
    if only is not None and only not in KERNELS:
        raise UsageError(f"kernel={only!r} is not known; choose from {', '.join(KERNELS)}.")
    check_arithmetic(device)  # each time: what it asks for can be switched while a process runs
    compiled.use(steps_agree())
    return _choice(torch.device(device), only)
