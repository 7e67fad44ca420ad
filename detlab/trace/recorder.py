"""The dispatch mode behind `capture`: sees each op, resolves its inputs, lays out and hashes its outputs.

A dispatch mode sees each ATen op after autograd and before the kernel; module hooks say where in the model it ran. Inputs
are resolved through their producers, so that an op costs the hashing of its output only; parameters are hashed once per
version; views cost nothing. What an op does to rows depends on its inputs' layouts and plain arguments alone: that *plan*
is made once and looked up from then on, which is what makes capturing a decode loop cheap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from detlab import bits
from detlab.trace import layout as lay
from detlab.trace.calls import NAMED_BY_ROWS, CallContext, begin_call, cache_tensors, input_layout
from detlab.trace.hashing import Hasher, parameter_digest
from detlab.trace.layout import Index, Layout
from detlab.trace.records import Call, ModuleRecord, OpRecord, TensorRecord, Trace
from detlab.trace.rules import MOVES, propagate

#: Called for each tensor computed: its op, record, value, layout and call.
Observer = Callable[[OpRecord, TensorRecord, Tensor, Layout | None, Call | None], None]

# Arguments that an output row sees beyond its own row: keys, values, and the right-hand side of a batched product.
_ATTENTION = {1, 2}
_CONTEXT_ARGS = {
    "mm": {1}, "bmm": {1}, "addmm": {2}, "baddbmm": {2}, "mv": {1}, "dot": {0, 1}, "cumsum": {0}, "cumprod": {0},
    "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION, "_scaled_dot_product_flash_attention": _ATTENTION,
    "_scaled_dot_product_efficient_attention": _ATTENTION, "_scaled_dot_product_cudnn_attention": _ATTENTION,
    "scaled_dot_product_attention": _ATTENTION, "_scaled_dot_product_fused_attention_overrideable": _ATTENTION,
}  # fmt: skip
_UNINITIALISED = {"empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided", "empty_permuted"}
# Their effect on rows follows from the values of an index.
_READS_VALUES = {"index", "index_select"}


@dataclass(slots=True)
class _Live:
    """What is known of a tensor that exists now."""

    ref: weakref.ref[Tensor]
    layout: Layout | None
    layout_id: int  # 0: unlaid
    base: int  # first query slot of the call in which the layout was made
    root: int  # the record whose rows it shows
    exact: bool  # its rows are the root's rows, element by element and in that order
    version: int
    other_version: int  # a view takes over its base's counter only after the dispatcher returns


@dataclass(slots=True)
class _OpInfo:
    """What an op's schema says, looked up once per op."""

    func: Any
    name: str
    argument_names: tuple[str, ...]
    writes: bool
    is_move: bool
    is_cat: bool
    is_hashed: bool
    is_planned: bool
    context: set[int]


@dataclass(slots=True)
class _Output:
    """How to treat one output of an op."""

    shape: tuple[int, ...]
    layout: Layout | None
    layout_id: int
    keeps_rows: bool
    status: str
    batch: Index | None
    slots: Index | None  # relative to the call's first query slot
    has_columns: bool
    num_rows: int
    width: int
    is_flat: bool  # rows are contiguous stretches: a reshape cuts them


@dataclass(slots=True)
class _Plan:
    """What an op does, for given layouts of its inputs and plain arguments."""

    outputs: list[_Output]
    inputs: tuple[tuple[str, str], ...]  # (name, relation)
    is_move: bool


class Recorder(TorchDispatchMode):
    """Records a model's calls into ``trace``."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets a compiled region run as it would without us; it is recorded as one op."""
        return True

    def __init__(self, model: nn.Module, save: Callable[[OpRecord], bool] | None, observer: Observer | None,
                 context: CallContext | None) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.trace = Trace(model=_describe(model))
        self.context = context
        self._save = save
        self._observer = observer
        self._paused = False
        self._modules: list[tuple[str, int]] = []
        self._handles: list[Any] = []
        self._live: dict[int, _Live] = {}
        self._named: dict[int, tuple[str, str]] = {}
        self._infos: dict[Any, _OpInfo] = {}
        self._plans: dict[Any, _Plan] = {}
        self._layout_ids: dict[Layout, int] = {}
        self._occurrence: dict[tuple[str, str], int] = {}
        self._hasher = Hasher()
        self._call: Call | None = None
        self._base = 0

    # ------------------------------------------------------------------------------------------------ set-up, hooks
    def __enter__(self) -> Recorder:
        """Hooks every module and starts to see ops."""
        for name, parameter in self.model.named_parameters():
            self._named[id(parameter)] = ("parameter", name)
        for name, buffer in self.model.named_buffers():
            self._named[id(buffer)] = ("buffer", name)
        for name, module in self.model.named_modules():
            before = self._before_root if module is self.model else self._before(name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._after(name), always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Unhooks, and completes the digests."""
        super().__exit__(*exc)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hasher.flush()
        self._live.clear()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Leaves detlab's own tensor work out of the trace."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._modules.append((name, len(self.trace.ops)))
            if self._call is not None and kwargs:
                self._relabel(kwargs, self._call)

        return hook

    def _relabel(self, kwargs: dict[str, Any], call: Call) -> None:
        """Gives rows to positions and masks that the model made itself, by the names under which it passes them on."""
        for name in NAMED_BY_ROWS:
            tensor = kwargs.get(name)
            if not isinstance(tensor, Tensor):
                continue
            known = self._live.get(id(tensor))
            layout = input_layout(name, tensor, call)
            if layout is not None and (known is None or known.layout != layout):
                with self._pause():
                    self._enter_tensor("input", name, tensor, layout)

    def _before_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._pause():
            self._hasher.flush()
            self._occurrence.clear()
            call, inputs, note = begin_call(module, args, kwargs, len(self.trace.calls), self.context)
            self.trace.calls.append(call)
            self._call, self._base = call, call.query.start
            if note and note not in self.trace.notes:
                self.trace.notes.append(note)
            for name, tensor, layout in inputs:
                is_cache = name.startswith("cache.layers")
                known = self._live.get(id(tensor))
                if is_cache and known is not None and self._is_current(known, tensor):
                    continue
                self._enter_tensor("cache" if is_cache else "input", name, tensor, layout)
        self._modules.append(("", len(self.trace.ops)))

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._modules:
                return
            _, first = self._modules.pop()
            tensor = _first_tensor(output)
            known = self._live.get(id(tensor)) if tensor is not None else None
            root = known.root if known is not None else -1
            calls, ops = len(self.trace.calls), len(self.trace.ops)
            self.trace.modules.append(ModuleRecord(calls - 1, name, type(module).__name__, first, ops, root))
            if module is self.model:
                with self._pause():
                    self._hasher.flush()
                    # Tensors that live on in a cache keep their layout: a later call may take them as its inputs.
                    for tensor_name, cached, layout in cache_tensors(output, self._call):
                        if id(cached) not in self._live:
                            self._enter_tensor("cache", tensor_name, cached, layout)
                self._call = None

        return hook

    # ------------------------------------------------------------------------------------------------------ the ops
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs the op, and records it."""
        if self._paused or (self._call is None and self.context is not None):
            return func(*args, **(kwargs or {}))  # our own work, or the runner's between two calls
        kwargs = kwargs or {}
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = _op_info(func)
        self._paused = True
        try:
            inputs, key = self._resolve_inputs(info, args, kwargs)
            if info.writes:
                self._hasher.flush()  # an output that waits to be hashed may be about to change
            result = func(*args, **kwargs)
            outputs = [result] if isinstance(result, Tensor) else _tensors(result)
            if outputs:
                self._observe(info, args, kwargs, inputs, key, outputs)
        finally:
            self._paused = False
        return result

    def _resolve_inputs(self, info: _OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[int, Tensor, _Live]], Any]:
        """The tensors among the arguments with their records, and a key for what the op will do to rows."""
        found: list[tuple[int, Tensor, _Live]] = []
        key: list[Any] = [info.func]
        for position, value in enumerate(args):
            if isinstance(value, Tensor):
                live = self._resolve(value)
                found.append((position, value, live))
                key.append(live.layout_id or tuple(value.shape))
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, Tensor):
                        live = self._resolve(item)
                        found.append((position, item, live))
                        key.append(live.layout_id or tuple(item.shape))
                    else:
                        key.append(item)
                key.append(len(value))
            else:
                key.append(value)
        for name, value in kwargs.items():
            key.append(name)
            if isinstance(value, Tensor):
                live = self._resolve(value)
                found.append((-1, value, live))
                key.append(live.layout_id or tuple(value.shape))
            else:
                key.append(tuple(value) if isinstance(value, list) else value)
        return found, tuple(key)

    def _is_current(self, known: _Live, tensor: Tensor) -> bool:
        version = 0 if tensor.is_inference() else tensor._version
        return known.ref() is tensor and (version == known.version or version == known.other_version)

    def _resolve(self, tensor: Tensor) -> _Live:
        """The live record of an input, made now where it was not seen before or has changed since."""
        known = self._live.get(id(tensor))
        if known is not None and known.ref() is tensor:
            if self._is_current(known, tensor):
                if known.base != self._base:
                    self._shift(known)
                return known
            # Written to through another view, or behind the dispatcher: its rows are new inputs.
            if known.base != self._base:
                self._shift(known)
            name = self.trace.tensors[known.root].name or "tensor"
            return self._enter_tensor("constant", f"{name} (changed in place)", tensor, known.layout)
        kind, name = self._named.get(id(tensor), ("constant", ""))
        return self._enter_tensor(kind, name, tensor, lay.plain(tensor.shape))

    def _shift(self, live: _Live) -> None:
        """Counts a layout's token slots from the present call's first query slot."""
        if live.layout is not None:
            live.layout = lay.shift(live.layout, live.base - self._base)
            live.layout_id = self._layout_id(live.layout)
        live.base = self._base

    def _layout_id(self, layout: Layout | None) -> int:
        return 0 if layout is None else self._layout_ids.setdefault(layout, len(self._layout_ids) + 1)

    def _enter_tensor(self, kind: str, name: str, tensor: Tensor, layout: Layout | None) -> _Live:
        """Records a tensor that no op of the trace computed."""
        record = self._new_record(kind, name, tensor, -1)
        version = 0 if tensor.is_inference() else tensor._version
        if kind in ("parameter", "buffer"):
            record.status, record.width = "whole", tensor.numel()
            record.digests = parameter_digest(tensor, version)
        else:
            self._hash(record, tensor, self._output(tensor, layout))
        return self._track(tensor, layout, self._layout_id(layout), record.number, True, version)

    def _new_record(self, kind: str, name: str, tensor: Tensor, op: int) -> TensorRecord:
        tensors = self.trace.tensors
        shape, dtype = tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype]
        record = TensorRecord(len(tensors), kind, name, len(self.trace.calls) - 1, op, shape, dtype, "unlaid")
        tensors.append(record)
        return record

    def _track(self, tensor: Tensor, layout: Layout | None, layout_id: int, root: int, exact: bool, other: int) -> _Live:
        version = 0 if tensor.is_inference() else tensor._version
        live = _Live(weakref.ref(tensor), layout, layout_id, self._base, root, exact, version, other)
        self._live[id(tensor)] = live
        return live

    def _layout_of(self, tensor: Tensor) -> Layout | None:
        known = self._live.get(id(tensor))
        return known.layout if known is not None else lay.plain(tensor.shape)

    def _observe(self, info: _OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any],
                 inputs: list[tuple[int, Tensor, _Live]], key: Any, outputs: list[Tensor]) -> None:  # fmt: skip
        plan = self._plan(info, args, kwargs, inputs, key, outputs)
        trace = self.trace
        module = self._modules[-1][0] if self._modules else "(outside)"
        slot = (module, info.name)
        occurrence = self._occurrence.get(slot, 0)
        self._occurrence[slot] = occurrence + 1
        index = len(trace.ops)
        seen = tuple([(name, live.root, relation) for (name, relation), (_, _, live) in zip(plan.inputs, inputs, strict=True)])
        op = OpRecord(index, len(trace.calls) - 1, module, info.name, occurrence, seen, (), plan.is_move, not inputs)
        trace.ops.append(op)
        if plan.is_move:
            _, source, live = inputs[0]
            other = 0 if source.is_inference() else source._version
            for tensor, out in zip(outputs, plan.outputs, strict=True):
                self._track(tensor, out.layout, out.layout_id, live.root, live.exact and out.keeps_rows, other)
            op.outputs = (live.root,) * len(outputs)
            return
        numbers = []
        for tensor, out in zip(outputs, plan.outputs, strict=True):
            record = self._new_record("op", "", tensor, index)
            numbers.append(record.number)
            if info.is_cat and self._collect(record, out, inputs):
                op.is_view = True
            elif info.is_hashed:
                self._hash(record, tensor, out)
            other = 0 if tensor.is_inference() else tensor._version + info.writes
            self._track(tensor, out.layout, out.layout_id, record.number, True, other)
        op.outputs = tuple(numbers)
        if (self._observer is not None or self._save is not None) and not op.is_view:
            for tensor, out, number in zip(outputs, plan.outputs, numbers, strict=True):
                self._keep(op, trace.tensors[number], tensor, out.layout)

    # -------------------------------------------------------------------------------------------------------- plans
    def _plan(self, info: _OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any],
              inputs: list[tuple[int, Tensor, _Live]], key: Any, outputs: list[Tensor]) -> _Plan:  # fmt: skip
        plan: _Plan | None = None
        if info.is_planned:
            try:
                plan = self._plans.get(key)
            except TypeError:  # an argument that cannot be a key
                key = None
        if plan is not None and all(out.shape == tensor.shape for out, tensor in zip(plan.outputs, outputs, strict=False)):
            return plan
        layouts = propagate(info.func, args, kwargs, outputs, self._layout_of)
        is_move = info.is_move and bool(inputs) and not info.writes
        if info.name == "_to_copy" and inputs:
            is_move = outputs[0].dtype == inputs[0][1].dtype
        made = [self._output(tensor, layout) for tensor, layout in zip(outputs, layouts, strict=True)]
        for out in made:
            out.keeps_rows = is_move and _keeps_rows(inputs[0][2].layout, out.layout)
        names, counts = [], {i: 0 for i, _, _ in inputs}
        for position, _, live in inputs:
            name = info.argument_names[position] if position >= 0 else "keyword"
            if position >= 0 and isinstance(args[position], (list, tuple)):
                name, counts[position] = f"{name}[{counts[position]}]", counts[position] + 1
            names.append((name, _relation(position, live.layout, layouts[0], info.context)))
        keywords = iter([name for name, value in kwargs.items() if isinstance(value, Tensor)])
        named = tuple((next(keywords) if name == "keyword" else name, relation) for name, relation in names)
        plan = _Plan(made, named, is_move)
        if info.is_planned and key is not None:
            self._plans[key] = plan
        return plan

    def _output(self, tensor: Tensor, layout: Layout | None) -> _Output:
        """How to hash a tensor of this shape and layout."""
        shape = tuple(tensor.shape)
        if layout is None or not lay.has_rows(layout):
            width = shape[-1] if shape else 1
            num_rows = tensor.numel() // width if width else 0
            status = "unlaid" if layout is None else "whole"
            return _Output(
                shape, layout, self._layout_id(layout), False, status, None, None, False, num_rows, width, True
            )
        cut = lay.cut_of(layout)
        return _Output(
            shape, layout, self._layout_id(layout), False, "rows", cut.batch, cut.slots, cut.columns is not None,
            cut.num_rows, cut.width, cut.is_flat,
        )  # fmt: skip

    def _hash(self, record: TensorRecord, tensor: Tensor, out: _Output) -> None:
        record.width = out.width
        if tensor.layout != torch.strided or tensor.is_quantized:  # opaque storage has no bits to read
            return
        record.status = out.status
        record.batch = out.batch
        if out.slots is not None:
            record.slots = lay.shift_index(out.slots, self._base)
        if not tensor.numel():
            return
        if out.has_columns:
            assert out.layout is not None
            rows = lay.rows_of(tensor, out.layout)
            columns, visible = _visible(self.trace.calls[record.call], rows, self._base)
            grid = bits.project_named_columns(rows.grid, columns.to(tensor.device), visible.to(tensor.device))
            self._hasher.add_projections(record, grid)
        elif out.is_flat:
            self._hasher.add(record, tensor.reshape(out.num_rows, out.width))
        else:
            assert out.layout is not None
            self._hasher.add(record, lay.rows_of(tensor, out.layout).grid)

    def _collect(self, record: TensorRecord, out: _Output, inputs: list[tuple[int, Tensor, _Live]]) -> bool:
        """Makes a record that only collects other tensors' rows, where a ``cat`` put rows one after another."""
        parts = [live for _, part, live in inputs if part.numel()]
        if out.status != "rows" or out.has_columns or not parts:
            return False
        numbers: list[int] = []
        for live in parts:
            source = self.trace.tensors[live.root]
            if not live.exact or source.status != "rows" or source.width != out.width or not lay.has_rows(live.layout):
                return False
            numbers += source.parts or (live.root,)
        record.status, record.width, record.parts = "rows", out.width, tuple(numbers)
        return True

    def _keep(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None) -> None:
        if self._observer is not None:
            self._observer(op, record, tensor, layout, self._call)
        if self._save is not None and self._save(op):
            self.trace.saved[record.number] = tensor.detach().clone()


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPE_NAMES = _DtypeNames()


def _op_info(func: Any) -> _OpInfo:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order op: a compiled region
        return _OpInfo(func, str(func), ("arg",) * 256, False, False, False, True, False, set())
    namespace, _, name = schema.name.rpartition("::")
    return _OpInfo(
        func=func,
        name=name if namespace == "aten" else f"{namespace}.{name}",
        argument_names=tuple(a.name for a in schema.arguments),
        writes=any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments),
        is_move=namespace == "aten" and name in MOVES,
        is_cat=namespace == "aten" and name == "cat",
        is_hashed=name not in _UNINITIALISED,
        is_planned=name not in _READS_VALUES,
        context=_CONTEXT_ARGS.get(name, set()),
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            found = _first_tensor(item)
            if found is not None:
                return found
    return None


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


def _visible(call: Call, rows: lay.Rows, base: int) -> tuple[Tensor, Tensor]:
    """Names the columns of a score or mask tensor by token position, and says which of them each row may see."""
    batch = np.arange(1) if rows.batch is None else np.asarray(rows.batch)
    slots = np.asarray(rows.slots) + base
    columns = np.asarray(rows.columns) + base
    held = call.positions.shape[1]
    padded = np.full((len(call.positions), max(held, int(columns.max()) + 1, int(slots.max()) + 1)), -1, np.int64)
    padded[:, :held] = call.positions
    row_position = padded[np.ix_(batch, slots)].reshape(-1)
    column_position = np.repeat(padded[np.ix_(batch, columns)], len(slots), axis=0)
    visible = (column_position >= 0) & (column_position <= row_position[:, None])
    return torch.from_numpy(column_position), torch.from_numpy(visible)


def _describe(model: nn.Module) -> dict[str, Any]:
    first = next(model.parameters(), None)
    return {
        "class": type(model).__name__,
        "dtype": _DTYPE_NAMES[first.dtype] if first is not None else "",
        "parameters": sum(p.numel() for p in model.parameters()),
    }
