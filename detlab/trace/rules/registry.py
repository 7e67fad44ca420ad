"""What a rule sees, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from detlab.trace.layout import Layout


class Op(NamedTuple):
    """What a rule sees: positional and keyword arguments, the outputs, and how to ask an input for its layout."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    layout_of: Callable[[Tensor], Layout | None]

    def lay(self, position: int) -> Layout | None:
        """Layout of the tensor argument at ``position``; None where it is no tensor or is unlaid."""
        value = self.args[position] if position < len(self.args) else None
        return self.layout_of(value) if isinstance(value, Tensor) else None

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Argument by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Rule = Callable[[Op], Sequence[Layout | None] | Layout | None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the ops of these names."""

    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def shape_of(op: Op, i: int = 0) -> tuple[int, ...]:
    """Shape of an output."""
    return tuple(op.outputs[i].shape)


def axis_of(dim: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return dim + ndim if dim < 0 else dim
