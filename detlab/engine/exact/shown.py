"""A part of the tier as one op, where something watches ops: a trace follows rows through a part, not through its steps.

How a row's digits are cut and its sums put together depends on how many rows there are; what comes out does not. Where
nothing watches, a part is called as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["shown"]

_LIBRARY = torch.library.Library("detlab", "FRAGMENT")  # type: ignore[no-untyped-call]
_asked = threading.local()  # what the op that is being called stands for


def _run(*tensors: Tensor) -> Tensor:
    result: Tensor = _asked.part(*tensors)
    return result


_ARGUMENTS = {
    "linear": "Tensor x", "norm": "Tensor x", "activation": "Tensor x", "softmax": "Tensor x",
    "encode": "Tensor x",
    "experts": "Tensor x, Tensor index, Tensor weights", "attention": "Tensor query, Tensor keys, Tensor values",
}  # fmt: skip
for _name, _arguments in _ARGUMENTS.items():
    _LIBRARY.define(f"exact_{_name}({_arguments}) -> Tensor")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(f"exact_{_name}", _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def shown(name: str, part: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """What a part makes of tensors, as one op.

    Args:
        name: "linear", "norm", "activation", "softmax", "encode" or "experts", whose rows are those of the first tensor, but
            for the last dimension; "attention" of queries, [batch, heads, tokens, size], and of keys and values by slot, whose
            rows are the queries'.
        part: the part.
        tensors: its inputs.
    """
    if not torch._C._len_torch_dispatch_stack():
        return part(*tensors)
    _asked.part = part
    try:
        result: Tensor = getattr(torch.ops.detlab, f"exact_{name}")(*tensors)
        return result
    finally:
        _asked.part = None
