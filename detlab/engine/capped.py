"""Attention whose scores are capped, as Gemma 2 has it: no flash kernel does it, so its two products are called one by one.

A score s becomes cap * tanh(s / cap). Scores are computed in products of one block of 512 key slots, weights and their
denominators in products over the same blocks, whose results are added in the order of the blocks. Blocks are always whole, so
that only the number of query rows is left to measure. All is float32 on one thread, whatever the model's format.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab.engine.cache import BLOCK
from detlab.engine.canonical import one_thread
from detlab.engine.classes import Probe, RowClasses, row_classes
from detlab.engine.elementwise import canonical_elementwise
from detlab.engine.probes import cancelling
from detlab.engine.step import Step
from detlab.errors import MachineError

__all__ = ["CappedClasses", "capped_attention", "capped_classes", "reference_capped_attention"]

_ROWS = 512  # query rows at once, heads of a group folded into them: what bounds the scores' memory
_tanh, _exp = canonical_elementwise(torch.tanh), canonical_elementwise(torch.exp)

#: The class maps of the two products, queries by keys and weights by values, on one thread.
CappedClasses = tuple[RowClasses, RowClasses]


def capped_classes(size: int, device: torch.device | str = "cpu") -> CappedClasses:
    """The class maps for a head size.

    Raises:
        MachineError: a product has no stable shape here.
    """
    made = []
    with one_thread():
        for what, width, outputs in (("scores", size, BLOCK), ("weights", BLOCK, size + 1)):
            found = row_classes(
                f"capped {what}", torch.float32, (width, outputs), partial(_probe, what, width, outputs, torch.device(device)),
                work=width * outputs, row_bytes=4 * width, device=device,
            )  # fmt: skip
            if found is None:
                raise MachineError(
                    f"attention with capped scores, heads of {size}: the product of {what} has no stable shape on this "
                    "machine, so it cannot be made invariant here."
                )
            made.append(found)
    return made[0], made[1]


def _probe(what: str, width: int, outputs: int, device: torch.device, seed: int) -> Probe:
    """One of the two products, with rows that cancel with what they are multiplied by."""
    x, weight, _ = (t if t is None else t.to(device) for t in cancelling(Probe.ROWS, width, outputs, torch.float32, seed=seed))
    assert x is not None and weight is not None
    call = partial(F.linear, weight=weight) if what == "scores" else partial(torch.mm, mat2=weight.t().contiguous())
    return Probe(call, x)


def _with_ones(values: Tensor) -> Tensor:
    """[keys, size] -> [keys, size + 1]: a column of ones adds up the weights, in the same product."""
    return F.pad(values, (0, 1), value=1.0)


def capped_attention(query: Tensor, keys: Tensor, values: Tensor, step: Step, cap: float, scale: float | None) -> Tensor:
    """Attends with capped scores.

    Args:
        query: [batch, heads, tokens, size].
        keys, values: [batch, KV heads, slots, size], whole blocks of `BLOCK` slots.
        step: the call's layout.
        cap: of the scores; positive.
        scale: of the scores before they are capped; None for 1 / sqrt(size).

    Returns:
        [batch, tokens, heads, size], in the query's dtype.
    """
    batch, heads, tokens, size = query.shape
    groups = keys.shape[1]
    group = heads // groups
    classes = capped_classes(size, query.device)
    folded = query.float().view(batch, groups, group, tokens, size)
    result = query.new_empty(batch, tokens, groups, group, size)
    with one_thread():
        chunk = max(1, _ROWS // group)
        for first in range(0, tokens, chunk):
            last = min(tokens, first + chunk)
            seen = -(-step.keys_of(last) // BLOCK) * BLOCK
            mask = step.mask(first, last, seen, group)[:, 0].float()
            for row in range(batch):
                for head in range(groups):
                    q = folded[row, head, :, first:last].reshape(-1, size)
                    k, v = keys[row, head, :seen].float(), values[row, head, :seen].float()
                    out = _attend(q, k, v, mask[min(row, len(mask) - 1)], cap, size**-0.5 if scale is None else scale, classes)
                    result[row, first:last, head] = out.view(group, last - first, size).transpose(0, 1)
    return result.view(batch, tokens, heads, size)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cap: float, scale: float,
            classes: CappedClasses) -> Tensor:  # fmt: skip
    """One head: [rows, size] after [whole blocks, size] of keys and values, float32, with a mask [rows or 1, keys]."""
    starts = range(0, len(keys), BLOCK)
    scores = torch.cat([classes[0].run(partial(F.linear, weight=keys[at : at + BLOCK]), q) for at in starts], 1)
    scores = _tanh(scores * (scale / cap)) * cap + mask
    weights = _exp(scores - scores.amax(1, keepdim=True))
    total = q.new_zeros(len(q), values.shape[1] + 1)
    for at in starts:  # a block that a row sees nothing of adds +0.0 to it
        product = partial(torch.mm, mat2=_with_ones(values[at : at + BLOCK]))
        total = total + classes[1].run(product, weights[:, at : at + BLOCK].contiguous())
    return total[:, :-1] / total[:, -1:]


def reference_capped_attention(query: Tensor, keys: Tensor, values: Tensor, cap: float, scale: float | None = None) -> Tensor:
    """What capped attention means, slowly: each query alone in the first place of a tile, on one thread.

    Args:
        query: [heads, size], one token's.
        keys, values: [KV heads, tokens, size], those the token sees, in the order of their positions.
        cap: of the scores.
        scale: of the scores; None for 1 / sqrt(size).

    Returns:
        [heads, size], in the query's dtype.
    """
    heads, size = query.shape
    groups, count, _ = keys.shape
    total = -(-count // BLOCK) * BLOCK
    first, second = capped_classes(size, query.device)
    scale = size**-0.5 if scale is None else scale
    rows = []
    with one_thread():
        for head in range(heads):
            k, v = (F.pad(t[head // (heads // groups)].float(), (0, 0, 0, total - count)) for t in (keys, values))
            tile = k.new_zeros(first.map.unit, size)
            tile[0] = query[head].float()
            blocks = [F.linear(tile, k[at : at + BLOCK])[0] for at in range(0, total, BLOCK)]
            scores = torch.tanh(torch.cat(blocks) * (scale / cap)) * cap
            scores[count:] = float("-inf")
            weights = torch.exp(scores - scores.max())
            sums = k.new_zeros(size + 1)
            for at in range(0, total, BLOCK):
                tile = k.new_zeros(second.map.unit, BLOCK)
                tile[0] = weights[at : at + BLOCK]
                sums = sums + torch.mm(tile, _with_ones(v[at : at + BLOCK]))[0]
            rows.append(sums[:-1] / sums[-1])
    return torch.stack(rows).to(query.dtype)
