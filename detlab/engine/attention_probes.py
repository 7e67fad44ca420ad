"""Queries, keys and values that show in which order attention adds, where random ones would hide it.

Attention has three sums: scores over the head's size, weights over the keys (the denominator), and weighted values over the
keys. Each has heads of its own here, in which it is badly conditioned and the others are exact or harmless:

    scores         products that cancel over the head's size (`probes.cancelling`). What rounding leaves of them is scaled to
                   the order of 1, so that another order moves the weights of all keys and with them every column.
    values         each column has a large value M at one key and -M at another of the same score. What is added while M is in
                   the sum is rounded to M's grid, what is not stays whole: so the result shows which keys are added before the
                   two meet. The places differ by column; in a quarter of them one is among the last 16 keys.
    rising values  the same, with scores that rise along the keys: M meets -M after the running maximum moved, so that it shows
                   how each block's sum is scaled to the next one's, too.
    denominator    one weight of 1, at another key for each row; most others are just under half a unit of its last place
                   (`probes.summands`): they count where they meet each other before they meet the 1. In 16 bits each column
                   lies so close to a rounding boundary for one of the rows that it falls over within three units of the last
                   place of that row's denominator, in float32.

How often do two orders agree by accident? Planted in an emulation (`tests/planted_attention.py`), with 48 to 1040 keys, a row
of its kind agrees on all its columns

    all steps of a chain reversed     scores 0.02, values 0.04, denominator 0.40 (0.65 of three steps in bfloat16), at most
    its last two steps exchanged      scores 0.02, values 0.0 to 0.6, denominator 0.5 to 1
    two steps in its middle exchanged scores 0.1, values 0.0 to 0.9, denominator 0.5 to 1

A shape is tried with 13 rows of each kind after three numbers of keys. Were rows independent, which they are not quite,
another order of a whole chain would be missed with a probability below 1e-3 in the denominator, and far below that in the
scores and values. Two exchanged steps of the denominator may be missed: nearly always they do not change its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from detlab.engine.probes import cancelling, draw

__all__ = ["KINDS", "ROWS", "AttentionData", "Kernel", "attention_data", "largest_weight"]

#: (count, first, last) -> so many keys at or after the first and before the last.
Places = Callable[[int, int, int], Tensor]
#: q [batch, heads, rows, size], k, v [batch, KV heads, keys, size], additive mask or None for a causal one, scale -> as q.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]

ROWS = 13  # query rows of each kind: a prime, so that each meets every place of every tile
KINDS = ("scores", "values", "rising values", "denominator")
_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


class AttentionData(NamedTuple):
    """One head of each kind. The scale of the scores is 1.

    Attributes:
        q: [kinds, ROWS, size].
        k, v: [kinds, slots, size].
    """

    q: Tensor
    k: Tensor
    v: Tensor


@lru_cache(maxsize=16)
def _queries(size: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Queries of all kinds, [kinds, ROWS, size], and keys whose scores cancel, [<= 509, size]."""
    x, weight, _ = cancelling(ROWS, size, 509, dtype, seed=seed)
    q = torch.zeros(len(KINDS), ROWS, size, dtype=dtype)
    # Rounding leaves about 2**-22 of the largest term: the scores become of the order of 1, whatever magnitudes a row has.
    largest = torch.frexp(x.float().abs().amax(1)).exponent
    q[0] = x.float() * 2.0 ** (11 - largest)[:, None]
    steps = torch.arange(ROWS, dtype=torch.float32)
    q[1, :, 0], q[2, :, 0] = steps / 8, (1 + steps) / 8  # one term a score: exact, in every order
    q[3, torch.arange(ROWS), torch.arange(ROWS) % size] = 1  # a feature of its own for each row
    return q, (weight.float() * 2**9).to(dtype)


@lru_cache(maxsize=4)
def _values(slots: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Uniform values for the first three kinds, [3, slots, size]."""
    v = draw(len(KINDS) - 1, slots, size, dtype=torch.float32, seed=seed + 8)
    v[1:] /= 2**8
    return v.to(dtype)


def _in_four(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Four numbers of a format whose sums are these to the last bit of float32: [4, size] of [size] in float64."""
    pieces = []
    for _ in range(4):
        pieces.append(sums.to(dtype))
        sums = sums - pieces[-1].double()
    return torch.stack(pieces)


def _boundaries(size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers from 1 to 2 in the middle between two of the format, float64 [size]."""
    bits = min(_BITS[dtype], 20)
    made: Tensor = (2 * torch.randint(0, 2 ** (bits - 1), (size,), generator=generator) + 1).double() / 2**bits + 1
    return made


def largest_weight(kernel: Kernel, size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """The weight that a kernel gives to the largest score, in its own float32: near 1, by its exponential function.

    In 16 bits it shows by where a quotient falls over from one number of the format to the next.
    """
    if dtype == torch.float32:
        return 1.0
    middles = _boundaries(size, dtype, torch.Generator().manual_seed(0))
    low, high = -(2.0**-9), 2.0**-9
    while high - low > 2.0**-25:
        q, k, v = (torch.zeros(1, 2, n, size, dtype=dtype) for n in (4, 512, 512))
        q[..., 0], k[..., 0], k[:, :, :4] = 1, -60, 0
        steps = low + torch.arange(size) * ((high - low) / size)
        v[:, :, :4] = _in_four(4 * middles * (1 + steps), dtype)
        mask = torch.zeros(1, 1, 1, 512, dtype=dtype)
        out = kernel(q.to(device), k.to(device), v.to(device), mask.to(device), 1.0)[0, 0, 0].cpu().double()
        over = int((out > middles).long().argmax()) if bool((out > middles).any()) else size
        width = (high - low) / size
        low, high = low + (over - 1) * width, low + (over + 1) * width
        if not -0.01 < low < 0.01:
            return 1.0
    return 1 + (low + high) / 2


def _denominators(q: Tensor, seen: tuple[int, ...], places: Places, slots: int, is_causal: bool, weight: float,
                  generator: torch.Generator) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and values of the last kind, both [slots, size], for its queries, [ROWS, size]."""
    keys, size, dtype = seen[0], q.shape[1], q.dtype
    largest = -17.33 if weight < 1 else -16.64  # half a unit of the last place below 1 is 2**-25, from 1 on 2**-24
    k = largest - (0.18 if dtype == torch.bfloat16 else 0.1) * torch.rand(slots, size, generator=generator)
    all_rows, late = torch.arange(ROWS), max(0, keys - 16)
    own = torch.stack([places(ROWS, 0, keys), places(ROWS, max(0, keys - 48), keys), places(ROWS, late, keys),
                       places(ROWS, 0, min(16, keys))])[all_rows % 4, all_rows]  # fmt: skip
    shared = places(2, 0, max(2, keys // 2))
    helpers = torch.tensor([-2.5, -5.0])  # their weights are not close to a rounding boundary of any format
    k[shared] = helpers[:, None]
    k[own, all_rows % size] = 0
    k = k.to(dtype)
    # Column j is made for one row after so many keys: the sum of its weights, and what all keys add to its values.
    columns = torch.arange(size)
    rows = columns % ROWS
    least = min(keys - 1, int(torch.cat([own, shared]).max()) + 1)
    if is_causal:
        counts = torch.randint(least, keys + 1, (size,), generator=generator)
    else:
        counts = torch.tensor(seen)[columns % len(seen)]
    weights = torch.exp(k.double()[:, rows % size]) * (torch.arange(slots)[:, None] < counts)
    weights = torch.where(weights == 1, weight, weights)
    offsets = torch.randint(-3, 4, (size,), generator=generator).double() / 2**23
    target = _boundaries(size, dtype, generator) * (weights.sum(0) + offsets)
    v, rounded = torch.zeros(slots, size, dtype=torch.float64), weights.to(dtype).double()
    v[own] = target.to(dtype).double()
    v[shared] = 0
    for key in shared.tolist():
        missing = target - (rounded * v).sum(0)
        v[key] += torch.where(rounded[key] > 2**-9, missing / rounded[key], 0).to(dtype).double()
    return k, v.to(dtype)


def attention_data(counts: tuple[int, ...], slots: int, size: int, dtype: torch.dtype, *, is_causal: bool = False,
                   weight: float = 1.0, seed: int = 0, device: torch.device | str = "cpu") -> AttentionData:  # fmt: skip
    """Data for calls of so many keys.

    Args:
        counts: keys that rows see, the largest number first, at least 2; what shows an order lies among them.
        slots: at least as many; those behind are filled, too.
        size: of a head.
        dtype: of all.
        is_causal: rows see 1, 2, 3 .. keys: more of what shows an order lies among the first keys.
        weight: the largest weight that the kernel gives.
        seed: of the numbers.
        device: where they are.
    """
    keys = counts[0]
    generator = torch.Generator().manual_seed(1000 * seed + keys)

    def places(count: int, first: int, last: int) -> Tensor:
        """Keys at or after ``first`` and before ``last``; for causal calls early ones are as frequent as late ones."""
        if is_causal and first == 0:
            return (last ** torch.rand(count, generator=generator)).long().clamp_max(last - 1)
        return torch.randint(first, max(first + 1, last), (count,), generator=generator)

    q, products = _queries(size, dtype, seed)
    capacity = 1 << max(9, (slots - 1).bit_length())
    v = torch.cat([_values(capacity, size, dtype, seed)[:, :slots], torch.zeros(1, slots, size, dtype=dtype)])
    k = torch.zeros(len(KINDS), slots, size, dtype=dtype)
    k[0] = products[torch.arange(slots) % len(products)]
    level = torch.rand(slots, generator=generator)
    k[1, :, 0] = -level
    k[2, :, 0] = 3 * level + torch.arange(slots) / 64 % 8
    late = max(0, keys - 16)
    columns = torch.arange(size)
    for kind in (1, 2):
        one, other = places(size, 0, keys), places(size, 0, keys)
        one[1::4] = places(size, 0, max(2, keys // 2))[1::4]
        other[1::4] = places(size, 0, max(2, keys // 2))[1::4]
        one[2::4] = places(size, late, keys)[2::4]
        one[3::4] = places(size, 0, max(2, late))[3::4]
        other[3::4] = places(size, 0, max(2, late))[3::4]
        other = torch.where(one == other, (other + 1) % keys, other)
        large = (2.0 ** torch.randint(6, 16 if dtype == torch.float16 else 18, (size,), generator=generator)).to(dtype)
        # Many columns share a key here and there: then their scores become one chain's, and all stay equal in pairs.
        root = list(range(slots))
        for a, b in zip(one.tolist(), other.tolist(), strict=True):
            root[b] = root[a]
        k[kind, :, 0] = k[kind, torch.tensor(root), 0]
        v[kind, one, columns], v[kind, other, columns] = large, -large
    k[3], v[3] = _denominators(q[3], counts, places, slots, is_causal, weight, generator)
    return AttentionData(q.to(device), k.to(device), v.to(device))
