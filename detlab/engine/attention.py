"""Attention whose rows depend on their own tokens alone: torch's flash kernel, called in canonical shapes.

A query's bits follow the number of query rows, the number of keys, the slot at which each key sits, and how the work is
cut among threads. So keys sit at slot = token position (`cache`), and calls are made only in shapes that were probed to give
the bits of one class (`attention_classes`): keys are rounded up, query rows padded or cut; what is rounded up is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab.engine.alibi import with_slopes
from detlab.engine.attention_classes import AttentionClasses, attention_classes
from detlab.engine.cache import BLOCK, arrived
from detlab.engine.canonical import one_thread
from detlab.engine.capped import capped_attention
from detlab.engine.elementwise import canonical_elementwise
from detlab.engine.step import Step, checked_step
from detlab.errors import MachineError, UsageError

__all__ = ["attention_rule", "canonical_attention", "reference_attention", "unpadded_attention"]

_FOLD = 64  # query rows up to which the heads of a group are folded into rows of one head
_CAUSAL = 2048  # query rows up to which the kernel's own causal mask is used
_PIECES = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # query rows at once where it is not


class _Unpadded:
    """Calls in the shapes that come, whatever the bits; in place of `AttentionClasses`."""

    granule = 1

    def keys(self, count: int, rows: int, mask: str, heads: str) -> int:
        """The number of keys that are seen."""
        return count

    def placed(self) -> nullcontext[None]:
        """Runs a block as it is."""
        return nullcontext()


_UNPADDED = _Unpadded()


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The flash kernel of torch: [batch, heads, rows, size]; fewer KV heads than query heads are shared among them."""
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        result: Tensor = flash(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)[0]
        return result
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, mask is None, scale=scale, enable_gqa=True)


def _flash_and_sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """As `_flash`, in float32, with the logarithm of each row's sum of weights behind it: [batch, heads, rows, size + 1]."""
    if q.device.type != "cpu":
        raise UsageError("attention with sinks is covered on a CPU only.")
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result, sums = flash(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    return torch.cat([result.float(), sums.unsqueeze(-1)], -1)


Kernel = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "float | None"], Tensor]


def flash_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, granule: int,
               kernel: Kernel = _flash) -> Tensor:  # fmt: skip
    """Attention of any number of query rows, padded to the granule.

    A single head of a single row of the batch would be one piece of work: the kernel would not go parallel over pieces,
    but its matrix products would over their own rows, with other bits. So it is cut in two heads.

    Args:
        q: [batch, heads, rows, size].
        k, v: [batch, KV heads, keys, size].
        mask: additive, [batch or 1, 1, rows or 1, keys].
        scale: of the scores; None for 1 / sqrt(size).
        granule: query rows are padded to a multiple of it (of two, where the head is cut).
        kernel: what computes.

    Returns:
        [batch, heads, rows, size].
    """
    batch, heads, rows, size = q.shape
    is_single = batch * heads == 1 and rows <= 32
    spare = -rows % (2 * granule if is_single else granule)
    if spare:
        q = F.pad(q, (0, 0, 0, spare))
        if mask.shape[2] > 1:
            mask = F.pad(mask, (0, 0, 0, spare))
    if is_single:
        half = (rows + spare) // 2
        if mask.shape[2] > 1:
            mask = mask.reshape(1, 2, half, mask.shape[3])
        return kernel(q.reshape(1, 2, half, size), k, v, mask, scale).reshape(1, 1, rows + spare, -1)[:, :, :rows]
    result = kernel(q, k, v, mask, scale)
    return result[:, :, :rows] if spare else result


def _shape(rows: int, batch: int, heads: int, groups: int, granule: int, has_rows: bool) -> tuple[int, str, str]:
    """Rows, mask and heads (`Shape`) of the call that `flash_rows` makes."""
    mask = "rows" if has_rows else "one"
    if batch * heads > 1:
        return rows, mask, "shared" if heads > groups else "many"
    return (-(-rows // (2 * granule)) * granule, mask, "shared") if rows <= 32 else (rows, mask, "single")


def attention_rule(dtype: torch.dtype, size: int, device: torch.device | str = "cpu") -> AttentionClasses:
    """The shapes in which the kernel may be called with heads of a size, at the number of threads now set.

    Raises:
        MachineError: no shape gives stable bits here.
    """
    return _rule(dtype, size, torch.device(device), torch.get_num_threads())


@lru_cache(maxsize=256)
def _rule(dtype: torch.dtype, size: int, device: torch.device, threads: int) -> AttentionClasses:
    found = attention_classes(dtype, size, _flash, device)
    if found is None:
        raise MachineError(
            f"attention with heads of {size} in {str(dtype).removeprefix('torch.')}: no canonical shape gives stable bits on "
            "this machine, so it cannot be made invariant here."
        )
    return found


# ------------------------------------------------------------------------------------------------------ the attention
def canonical_attention(module: Any, query: Tensor, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
                        dropout: float = 0.0, slopes: Tensor | None = None, _is_unpadded: bool = False,
                        **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """The attention that transformers calls: stores the new keys and values, and attends in canonical shapes.

    Args:
        module: the attention module.
        query: [batch, heads, tokens, size].
        key, value: [batch, KV heads, tokens, size], or what a canonical cache made of them.
        attention_mask: the call's `Step`.
        scaling: of the scores; None for 1 / sqrt(size).
        dropout: must be 0.
        slopes: of ALiBi, float32 [heads]; the scores have slope * position of the key added.
        kwargs: what else the model passes (s_aux or sinks: each head's score of nothing); what else would change the result
            is refused.

    Returns:
        [batch, tokens, heads, size], and no weights.
    """
    sinks = kwargs.get("s_aux", kwargs.get("sinks"))
    step = checked_step(module, attention_mask, dropout, kwargs, covered=("softcap", "s_aux", "sinks"))
    batch, heads, tokens, size = query.shape
    layer, new_keys, new_values = arrived(key, value, tokens)
    groups, wide = new_keys.shape[1], new_values.shape[3]
    if new_keys.shape[3] != size or new_values.shape[1] != groups or heads % groups:
        raise UsageError(
            f"{type(module).__name__}: {heads} heads of {size} for queries, {groups} of {new_keys.shape[3]} for keys and "
            f"{new_values.shape[1]} for values; the invariant tier covers heads of one size in whole groups."
        )
    scale = size**-0.5 if scaling is None else scaling
    if slopes is not None:
        query, new_keys = with_slopes(query, new_keys, slopes, step.positions(), scale)
    size = max(new_values.shape[3], new_keys.shape[3])  # zeros add nothing to a score
    query, new_keys, new_values = (
        t if t.shape[3] == size else F.pad(t, (0, size - t.shape[3])) for t in (query, new_keys, new_values)
    )
    if kwargs.get("softcap") is not None:
        if sinks is not None:
            raise UsageError(f"{type(module).__name__}: attention with both softcap and sinks is not covered by this tier.")
        slots = -(-step.slots_needed // BLOCK) * BLOCK
        keys, values = layer.room(slots, new_keys, new_values)
        step.store(layer, keys, values, new_keys, new_values)
        return capped_attention(query, keys, values, step, kwargs["softcap"], scale)[..., :wide], None
    rule = _UNPADDED if _is_unpadded else attention_rule(query.dtype, size, query.device)
    plan = _plan(rule, step, batch, heads, groups)
    keys, values = layer.room(max(step.slots_needed, *(piece.keys for piece in plan)), new_keys, new_values)
    step.store(layer, keys, values, new_keys, new_values)
    kernel = _flash if sinks is None else _flash_and_sums
    with rule.placed():
        out = _attend(query, keys, values, step, rule.granule, plan, scale, kernel)
    if sinks is not None:
        out = _with_sinks(out, sinks).to(query.dtype)
    return (out if out.shape[3] == wide else out[..., :wide]).contiguous(), None


_sigmoid = canonical_elementwise(torch.sigmoid)


def _with_sinks(out: Tensor, sinks: Tensor) -> Tensor:
    """What is left of [batch, tokens, heads, size + 1] where each head has a score, [heads], that takes weight to nothing.

    The last number is the logarithm of the sum by which the kernel divided the row, so that it has the row's bit class.
    """
    share = _sigmoid(out[..., -1] - sinks.float().reshape(-1))
    return out[..., :-1] * share.unsqueeze(-1)


def unpadded_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`canonical_attention` in the shapes that come, whatever the bits: the price of invariance is the difference."""
    return canonical_attention(*args, **kwargs | {"_is_unpadded": True})


class _Piece(NamedTuple):
    """Queries first..last in one call of so many key slots: heads "folded" into rows, "causal", or masked in "rows"."""

    first: int
    last: int
    keys: int
    how: str


def _plan(rule: AttentionClasses | _Unpadded, step: Step, batch: int, heads: int, groups: int) -> list[_Piece]:
    """Cuts a call into calls of shapes of one class.

    Raises:
        MachineError: there is none for some of its queries.
    """
    tokens, group, granule = step.tokens, heads // groups, rule.granule
    if tokens * group <= _FOLD and (tokens == 1 or group > 1):
        rows = group * (tokens + (-tokens % granule if tokens > 1 else 0))
        keys = rule.keys(step.slots_needed, *_shape(rows, batch, groups, groups, granule, tokens > 1))
        if keys is not None:
            return [_Piece(0, tokens, keys, "folded")]
    plan, done = [], 0
    if step.is_plain and batch * heads > 1:
        most = min(tokens, _CAUSAL)
        for done in (most, *(size for size in (1024, 512, 256) if size < most)):
            keys = rule.keys(-(-done // granule) * granule, done, "causal", "shared" if group > 1 else "many")
            if keys is not None:
                plan.append(_Piece(0, done, keys, "causal"))
                break
        else:
            done = 0
    while done < tokens:
        for size in _PIECES:
            last = min(tokens, done + size)
            shape = _shape(last - done, batch, heads, groups, granule, last - done > 1)
            keys = rule.keys(step.keys_of(last), *shape)
            if keys is not None:
                plan.append(_Piece(done, last, keys, "rows"))
                done = last
                break
        else:
            raise MachineError(
                f"attention of {batch} x {heads} heads in {str(step.dtype).removeprefix('torch.')}, token {done} after "
                f"{step.keys_of(last)} keys: no call has the bits of its class on this machine, so it cannot be made invariant."
            )
    return plan


def _attend(query: Tensor, keys: Tensor, values: Tensor, step: Step, granule: int, plan: list[_Piece],
            scale: float | None, kernel: Kernel) -> Tensor:  # fmt: skip
    batch, heads, tokens, size = query.shape
    groups = keys.shape[1]
    group = heads // groups
    pieces = []
    for first, last, seen, how in plan:
        k, v = keys[:, :, :seen], values[:, :, :seen]
        if how == "folded":
            spare = -tokens % granule if tokens > 1 else 0
            padded = F.pad(query, (0, 0, 0, spare)) if spare else query
            folded = padded.reshape(batch, groups, group * (tokens + spare), size)
            out = flash_rows(folded, k, v, step.mask(0, tokens, seen, group, spare), scale, granule, kernel)
            if tokens == 1:
                return out.reshape(batch, 1, heads, -1)
            out = out.reshape(batch, heads, tokens + spare, -1).transpose(1, 2)
            return out[:, :tokens] if spare else out
        if how == "causal":
            spare = -last % granule
            q = F.pad(query[:, :, :last], (0, 0, 0, spare)) if spare else query[:, :, :last]
            piece = kernel(q, k, v, None, scale)[:, :, :last]
        else:
            piece = flash_rows(query[:, :, first:last], k, v, step.mask(first, last, seen, 1), scale, granule, kernel)
        pieces.append(piece.transpose(1, 2))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def reference_attention(query: Tensor, keys: Tensor, values: Tensor, rule: AttentionClasses,
                        scale: float | None = None) -> Tensor:  # fmt: skip
    """What canonical attention means, slowly: each query alone, after all keys it sees, in whole blocks, on one thread.

    Args:
        query: [heads, size], one token's.
        keys, values: [KV heads, tokens, size], those the token sees, in the order of their positions.
        rule: this machine's classes for this head size.
        scale: of the scores; None for 1 / sqrt(size).

    Returns:
        [heads, size].
    """
    heads, size = query.shape
    groups, count, _ = keys.shape
    total = -(-count // BLOCK) * BLOCK
    mask = query.new_zeros(1, 1, 1, total)
    mask[..., count:] = float("-inf")
    k, v = (F.pad(t, (0, 0, 0, total - count))[None] for t in (keys, values))
    rows = []
    with one_thread():
        for head in range(heads):
            at = head // (heads // groups)
            tile = query.new_zeros(1, 1, rule.granule, size)
            tile[0, 0, 0] = query[head]
            rows.append(_flash(tile, k[:, at : at + 1], v[:, at : at + 1], mask, scale)[0, 0, 0])
    return torch.stack(rows)
