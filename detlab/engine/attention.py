"""Attention whose rows depend on their own tokens alone: torch's flash kernel, called in canonical shapes.

A query's bits follow the number of query rows, the number of keys, the slot at which each key sits, and how the work is
cut among threads. So keys sit at slot = token position (`cache`), their number is rounded up to one that was measured to
give the bits of whole blocks, and query rows to a multiple of a granule; what is rounded up is masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab import bits
from detlab.engine.cache import BLOCK, CanonicalLayer, Pending
from detlab.engine.canonical import one_thread
from detlab.engine.capped import capped_attention
from detlab.engine.ledger import ledger, name_of
from detlab.engine.probes import draw
from detlab.engine.step import Step, checked_step
from detlab.errors import MachineError, UsageError

__all__ = ["AttentionRule", "attention_rule", "canonical_attention", "reference_attention", "unpadded_attention"]

_STEP = 16  # key counts are measured at multiples of this
_FOLD = 64  # query rows up to which the heads of a group are folded into rows of one head


@dataclass(frozen=True)
class AttentionRule:
    """How the flash kernel must be called so that a query row's bits depend on its own tokens alone.

    Attributes:
        granule: query rows are padded to a multiple of it.
        most: more query rows are computed in pieces.
        causal: query rows up to which the kernel's own causal mask, in one call, gives the bits of single rows.
        tails: key counts, modulo the block of 512, that give the bits of a whole block; 512 is always among them.
        is_threaded: the bits are those of one thread at the number of threads it was measured for.
    """

    granule: int
    most: int
    causal: int
    tails: tuple[int, ...]
    is_threaded: bool

    def keys(self, count: int) -> int:
        """The canonical number of keys that holds so many."""
        blocks, tail = divmod(count, BLOCK)
        return count if not tail else blocks * BLOCK + next(t for t in self.tails if t >= tail)


UNPADDED = AttentionRule(granule=1, most=1024, causal=1 << 30, tails=tuple(range(1, BLOCK + 1)), is_threaded=True)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The flash kernel of torch: [batch, heads, rows, size]; fewer KV heads than query heads are shared among them."""
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        result: Tensor = flash(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)[0]
        return result
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, mask is None, scale=scale, enable_gqa=True)


def flash_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, granule: int) -> Tensor:
    """Attention of any number of query rows, padded to the granule.

    A single head of a single row of the batch would be one piece of work: the kernel would not go parallel over pieces,
    but its matrix products would over their own rows, with other bits. So it is cut in two heads.

    Args:
        q: [batch, heads, rows, size].
        k, v: [batch, KV heads, keys, size].
        mask: additive, [batch or 1, 1, rows or 1, keys].
        scale: of the scores; None for 1 / sqrt(size).
        granule: query rows are padded to a multiple of it (of two, where the head is cut).

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
        return _flash(q.reshape(1, 2, half, size), k, v, mask, scale).reshape(1, 1, rows + spare, -1)[:, :, :rows]
    result = _flash(q, k, v, mask, scale)
    return result[:, :, :rows] if spare else result


# ------------------------------------------------------------------------------------------------------- measurement
def attention_rule(dtype: torch.dtype, size: int, device: torch.device | str = "cpu") -> AttentionRule:
    """The rule for a head size, measured once per machine and number of threads.

    Raises:
        MachineError: no rule gives stable bits here.
    """
    return _rule(dtype, size, torch.device(device), torch.get_num_threads())


@lru_cache(maxsize=256)
def _rule(dtype: torch.dtype, size: int, device: torch.device, threads: int) -> AttentionRule:
    name = name_of("attention", dtype, size, device=device)
    found = ledger().look_up(name, AttentionRule, lambda: _measure(dtype, size, device))
    if found is None:
        raise MachineError(
            f"attention with heads of {size} in {str(dtype).removeprefix('torch.')}: no canonical shape gives stable bits on "
            "this machine, so it cannot be made invariant here."
        )
    assert isinstance(found, AttentionRule)
    return found


_CAUSAL = 2048
_CANDIDATES = ((4, 1024), (4, 128), (8, 128), (32, 32))


def _measure(dtype: torch.dtype, size: int, device: torch.device | str) -> AttentionRule | None:
    """Finds the cheapest candidate that is one bit class on one thread, then asks whether the threads set now keep it."""
    probe = _Probe(dtype, size, device)
    # In 16 bits most differences round away, so that a few samples may miss them: a tail must be stable in float32, too.
    wide = _Probe(torch.float32, size, device) if dtype != torch.float32 else None
    for granule, most in _CANDIDATES:
        with one_thread():
            measured = probe.stable_tails(granule)
            if wide is not None:
                measured = tuple(tail for tail in wide.stable_tails(granule) if tail in measured)
        for tails in dict.fromkeys((measured, (BLOCK,))):  # whole blocks alone, where parts of one do not hold after all
            rule = _measured_rule(probe, AttentionRule(granule, most, 0, tails, True))
            if rule is not None:
                return rule
    return None


def _measured_rule(probe: _Probe, rule: AttentionRule) -> AttentionRule | None:
    """A candidate with what it allows, on one thread and on the threads set now; None where it is not one bit class."""
    with one_thread():
        if not probe.holds(rule):
            return None
        rule = replace(rule, causal=_CAUSAL if probe.causal_holds(rule) else 0)
    if torch.get_num_threads() == 1:
        return rule
    if not probe.holds(rule):
        return replace(rule, is_threaded=False)
    return rule if not rule.causal or probe.causal_holds(rule) else replace(rule, causal=0)


class _Probe:
    """Random queries, keys and values, and the bits each query has in the reference call."""

    def __init__(self, dtype: torch.dtype, size: int, device: torch.device | str) -> None:
        self.q = draw(1, 6, 512, size, dtype=dtype, seed=1, device=device)
        self.k = draw(1, 3, 2 * BLOCK, size, dtype=dtype, seed=2, device=device)
        self.v = draw(1, 3, 2 * BLOCK, size, dtype=dtype, seed=3, device=device)
        self.known: dict[tuple[int, int], Tensor] = {}

    def mask(self, count: int, total: int) -> Tensor:
        """[1, 1, 1, total]: the first ``count`` keys are seen."""
        mask = self.q.new_zeros(1, 1, 1, total)
        mask[..., count:] = float("-inf")
        return mask

    def reference(self, count: int, granule: int) -> Tensor:
        """One granule of query rows a call, whole blocks of keys, one thread: [1, 6, 256, size]."""
        if (count, granule) not in self.known:
            total = -(-count // BLOCK) * BLOCK
            keys, values, mask = self.k[:, :, :total], self.v[:, :, :total], self.mask(count, total)
            with one_thread():
                tiles = [
                    _flash(self.q[:, :, at : at + granule].contiguous(), keys, values, mask, None)
                    for at in range(0, 256, granule)
                ]
            self.known[count, granule] = torch.cat(tiles, 2)
        return self.known[count, granule]

    def stable_tails(self, granule: int) -> tuple[int, ...]:
        """Key counts up to a block that give the bits of the whole block, for every count of keys that they hold."""
        stable = []
        for tail in range(_STEP, BLOCK, _STEP):
            calls = [(less, more, rows) for less in (0, 7, 15) for more in (0, BLOCK) for rows in (granule, 96)]
            if all(self._same(tail - less + more, tail + more, rows) for less, more, rows in calls):
                stable.append(tail)
        return (*stable, BLOCK)

    def _same(self, count: int, total: int, rows: int) -> bool:
        whole = -(-count // BLOCK) * BLOCK
        q, mask = self.q[:, :, :rows].contiguous(), self.mask(count, whole)
        few = _flash(q, self.k[:, :, :total], self.v[:, :, :total], mask[..., :total], None)
        return bits.equal(few, _flash(q, self.k[:, :, :whole], self.v[:, :, :whole], mask, None))

    def holds(self, rule: AttentionRule) -> bool:
        """Whether calls of many shapes give the reference's bits: rows, heads, batches, folding, masks by row."""
        counts = (5, 130, 190, 300, 700)
        rows = [r for r in (1, 3, 4, 8, 20, 31, 32, 33, 64, 100, 192, 256) if r <= rule.most]
        for count in counts:
            total = rule.keys(count)
            expected, mask = self.reference(count, rule.granule), self.mask(count, total)
            for r in rows:
                for heads, groups in ((6, 3), (2, 1), (1, 1)):
                    k, v = self.k[:, :groups, :total], self.v[:, :groups, :total]
                    got = flash_rows(self.q[:, :heads, :r], k, v, mask, None, rule.granule)
                    if not bits.equal(got.contiguous(), expected[:, :heads, :r].contiguous()):
                        return False
        return self._rows_see_their_own(rule)

    def causal_holds(self, rule: AttentionRule) -> bool:
        """Whether long causal calls give the bits of pieces of 64 rows, each with its own mask."""
        size, device = self.q.shape[3], self.q.device
        for length in (132, 1000, _CAUSAL):
            rows = -(-length // rule.granule) * rule.granule
            total = rule.keys(rows)
            q = draw(1, 2, rows, size, dtype=self.q.dtype, seed=4, device=device)
            keys, values = (draw(1, 1, total, size, dtype=self.q.dtype, seed=s, device=device) for s in (5, 6))
            whole = _flash(q, keys, values, None, None)
            for first in range(0, rows, 128 if length < _CAUSAL else 320):
                piece = q[:, :, first : first + 32]
                last = first + piece.shape[2]
                seen = rule.keys(last)
                hidden = torch.arange(seen, device=device) > torch.arange(first, last, device=device)[:, None]
                mask = self.q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[None, None]
                with one_thread():
                    expected = flash_rows(piece, keys[:, :, :seen], values[:, :, :seen], mask, None, rule.granule)
                if not bits.equal(whole[:, :, first:last].contiguous(), expected.contiguous()):
                    return False
        return True

    def _rows_see_their_own(self, rule: AttentionRule) -> bool:
        """Causal masks: each row has the bits of the row alone with its own keys."""
        for length in (32, 52, 200, 420):
            length = min(length, rule.most)
            rows = -(-length // rule.granule) * rule.granule
            total = rule.keys(rows)
            keys, values = self.k[:, :, :total], self.v[:, :, :total]
            causal = self.q.new_zeros(rows, total).masked_fill_(
                ~torch.ones(rows, total, dtype=torch.bool).tril().to(self.q.device), float("-inf")
            )
            q = self.q[:, :, :rows].contiguous()
            masked = _flash(q, keys, values, causal[None, None], None)
            if not bits.equal(masked, _flash(q, keys, values, None, None)):
                return False
            for at in (0, 1, length // 2, length - 1):
                total = rule.keys(at + 1)
                alone = flash_rows(
                    q[:, :, at : at + 1],
                    self.k[:, :, :total],
                    self.v[:, :, :total],
                    self.mask(at + 1, total),
                    None,
                    rule.granule,
                )
                if not bits.equal(alone.contiguous(), masked[:, :, at : at + 1].contiguous()):
                    return False
        return True


# ------------------------------------------------------------------------------------------------------ the attention
def canonical_attention(module: Any, query: Tensor, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
                        dropout: float = 0.0, _is_unpadded: bool = False, **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """The attention that transformers calls: stores the new keys and values, and attends in canonical shapes.

    Args:
        module: the attention module.
        query: [batch, heads, tokens, size].
        key, value: [batch, KV heads, tokens, size], or what a canonical cache made of them.
        attention_mask: the call's `Step`.
        scaling: of the scores; None for 1 / sqrt(size).
        dropout: must be 0.
        kwargs: what else the model passes; what would change the result is refused.

    Returns:
        [batch, tokens, heads, size], and no weights.
    """
    step = checked_step(module, attention_mask, dropout, kwargs, covered=("softcap",))
    layer, new_keys, new_values = (
        (key.layer, key.keys, value.values) if isinstance(key, Pending) else (CanonicalLayer(), key, value)
    )
    batch, heads, tokens, size = query.shape
    groups = new_keys.shape[1]
    if new_values.shape[3] != size or heads % groups:
        raise UsageError(
            f"{type(module).__name__}: heads of {size} for keys and {new_values.shape[3]} for values, {heads} over {groups}; "
            "the invariant tier covers heads of one size in whole groups."
        )
    if kwargs.get("softcap") is not None:
        slots = -(-step.slots_needed // BLOCK) * BLOCK
        keys, values = layer.room(slots, new_keys, new_values)
        step.store(layer, keys, values, new_keys, new_values)
        return capped_attention(query, keys, values, step, kwargs["softcap"], scaling), None
    rule = UNPADDED if _is_unpadded else attention_rule(query.dtype, size, query.device)
    keys, values = layer.room(max(step.slots_needed, rule.keys(step.slots_needed)), new_keys, new_values)
    step.store(layer, keys, values, new_keys, new_values)
    if rule.is_threaded:
        return _attend(query, keys, values, step, rule, scaling), None
    with one_thread():
        return _attend(query, keys, values, step, rule, scaling), None


def unpadded_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`canonical_attention` in the shapes that come, whatever the bits: the price of invariance is the difference."""
    return canonical_attention(*args, **kwargs | {"_is_unpadded": True})


def _attend(query: Tensor, keys: Tensor, values: Tensor, step: Step, rule: AttentionRule, scale: float | None) -> Tensor:
    batch, heads, tokens, size = query.shape
    groups = keys.shape[1]
    group = heads // groups
    total = rule.keys(step.slots_needed)
    if tokens * group <= min(_FOLD, rule.most) and (tokens == 1 or group > 1):
        spare = -tokens % rule.granule if tokens > 1 else 0
        padded = F.pad(query, (0, 0, 0, spare)) if spare else query
        folded = padded.reshape(batch, groups, group * (tokens + spare), size)
        mask = step.mask(0, tokens, total, group, spare)
        out = flash_rows(folded, keys[:, :, :total], values[:, :, :total], mask, scale, rule.granule)
        if tokens == 1:
            return out.reshape(batch, 1, heads, size)
        out = out.reshape(batch, heads, tokens + spare, size).transpose(1, 2)
        return out[:, :tokens] if spare else out
    pieces, done = [], 0
    if step.is_plain and batch * heads > 1 and rule.causal:
        done = min(tokens, rule.causal)
        spare = -done % rule.granule
        seen = rule.keys(done + spare)
        q = F.pad(query, (0, 0, 0, spare)) if spare else query[:, :, :done]
        out = _flash(q, keys[:, :, :seen], values[:, :, :seen], None, scale).transpose(1, 2)
        pieces.append(out[:, :done] if spare else out)
    chunk = min(256, rule.most)
    for first in range(done, tokens, chunk):
        last = min(tokens, first + chunk)
        seen = rule.keys(step.keys_of(last))
        mask = step.mask(first, last, seen, 1)
        piece = flash_rows(query[:, :, first:last], keys[:, :, :seen], values[:, :, :seen], mask, scale, rule.granule)
        pieces.append(piece.transpose(1, 2))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def reference_attention(query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule, scale: float | None = None) -> Tensor:
    """What canonical attention means, slowly: each query alone, after all keys it sees, in whole blocks, on one thread.

    Args:
        query: [heads, size], one token's.
        keys, values: [KV heads, tokens, size], those the token sees, in the order of their positions.
        rule: the machine's rule for this head size.
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
