"""ALiBi as two more numbers of each head: a bias that grows with the key's position, without a mask of its own.

A score is scale * q.k + slope * position. With slope / scale appended to q and the position to k it is one product, so that a
query's bits follow its own keys as those of any attention do. Where the dtype cannot hold a slope or a position, parts of it
that it can hold are appended, and their products are added in float32 as all others are.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["with_slopes"]

_MULTIPLE = 8  # head sizes that kernels like


def _parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of a dtype, each held exactly, whose sum is x, float64, to 24 bits."""
    count = 1 if dtype == torch.float32 else 3
    found = []
    for _ in range(count):
        part = x.to(dtype)
        found.append(part)
        x = x - part.double()
    return found


def with_slopes(query: Tensor, keys: Tensor, slopes: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Appends slopes to queries and positions to keys.

    Args:
        query: [batch, heads, tokens, size].
        keys: [batch, KV heads, tokens, size], of the new tokens.
        slopes: [heads].
        positions: int64 [batch or 1, tokens]: of the new tokens, below 2**16.
        scale: of the scores.

    Returns:
        Both with more numbers a head, the same in both.
    """
    dtype = query.dtype
    steps = _parts(slopes.double() / scale, dtype)
    if dtype == torch.float32:
        places, factors = [positions], [1.0]
    else:  # 8 bits are all that bfloat16 holds
        places, factors = [positions // 256, positions % 256], [256.0, 1.0]
    ours = [step * factor for factor in factors for step in steps]
    theirs = [place for place in places for _ in steps]
    batch, heads, tokens, size = query.shape
    spare = -(size + len(ours)) % _MULTIPLE
    more = torch.stack(ours, -1)[None, :, None].expand(batch, heads, tokens, -1)
    behind = torch.stack(theirs, -1).to(dtype)[:, None].expand(batch, keys.shape[1], tokens, -1)
    query, keys = torch.cat([query, more], -1), torch.cat([keys, behind], -1)
    return torch.nn.functional.pad(query, (0, spare)), torch.nn.functional.pad(keys, (0, spare))
