"""What an op will do to rows: found once for given layouts of its inputs and plain arguments, then looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detlab.bits import PIECE_BYTES
from detlab.trace import layout as lay
from detlab.trace.layout import Index, Layout
from detlab.trace.rules import MOVES, propagate

# Arguments that an output row sees beyond its own row: keys, values, and the right-hand side of a batched product.
_ATTENTION = {1, 2}
_CONTEXT_ARGS = {
    "mm": {1}, "bmm": {1}, "addmm": {2}, "baddbmm": {2}, "mv": {1}, "dot": {0, 1}, "cumsum": {0}, "cumprod": {0},
    "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION, "_scaled_dot_product_flash_attention": _ATTENTION,
    "_scaled_dot_product_efficient_attention": _ATTENTION, "_scaled_dot_product_cudnn_attention": _ATTENTION,
    "scaled_dot_product_attention": _ATTENTION, "_scaled_dot_product_fused_attention_overrideable": _ATTENTION,
    "exact_attention": _ATTENTION,
}  # fmt: skip
# Arguments that say where rows go, not what is in them: they follow the batch, and so are no inputs to be compared.
_PLACES = {
    "index": {1}, "index_select": {2}, "index_add": {2}, "index_add_": {2}, "index_copy": {2}, "index_copy_": {2},
    "index_put": {1}, "index_put_": {1}, "_grouped_mm": {2},
}  # fmt: skip
_UNINITIALISED = {"empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided", "empty_permuted"}
#: A process that knows more plans than this starts anew with its next capture.
MAX_PLANS = 8192
# Their effect on rows follows from the values of an index.
_READS_VALUES = {"index", "index_select", "index_copy", "index_copy_"}


@dataclass(slots=True)
class OpInfo:
    """What an op's schema says, looked up once per op."""

    func: Any
    name: str
    argument_names: tuple[str, ...]
    writes: tuple[tuple[int, str], ...]  # the arguments that it writes to: position and name
    is_composite: bool  # torch takes it apart into other ops
    is_move: bool
    is_cat: bool
    is_hashed: bool
    is_planned: bool
    context: set[int]
    plans: dict[Any, Plan] = field(default_factory=dict)  # by kinds and plain arguments


@dataclass(slots=True, eq=False)
class Kind:
    """What all tensors of one shape, dtype and layout have in common. There is one object for each, compared by identity."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dtype_name: str
    layout: Layout | None
    status: str
    batch: Index | None
    slots: Index | None  # relative to the call's first query slot
    pairs: Index | None  # likewise
    has_columns: bool
    num_rows: int
    width: int
    is_flat: bool  # rows are contiguous stretches: a reshape cuts them
    is_opaque: bool  # sparse or quantized: there are no bits to read
    numel: int
    num_bytes: int


@dataclass(slots=True)
class Plan:
    """What an op does, for given kinds of its inputs and plain arguments."""

    outputs: tuple[Kind, ...]
    inputs: tuple[tuple[str, str], ...]  # (name, relation)
    is_move: bool
    keeps_rows: tuple[bool, ...]  # per output: a move left each row's elements complete and in order


class Kinds:
    """Finds the kind of a tensor."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Kind] = {}
        self._plain: dict[tuple[Any, ...], Kind] = {}

    def of(self, tensor: Tensor, layout: Layout | None) -> Kind:
        """The kind of a tensor with this layout."""
        is_opaque = tensor.layout != torch.strided or tensor.is_quantized
        at = (tensor.shape, tensor.dtype, is_opaque, layout)
        found = self._known.get(at)
        if found is None:
            found = self._known[at] = _make_kind(tensor, layout, is_opaque)
        return found

    def plain(self, tensor: Tensor) -> Kind:
        """The kind of a tensor that has features only."""
        at = (tensor.shape, tensor.dtype, tensor.layout)
        found = self._plain.get(at)
        if found is None:
            found = self._plain[at] = self.of(tensor, lay.plain(tensor.shape))
        return found


def _make_kind(tensor: Tensor, layout: Layout | None, is_opaque: bool) -> Kind:
    shape, numel = tuple(tensor.shape), tensor.numel()
    num_bytes = numel * tensor.element_size()
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    if layout is None or not lay.has_rows(layout):
        # Small ones are hashed flat: what a view of them says must not depend on its shape.
        width = max(1, numel) if num_bytes <= PIECE_BYTES else (shape[-1] if shape else 1)
        num_rows = numel // width if width else 0
        status = "unlaid" if layout is None else "whole"
        return Kind(
            shape, tensor.dtype, dtype_name, layout, status, None, None, None, False, num_rows, width, True, is_opaque, numel,
            num_bytes,
        )  # fmt: skip
    cut = lay.cut_of(layout)
    return Kind(
        shape, tensor.dtype, dtype_name, layout, "rows", cut.batch, cut.slots, cut.pairs, cut.columns is not None,
        cut.num_rows, cut.width, cut.is_flat, is_opaque, numel, num_bytes,
    )  # fmt: skip


class Plans:
    """Remembers what ops do to rows: by op, kinds of the input tensors, and plain arguments."""

    def __init__(self) -> None:
        self.kinds = Kinds()
        self.infos: dict[int, OpInfo] = {}  # by the id of the op, which the info keeps alive

    def info(self, func: Any) -> OpInfo:
        """What an op's schema says."""
        found = self.infos.get(id(func))
        if found is None:
            found = self.infos[id(func)] = op_info(func)
        return found

    def find(self, info: OpInfo, key: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any],
             outputs: Sequence[Tensor], layout_of: Callable[[Tensor], Layout | None]) -> Plan:  # fmt: skip
        """The plan of a call of an op; made where there is none, or where the outputs are not what it says."""
        name: tuple[Any, ...] | None = tuple(key) if info.is_planned else None
        try:
            plan = info.plans.get(name)
        except TypeError:  # an argument that cannot be part of a key
            plan = name = None
        if plan is not None and len(plan.outputs) == len(outputs):
            for kind, tensor in zip(plan.outputs, outputs, strict=True):
                if kind.shape != tensor.shape or kind.dtype is not tensor.dtype:
                    break
            else:
                return plan
        sources = [(position, layout_of(tensor)) for position, tensor in _tensors(args, kwargs)]
        plan = make_plan(info, args, kwargs, sources, outputs, layout_of, self.kinds)
        if name is not None:
            info.plans[name] = plan
        return plan


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """The tensors among an op's arguments, in order, with their positions (-1 for a keyword)."""
    found = []
    for position, value in enumerate(args):
        items = value if isinstance(value, (list, tuple)) else (value,)
        found += [(position, item) for item in items if isinstance(item, Tensor)]
    return found + [(-1, value) for value in kwargs.values() if isinstance(value, Tensor)]


_shared = Plans()


def shared_plans() -> Plans:
    """The plans of all captures of this process: the second capture of a model makes none."""
    global _shared
    if sum(len(info.plans) for info in _shared.infos.values()) > MAX_PLANS:
        _shared = Plans()
    return _shared


def make_plan(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], sources: Sequence[tuple[int, Layout | None]],
              outputs: Sequence[Tensor], layout_of: Callable[[Tensor], Layout | None], kinds: Kinds) -> Plan:  # fmt: skip
    """Finds out what an op does to rows.

    Args:
        info, args, kwargs: the op and what it was called with.
        sources: (argument position or -1 for a keyword, layout) of each input tensor, in order.
        outputs: its output tensors.
        layout_of: tells an input tensor's layout.
        kinds: finds the outputs' kinds.
    """
    found = propagate(info.func, args, kwargs, list(outputs), layout_of)
    is_move = info.is_move and bool(sources) and not info.writes
    if info.name == "_to_copy" and sources:
        is_move = outputs[0].dtype == args[0].dtype
    made = tuple([kinds.of(tensor, layout) for tensor, layout in zip(outputs, found, strict=True)])
    keeps_rows = tuple([is_move and _keeps_rows(sources[0][1], layout) for layout in found])
    counts = {position: 0 for position, _ in sources}
    keywords = iter([name for name, value in kwargs.items() if isinstance(value, Tensor)])
    named = []
    for position, layout in sources:
        if position < 0:
            name = next(keywords)
        else:
            name = info.argument_names[position]
            if isinstance(args[position], (list, tuple)):
                name, counts[position] = f"{name}[{counts[position]}]", counts[position] + 1
        relation = _relation(position, layout, found[0], info.context)
        if relation == "whole" and position in _PLACES.get(info.name, ()):
            relation = "place"
        named.append((name, relation))
    return Plan(made, tuple(named), is_move, keeps_rows)


def op_info(func: Any) -> OpInfo:
    """Reads an op's schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order op: a compiled region
        return OpInfo(func, str(func), ("arg",) * 256, (), False, False, False, True, False, set())
    namespace, _, name = schema.name.rpartition("::")
    return OpInfo(
        func=func,
        name=name if namespace == "aten" else f"{namespace}.{name}",
        argument_names=tuple(a.name for a in schema.arguments),
        writes=tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write),
        is_composite=func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        is_move=namespace == "aten" and name in MOVES,
        is_cat=namespace == "aten" and name == "cat",
        is_hashed=name not in _UNINITIALISED,
        is_planned=name not in _READS_VALUES,
        context=_CONTEXT_ARGS.get(name, set()),
    )


def _keeps_rows(before: Layout | None, after: Layout | None) -> bool:
    """Whether a move leaves each row's elements complete and in order (features neither cut, repeated nor exchanged)."""
    if before is None or after is None:
        return False
    a, b = lay.feature_sizes(before), lay.feature_sizes(after)
    if a == b:
        # Equal sizes can hide an exchange of two feature axes of one size; that is refused, not guessed.
        return len(set(a)) == len(a)
    size_a, size_b = int(np.prod(a)), int(np.prod(b))
    return size_a == size_b and (len(a) <= 1 or len(b) <= 1)


def _relation(position: int, source: Layout | None, output: Layout | None, context: set[int]) -> str:
    if not lay.has_rows(source):
        return "whole"
    return "context" if position in context or not lay.has_rows(output) else "row"
