"""A readable flash attention whose order of additions is known, and changes where a test plants it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

BLOCK, LANES = 512, 16


@dataclass(frozen=True)
class Call:
    """What a kernel may choose an order by."""

    rows: int
    keys: int
    is_causal: bool
    is_masked_by_row: bool
    heads: int


@dataclass(frozen=True)
class Plant:
    """Another order of one sum, in some calls, rows, heads or blocks of keys.

    Attributes:
        where: which sum: "scores", "values", "denominator", or "rescaling".
        when: calls in which it is another.
        order: steps of a chain of n, in the order in which they are added.
        rows, heads: those that are computed otherwise; None for all.
        is_last_block: only the last block of keys is.
    """

    where: str
    when: Callable[[Call], bool] = lambda call: True
    order: Callable[[int], Sequence[int]] = lambda steps: range(steps)[::-1]
    rows: slice | None = None
    heads: slice | None = None
    is_last_block: bool = False


def halved(sums):
    """Adds the lanes, [..., lanes], in a tree."""
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def chained(term, count, lanes, order):
    """Adds ``term(first, last)``, [..., last - first], of ``count`` terms: a chain in each lane, then a tree over the lanes."""
    steps = -(-count // lanes)
    total = None
    for step in order(steps):
        part = term(step * lanes, min(count, (step + 1) * lanes))
        part = torch.nn.functional.pad(part, (0, lanes - part.shape[-1]))
        total = part if total is None else total + part
    return halved(total)


def over_size(q, k):
    """Terms of the scores [.., rows, keys], and their number."""
    return lambda a, b: q[:, :, :, None, a:b] * k[:, :, None, :, a:b], k.shape[3]


def over_keys(weights, v=None):
    """Terms of the denominators [.., rows] or of the weighted values [.., rows, size], and their number."""
    if v is None:
        return lambda a, b: weights[..., a:b], weights.shape[3]
    v = v.transpose(2, 3)[:, :, None]
    return lambda a, b: weights[..., None, a:b] * v[..., a:b], weights.shape[3]


class Emulated:
    """A kernel as `AttentionClasses` takes it; float32 inside, weights rounded to the dtype before they meet the values."""

    def __init__(self, plant=None):
        self.plant = plant

    def __call__(self, q, k, v, mask, scale):
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1).float() for t in (k, v))
        rows, keys = q.shape[2], k.shape[2]
        call = Call(rows, keys, mask is None, mask is not None and mask.shape[2] > 1, q.shape[1])
        if mask is None:
            hidden = torch.arange(keys) > torch.arange(rows)[:, None]
            mask = torch.zeros(rows, keys).masked_fill_(hidden, float("-inf"))[None, None]
        made = self.attend(q.float(), k, v, mask.float(), scale, q.dtype, None)
        if self.plant is not None and self.plant.when(call):
            at = (slice(None), self.plant.heads or slice(None), self.plant.rows or slice(None))
            made[at] = self.attend(q.float(), k, v, mask.float(), scale, q.dtype, self.plant)[at]
        return made.to(q.dtype)

    def attend(self, q, k, v, mask, scale, dtype, plant):
        keys, size = k.shape[2:]
        peak = torch.full((*q.shape[:3], 1), float("-inf"))
        total, out = torch.zeros_like(peak), torch.zeros_like(q)
        for first in range(0, keys, BLOCK):
            last = min(keys, first + BLOCK)
            is_planted = plant is not None and (not plant.is_last_block or last == keys)
            orders = {name: plant.order if is_planted and plant.where == name else range
                      for name in ("scores", "values", "denominator")}  # fmt: skip
            scores = chained(*over_size(q, k[:, :, first:last]), 8, orders["scores"])
            scores = scores * (size**-0.5 if scale is None else scale) + mask[..., first:last]
            new = torch.maximum(peak, scores.amax(-1, keepdim=True))
            base = new.masked_fill(new == float("-inf"), 0)
            weights = torch.exp(scores - base)
            old = torch.exp(peak - base)
            if is_planted and plant.where == "rescaling":
                old = old * (1 + 2**-21)
            total = total * old + chained(*over_keys(weights), LANES, orders["denominator"])[..., None]
            weighted = over_keys(weights.to(dtype).float(), v[:, :, first:last])
            product = chained(*weighted, LANES, orders["values"])
            out, peak = out * old + product, new
        return out / total
