"""Serves a model whose sums over the terms of a linear layer are cut in parts, as tensor-parallel ranks would add them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from detlab.engine import session as engine
from detlab.engine.exact.experts import ExactExperts, ExactRouter
from detlab.engine.exact.linear import prepare
from detlab.engine.exact.machine import choose_kernel
from detlab.engine.exact.split import SplitLinear
from detlab.engine.linear import weight_of
from detlab.verify.serve import Way

__all__ = ["Tally", "in_parts", "shares"]


class Tally:
    """What was really computed in parts.

    Attributes:
        products: products that were.
        most_parts: parts of one of them, at most.
    """

    def __init__(self) -> None:
        self.products = self.most_parts = 0

    def note(self, parts: int) -> None:
        """Counts one product."""
        self.products += 1
        self.most_parts = max(self.most_parts, parts)


def shares(size: int, way: Way) -> list[Tensor]:
    """Which columns each rank holds, the first to be added first: neighbouring ones, or dealt out at random."""
    draw = random.Random(f"parts {way.parts} {way.order} {size}")
    columns = torch.arange(size)
    if way.order % 2:
        columns = torch.tensor(draw.sample(range(size), size))
    dealt = list(columns.tensor_split(min(way.parts, size)))
    draw.shuffle(dealt)
    return dealt


@contextmanager
def in_parts(model: nn.Module, way: Way, tally: Tally) -> Iterator[None]:
    """In this block the model's linear layers, under the exact tier or under none, compute their sums in ``way.parts`` parts.

    Under the tier the routers and experts of a mixture do so, too. Weights are prepared anew at each call, a layer at a time.
    """
    if way.parts == 1:
        yield
        return
    session = engine.session_of(model)
    undo: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            if isinstance(module, (nn.Linear, Conv1D)):
                split = _stock if session is None else partial(_exact, choose_kernel(weight_of(module).device))
                make = partial(split, module, way, tally)
                undo.append(_set(module, "forward", make))
            part = vars(module).get("forward")
            if isinstance(part, ExactRouter):
                undo.append(_set(part, "layer", partial(_of_weight, part.layer.kernel, part.weight, way, tally)))
            elif isinstance(part, ExactExperts):
                module_: Any = module
                for name, weights in (("up", module_.gate_up_proj), ("down", module_.down_proj)):
                    kernel = getattr(part, name)[0].kernel
                    undo.append(_set(part, name, [partial(_of_weight, kernel, w, way, tally) for w in weights.detach()]))
        yield
    finally:
        for action in reversed(undo):
            action()


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an instance's attribute; returns what puts back what was there."""
    had = vars(owner).get(name)
    setattr(owner, name, value)

    def put_back() -> None:
        if had is None:
            vars(owner).pop(name)
        else:
            setattr(owner, name, had)

    return put_back


def _stock(module: Any, way: Way, tally: Tally, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
    """Ranks with the library's own product: their results, in the model's dtype, are added one after the other."""
    weight = weight_of(module)
    parts = shares(weight.shape[1], way)
    tally.note(len(parts))
    total = None
    for part in parts:
        piece = F.linear(input[..., part].contiguous(), weight[:, part].contiguous())
        total = piece if total is None else total + piece
    assert total is not None
    return total if module.bias is None else total + module.bias


def _exact(kernel: str, module: Any, way: Way, tally: Tally, input: Tensor) -> Tensor:  # noqa: A002
    return _of_weight(kernel, weight_of(module), way, tally, input, module.bias)


def _of_weight(kernel: str, weight: Tensor, way: Way, tally: Tally, x: Tensor, bias: Tensor | None = None) -> Tensor:
    parts = shares(weight.shape[1], way)
    tally.note(len(parts))
    return SplitLinear(prepare(weight), bias, parts, kernel)(x)
