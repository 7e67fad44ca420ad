"""New keys and values on their way from a cache's update to the attention that stores them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from detlab.errors import UsageError

__all__ = ["Pending", "inside", "own_attention_error", "taken", "touched_by"]


class _Touched(threading.local):
    """The layer whose new keys a module took out of their `Pending`, until the attention stores them."""

    layer: Any = None
    module = ""
    is_inside = 0  # calls of a model under a tier


_touched = _Touched()


@contextmanager
def inside() -> Iterator[None]:
    """A call of a model under a tier: new keys that a module takes must come back to the attention before it ends.

    Raises:
        UsageError: a module computed its attention itself.
    """
    _touched.is_inside += 1
    try:
        yield
        if _touched.is_inside == 1 and _touched.layer is not None:
            raise UsageError(own_attention_error())
    finally:
        _touched.is_inside -= 1
        if not _touched.is_inside:
            _touched.layer = None


def taken() -> Any:
    """The layer whose new keys a module took, which from now on counts as attended to; None where none did."""
    layer, _touched.layer = _touched.layer, None
    return layer


def touched_by() -> str:
    """The class of the module that last took new keys."""
    return _touched.module


def own_attention_error() -> str:
    """What to say where a module that took new keys never came to the tier's attention."""
    return (
        f"{_touched.module} computes its attention itself, not through transformers' AttentionInterface, and the tier has "
        "no part for it: it does not cover the model."
    )


class Pending:
    """New keys or values on their way from `CanonicalLayer.update` to the attention that stores them.

    Where they belong depends on the attention mask, which a cache's update does not see. A module that computes with them in
    between (keys and values that are made of what is cached) is given those of the new tokens alone; what it makes of them
    is stored in their place, so that it must treat each token by itself.
    """

    __slots__ = ("is_keys", "keys", "layer", "values")

    def __init__(self, layer: Any, keys: Tensor, values: Tensor, is_keys: bool = True) -> None:
        self.layer, self.keys, self.values, self.is_keys = layer, keys, values, is_keys

    def __getattr__(self, name: str) -> Any:
        return getattr(self.touch(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.touch()[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch that is given one takes the tensor."""
        args, kwargs = tree_map(_plain, args), tree_map(_plain, kwargs or {})
        return func(*args, **kwargs)

    def touch(self) -> Tensor:
        """The tensor, for a module that computes with it."""
        if not _touched.is_inside:
            raise UsageError(
                "these keys are kept for detlab's attention, and another attention asked for them: the cache was "
                "filled inside detlab.deterministic and is used outside; start a new one."
            )
        if _touched.layer is not None and _touched.layer is not self.layer:
            raise UsageError(own_attention_error())
        if _touched.layer is None:
            _touched.layer, _touched.module = self.layer, _caller()
        return self.keys if self.is_keys else self.values


def _plain(value: Any) -> Any:
    return value.touch() if isinstance(value, Pending) else value


def _caller() -> str:
    """The class of the module whose code is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    return "A module" if frame is None else type(frame.f_locals["self"]).__name__
