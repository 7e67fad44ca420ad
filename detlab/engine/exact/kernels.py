"""The tier's steps between products as loops, which Numba compiles: each row in one pass or a few, where tensors take dozens.

Each computes what a function of tensors computes, bit for bit, and the definition of both is `reference`. Numba is asked for
neither fast-math nor fused operations: every operation is rounded as it stands here. Sums are of whole numbers, in int64,
so that the compiler may add them in any order. Each loop runs over rows first..last, so that threads can share the rows.

This module is imported by `compiled` alone, and only where Numba is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from detlab.engine.exact.constants import (
    DIGIT_OFFSET,
    EXP2_TERMS,
    FAR,
    GELU_CUBE,
    GELU_UNIT,
    GRID,
    LEAST,
    LEAST_FIELD,
    MAGIC,
    NORM_GRID,
    NOT_FINITE,
    ROW_BITS,
    STEPS,
    SUM_BITS,
    UNIT,
    powers,
)

__all__ = ["IS_COMPILED", "cut", "encode", "gelu_tanh", "layer_norm", "put_together", "rms_norm", "silu", "softmax_weights"]

#: False where NUMBA_DISABLE_JIT is set: then the loops are Python's.
IS_COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]

Array = Any  # of numpy, of the dtype that each loop names
Number = Any  # int64 or float64


def _compile(function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(nogil=True, error_model="numpy", fastmath=False, cache=True)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(nogil=True, error_model="numpy", fastmath=False)(function)


_WITHOUT_SIGN = 0x7FFFFFFF
_ALL_BUT_SIGN = 0x7FFFFFFFFFFFFFFF
_POWERS = np.array(powers()).view(np.int64) - (np.arange(STEPS) << 42)
_TERM1, _TERM2 = EXP2_TERMS[1:]


# ------------------------------------------------------------------------------------------------------------- scalars
@_compile
def _from_bits(bits: Number) -> Number:
    return np.int64(bits).view(np.float64)


@_compile
def _bits(x: Number) -> Number:
    """A float64's bits; of a positive one, (bits >> 52) - 1022 is the exponent E: x < 2**E."""
    return np.float64(x).view(np.int64)


@_compile
def _pow2(exponent: Number) -> Number:
    return _from_bits((exponent + 1023) << 52)


@_compile
def _exp2(t: Number, shift: Number) -> Number:
    """2**(t / 1024 + shift): see `functions.exp2_`."""
    whole = t + MAGIC
    f = t - (whole - MAGIC)
    n = _bits(whole)
    return ((f * _TERM2 + _TERM1) * f + 1.0) * _from_bits(_POWERS[n & (STEPS - 1)] + ((n + (shift << 10)) << 42))


@_compile
def _one_plus_exp2(t: Number) -> Number:
    return _exp2(-FAR if t < -FAR else FAR if t > FAR else t, 0) + 1.0


@_compile
def _field(bits: Array) -> Number:
    """The exponent field of the largest of float32 values, given as their bits, int32 [K]; at least that of the smallest E."""
    largest = np.int32(0)
    for k in range(bits.shape[0]):
        largest = max(largest, bits[k] & np.int32(_WITHOUT_SIGN))
    return max(np.int64(largest >> 23), np.int64(LEAST_FIELD))


# -------------------------------------------------------------------------------------------------------------- linear
@_compile
def cut(first: int, last: int, x: Array, bits: Array, digits: Array, scale: Array, bad: Array) -> None:
    """Rows as digits: `digits.rows_of`.

    Args:
        first, last: rows.
        x, bits: float32 [M, K], and the same memory as int32.
        digits: uint8 [4, M, K], written.
        scale: float64 [M], written: 2**(E - 27).
        bad: bool [M], written: not finite.
    """
    for m in range(first, last):
        field = _field(bits[m])
        bad[m] = field == NOT_FINITE
        if bad[m]:
            scale[m] = _pow2(LEAST - ROW_BITS)
            digits[:, m] = 64
            continue
        scale[m] = _pow2(field - 126 - ROW_BITS)
        up = np.float32(_pow2(ROW_BITS + 126 - field))
        for k in range(x.shape[1]):
            q = np.int32(np.rint(x[m, k] * up)) + np.int32(DIGIT_OFFSET)
            digits[0, m, k] = q >> 21
            digits[1, m, k] = (q >> 14) & 127
            digits[2, m, k] = (q >> 7) & 127
            digits[3, m, k] = q & 127


@_compile
def put_together(first: int, last: int, sums: Array, scale: Array, columns: Array, bias: Array, bad: Array, out: Array,
                 at: int) -> None:  # fmt: skip
    """What sums of digit products come to: T scaled, with the bias, rounded: `ExactLinear.result`.

    Args:
        first, last: rows.
        sums: float32 or int32 [4, M, N], whole numbers.
        scale: float64 [M], of the rows.
        columns: float64 [N], of the columns.
        bias: float64 [N], or of length 0.
        bad: bool [M], rows that become NaN, or of length 0.
        out: float32 [M, all columns], written from column `at` on.
        at: the first of these columns.
    """
    for m in range(first, last):
        if bad.shape[0] > 0 and bad[m]:
            out[m, at : at + sums.shape[2]] = np.nan
            continue
        up = scale[m]
        for n in range(sums.shape[2]):
            total = np.float64(sums[0, m, n]) * 2097152.0 + np.float64(sums[1, m, n]) * 16384.0
            total += np.float64(sums[2, m, n]) * 128.0 + np.float64(sums[3, m, n])
            y = (total * up) * columns[n]
            if bias.shape[0] > 0:
                y += bias[n]
            out[m, at + n] = np.float32(y)


# --------------------------------------------------------------------------------------------------- norms, activations
@_compile
def _inverse(row: Array, mean: Number, up: Number, eps: Number) -> Number:
    """One over the root of the mean square of (row - mean) * up, eps added in the same scale: r of `norms`."""
    total = np.int64(0)
    for k in range(row.shape[0]):
        z = (np.float64(row[k]) - mean) * up
        total += np.int64(np.rint(z * z))
    return 1.0 / np.sqrt((up * up) * eps + np.float64(total) * (1.0 / row.shape[0]))


@_compile
def rms_norm(first: int, last: int, x: Array, bits: Array, weight: Array, eps: float, out: Array) -> None:
    """`norms.rms_norm` of float32 [M, K] into float32 [M, K]; weight: float64 [K], or of length 0."""
    size = x.shape[1]
    for m in range(first, last):
        field = _field(bits[m])
        if field == NOT_FINITE:
            out[m] = np.nan
            continue
        up = _pow2(NORM_GRID // 2 + 126 - field)
        r = _inverse(x[m], 0.0, up, eps)
        for k in range(size):
            y = (np.float64(x[m, k]) * up) * r
            out[m, k] = np.float32(y * weight[k] if weight.shape[0] > 0 else y)


@_compile
def layer_norm(first: int, last: int, x: Array, bits: Array, weight: Array, bias: Array, eps: float, out: Array) -> None:
    """`norms.layer_norm` of float32 [M, K] into float32 [M, K]; weight, bias: float64 [K], or of length 0."""
    size = x.shape[1]
    for m in range(first, last):
        field = _field(bits[m])
        if field == NOT_FINITE:
            out[m] = np.nan
            continue
        fine = _pow2(NORM_GRID + 126 - field)
        total = np.int64(0)
        for k in range(size):
            total += np.int64(np.rint(np.float64(x[m, k]) * fine))
        mean = (np.float64(total) / fine) * (1.0 / size)
        largest = np.int64(0)
        for k in range(size):
            largest = max(largest, _bits(np.float64(x[m, k]) - mean) & _ALL_BUT_SIGN)
        up = _pow2(NORM_GRID // 2 - max((largest >> 52) - 1022, np.int64(LEAST)))
        r = _inverse(x[m], mean, up, eps)
        for k in range(size):
            y = ((np.float64(x[m, k]) - mean) * up) * r
            if weight.shape[0] > 0:
                y = y * weight[k]
            if bias.shape[0] > 0:
                y = y + bias[k]
            out[m, k] = np.float32(y)


@_compile
def silu(first: int, last: int, x: Array, out: Array) -> None:
    """Of float32 [M, K], x / (1 + exp(-x)) into float32 [M, K]."""
    for m in range(first, last):
        for k in range(x.shape[1]):
            wide = np.float64(x[m, k])
            out[m, k] = np.float32(wide / _one_plus_exp2(wide * -UNIT))


@_compile
def gelu_tanh(first: int, last: int, x: Array, out: Array) -> None:
    """Of float32 [M, K], gelu in its tanh form into float32 [M, K]."""
    for m in range(first, last):
        for k in range(x.shape[1]):
            wide = np.float64(x[m, k])
            out[m, k] = np.float32(wide / _one_plus_exp2((((wide * wide) * GELU_CUBE + 1.0) * wide) * GELU_UNIT))


# ----------------------------------------------------------------------------------------------------------- attention
@_compile
def encode(first: int, last: int, x: Array, bits: Array, precision: int, out: Array) -> None:
    """Rows as whole numbers, then their scale: `attention.numbers` of float32 [M, size] into float64 [M, size + 1]."""
    size = x.shape[1]
    for m in range(first, last):
        field = _field(bits[m])
        up = _pow2(precision + 126 - field)
        for k in range(size):
            out[m, k] = np.rint(np.float64(x[m, k]) * up)
        out[m, size] = np.nan if field == NOT_FINITE else 1.0 / up


@_compile
def softmax_weights(first: int, last: int, scores: Array, queries: Array, keys: Array, values: Array, hidden: Array,
                    factor: float, scale: Array, total: Array) -> None:  # fmt: skip
    """Turns scores into whole weights, in place, as `attention.attend` defines them.

    Args:
        first, last: rows of all [groups * rows].
        scores: float64 [groups, rows, tokens]: products of queries and keys; replaced by w.
        queries: float64 [groups, rows], scales.
        keys, values: float64 [groups, tokens], scales.
        hidden: bool [batch, rows, last tokens], `groups` a multiple of `batch`: what is not seen; none: of length 0.
        factor: of the scores.
        scale, total: float64 [groups, rows], written: 2**(f + e - 70) and Z; both NaN for a row that saw a NaN.
    """
    groups, rows, tokens = scores.shape
    shared = max(1, groups // max(1, hidden.shape[0]))
    start = tokens - hidden.shape[2]
    for index in range(first, last):
        group, m = index // rows, index % rows
        row = scores[group, m]
        for t in range(tokens):
            row[t] = ((row[t] * queries[group, m]) * keys[group, t]) * factor
        for t in range(hidden.shape[2]):
            if hidden[group // shared, m, t]:
                row[start + t] = -np.inf
        top, nans = np.int64(-_ALL_BUT_SIGN), np.int64(0)
        for t in range(tokens):
            bits = _bits(row[t])
            top = max(top, bits ^ ((bits >> 63) & _ALL_BUT_SIGN))  # whole numbers in the order of the floats
            nans |= np.int64(row[t] != row[t])
        largest = _from_bits(top ^ ((top >> 63) & _ALL_BUT_SIGN))
        if nans or np.isinf(largest):
            row[:], scale[group, m], total[group, m] = 0.0, np.nan, np.nan
            continue
        z, highest = np.int64(0), np.int64(0)
        for t in range(tokens):
            s = row[t] - largest
            p = np.rint(_exp2(-64.0 * STEPS if s < -64.0 * STEPS else s, GRID))
            z += np.int64(p)
            row[t] = p * values[group, t]
            highest = max(highest, _bits(row[t]))
        e = max((highest >> 52) - 1022, np.int64(-200))
        up, h = _pow2(GRID - e), np.int64(0)
        for t in range(tokens):
            row[t] = np.rint(row[t] * up)
            h += np.int64(row[t])
        f = max((_bits(np.float64(h)) >> 52) - 1022, np.int64(0))
        up = _pow2(SUM_BITS - f)
        for t in range(tokens):
            row[t] = np.rint(row[t] * up)
        scale[group, m], total[group, m] = _pow2(f + e - (SUM_BITS + GRID)), np.float64(z)

