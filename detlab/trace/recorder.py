"""The dispatch mode behind `capture`: sees each op, resolves its inputs, lays out and hashes its outputs.

A dispatch mode sees each ATen op after autograd and before the kernel; module hooks say where in the model it ran. Inputs
are resolved through their producers, so that an op costs the hashing of its output only; parameters are hashed once per
capture; views cost nothing. What an op does to rows depends on its inputs' layouts and plain arguments alone: that *plan*
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
from detlab.trace.hashing import Hasher
from detlab.trace.layout import Layout
from detlab.trace.plans import Layouts, OpInfo, Output, Plan, make_plan, op_info
from detlab.trace.records import NO_DIGESTS, REGION, Call, ModuleRecord, OpRecord, TensorRecord, Trace

#: Called for each tensor computed: its op, record, value, layout and call.
Observer = Callable[[OpRecord, TensorRecord, Tensor, Layout | None, Call | None], None]

@dataclass(slots=True)
class _Live:
    """What is known of a tensor that exists now."""

    ref: weakref.ref[Tensor]
    layout: Layout | None
    layout_id: str  # "": unlaid
    base: int  # first query slot of the call in which the layout was made
    root: int  # the record whose rows it shows
    exact: bool  # its rows are the root's rows, element by element and in that order
    version: int
    other_version: int  # a view takes over its base's counter only after the dispatcher returns
    clock: int  # number of writes before it


#: An input of an op: argument position (-1: a keyword), the tensor, and its record.
Source = tuple[int, Tensor, _Live]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a model's calls into ``trace``."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets a compiled region run as it would without us; it is recorded as one op."""
        return True

    def __init__(self, model: nn.Module, save: Callable[[OpRecord], bool] | None, observer: Observer | None,
                 context: CallContext | None) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.trace = Trace(model=_describe(model))
        self.context = context
        self._save = save
        self._observer = observer
        self._paused = False
        self._modules: list[tuple[str, int, tuple[tuple[str, int], ...]]] = []
        self._region: str | None = None  # the compiled module that is running
        self._handles: list[Any] = []
        self._live: dict[int, _Live] = {}
        self._named: dict[int, tuple[str, str]] = {}
        self._infos: dict[Any, OpInfo] = {}
        self._plans: dict[Any, Plan] = {}
        self._layouts = Layouts()
        self._occurrence: dict[tuple[str, str], int] = {}
        self._stored: dict[int, int] = {}  # parameters and buffers: number of elements
        self._parts: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._hasher = Hasher()
        self._call: Call | None = None
        self._base = 0
        self._writes: dict[int, int] = {}  # storage -> number of the last write to it
        self._clock = 0

    # ------------------------------------------------------------------------------------------------ set-up, hooks
    def __enter__(self) -> Recorder:
        """Hooks every module and starts to see ops."""
        for name, parameter in self.model.named_parameters():
            self._named[id(parameter)] = ("parameter", name)
        for name, buffer in self.model.named_buffers():
            self._named[id(buffer)] = ("buffer", name)
        for name, module in self.model.named_modules():
            # Dynamo marks what it compiled: such a module runs as one region, and is recorded as one op.
            is_region = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
            before = self._before_root if module is self.model else self._before(name, is_region)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._after(name), always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        """Unhooks, and completes the digests."""
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
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

    def _before(self, name: str, is_region: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._region is not None:
                return
            if self._call is not None:
                if kwargs:
                    self._relabel(kwargs, self._call)
                if isinstance(module, nn.Embedding) and args:  # looked up with one index a token: positions, types
                    self._relabel({"position_ids": args[0]}, self._call)
            self._modules.append((name, len(self.trace.ops), self._arguments(args, kwargs)))
            if is_region:
                self._region = name

        return hook

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, int], ...]:
        """The known tensors that a module is called with: (name, record)."""
        found = []
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor):
                known = self._live.get(id(value))
                if known is not None and known.ref() is value:
                    found.append((str(name), known.root))
        return tuple(found)

    def _relabel(self, kwargs: dict[str, Any], call: Call) -> None:
        """Gives rows to positions and masks that the model made itself, by the names under which it passes them on."""
        for name in NAMED_BY_ROWS:
            tensor = kwargs.get(name)
            if not isinstance(tensor, Tensor):
                continue
            known = self._live.get(id(tensor))
            layout = input_layout(name, tensor, call)
            if name == "position_ids" and known is not None and lay.has_rows(known.layout):
                continue
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
        self._modules.append(("", len(self.trace.ops), ()))

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._modules or (self._region is not None and self._region != name):
                return
            _, first, inputs = self._modules.pop()
            if self._region == name:
                self._region = None
                with self._pause():
                    self._record_region(name, inputs, _tensors(_plain(output)))
            tensor = _first_tensor(output)
            known = self._live.get(id(tensor)) if tensor is not None else None
            root = known.root if known is not None else -1
            calls, ops = len(self.trace.calls), len(self.trace.ops)
            self.trace.modules.append(ModuleRecord(calls - 1, name, type(module).__name__, first, ops, root, inputs))
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
        if self._paused or self._region is not None or (self._call is None and self.context is not None):
            return func(*args, **(kwargs or {}))  # our own work, a compiled region's, or the runner's
        kwargs = kwargs or {}
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = op_info(func)
        if info.is_composite and torch.is_inference_mode_enabled():
            # Elsewhere autograd's dispatch takes such ops apart before they come here: do the same, and see the same ops.
            with self._entered_again():
                return func.decompose(*args, **kwargs)
        self._paused = True
        try:
            inputs, key = self._resolve_inputs(func, args, kwargs)
            if info.writes:
                self._hasher.flush()  # an output that waits to be hashed may be about to change
                self._note_writes(info, args, kwargs)
            result = func(*args, **kwargs)
            outputs = [result] if isinstance(result, Tensor) else _tensors(result)
            if outputs:
                self._observe(info, args, kwargs, inputs, key, outputs)
        finally:
            self._paused = False
        return result

    def _resolve_inputs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Source], list[Any]]:
        """The tensors among the arguments with their records, and a key for what the op will do to rows."""
        found: list[Source] = []
        key: list[Any] = [func]
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
        return found, key

    @contextmanager
    def _entered_again(self) -> Iterator[None]:
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _note_writes(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remembers which storages an op writes to: what was known of tensors that share them is out of date then."""
        self._clock += 1
        for position, name in info.writes:
            for tensor in _tensors(args[position] if position < len(args) else kwargs.get(name)):
                self._writes[_storage(tensor)] = self._clock

    def _is_current(self, known: _Live, tensor: Tensor) -> bool:
        """Whether a tensor has not been written to since, be it through a view that shares no version with it."""
        version = _version(tensor)
        if known.ref() is not tensor or (version != known.version and version != known.other_version):
            return False
        return not self._writes or self._writes.get(_storage(tensor), 0) <= known.clock

    def _resolve(self, tensor: Tensor) -> _Live:
        """The live record of an input, made now where it was not seen before or has changed since."""
        known = self._live.get(id(tensor))
        if known is not None and known.ref() is tensor:
            if known.base != self._base:
                self._shift(known)
            if self._is_current(known, tensor):
                return known
            # Written to through another view, or behind the dispatcher: its rows are new inputs.
            name = self.trace.tensors[known.root].name or "tensor"
            return self._enter_tensor("constant", f"{name} (changed in place)", tensor, known.layout)
        kind, name = self._named.get(id(tensor), ("constant", ""))
        return self._enter_tensor(kind, name, tensor, lay.plain(tensor.shape))

    def _shift(self, live: _Live) -> None:
        """Counts a layout's token slots from the present call's first query slot."""
        if live.layout is not None:
            live.layout = lay.shift(live.layout, live.base - self._base)
            live.layout_id = self._layouts.name(live.layout)
        live.base = self._base

    def _enter_tensor(self, kind: str, name: str, tensor: Tensor, layout: Layout | None) -> _Live:
        """Records a tensor that no op of the trace computed."""
        record = self._new_record(kind, name, tensor, -1)
        version = _version(tensor)
        if kind in ("parameter", "buffer"):
            record.status, record.width = "whole", tensor.numel()
            record.digests = np.array([bits.digest(tensor.detach())], np.int64)
            self._stored[record.number] = tensor.numel()
        else:
            self._hash(record, tensor, self._layouts.output(tensor, layout))
        return self._track(tensor, layout, self._layouts.name(layout), record.number, True, version)

    def _part(self, whole: int, tensor: Tensor) -> int:
        """A part of a parameter as a record of its own: one expert's weight is another input than the next one's."""
        offset = int(tensor.storage_offset())
        at = (whole, offset, tuple(tensor.shape))
        known = self._parts.get(at)
        if known is None:
            source = self.trace.tensors[whole]
            name = f"{source.name}[{offset // max(1, tensor.numel())}]"
            record = self._new_record(source.kind, name, tensor, -1)
            record.status, record.width = "whole", tensor.numel()
            record.digests = np.array([bits.digest(tensor.detach())], np.int64)
            known = self._parts[at] = record.number
            self._stored[known] = tensor.numel()
        return known

    def _new_record(self, kind: str, name: str, tensor: Tensor, op: int) -> TensorRecord:
        tensors = self.trace.tensors
        record = TensorRecord(
            len(tensors), kind, name, len(self.trace.calls) - 1, op, tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype], "unlaid",
            None, None, 0, NO_DIGESTS, (),
        )  # fmt: skip
        tensors.append(record)
        return record

    def _track(self, tensor: Tensor, layout: Layout | None, layout_id: str, root: int, exact: bool, other: int) -> _Live:
        live = _Live(weakref.ref(tensor), layout, layout_id, self._base, root, exact, _version(tensor), other, self._clock)
        self._live[id(tensor)] = live
        return live

    def _layout_of(self, tensor: Tensor) -> Layout | None:
        known = self._live.get(id(tensor))
        return known.layout if known is not None else lay.plain(tensor.shape)

    def _observe(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Source], key: list[Any],
                 outputs: list[Tensor]) -> None:  # fmt: skip
        plan = self._plan(info, args, kwargs, inputs, key, outputs)
        trace = self.trace
        module = self._modules[-1][0] if self._modules else "(outside)"
        slot = (module, info.name)
        occurrence = self._occurrence.get(slot, 0)
        self._occurrence[slot] = occurrence + 1
        index = len(trace.ops)
        seen = tuple([(name, source[2].root, relation) for (name, relation), source in zip(plan.inputs, inputs, strict=True)])
        op = OpRecord(index, len(trace.calls) - 1, module, info.name, occurrence, seen, (), plan.is_move, not inputs)
        trace.ops.append(op)
        if plan.is_move:
            _, source, live = inputs[0]
            other = _version(source)
            stored = self._stored.get(live.root, 0)
            roots = []
            for tensor, out in zip(outputs, plan.outputs, strict=True):
                root = live.root if tensor.numel() >= stored else self._part(live.root, tensor)
                self._track(tensor, out.layout, out.layout_id, root, live.exact and out.keeps_rows, other)
                roots.append(root)
            op.outputs = tuple(roots)
            return
        numbers = []
        for tensor, out in zip(outputs, plan.outputs, strict=True):
            record = self._new_record("op", "", tensor, index)
            numbers.append(record.number)
            if info.is_cat and self._collect(record, out, inputs):
                op.is_view = True
            elif info.is_hashed:
                self._hash(record, tensor, out)
            self._track(tensor, out.layout, out.layout_id, record.number, True, _version(tensor) + bool(info.writes))
        op.outputs = tuple(numbers)
        if (self._observer is not None or self._save is not None) and not op.is_view:
            for tensor, out, number in zip(outputs, plan.outputs, numbers, strict=True):
                self._keep(op, trace.tensors[number], tensor, out.layout)

    def _record_region(self, name: str, inputs: tuple[tuple[str, int], ...], outputs: list[Tensor]) -> None:
        """Records a compiled module as one op.

        What it does inside is not seen; its outputs are laid out like the first input that has their leading dimensions,
        which holds for modules that compute row by row.
        """
        op = OpRecord(len(self.trace.ops), len(self.trace.calls) - 1, name, REGION, 0, (), (), False, False)
        self.trace.ops.append(op)
        sources = [live for live in self._live.values() if live.root in {number for _, number in inputs}]
        numbers = []
        for tensor in outputs:
            layout = None
            for live in sources:
                if live.layout is not None and live.ref() is not None and lay.has_rows(live.layout):
                    lead = live.layout[: tensor.ndim - 1]
                    if len(lead) == tensor.ndim - 1 and tuple(map(lay.dim_size, lead)) == tuple(tensor.shape[:-1]):
                        layout = (*lead, lay.feature(tensor.shape[-1]))
                        break
            out = self._layouts.output(tensor, layout)
            record = self._new_record("op", "", tensor, op.index)
            numbers.append(record.number)
            self._hash(record, tensor, out)
            self._track(tensor, layout, out.layout_id, record.number, True, _version(tensor))
            self._keep(op, record, tensor, layout)
        op.outputs = tuple(numbers)
        tensors = self.trace.tensors
        op.inputs = tuple((n, t, "row" if tensors[t].status == "rows" else "whole") for n, t in inputs)

    def _plan(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Source], key: list[Any],
              outputs: list[Tensor]) -> Plan:  # fmt: skip
        if info.name == "_to_copy":  # it moves or computes, which its arguments do not say
            key.append(args[0].dtype)
        name: tuple[Any, ...] | None = tuple(key) if info.is_planned else None
        try:
            plan = self._plans.get(name)
        except TypeError:  # an argument that cannot be part of a key
            plan = name = None
        if plan is not None and len(plan.outputs) == len(outputs):
            for out, tensor in zip(plan.outputs, outputs, strict=True):
                if out.shape != tensor.shape:
                    break
            else:
                return plan
        sources = [(position, live.layout) for position, _, live in inputs]
        plan = make_plan(info, args, kwargs, sources, outputs, self._layout_of, self._layouts)
        if name is not None:
            self._plans[name] = plan
        return plan

    def _hash(self, record: TensorRecord, tensor: Tensor, out: Output) -> None:
        record.width = out.width
        if tensor.layout != torch.strided or tensor.is_quantized:  # opaque storage has no bits to read
            return
        record.status = out.status
        record.batch = out.batch
        if out.slots is not None:
            record.slots = lay.shift_index(out.slots, self._base)
        if out.pairs is not None:
            record.pairs = tuple(lay.shift_index(out.pairs, self._base))
        if not tensor.numel():
            return
        if out.has_columns:
            assert out.layout is not None
            rows = lay.rows_of(tensor, out.layout)
            columns, visible = _visible(self.trace.calls[record.call], rows, self._base)
            grid = bits.project_named_columns(rows.grid, columns.to(tensor.device), visible.to(tensor.device))
            self._hasher.add_projections(record, grid)
        elif out.is_flat:
            self._hasher.add(record, tensor, out.num_rows, out.width)
        else:
            assert out.layout is not None
            self._hasher.add(record, lay.rows_of(tensor, out.layout).grid, out.num_rows, out.width)

    def _collect(self, record: TensorRecord, out: Output, inputs: list[Source]) -> bool:
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


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_DTYPE_NAMES = _DtypeNames()


def _storage(tensor: Tensor) -> int:
    """A number for the memory that a tensor shares with its views; 0 where it is opaque."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _plain(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    value = _plain(value)
    if isinstance(value, (list, tuple)):
        for item in value:
            found = _first_tensor(item)
            if found is not None:
                return found
    return None


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
