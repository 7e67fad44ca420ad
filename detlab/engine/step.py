"""One forward call as attention sees it: at which slot each token's keys are stored, and which slots each query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from detlab.engine.cache import CanonicalLayer
from detlab.errors import UsageError

__all__ = ["Step", "canonical_mask", "checked_step"]

_HIDDEN = float("-inf")


class Step:
    """Where the tokens of one call sit; made once a call, in place of an attention mask.

    Attributes:
        tokens: new tokens a row.
        before: real tokens stored before this call: one number where all rows agree, else int64 [batch].
        after: the same, after this call.
        slots: int64 [batch, tokens], where each new token is stored; None where row b's token t is stored at before + t.
            A padding token goes to the slot behind the last, which no query sees.
        slots_needed: slots that the buffers must have.
        window: tokens that a query sees at most, its own included; None for all.
        given: the mask that it was made of, bool [batch, tokens so far]; None where there was none.
    """

    def __init__(self, batch: int, tokens: int, offset: int, mask: Tensor | None, window: int | None, dtype: torch.dtype,
                 device: torch.device, chunk: int | None = None) -> None:  # fmt: skip
        """Lays out a call.

        Args:
            batch, tokens: rows, and new tokens a row.
            offset: tokens of earlier calls a row, padding counted.
            mask: bool [batch, offset + tokens], True for real tokens; None where all are.
            window: of sliding-window attention.
            dtype, device: of the queries.
            chunk: tokens see those of their own chunk of so many positions alone; None for no such chunks.
        """
        self.chunk = chunk
        self.tokens, self.window, self.dtype, self.device = tokens, window, dtype, device
        self.given = mask
        self._batch = batch
        self._windows: dict[int, Step] = {}
        self.slots: Tensor | None = None
        self._masks: dict[tuple[int, int, int, int, int], Tensor] = {}
        self.before: int | Tensor = offset
        self.after: int | Tensor = offset + tokens
        self._positions: Tensor | None = None
        self._padding: Tensor | None = None
        self._offset = offset
        self._vouched: Tensor | None = None
        self.real: Tensor | None = None
        self.slots_needed = offset + tokens
        if mask is not None:
            if mask.shape[0] != batch or mask.shape[1] < offset + tokens:
                raise UsageError(
                    f"attention_mask must cover {batch} rows and {offset} cached and {tokens} new tokens; "
                    f"got {list(mask.shape)}."
                )
            mask = mask[:, : offset + tokens]
            if not bool(mask.all()):
                self.real = mask
                self._lay_out(mask, batch, offset)

    @property
    def _start(self) -> int:
        """The slot of the first new token, where all rows agree on it."""
        return self.before if isinstance(self.before, int) else 0

    def _lay_out(self, mask: Tensor, batch: int, offset: int) -> None:
        if self.window is not None and bool(((mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0] > 1).any()):
            raise UsageError(
                "attention_mask has zeros between ones, and this model's attention is a sliding window, which counts them: "
                "the tier does not cover that. Pad on one side only."
            )
        counts = mask.cumsum(1)
        new, real = counts[:, offset:], mask[:, offset:]
        before = counts[:, offset - 1] if offset else counts.new_zeros(batch)
        longest = int(counts[:, -1].max())
        if bool(real.all()) and bool((before == before[0]).all()):
            self.before = int(before[0])
            self.after = self.before + self.tokens
            self.slots_needed = longest
            return
        self.before, self.after = before, counts[:, -1]
        self.slots = torch.where(real, new - 1, longest)
        self._positions = (new - 1).clamp_min(0)  # a padding query sees what is there: finite, and read by no one
        self.slots_needed = longest
        if not bool(real.all()):
            self.slots_needed += 1
            self._padding = ~real[:, None, :, None]

    @property
    def is_plain(self) -> bool:
        """A first call without padding or window: the kernel's own causal mask does."""
        return self.slots is None and self._start == 0 and self.window is None and self.chunk is None

    def positions(self) -> Tensor:
        """The new tokens' positions, int64 [batch or 1, tokens]; what stands for padding is read by no one."""
        if self._positions is not None:
            return self._positions
        return torch.arange(self._start, self._start + self.tokens, device=self.device)[None]

    def within(self, window: int) -> Step:
        """The same call for layers that see a window, where the model has one mask for all."""
        if window not in self._windows:
            past = self._offset
            self._windows[window] = Step(self._batch, self.tokens, past, self.real, window, self.dtype, self.device)
        return self._windows[window]

    def keys_of(self, last: int) -> int:
        """Slots that the queries before token ``last`` may see."""
        return self._start + last if self.slots is None else self.slots_needed

    def store(self, layer: CanonicalLayer, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
        """Writes a layer's new keys and values, [batch, KV heads, tokens, size], to their slots."""
        self._check(layer)
        if self.slots is None:
            keys[:, :, self._start : self._start + self.tokens] = new_keys
            values[:, :, self._start : self._start + self.tokens] = new_values
        else:
            rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
            if self._padding is not None:  # 0 x infinity would be a number that is none, in a row that is fine
                new_keys, new_values = (t.masked_fill(self._padding, 0) for t in (new_keys, new_values))
            keys.transpose(1, 2)[rows, self.slots] = new_keys.transpose(1, 2)
            values.transpose(1, 2)[rows, self.slots] = new_values.transpose(1, 2)
        layer.filled, layer.real = self.after, self.real

    def _check(self, layer: CanonicalLayer) -> None:
        """The mask must tell the same of the cached tokens as the masks under which they were stored."""
        if layer.real is None and self.real is None and layer.filled == self.before:
            return
        if layer.real is not None and layer.real is self._vouched:  # the layers of a cache share it
            return
        ours = None if self.real is None else self.real[:, : self._offset]
        if layer.real is None:
            same = ours is None or bool(ours.all())
        else:
            same = bool(layer.real.all()) if ours is None else torch.equal(ours, layer.real)
        if same:
            self._vouched = layer.real
        else:
            raise UsageError(
                "attention_mask says other of the cached tokens than when they were stored: it counts "
                f"{_words(self.before)}, the cache holds {_words(layer.filled)}. Pass attention_mask with the padding of "
                "earlier calls, as generate does."
            )

    def mask(self, first: int, last: int, keys: int, copies: int, spare: int = 0) -> Tensor:
        """Additive mask of queries first..last, [batch or 1, 1, rows, keys].

        Args:
            first, last: the queries' tokens.
            keys: key slots.
            copies: heads that are folded into rows, head-major.
            spare: rows that are appended to each head's, which see everything and are read by no one.
        """
        name = (first, last, keys, copies, spare)
        known = self._masks.get(name)
        if known is not None:
            return known
        slots = torch.arange(keys, device=self.device)
        if self._positions is None:
            positions = torch.arange(self._start + first, self._start + last, device=self.device)[None, :, None]
        else:
            positions = self._positions[:, first:last, None]
        seen = slots <= positions
        if self.window is not None:
            seen &= slots > positions - self.window
        if self.chunk is not None:
            seen &= slots >= positions // self.chunk * self.chunk
        made = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, _HIDDEN)
        if spare:
            made = F.pad(made, (0, 0, 0, spare))
        if last - first > 1 and copies > 1:  # a single row is shared by the heads as it is
            made = made.repeat(1, copies, 1)
        self._masks[name] = made = made[:, None]
        return made


class OtherMask:
    """Stands for a mask that no tier covers; it is refused when an attention, or the model itself, makes use of it."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __getattr__(self, name: str) -> Any:
        raise UsageError(self.why)

    def _used(self, *_: Any, **__: Any) -> Any:
        raise UsageError(self.why)

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __invert__ = __and__ = _used

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch that is given one, in place of a mask."""
        masks = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, OtherMask)]
        raise UsageError(masks[0].why if masks else "a mask that no tier covers was used.")


class _NoTensor(UsageError, AttributeError):
    """A layout was taken for a mask; an AttributeError, too, so that who only asks whether it has something is answered."""


def _used(*_: Any, **__: Any) -> Any:
    raise _NoTensor(
        "the model makes use of its attention mask itself (it computes attention, or chooses keys, without transformers' "
        "AttentionInterface), and the tier has no part for it: it does not cover the model."
    )


def _made_for(self: Step, *_: Any, **__: Any) -> Step:
    """A mask is moved or made to be of a dtype, which changes nothing here."""
    return self


Step.to = _made_for  # type: ignore[attr-defined]
for _operator in ("__getitem__", "__add__", "__radd__", "__mul__", "__rmul__", "__invert__", "__and__", "__torch_function__"):
    setattr(Step, _operator, _used)
Step.__getattr__ = _used  # type: ignore[attr-defined]


#: Tensors that models hand on to every attention, and that change nothing in it here.
_HARMLESS = frozenset(
    "position_ids cache_position position_embeddings input_ids inputs_embeds cu_seq_lens_q cu_seq_lens_k s_aux sinks "
    "softcap".split()
)
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")


def checked_step(module: Any, step: Any, dropout: float, kwargs: dict[str, Any], covered: tuple[str, ...] = ()) -> Step:
    """What an attention was given in place of a mask, where a tier covers the call.

    Args:
        module: the attention module.
        step: what it was given.
        dropout: must be 0.
        kwargs: what else it was given.
        covered: names among kwargs that change the scores and that the tier covers nevertheless.

    Raises:
        UsageError: the call needs another mask, dropout, weights, or something that changes the scores.
    """
    name = type(module).__name__
    if isinstance(step, OtherMask):
        raise UsageError(step.why)
    if not isinstance(step, Step):
        shape = f"a mask of shape {list(step.shape)}" if isinstance(step, Tensor) else type(step).__name__
        raise UsageError(
            f"{name}: inside detlab.deterministic attention is causal, with a 2D attention_mask of ones and zeros; got "
            f"{'no mask' if step is None else shape}. Masks of another form are not covered."
        )
    if dropout:
        raise UsageError("attention dropout is on: the engine computes in eval mode. Call model.eval().")
    for given in _UNSUPPORTED:
        if kwargs.get(given) is not None and given not in covered:
            raise UsageError(f"{name}: attention with {given} is not covered by this tier.")
    odd = [given for given, value in kwargs.items() if isinstance(value, Tensor) and given not in _HARMLESS]
    if odd:
        raise UsageError(f"{name}: attention that is given {odd[0]} is not covered by this tier.")
    if kwargs.get("output_attentions"):
        raise UsageError("output_attentions is not available inside detlab.deterministic: no weights are kept.")
    return step


def _words(count: int | Tensor) -> str:
    return str(count if isinstance(count, int) else count.tolist())


def _cells(function: Any) -> list[Any]:
    """What a function made by another one remembers."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _chunk_of(function: Callable[..., Any]) -> int | None:
    """The size of the chunks where a mask function is transformers' causal one in chunks, counted after left padding."""
    parts = _cells(function)
    others = [part for part in parts[0] if part is not causal_mask_function] if parts and isinstance(parts[0], tuple) else []
    if len(parts) != 1 or len(parts[0]) != 2 or len(others) != 1 or not others[0].__qualname__.startswith("chunked_overlay"):
        return None
    sizes = [cell for cell in _cells(others[0]) if isinstance(cell, int)]
    return sizes[0] if len(sizes) == 1 else None


def _is_sliding(function: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask function is transformers' causal sliding window of that size, and nothing more."""
    cells: Any = getattr(function, "__closure__", None) or ()
    parts: Any = cells[0].cell_contents if len(cells) == 1 else ()
    others = [part for part in parts if part is not causal_mask_function] if isinstance(parts, tuple) else []
    if len(parts) != 2 or len(others) != 1:
        return False
    other: Any = others[0]
    cells = getattr(other, "__closure__", None) or ()
    return other.__qualname__.startswith("sliding_window_overlay") and [c.cell_contents for c in cells] == [window]


def canonical_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
                   mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None,
                   local_size: int | None = None, dtype: torch.dtype = torch.float32, device: Any = "cpu",
                   **_: Any) -> Step | OtherMask:  # fmt: skip
    """What transformers calls to build a mask: lays out the call instead of building a mask.

    Returns:
        The layout; where the model or the caller asks for another mask than a causal one, a sliding window or chunks, what is
        refused when it is used (a decoder that has no encoder here has a mask for it all the same).
    """
    chunk = _chunk_of(mask_function)
    if chunk is not None:
        return Step(batch_size, q_length, int(q_offset), attention_mask, None, dtype, torch.device(device), chunk)
    if mask_function is not causal_mask_function and not _is_sliding(mask_function, local_size):
        return OtherMask(
            "this call needs an attention mask that is neither causal nor a causal sliding window (packed sequences? "
            "bidirectional attention? position_ids that do not count up, without attention_mask?); no tier "
            "covers it."
        )
    if kv_offset:
        raise UsageError("this call's keys do not start at token 0, which no tier covers.")
    return Step(batch_size, q_length, int(q_offset), attention_mask, local_size, dtype, torch.device(device))
