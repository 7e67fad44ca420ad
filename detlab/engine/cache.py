"""A KV cache in which a token's keys and values sit at slot = token position, in buffers of whole blocks.

Attention's blocks and vector lanes follow the slot. In a stock cache, left padding and dropped sliding-window tokens move
a token to other slots, and its bits with it. Here padding is left out, and no token moves. Layers with a recurrence keep
their state after each row's last real token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    StaticCache,
)

from detlab.engine.pending import Pending, own_attention_error, taken, touched_by
from detlab.errors import UsageError

__all__ = ["BLOCK", "CanonicalLayer", "Pending", "StateAndKeysLayer", "StateLayer", "adopt", "arrived"]

_SMALL = (128, 256)  # slots of the first buffers of a short text
BLOCK = 512  # slots; the block of torch's CPU flash attention


def arrived(key: Any, value: Any, tokens: int) -> tuple[CanonicalLayer, Tensor, Tensor]:
    """The layer to which an attention's new keys and values belong, and those; a layer of the call alone without a cache.

    Args:
        key, value: as they came to the attention, [batch, KV heads, tokens, size].
        tokens: new tokens a row.

    Raises:
        UsageError: they are not those of the new tokens.
    """
    pending = key if isinstance(key, Pending) else value if isinstance(value, Pending) else None
    touched = taken()
    layer = touched if pending is None else pending.layer
    keys = key.keys if isinstance(key, Pending) else key
    values = value.values if isinstance(value, Pending) else value
    if layer is None:
        layer = CanonicalLayer()
    if touched is not None and touched is not layer:
        raise UsageError(own_attention_error())
    if touched is not None and (keys.shape[2] != tokens or values.shape[2] != tokens):
        raise UsageError(
            f"{touched_by()} gives its attention {keys.shape[2]} keys and {values.shape[2]} values for {tokens} new tokens; "
            "the tier covers one of each a token."
        )
    return layer, keys, values


class CanonicalLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, [batch, KV heads, slots, head size], zero where nothing is stored yet.

    Attributes:
        seen: tokens given to it, padding counted.
        filled: tokens stored: one number where all rows agree, else int64 [batch].
    """

    is_sliding = False  # windows are masks here; nothing is dropped
    is_croppable = True

    def __init__(self, longest: int = 0, **_: Any) -> None:
        """Makes an empty layer; ``longest``: tokens that a static cache has room for (0: grows)."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.is_initialized = False
        self.longest = longest
        self.seen = 0
        self.filled: int | Tensor = 0
        self.real: Tensor | None = None  # bool [batch, seen]: which tokens are no padding; None where none is

    # ------------------------------------------------------------------------------------------- as transformers asks
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: buffers are made when the first keys are stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hands new keys and values on to the attention, which knows where they belong."""
        self.is_initialized = True
        self.dtype, self.device = key_states.dtype, key_states.device
        self.seen += key_states.shape[2]
        if self.longest and self.seen > self.longest:
            raise UsageError(f"a static cache of {self.longest} tokens is full: {self.seen} were given. Make a longer one.")
        return Pending(self, key_states, value_states), Pending(self, key_states, value_states, is_keys=False)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys a mask covers for so many new tokens, and the first of them."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens given so far, padding counted."""
        return self.seen

    def get_query_offset(self) -> int:
        """Index of the next token, padding counted."""
        return self.seen

    def get_max_length(self) -> int:
        """Tokens it can hold; -1 where it grows."""
        return self.longest or -1

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The keys stored, without the room behind them."""
        return None if self._keys is None else self._keys[:, :, : self._most()]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The values stored, without the room behind them."""
        return None if self._values is None else self._values[:, :, : self._most()]

    def _most(self) -> int:
        return self.filled if isinstance(self.filled, int) else int(self.filled.max())

    def offload(self) -> None:
        """Refused: the buffers stay where the model computes."""
        raise UsageError("an offloaded cache is not available inside detlab.deterministic; use a dynamic or static cache.")

    def reset(self) -> None:
        """Forgets all tokens."""
        self.seen, self.filled, self.real = 0, 0, None
        if self._keys is not None and self._values is not None:
            self._keys.zero_()
            self._values.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops tokens from the end of each row; a negative number, as transformers counts here."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop takes how many tokens to drop as a negative number; got {tokens_to_remove}.")
        if not tokens_to_remove or not self.is_initialized:
            return
        filled = self.filled + tokens_to_remove
        if bool((torch.as_tensor(filled) < 0).any()):
            raise UsageError(f"crop({tokens_to_remove}) would cut into the padding of a row; a row holds {self.filled} tokens.")
        self.filled, self.seen = filled, self.seen + tokens_to_remove
        self.real = None if self.real is None else self.real[:, :tokens_to_remove]

    def _select(self, index: Tensor) -> None:
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, index.to(self._keys.device))
            self._values = self._values.index_select(0, index.to(self._values.device))
        if not isinstance(self.filled, int):
            self.filled = self.filled.index_select(0, index.to(self.filled.device))
        if self.real is not None:
            self.real = self.real.index_select(0, index.to(self.real.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, as beam search asks."""
        if self._keys is not None:
            self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        if self._keys is not None:
            self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        if self._keys is not None:
            self._select(torch.arange(self._keys.shape[0]).repeat_interleave(repeats))

    # ------------------------------------------------------------------------------------------- as the attention asks
    def room(self, slots: int, like_keys: Tensor, like_values: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers, grown to hold so many slots."""
        have = 0 if self._keys is None else self._keys.shape[2]
        if slots > have:
            wanted = max(slots, self.longest)
            wanted = next((size for size in _SMALL if size >= wanted), -(-wanted // BLOCK) * BLOCK)
            if have:  # room to grow, so that a long text is not copied at every block
                wanted = max(wanted, 2 * have if have < BLOCK else have + max(BLOCK, have // 2 // BLOCK * BLOCK))
            batch, heads, _, size = like_keys.shape
            keys = like_keys.new_zeros(batch, heads, wanted, size)
            values = like_values.new_zeros(batch, heads, wanted, like_values.shape[3])
            if self._keys is not None and self._values is not None:
                keys[:, :, :have] = self._keys
                values[:, :, :have] = self._values
            self._keys, self._values = keys, values
        assert self._keys is not None and self._values is not None
        if self._keys.shape[0] != like_keys.shape[0]:
            raise UsageError(
                f"this cache holds {self._keys.shape[0]} rows, and the call has {like_keys.shape[0]}; "
                "give each batch its own cache."
            )
        return self._keys, self._values


class StateLayer(LinearAttentionCacheLayerMixin):
    """What one layer with a recurrence, or with a convolution over time, keeps between calls.

    Attributes:
        stepped: tokens given to it, padding counted.
        kept: tensors by name, with the rows of the batch in dimension ``rows_in[name]``; empty before the first call.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        """Makes an empty layer."""
        super().__init__()
        self.stepped = 0
        self.kept: dict[str, Tensor] = {}
        self.rows_in: dict[str, int] = {}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: states are made by the first call."""

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused: it is what a stock layer calls."""
        raise UsageError(
            "this layer's state is kept for detlab's recurrence, and a stock one asked for it. Either the cache was filled "
            "inside detlab.deterministic and is used outside: start a new one. Or the tier has no part for this model's "
            "recurrent layers: it does not cover the model."
        )

    update_recurrent_state = update_conv_state

    def activate_past_recording(self) -> None:
        """Refused: a state cannot be wound back."""
        raise UsageError(
            "assisted decoding takes tokens back, which a recurrent state cannot do inside detlab.deterministic. "
            "Generate without an assistant."
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a state cannot be wound back."""
        if tokens_to_remove:
            raise UsageError("a recurrent state cannot be wound back, so this cache cannot be cropped. Start a new one.")

    def offload(self) -> None:
        """Refused: the states stay where the model computes."""
        raise UsageError("an offloaded cache is not available inside detlab.deterministic; use a dynamic or static cache.")

    def reset(self) -> None:
        """Forgets all tokens."""
        self.stepped = 0
        self.kept.clear()

    def keep(self, name: str, value: Tensor, rows_in: int = 0) -> None:
        """Keeps a tensor until the next call; its rows are in this dimension."""
        self.kept[name], self.rows_in[name] = value, rows_in

    def get(self, name: str, batch: int) -> Tensor | None:
        """A kept tensor of so many rows; None before the first call.

        Raises:
            UsageError: it was kept for another number of rows.
        """
        value = self.kept.get(name)
        if value is not None and value.shape[self.rows_in[name]] != batch:
            raise UsageError(
                f"this cache holds {value.shape[self.rows_in[name]]} rows, and the call has {batch}; "
                "give each batch its own cache."
            )
        return value

    def _choose(self, index: Tensor) -> None:
        for name, value in self.kept.items():
            self.kept[name] = value.index_select(self.rows_in[name], index.to(value.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, as beam search asks."""
        self._choose(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        self._choose(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        for name, value in self.kept.items():
            self.kept[name] = value.repeat_interleave(repeats, self.rows_in[name])


class StateAndKeysLayer(StateLayer, CanonicalLayer):  # type: ignore[misc, no-untyped-call]
    """One layer that has both a recurrence and attention, side by side."""

    is_croppable = False

    def __init__(self, longest: int = 0) -> None:
        """Makes an empty layer; ``longest`` as in `CanonicalLayer`."""
        CanonicalLayer.__init__(self, longest)
        StateLayer.__init__(self)

    def reset(self) -> None:
        """Forgets all tokens."""
        StateLayer.reset(self)
        CanonicalLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, as beam search asks."""
        StateLayer.reorder_cache(self, beam_idx)
        CanonicalLayer.reorder_cache(self, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        StateLayer.batch_select_indices(self, indices)
        CanonicalLayer.batch_select_indices(self, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        StateLayer.batch_repeat_interleave(self, repeats)
        CanonicalLayer.batch_repeat_interleave(self, repeats)

    def get_max_length(self) -> int:
        """Tokens it can hold; -1 where it grows."""
        return CanonicalLayer.get_max_length(self)


def adopt(cache: Any) -> None:
    """Makes an empty transformers cache canonical, in place; leaves a canonical one as it is.

    Raises:
        UsageError: it is of another kind, or holds tokens that the stock model computed.
    """
    if not isinstance(cache, Cache):
        raise UsageError(
            f"inside detlab.deterministic a cache must be a DynamicCache or a StaticCache; got {type(cache).__name__}."
        )
    if any(isinstance(layer, (CanonicalLayer, StateLayer)) for layer in cache.layers):
        return
    if cache.layer_class_to_replicate is CanonicalLayer:
        return
    if type(cache) not in (DynamicCache, StaticCache) or getattr(cache, "offloading", False):
        raise UsageError(
            f"inside detlab.deterministic a cache must be a plain DynamicCache or StaticCache; got {type(cache).__name__}"
            f"{' with offloading' if getattr(cache, 'offloading', False) else ''}."
        )
    layers: list[Any] = cache.layers
    has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    for layer in layers:
        has_tokens = getattr(layer, "is_initialized", False) and hasattr(layer, "get_seq_length") and layer.get_seq_length() > 0
        if has_tokens or any(getattr(layer, "has_previous_state", {}).values()):
            raise UsageError(
                "this cache holds tokens that the stock model computed, whose bits depend on their batch. "
                "Fill a new cache inside detlab.deterministic."
            )
        if isinstance(layer, LinearAttentionCacheLayerMixin) and layer.number_of_states > 1:
            raise UsageError(f"a layer with {layer.number_of_states} recurrent states is not covered by detlab.deterministic.")
        is_known = hasattr(layer, "get_mask_sizes") or isinstance(layer, LinearAttentionCacheLayerMixin)
        if has_states and isinstance(layer, DummyLayer):  # a layer of experts or an MLP between those with states
            continue
        is_of_a_model = not type(layer).__module__.startswith("transformers.cache_utils")  # it keeps more than keys and values
        if is_of_a_model or not is_known or type(layer).__name__.startswith(("Dummy", "Quant")):
            raise UsageError(f"a cache layer of type {type(layer).__name__} is not covered by detlab.deterministic.")
    longest = 0
    if isinstance(cache, StaticCache):
        # A sliding layer's length is its window; where all slide, the length asked for is not known, and the buffers grow.
        full = [layer for layer in cache.layers if not getattr(layer, "is_sliding", False)]
        longest = max((int(getattr(layer, "max_cache_len", 0) or 0) for layer in full), default=0)
    cache.layers = [_canonical(layer, longest) for layer in cache.layers]
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = CanonicalLayer


def _canonical(layer: Any, longest: int) -> Any:
    """The layer in the place of a stock one."""
    if isinstance(layer, DummyLayer):
        return layer
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return CanonicalLayer(longest)
    return StateAndKeysLayer(longest) if hasattr(layer, "get_mask_sizes") else StateLayer()
