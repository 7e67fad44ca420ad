"""Activations and rotary tables whose elements do not depend on where in a buffer they stand.

A vectorised elementwise kernel computes whole vectors with one formula and what is left over at the end of each thread's
share with another. Here every element is computed in a vector: on one thread, in a buffer whose length is a multiple of 64,
and that it is so is probed for each length before it is first used (`places`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detlab.engine.canonical import one_thread
from detlab.engine.places import VECTOR, Places, places_of
from detlab.engine.watch import NoCopy
from detlab.errors import UsageError

__all__ = ["RotaryTable", "canonical_elementwise", "is_activation", "reference_elementwise"]

_BLOCK = 512  # positions a rotary table grows by; always computed in calls of this one shape


def canonical_elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Makes an elementwise function of one tensor independent of the tensor's shape and of the number of threads."""
    known: dict[tuple[torch.dtype, bool], Places] = {}

    def canonical(x: Tensor) -> Tensor:
        length = x.numel()
        places = known.get((x.dtype, x.is_cpu))
        if places is not None and length in places.ran and torch.get_num_threads() == 1:  # the short way, taken nearly always
            return function(x if x.is_contiguous() else x.contiguous())
        spare = -length % VECTOR
        if places is None:
            places = known[x.dtype, x.is_cpu] = places_of(function, x.dtype, x.device)
        plan = places.plan(length + spare)
        if length in places.ran and torch.get_num_threads() == 1:  # from the first call on: a trace is to see the same ops
            return function(x if x.is_contiguous() else x.contiguous())
        with one_thread():
            flat = x.reshape(-1).contiguous()  # of every other element, it would be a view that is not computed in vectors
            padded = F.pad(flat, (0, spare)) if spare else flat
            if len(plan) <= 1:
                return function(padded)[:length].view(x.shape)
            parts = padded.split(plan)  # type: ignore[no-untyped-call]
            return torch.cat([function(part.clone()) for part in parts])[:length].view(x.shape)

    return canonical


def reference_elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a canonical elementwise function means, slowly: each element alone, in a vector of its copies."""
    return torch.stack([function(element.repeat(VECTOR))[0] for element in x.reshape(-1)]).view(x.shape)


_WHOLE_ROWS = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention, nn.PReLU, nn.RReLU)


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an elementwise activation of one tensor, of torch's or of transformers'."""
    home = type(module).__module__
    known = home.startswith(("torch.nn.modules.activation", "transformers.activations"))
    return known and not isinstance(module, _WHOLE_ROWS) and next(module.parameters(), None) is None


class RotaryTable(NoCopy):
    """Cosines and sines of rotary embeddings by position, computed by the model's own module in calls of one shape.

    They are the module's values; its call would compute a position's row with the others it is asked for, and the
    place in the buffer would show in the last bit where the head size is no multiple of 32.
    """

    def __init__(self, module: Any) -> None:
        """Wraps a rotary embedding module.

        Raises:
            UsageError: the table changes with the length of what came before, so that no position has bits of its own.
        """
        kinds = getattr(module, "rope_type", "default")
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in ("dynamic", "longrope"):
                raise UsageError(
                    f"rotary embeddings of type {kind!r} depend on the longest text seen so far, so a token's bits depend on "
                    'its history; the engine cannot make them invariant. Use a checkpoint with "default", "linear" or "llama3".'
                )
        self.original = module.forward
        self.tables: dict[Any, tuple[Tensor, ...]] = {}

    def refresh(self) -> None:
        """Forgets the tables; they are computed anew."""
        self.tables.clear()

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward: [batch, tokens, head size] cosines and sines in x's dtype, or one complex tensor of both."""
        if position_ids.ndim == 3:  # text, images and frames counted apart; text alone counts the same in all
            if not bool((position_ids == position_ids[:1]).all()):
                raise UsageError("position_ids that count images or frames are not covered by a tier; it covers text alone.")
            position_ids = position_ids[0]
        if position_ids.ndim != 2 or position_ids.is_floating_point():
            raise UsageError(
                f"position_ids must be whole numbers [batch, tokens]; got {position_ids.dtype} {list(position_ids.shape)}."
            )
        key = (x.dtype, x.device, args, tuple(sorted(kwargs.items())))
        tables = self.tables.get(key) or self._grow(key, x, 1, args, kwargs)
        needed = int(position_ids.max()) + 1 if position_ids.numel() else 0
        if needed > len(tables[0]):
            tables = self._grow(key, x, needed, args, kwargs)
        if position_ids.numel() and int(position_ids.min()) < 0:
            raise UsageError(f"position_ids count from 0; got {int(position_ids.min())}.")
        found = tuple(
            table[position_ids] if table.is_complex() else F.embedding(position_ids, table) for table in tables
        )
        return found if len(found) > 1 else found[0]

    def _grow(self, key: Any, x: Tensor, needed: int, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        """Extends a table to hold so many positions. Two threads that grow it at once write the same values."""
        blocks: list[tuple[Tensor, ...]] = [] if key not in self.tables else [self.tables[key]]
        length = len(blocks[0][0]) if blocks else 0
        with one_thread():
            while length < needed:
                positions = torch.arange(length, length + _BLOCK, device=x.device)[None]
                made = self.original(x, positions, *args, **kwargs)
                blocks.append(tuple(t[0] for t in (made if isinstance(made, tuple) else (made,))))
                length += _BLOCK
        self.tables[key] = table = tuple(map(torch.cat, zip(*blocks, strict=True)))
        return table
