"""Random numbers that belong to a request: a pure function of (seed, request, position), with the same bits everywhere.

Stock sampling has one generator for a whole batch: row 3 draws what rows 0 to 2 left over, so a request's text depends on
its slot and on its mates. Here there is no state to share. A counter-based generator turns *which* number is wanted
(the request, the generated position, the index in the vocabulary) into the number itself:

    SHA-256(seed, request)            -> two words of key, two words of counter: the stream
    Philox4x32-10(position, index)    -> 128 random bits: two uniforms
    -log(-log(uniform))               -> a Gumbel number

All of it is integer arithmetic and single float64 additions, multiplications and divisions, which IEEE 754 rounds in one way
only. No libm is called (the last bit of its ``log`` differs between instruction sets), and NumPy carries out one operation
a time, so that no multiplication and addition can be fused.

Sources: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox); Gumbel's use for
drawing: Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detlab.errors import UsageError

__all__ = ["check_request", "check_seed", "gumbels", "gumbels_of_rows", "is_whole", "log", "philox", "uniforms"]

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]  # 32-bit words, each in 64 bits: room for a product

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio, sqrt(3) - 1
_ROUNDS = 10
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_VERSION = b"detlab stream 1"
_CHUNK = 1 << 12  # numbers computed at a time, so that what is computed on the way stays in the cache


# ------------------------------------------------------------------------------------------------------ what is asked for
def is_whole(value: Any, limit: int) -> bool:
    """Tells whether a value is a whole number from 0 to below ``limit``; True and False are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= int(value) < limit


def check_seed(seed: int) -> int:
    """Returns the seed; refuses what is not a whole number of 0 to 2**64 - 1."""
    if not is_whole(seed, 1 << 64):
        raise UsageError(f"seed={seed!r} is not possible; give a whole number from 0 to 2**64 - 1.")
    return int(seed)


def check_request(request: Any) -> str:
    """Returns the request's id; refuses what is not a text of at least one character."""
    if not isinstance(request, str) or not request:
        raise UsageError(
            f"request id {request!r} is not possible; give a text of your own, such as 'order-17', or request_id(token_ids)."
        )
    return request


def _check_position(position: int) -> int:
    if not is_whole(position, 1 << 32):
        raise UsageError(
            f"position={position!r} is not possible; give the number of tokens generated so far, from 0 to 2**32 - 1."
        )
    return int(position)


# ------------------------------------------------------------------------------------------------------------- random bits
def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four random 32-bit words for each counter of four words, under a key of two.

    Args:
        counter, key: four and two uint64 arrays of one shape (or that broadcast), values below 2**32.

    Returns:
        Four uint64 arrays, values below 2**32.

    Source: Salmon et al. 2011, section 3.3; constants and test vectors as published with Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 x 32 -> 64 bits: exact
        c0, c1, c2, c3 = (
            (right >> _HALF) ^ c1 ^ k0,
            right & _LOW,
            (left >> _HALF) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


@lru_cache(maxsize=1024)
def _stream(seed: int, request: str) -> Words:
    """Four 32-bit words that name the stream of a seed and a request; two streams share them with probability 2**-128."""
    said = _VERSION + seed.to_bytes(8, "little") + request.encode("utf-8", "surrogatepass")
    return np.frombuffer(hashlib.sha256(said).digest()[:16], dtype="<u4").astype(np.uint64)


def uniforms(seed: int, request: str, position: int, n: int, at: NDArray[np.int64] | None = None) -> Floats:
    """Uniform numbers of one request at one position.

    Args:
        seed: 0 to 2**64 - 1.
        request: the request's id, a text.
        position: number of tokens generated before this one, from 0.
        n: how many.
        at: indices below ``n``, int64 [m]: only these of the ``n`` are computed, with the bits they have among all.

    Returns:
        float64 [n], or [m] with ``at``; each is an odd multiple of 2**-53, so never 0 nor 1 and symmetric about 1/2.

    Raises:
        UsageError: a seed, request, position, count or index that is not possible.
    """
    stream, place = _stream(check_seed(seed), check_request(request)), _check_position(position)
    if not is_whole(n, 1 << 33):
        raise UsageError(f"n={n!r} is not possible; give how many numbers, from 0 to 2**33 - 1.")
    if at is not None:
        if at.size and not (at.min() >= 0 and at.max() < n):
            raise UsageError(f"at holds {at.min()}..{at.max()}; the indices of n={n} numbers are 0..{n - 1}.")
        return _uniforms_at(stream[:, None], np.full(1, place, np.uint64), at)
    even, odd = _blocks(stream[:, None], np.full(1, place, np.uint64), np.arange((n + 1) // 2, dtype=np.uint64))
    return _to_floats(np.stack([even, odd], 1).reshape(-1)[:n])


def _uniforms_at(streams: Words, positions: Words, at: NDArray[np.int64]) -> Floats:
    """The numbers of these indices; streams uint64 [4, m], positions and indices [m], or a 1 in place of m."""
    even, odd = _blocks(streams, positions, at.astype(np.uint64) >> np.uint64(1))
    return _to_floats(np.where(at & 1, odd, even))


def _blocks(streams: Words, positions: Words, blocks: Words) -> tuple[Words, Words]:
    """128 random bits of each block, in two halves: a block makes the uniforms of index 2 * block and 2 * block + 1."""
    k0, k1, c2, c3 = streams
    w0, w1, w2, w3 = philox((blocks, positions, c2, c3), (k0, k1))
    return w0 << _HALF | w1, w2 << _HALF | w3


def _to_floats(bits: Words) -> Floats:
    # 52 bits and a half: 2 * k + 1 has 53 bits, so it is exact in float64, and so is its product with a power of 2.
    odd = (bits >> np.uint64(12) << np.uint64(1)) | np.uint64(1)
    numbers: Floats = odd.astype(np.float64) * 2.0**-53
    return numbers


# --------------------------------------------------------------------------------------------------------- a portable log
# ln 2 in two parts: the first has 32 bits, so that its product with an exponent is exact; the second is the rest.
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
_SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")


def log(x: Floats) -> Floats:
    """Natural logarithm made of single float64 operations: the same bits on every machine.

    x = 2**e * m with m between sqrt(1/2) and sqrt(2), and with s = (m - 1) / (m + 1), |s| < 0.172:

        log(x) = e * ln 2 + 2 * (s + s**3 / 3 + s**5 / 5 + ... + s**21 / 21)

    What the series leaves out is below 1e-18 of the sum. The error is within 4 ULPs of the exact logarithm (measured: below
    2.5), also near x = 1, since m - 1 is exact.

    Args:
        x: float64, any shape; positive, finite and normal (2**-1022 or more). Others are not looked for.

    Returns:
        float64, same shape; log(1) is +0.0.
    """
    bits = x.view(np.int64)
    exponent = (bits >> 52) - 1023
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(np.float64)  # 1 <= m < 2
    is_large = m > _SQRT2
    m = np.where(is_large, m * 0.5, m)
    e = (exponent + is_large).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = np.full_like(z, 1.0 / 21.0)
    for odd in range(19, 1, -2):
        series = series * z
        series = series + 1.0 / odd
    twice = s + s
    tail = z * series
    small = twice + twice * tail
    total: Floats = e * _LN2_HIGH + (e * _LN2_LOW + small)
    return total


def gumbels(seed: int, request: str, position: int, n: int, at: NDArray[np.int64] | None = None) -> Floats:
    """Gumbel numbers of one request at one position: ``argmax(scores + gumbels)`` draws from ``softmax(scores)``.

    They lie between -3.7 and 36.8; the error of each is below 1e-15 plus 8 ULPs.

    Args:
        seed, request, position, n, at: as for `uniforms`.

    Returns:
        float64 [n], or [m] with ``at``.
    """
    numbers: Floats = -log(-log(uniforms(seed, request, position, n, at)))
    return numbers


def gumbels_of_rows(
    seed: int, requests: Sequence[str], positions: Sequence[int], rows: NDArray[np.int64], at: NDArray[np.int64]
) -> Floats:
    """Gumbel numbers of several requests in one go, with the bits that `gumbels` gives each of them.

    Args:
        seed: 0 to 2**64 - 1.
        requests, positions: one of each for every row.
        rows, at: int64 [m]; the row and the index of each number that is wanted.

    Returns:
        float64 [m].
    """
    check_seed(seed)
    named = [_stream(seed, check_request(request)) for request in requests]
    places = np.array([_check_position(position) for position in positions], np.uint64)
    numbers = np.empty(rows.size)
    streams = np.stack(named, 1) if named else np.empty((4, 0), np.uint64)
    for start in range(0, rows.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        numbers[part] = -log(-log(_uniforms_at(streams[:, rows[part]], places[rows[part]], at[part])))
    return numbers
