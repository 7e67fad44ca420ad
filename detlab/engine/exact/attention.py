"""Attention as exact sums: scores, softmax denominators and weighted values are whole numbers that float64 holds.

For one query head of size D, over the tokens t that it sees:

    Q, K, V rows scaled per token: q = round(Q * 2**(b - E)), likewise k, v
    s_t = (sum_d q_d k_td) * 2**(...) * (scaling * 1024 * log2 e)      the sum is exact; one rounding
    p_t = round(2**((s_t - max s) / 1024) * 2**40)                     Z = sum p_t, exact
    g_t = p_t * 2**E(V_t)                                              exact: V's exponents are folded into P
    h_t = round(g_t * 2**(40 - E(max g)))                              H = sum h_t, exact
    w_t = round(h_t * 2**(30 - E(H)))                                  quantised per query: sum w_t <= 2**30 + tokens / 2
    out = round((sum_t w_t v_td) * 2**(...) / Z)                       the sum is exact; one division, one rounding

A scale of V over tokens, per column, would leak the future into the past; here a token is scaled by itself. Bits are
constants: k and v have 22, q has 31 less those of D, w 31, for a context of up to 2**17 tokens.
A token that is not seen has p = 0, so that padding, blocks and slots add nothing; a query that sees a key or a value with a NaN
or an infinity becomes NaN, others do not notice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from detlab.engine.cache import arrived
from detlab.engine.exact import compiled
from detlab.engine.exact.constants import GRID, KEY_BITS, LEAST_FIELD, MOST_TOKENS, NOT_FINITE, STEPS, SUM_BITS, UNIT
from detlab.engine.exact.functions import exp2_
from detlab.engine.exact.linear import rounded
from detlab.engine.exact.shown import shown
from detlab.engine.step import Step, checked_step
from detlab.errors import UsageError

__all__ = ["attend", "encoded", "exact_attention", "numbers", "query_bits"]

_EXACT_SUM = 1 << 13  # terms of at most 2**40 whose sum float64 holds
_MANY_ROWS = 16
_TILE = 1 << 19  # scores computed at a time: what is made on the way stays in the cache


def query_bits(size: int) -> int:
    """Bits of a query's numbers: their products with a key's, ``size`` of them, stay below 2**53."""
    return 53 - KEY_BITS - (size - 1).bit_length()


def numbers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers, float64 [..., size], and 2**(E - bits), [..., 1]: NaN for a row that is not finite."""
    if compiled.serves_rows(x):
        rows = compiled.encode(x, bits)
        return rows[..., :-1], rows[..., -1:]
    x = x.float()
    field = ((x.abs().amax(-1, keepdim=True).view(torch.int32) & 0x7FFFFFFF) >> 23).clamp_(LEAST_FIELD)
    up = ((bits + 126 + 1023 - field.long()) << 52).view(torch.float64)
    return x.double().mul_(up).round_(), up.reciprocal().masked_fill_(field == NOT_FINITE, float("nan"))


def encoded(x: Tensor) -> Tensor:
    """Rows of keys or values as they are kept in a cache: `numbers` of 22 bits with their scale, float64 [..., size + 1]."""
    return compiled.encode(x, KEY_BITS) if compiled.serves_rows(x) else torch.cat(numbers(x, KEY_BITS), -1)


def _sealed(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Takes what is not finite out of encoded keys and values (0 * NaN would carry it to others); the key's scale tells."""
    bad = keys[..., -1:].isnan() | values[..., -1:].isnan()
    if not bool(bad.any()):
        return keys, values
    keys, values = keys.masked_fill(bad, 0.0), values.masked_fill(bad, 0.0)
    keys[..., -1:].masked_fill_(bad, float("nan"))
    return keys, values


def _exact_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension of whole numbers up to 2**40, [..., 1]: exact, then rounded to float64."""
    if x.shape[-1] <= _EXACT_SUM:
        return x.sum(-1, keepdim=True)
    parts = [x[..., at : at + _EXACT_SUM].sum(-1).long() for at in range(0, x.shape[-1], _EXACT_SUM)]
    return torch.stack(parts, -1).sum(-1, keepdim=True).double()


def _below(x: Tensor) -> Tensor:
    """The exponent E of positive float64: x < 2**E, from its bits; of zero, -1022."""
    return (x.view(torch.int64) >> 52) - 1022


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """The exact products [groups, rows, tokens] x [groups, tokens, size]; of many rows transposed, which is faster."""
    if weights.shape[1] < _MANY_ROWS:
        return torch.bmm(weights, values)
    return torch.bmm(values.transpose(1, 2), weights.transpose(1, 2)).transpose(1, 2).contiguous()


def attend(query: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, hidden: Tensor | None, factor: float) -> Tensor:
    """Attention of some queries to all of the keys given.

    Args:
        query: `numbers`, float64 [batch, KV heads, rows, size] and [batch, KV heads, rows, 1].
        keys, values: encoded, float64 [batch, KV heads, tokens, size + 1].
        hidden: bool [batch or 1, 1, rows or 1, last tokens]: what a query does not see of the last tokens.
        factor: of the scores: scaling * 1024 * log2 e.

    Returns:
        float64 [batch, KV heads, rows, size].
    """
    batch, groups, rows, size = query[0].shape
    tokens = keys.shape[2]
    q, k, v = (t.reshape(batch * groups, -1, t.shape[3]) for t in (query[0], keys, values))
    scores = torch.bmm(q, k[..., :size].transpose(1, 2))
    scale = query[1].reshape(batch * groups, rows, 1)
    if compiled.serves(scores):
        unseen = None if hidden is None else hidden[:, 0].expand(-1, rows, -1)
        up, weight = compiled.attend_weights(scores, scale[..., 0], k[..., size], v[..., size], unseen, factor)
        return _weighted(scores, v[..., :size]).mul_(up).div_(weight).view(batch, groups, rows, size)
    scores.mul_(scale).mul_(k[..., size:].transpose(1, 2)).mul_(factor)
    if hidden is not None:
        last = scores.view(batch, groups, rows, tokens)[..., tokens - hidden.shape[-1] :]
        last.masked_fill_(hidden, float("-inf"))
    p = exp2_(scores.sub_(scores.amax(-1, keepdim=True)).clamp_(-64.0 * STEPS), GRID).round_()
    weight = _exact_sum(p)
    g = p.mul_(v[..., size:].transpose(1, 2))
    e = _below(g.amax(-1, keepdim=True)).clamp_min_(-200)
    h = g.mul_(((GRID + 1023 - e) << 52).view(torch.float64)).round_()
    f = _below(_exact_sum(h)).clamp_min_(0)
    w = h.mul_(((SUM_BITS + 1023 - f) << 52).view(torch.float64)).round_()
    out = _weighted(w, v[..., :size])
    out.mul_(((f + e - (SUM_BITS + GRID) + 1023) << 52).view(torch.float64)).div_(weight)
    return out.view(batch, groups, rows, size)


# ------------------------------------------------------------------------------------------------ as transformers calls


def exact_attention(module: Any, query: Tensor, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
                    dropout: float = 0.0, **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """The attention that transformers calls: stores the new keys and values in numbers, and attends.

    Args:
        module: the attention module.
        query: [batch, heads, tokens, size].
        key, value: [batch, KV heads, tokens, size], or what a canonical cache made of them.
        attention_mask: the call's `Step`.
        scaling: of the scores; None for 1 / sqrt(size).
        dropout: must be 0.
        kwargs: what else the model passes; what would change the result is refused.

    Returns:
        [batch, tokens, heads, size] in the query's dtype, and no weights.

    Raises:
        UsageError: a mask, an option or a length that is not covered.
    """
    step = checked_step(module, attention_mask, dropout, kwargs)
    batch, heads, tokens, size = query.shape
    layer, new_keys, new_values = arrived(key, value, tokens)
    groups = new_keys.shape[1]
    if new_values.shape[3] != size or new_keys.shape[3] != size or heads % groups:
        raise UsageError(
            f"{type(module).__name__}: heads of {size} for queries, {new_keys.shape[3]} for keys and {new_values.shape[3]} for "
            f"values, {heads} over {groups}; the exact tier covers heads of one size in whole groups."
        )
    if step.slots_needed > MOST_TOKENS:
        raise UsageError(
            f"a context of {step.slots_needed} tokens is longer than the {MOST_TOKENS} that the exact tier's bits are made for."
        )
    new_keys, new_values = _sealed(*shown("encode", encoded, torch.stack([new_keys, new_values])).unbind(0))
    keys, values = layer.room(step.slots_needed, new_keys, new_values)
    step.store(layer, keys, values, new_keys, new_values)
    factor = (size**-0.5 if scaling is None else float(scaling)) * UNIT

    def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = _tiles(numbers(query, query_bits(size)), keys, values, step, factor, groups)
        return rounded(out, query.dtype).transpose(1, 2)

    seen = step.slots_needed
    return shown("attention", attention, query, keys[:, :, :seen], values[:, :, :seen]).transpose(1, 2), None


def _tiles(query: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, step: Step, factor: float, groups: int) -> Tensor:
    """`attend` for tiles of queries, each with the keys that it may see: float64 [batch, tokens, heads, size]."""
    batch, heads, tokens, size = query[0].shape
    group = heads // groups
    if tokens == 1 and (step.slots is None and step.window is None):
        seen = step.keys_of(1)
        folded = query[0].view(batch, groups, group, size), query[1].view(batch, groups, group, 1)
        return attend(folded, keys[:, :, :seen], values[:, :, :seen], None, factor).view(batch, 1, heads, size)
    out = query[0].new_empty(batch, tokens, heads, size)
    # A tile holds all heads of some rows of the batch and some tokens; few tokens, so that the causal half is not computed.
    together = batch if tokens == 1 else 1
    rows = min(tokens, max(8, min(64, _TILE // (heads * step.slots_needed))))
    for first in range(0, tokens, rows):
        last = min(tokens, first + rows)
        seen = min(step.keys_of(last), step.slots_needed)
        hidden = _hidden(step, first, last, seen)
        for row in range(0, batch, together):
            part = slice(row, row + together)
            q, scale = (t[part, :, first:last].reshape(-1, groups, group * (last - first), t.shape[3]) for t in query)
            mask = hidden if hidden is None or hidden.shape[0] == 1 else hidden[part]
            if mask is not None and last - first > 1:
                mask = mask.repeat(1, 1, group, 1)
            piece = attend((q, scale), keys[part, :, :seen], values[part, :, :seen], mask, factor)
            out[part, first:last] = piece.view(-1, heads, last - first, size).transpose(1, 2)
    return out


def _hidden(step: Step, first: int, last: int, seen: int) -> Tensor | None:
    """What queries first..last do not see, bool [batch or 1, 1, rows, last slots]; None where they see all."""
    if step.slots is None and step.window is None:
        if last - first == 1:
            return None
        rows = last - first
        return torch.ones(rows, rows, dtype=torch.bool, device=step.device).triu_(1)[None, None]
    return step.mask(first, last, seen, 1).isinf()
