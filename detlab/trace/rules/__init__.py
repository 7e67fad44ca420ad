"""What each op does to rows: one rule per op, from its inputs' layouts to its outputs'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from detlab.trace.layout import Layout, dim_size, plain
from detlab.trace.rules import views as views  # registers its rules
from detlab.trace.rules.compute import pointwise
from detlab.trace.rules.registry import RULES, Op

_FACTORIES = {
    "arange", "full", "zeros", "ones", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty",
    "linspace", "eye", "rand", "randn", "randint", "tril_indices", "triu_indices", "empty_strided", "new_empty_strided",
    "_efficientzerotensor", "randperm", "tensor", "empty_permuted",
}  # fmt: skip

#: Ops that only rename or move elements: they make no new bits, so their rows keep their digests.
VIEWS = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "swapaxes", "t", "numpy_T", "unsqueeze",
    "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "alias", "detach", "unflatten",
    "flatten", "mT", "unsafe_chunk", "unsafe_split", "lift_fresh", "as_strided", "unfold", "diagonal", "view_as_real",
    "view_as_complex", "_conj", "_neg_view", "movedim", "tensor_split",
}  # fmt: skip
MOVES = VIEWS | {"clone", "contiguous", "repeat", "lift_fresh_copy", "split_with_sizes_copy"}


def propagate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor],
              layout_of: Callable[[Tensor], Layout | None]) -> list[Layout | None]:  # fmt: skip
    """Finds the layouts of an op's outputs.

    Args:
        func: the ``OpOverload`` that ran.
        args, kwargs: what it was called with.
        outputs: its output tensors, flattened.
        layout_of: tells an input tensor's layout (None: unlaid).

    Returns:
        One layout an output; None where this op's effect on rows is not known.
    """
    name = func._schema.name.removeprefix("aten::").rpartition("::")[2]
    op = Op(name, args, kwargs, outputs, layout_of)
    rule = RULES.get(name)
    found: Any = None
    if rule is not None:
        found = rule(op)
    elif name in _FACTORIES:
        found = [plain(o.shape) for o in outputs]
    elif torch.Tag.pointwise in func.tags or func._schema.name.endswith("_") and len(outputs) == 1:
        found = [pointwise(op)]
    if found is None:
        return [None] * len(outputs)
    if isinstance(found, tuple):
        found = [found]
    result = list(found) + [None] * (len(outputs) - len(found))
    # A wrong layout is worse than none: sizes must agree, and no axis may walk over the batch twice.
    return [
        lay if lay is not None and _is_sound(lay, tuple(out.shape)) else None for lay, out in zip(result, outputs, strict=False)
    ]


def _is_sound(layout: Layout, shape: tuple[int, ...]) -> bool:
    if tuple(dim_size(dim) for dim in layout) != shape:
        return False
    batch = [atom for dim in layout for atom in dim if atom.kind == "batch"]
    if len(batch) > 1 and (len(batch[0].index) > 1 or len(set(batch)) > 1):
        return False
    return sum(atom.kind == "token" for dim in layout for atom in dim) <= 2
