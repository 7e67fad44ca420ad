"""The compiled loops on tensors: which calls they serve, and how threads share them.

A step between products, such as a norm, is a handful of tensor operations, each a pass over memory. Compiled it is one pass,
with the same bits (`kernels`). `detlab.engine.exact.machine` compares the two on this machine before it allows the loops;
without Numba, or on a GPU, the functions of tensors serve.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from detlab.engine.exact.constants import DIGITS

__all__ = [
    "ACTIVATIONS", "activation", "allowed", "attend_weights", "cut", "encode", "is_installed", "norm", "put_together", "serves",
    "serves_rows", "use",
]  # fmt: skip

_is_used = False


def serves(x: Tensor) -> bool:
    """Whether the loops are allowed, and can read this tensor."""
    return _is_used and x.is_cpu


def serves_rows(x: Tensor, *parameters: Tensor | None) -> bool:
    """`serves`, for rows of float32 or 16 bits and parameters of their size: others are left to the functions of tensors."""
    of_size = all(p is None or p.shape == x.shape[-1:] for p in parameters)
    return serves(x) and of_size and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def use(wanted: bool) -> None:
    """Allows the loops, or not, from now on: for the whole process."""
    global _is_used
    _is_used = wanted


@contextmanager
def allowed(wanted: bool) -> Iterator[None]:
    """Allows the loops, or not, in a block."""
    before = _is_used
    use(wanted)
    try:
        yield
    finally:
        use(before)


@lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether Numba is there, and compiles."""
    try:
        return bool(_kernels().IS_COMPILED)
    except ImportError:
        return False


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    from detlab.engine.exact import kernels  # Numba takes half a second to import, and need not be there

    return kernels


# ------------------------------------------------------------------------------------------------------------- threads
_SHARE = 1 << 16  # elements worth a thread


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork's are not its parent's."""
    # The caller's thread was asked whether it keeps subnormal numbers; a thread that starts while it does not would not.
    return ThreadPoolExecutor(threads, "detlab-exact", initializer=torch.set_flush_denormal, initargs=(False,))


def _over(rows: int, size: int, loop: Callable[..., None], *arguments: Any) -> None:
    """Runs a loop over all rows, shared out among as many threads as torch has; rows do not know of each other."""
    shares = min(torch.get_num_threads(), rows, 1 + rows * size // _SHARE)
    if shares <= 1:
        loop(0, rows, *arguments)
        return
    ends = [rows * share // shares for share in range(shares + 1)]
    pool = _pool(shares - 1, os.getpid())
    try:
        others = [pool.submit(loop, first, last, *arguments) for first, last in zip(ends[1:-1], ends[2:], strict=True)]
    except RuntimeError:  # the interpreter ends, and starts no more threads: this one does all
        loop(0, rows, *arguments)
        return
    loop(ends[0], ends[1], *arguments)
    for other in others:
        other.result()


def _array(x: Tensor) -> Any:
    return x.detach().numpy()


def _rows(x: Tensor) -> tuple[Any, Any]:
    """Float32 rows of the last dimension as an array, and their bits."""
    flat = x.detach().float().reshape(-1, x.shape[-1]).contiguous()
    return flat.numpy(), flat.view(torch.int32).numpy()


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cpu")  # whatever torch's defaults are


@lru_cache(maxsize=1)
def _nothing() -> Any:
    return _empty(0, dtype=torch.float64).numpy()


@lru_cache(maxsize=1)
def _no_rows() -> Any:
    return _empty(0, dtype=torch.bool).numpy()


def _or_nothing(x: Tensor | None) -> Any:
    return _nothing() if x is None else _array(x)


# --------------------------------------------------------------------------------------------------------------- steps
def cut(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, [M, K], as digits: uint8 [4, M, K], scales, float64 [M, 1], and which are not finite, bool [M, 1]."""
    rows, bits = _rows(x)
    digits = _empty(DIGITS, *rows.shape, dtype=torch.uint8)
    scale, bad = _empty(len(rows), dtype=torch.float64), _empty(len(rows), dtype=torch.bool)
    _over(*rows.shape, _kernels().cut, rows, bits, digits.numpy(), scale.numpy(), bad.numpy())
    return digits, scale[:, None], bad[:, None]


def put_together(sums: Tensor, scale: Tensor, columns: Tensor, bias: Tensor | None, bad: Tensor | None, out: Tensor,
                 at: int) -> None:  # fmt: skip
    """Writes what sums of digit products come to.

    Args:
        sums: float32 or int32 [4 M, N], whole numbers.
        scale: float64 [M, 1], of the rows.
        columns: float64 [N], of the columns.
        bias: float64 [N], or None.
        bad: bool [M, 1]: rows that become NaN; None: no row.
        out: float32 [M, all columns].
        at: the first column to be written.
    """
    _over(
        len(out), sums.shape[1], _kernels().put_together, _array(sums.view(DIGITS, len(out), -1)), _array(scale[:, 0]),
        _array(columns), _or_nothing(bias), _no_rows() if bad is None else _array(bad[:, 0]), out.numpy(), at,
    )  # fmt: skip


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool) -> Tensor:
    """LayerNorm (centred) or RMSNorm over the last dimension; weight and bias: float64 [K] or None."""
    rows, bits = _rows(x)
    out = _empty(*rows.shape)
    of = (_or_nothing(weight), _or_nothing(bias)) if is_centred else (_or_nothing(weight),)
    loop = _kernels().layer_norm if is_centred else _kernels().rms_norm
    _over(*rows.shape, loop, rows, bits, *of, eps, out.numpy())
    return out.to(x.dtype).view(x.shape)


#: Activations that there are loops for.
ACTIVATIONS = ("silu", "gelu_tanh")
_WIDTH = 256  # elements of a row, where there are no rows


def activation(name: str, x: Tensor) -> Tensor:
    """An activation, element by element: of `ACTIVATIONS`."""
    flat = x.detach().float().reshape(-1).contiguous()
    out = torch.empty_like(flat)
    loop, whole = getattr(_kernels(), name), flat.numel() // _WIDTH * _WIDTH
    for part, width in ((slice(0, whole), _WIDTH), (slice(whole, None), flat.numel() - whole)):
        if width and len(flat[part]):
            rows = flat[part].view(-1, width)
            _over(*rows.shape, loop, rows.numpy(), out[part].view_as(rows).numpy())
    return out.to(x.dtype).view(x.shape)


def encode(x: Tensor, bits: int) -> Tensor:
    """Rows as whole numbers of so many bits, then their scale: float64 [..., size + 1]."""
    rows, of_rows = _rows(x)
    out = _empty(len(rows), rows.shape[1] + 1, dtype=torch.float64)
    _over(*rows.shape, _kernels().encode, rows, of_rows, bits, out.numpy())
    return out.view(*x.shape[:-1], rows.shape[1] + 1)


def attend_weights(scores: Tensor, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None,
                   factor: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turns scores into whole weights, in place.

    Args:
        scores: float64 [groups, rows, tokens].
        queries: float64 [groups, rows], scales.
        keys, values: float64 [groups, tokens], scales.
        hidden: bool [batch, rows, last tokens], or None; batch divides groups.
        factor: of the scores.

    Returns:
        What weighted values are multiplied and divided by, float64 [groups, rows, 1] both.
    """
    groups, rows, tokens = scores.shape
    scale, total = _empty(2, groups, rows, dtype=torch.float64)
    hidden = _empty(1, rows, 0, dtype=torch.bool) if hidden is None else hidden.contiguous()
    _over(
        groups * rows, tokens, _kernels().softmax_weights, _array(scores), _array(queries.contiguous()),
        _array(keys.contiguous()), _array(values.contiguous()), hidden.numpy(), factor, scale.numpy(), total.numpy(),
    )  # fmt: skip
    return scale[..., None], total[..., None]
