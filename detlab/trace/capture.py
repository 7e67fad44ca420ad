"""Captures every op and module call of a model, with one digest per row, without changing what it observes.

A dispatch mode sees each ATen op after autograd and before the kernel; module hooks say where in the model it ran.
Inputs are resolved through their producers, so that an op costs the hashing of its output only; parameters are hashed
once per version; views cost nothing; small outputs are hashed together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from detlab import bits
from detlab.errors import CaptureError, UsageError
from detlab.trace import layout as lay
from detlab.trace.calls import NAMED_BY_ROWS, CallContext, begin_call, cache_tensors, input_layout
from detlab.trace.layout import Layout
from detlab.trace.records import Call, ModuleRecord, OpRecord, TensorRecord, Trace

#: Outputs up to this size wait, so that many of one width are hashed by one kernel.
SMALL_BYTES = 64 << 10
#: At most this much waits.
PENDING_BYTES = 4 << 20

Observer = Callable[[OpRecord, TensorRecord, Tensor, Layout | None, Call | None], None]
Save = str | Callable[[OpRecord], bool]

# Arguments that an output row sees beyond its own row: keys, values, and the right-hand side of a batched product.
_ATTENTION = {1, 2}
_CONTEXT_ARGS = {
    "mm": {1}, "bmm": {1}, "addmm": {2}, "baddbmm": {2}, "mv": {1}, "dot": {0, 1}, "cumsum": {0}, "cumprod": {0},
    "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION, "_scaled_dot_product_flash_attention": _ATTENTION,
    "_scaled_dot_product_efficient_attention": _ATTENTION, "_scaled_dot_product_cudnn_attention": _ATTENTION,
    "scaled_dot_product_attention": _ATTENTION, "_scaled_dot_product_fused_attention_overrideable": _ATTENTION,
}  # fmt: skip
_UNINITIALISED = {"empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided", "empty_permuted"}

_parameter_digests: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(slots=True)
class _Live:
    """What is known of a tensor that exists now."""

    ref: weakref.ref[Tensor]
    layout: Layout | None
    root: int  # the record whose rows it shows
    exact: bool  # its rows are the root's rows, element by element and in that order
    versions: tuple[int, int]  # either of these: a view takes over its base's counter only after the dispatcher returns


@dataclass(slots=True)
class _OpInfo:
    """What an op's schema says, looked up once per op."""

    name: str
    argument_names: tuple[str, ...]
    written: tuple[int, ...]
    is_move: bool
    context: set[int]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Recorder(TorchDispatchMode):
    """The dispatch mode behind `capture`; use `capture`."""

    def __init__(self, model: nn.Module, *, save: Save = "digest", observer: Observer | None = None) -> None:
        super().__init__()
        if not (callable(save) or save in ("digest", "full")):
            raise UsageError(f'capture: save is "digest", "full" or a function of an OpRecord; got {save!r}.')
        self.model = model
        self.trace = Trace(model=_describe(model))
        self.context: CallContext | None = None
        self._save = save
        self._observer = observer
        self._paused = False
        self._modules: list[tuple[str, int]] = []
        self._handles: list[Any] = []
        self._live: dict[int, _Live] = {}
        self._named: dict[int, tuple[str, str]] = {}
        self._infos: dict[Any, _OpInfo] = {}
        self._occurrence: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[torch.dtype, int], list[tuple[TensorRecord, Tensor]]] = {}
        self._pending_bytes = 0
        self._staged: list[tuple[TensorRecord, Tensor, Tensor]] = []
        self._call: Call | None = None

    # ------------------------------------------------------------------------------------------------ set-up, hooks
    def __enter__(self) -> Recorder:
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
        super().__exit__(*exc)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._flush()
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
            if self._call is not None:
                self._relabel(kwargs)

        return hook

    def _relabel(self, kwargs: dict[str, Any]) -> None:
        """Gives rows to positions and masks that the model made itself, by the names under which it passes them on."""
        assert self._call is not None
        for name in NAMED_BY_ROWS:
            tensor = kwargs.get(name)
            if not isinstance(tensor, Tensor):
                continue
            known = self._live.get(id(tensor))
            layout = input_layout(name, tensor, self._call)
            if layout is not None and (known is None or known.layout != layout):
                with self._pause():
                    self._enter_tensor("input", name, tensor, layout)

    def _before_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._pause():
            self._flush()
            self._occurrence.clear()
            index = len(self.trace.calls)
            call, inputs, note = begin_call(module, args, kwargs, index, self.context)
            self.trace.calls.append(call)
            self._call = call
            if note and note not in self.trace.notes:
                self.trace.notes.append(note)
            for name, tensor, layout in inputs:
                known = self._live.get(id(tensor))
                if name.startswith("cache.layers") and known is not None and self._is_current(known, tensor):
                    continue
                self._enter_tensor("cache" if name.startswith("cache.layers") else "input", name, tensor, layout)
        self._modules.append(("", len(self.trace.ops)))

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._modules:
                return
            _, first = self._modules.pop()
            tensor = _first_tensor(output)
            known = self._live.get(id(tensor)) if tensor is not None else None
            self.trace.modules.append(
                ModuleRecord(
                    call=len(self.trace.calls) - 1,
                    module=name,
                    class_name=type(module).__name__,
                    first_op=first,
                    end_op=len(self.trace.ops),
                    output=known.root if known is not None else -1,
                )
            )
            if module is self.model:
                with self._pause():
                    self._flush()
                    # Tensors that live on in a cache keep their layout: a later call may take them as its inputs.
                    for tensor_name, cached, layout in cache_tensors(output, self._call):
                        live = self._live.get(id(cached))
                        if live is None:
                            self._enter_tensor("cache", tensor_name, cached, layout)
                self._call = None

        return hook

    # ------------------------------------------------------------------------------------------------------ the ops
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or (self._call is None and self.context is not None):
            return func(*args, **kwargs)  # our own work, or the runner's between two calls
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = _op_info(func)
        with self._pause():
            inputs = self._resolve_inputs(info, args, kwargs)
            if info.written:
                self._flush()  # an output that waits to be hashed may be about to change
            result = func(*args, **kwargs)
            outputs = [result] if isinstance(result, Tensor) else _tensors(result)
            if outputs:
                self._observe(func, info, args, kwargs, inputs, outputs)
        return result

    def _resolve_inputs(self, info: _OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor, _Live, int]]:
        found = []
        for position, value in enumerate(args):
            if isinstance(value, Tensor):
                found.append((info.argument_names[position], value, self._resolve(value), position))
            elif isinstance(value, (list, tuple)):
                for i, item in enumerate(value):
                    if isinstance(item, Tensor):
                        name = f"{info.argument_names[position]}[{i}]"
                        found.append((name, item, self._resolve(item), position))
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                found.append((name, value, self._resolve(value), -1))
        return found

    def _is_current(self, known: _Live, tensor: Tensor) -> bool:
        return known.ref() is tensor and _version(tensor) in known.versions

    def _resolve(self, tensor: Tensor) -> _Live:
        """The live record of an input, made now where it was not seen before or has changed since."""
        known = self._live.get(id(tensor))
        if known is not None and known.ref() is tensor:
            if _version(tensor) in known.versions:
                return known
            # Written to through another view, or behind the dispatcher: its rows are new inputs.
            record = self.trace.tensors[known.root]
            return self._enter_tensor("constant", f"{record.name or 'tensor'} (changed in place)", tensor, known.layout)
        kind, name = self._named.get(id(tensor), ("constant", ""))
        return self._enter_tensor(kind, name, tensor, lay.plain(tensor.shape))

    def _enter_tensor(self, kind: str, name: str, tensor: Tensor, layout: Layout | None) -> _Live:
        record = self._new_record(kind, name, tensor, op=-1)
        if kind in ("parameter", "buffer"):
            record.status = "whole"
            record.width = tensor.numel()
            record.digests = np.array([_parameter_digest(tensor)], np.int64)
        else:
            self._digest(record, tensor, layout)
        return self._track(tensor, layout, record.number, exact=True)

    def _new_record(self, kind: str, name: str, tensor: Tensor, op: int) -> TensorRecord:
        record = TensorRecord(
            number=len(self.trace.tensors),
            kind=kind,
            name=name,
            call=len(self.trace.calls) - 1,
            op=op,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            status="unlaid",
        )
        self.trace.tensors.append(record)
        return record

    def _track(self, tensor: Tensor, layout: Layout | None, root: int, exact: bool, other_version: int = 0) -> _Live:
        live = _Live(weakref.ref(tensor), layout, root, exact, (_version(tensor), other_version))
        self._live[id(tensor)] = live
        return live

    def _layout_of(self, tensor: Tensor) -> Layout | None:
        known = self._live.get(id(tensor))
        return known.layout if known is not None else lay.plain(tensor.shape)

    def _observe(self, func: Any, info: _OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any],
                 inputs: list[tuple[str, Tensor, _Live, int]], outputs: list[Tensor]) -> None:  # fmt: skip
        layouts = lay.propagate(func, args, kwargs, outputs, self._layout_of)
        module = self._modules[-1][0] if self._modules else "(outside)"
        slot = (module, info.name)
        occurrence = self._occurrence.get(slot, 0)
        self._occurrence[slot] = occurrence + 1
        is_move = info.is_move or (info.name == "_to_copy" and outputs[0].dtype == args[0].dtype)
        rooted = is_move and bool(inputs) and not info.written
        op = OpRecord(
            index=len(self.trace.ops),
            call=len(self.trace.calls) - 1,
            module=module,
            op=info.name,
            occurrence=occurrence,
            inputs=(),
            outputs=(),
            is_view=rooted,
            is_factory=not inputs,
        )
        self.trace.ops.append(op)
        numbers = []
        for tensor, layout in zip(outputs, layouts, strict=True):
            if rooted:
                source = inputs[0][2]
                exact = source.exact and _keeps_rows(source.layout, layout)
                self._track(tensor, layout, source.root, exact, _version(inputs[0][1]))
                numbers.append(source.root)
                continue
            record = self._new_record("op", "", tensor, op.index)
            numbers.append(record.number)
            if info.name == "cat" and self._collect(record, tensor, layout, inputs):
                op.is_view = True
            elif info.name not in _UNINITIALISED:
                self._digest(record, tensor, layout)
            self._track(tensor, layout, record.number, True, _version(tensor) + bool(info.written))
        op.outputs = tuple(numbers)
        op.inputs = tuple(
            (name, live.root, _relation(position, live, layouts[0], info.context)) for name, _, live, position in inputs
        )
        if not op.is_view:
            for tensor, layout, number in zip(outputs, layouts, op.outputs, strict=True):
                self._keep(op, self.trace.tensors[number], tensor, layout)

    def _collect(self, record: TensorRecord, tensor: Tensor, layout: Layout | None, inputs: list[tuple[str, Tensor, _Live, int]]) -> bool:
        """Makes a record that only collects other tensors' rows, where a ``cat`` put rows one after another."""
        parts = [live for _, part, live, _ in inputs if part.numel()]
        if layout is None or not parts or not all(live.exact and live.layout is not None for live in parts):
            return False
        width = _width(layout)
        if any(live.layout is None or _width(live.layout) != width or not lay.has_rows(live.layout) for live in parts):
            return False
        numbers: list[int] = []
        for live in parts:
            source = self.trace.tensors[live.root]
            if source.status != "rows":
                return False
            numbers += source.parts or (live.root,)
        record.status, record.width, record.parts = "rows", width, tuple(numbers)
        return True

    # ---------------------------------------------------------------------------------------------------- digesting
    def _digest(self, record: TensorRecord, tensor: Tensor, layout: Layout | None) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized:
            record.status = "unlaid"
            return
        if layout is None or not lay.has_rows(layout):
            record.status = "unlaid" if layout is None else "whole"
            record.width = tensor.shape[-1] if tensor.ndim else 1
            self._hash_later(record, tensor.reshape(-1, record.width) if tensor.numel() else tensor.new_zeros((0, 1)))
            return
        rows = lay.rows_of(tensor, layout)
        record.status, record.batch, record.slots = "rows", rows.batch, rows.slots
        if rows.columns is None:
            record.width = rows.grid.shape[1]
            self._hash_later(record, rows.grid)
            return
        record.width = rows.grid.shape[1]
        call = self.trace.calls[record.call]
        columns, visible = _visible(call, rows)
        low, high = bits.masked_row_digests(rows.grid, columns.to(tensor.device), visible.to(tensor.device))
        self._staged.append((record, low, high))

    def _hash_later(self, record: TensorRecord, grid: Tensor) -> None:
        size = grid.numel() * grid.element_size()
        if size > SMALL_BYTES:
            self._staged.append((record, *bits.row_digests(grid)))
            return
        self._pending.setdefault((grid.dtype, grid.shape[1]), []).append((record, grid))
        self._pending_bytes += size
        if self._pending_bytes > PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Hashes what waits and moves digests to the host."""
        with self._pause():
            for entries in self._pending.values():
                grids = [grid for _, grid in entries]
                low, high = bits.row_digests(grids[0] if len(grids) == 1 else torch.cat(grids))
                start = 0
                for record, grid in entries:
                    end = start + grid.shape[0]
                    self._staged.append((record, low[start:end], high[start:end]))
                    start = end
            self._pending.clear()
            self._pending_bytes = 0
            if not self._staged:
                return
            packed = bits.pack(
                torch.cat([low for _, low, _ in self._staged]), torch.cat([high for _, _, high in self._staged])
            )
            start = 0
            for record, low, _ in self._staged:
                record.digests = packed[start : start + low.shape[0]]
                start += low.shape[0]
            self._staged.clear()

    def _keep(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None) -> None:
        if self._observer is not None:
            self._observer(op, record, tensor, layout, self._call)
        if self._save == "digest":
            return
        if self._save == "full" or (callable(self._save) and self._save(op)):
            self.trace.saved[record.number] = tensor.detach().clone()
            self.trace.layouts[record.number] = layout


def _op_info(func: Any) -> _OpInfo:
    schema = func._schema
    namespace, _, name = schema.name.rpartition("::")
    written = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    return _OpInfo(
        name=name if namespace == "aten" else f"{namespace}.{name}",
        argument_names=tuple(a.name for a in schema.arguments),
        written=written,
        is_move=namespace == "aten" and name in lay.MOVES,
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


def _width(layout: Layout) -> int:
    width = 1
    for dim in layout:
        for atom in dim:
            if not atom.is_row:
                width *= len(atom.index)
    return width


def _features(layout: Layout) -> list[int]:
    return [len(a.index) for dim in layout for a in dim if not a.is_row and len(a.index) > 1]


def _keeps_rows(before: Layout | None, after: Layout | None) -> bool:
    """Whether a move leaves each row's elements complete and in order (features neither cut, repeated nor exchanged)."""
    if before is None or after is None:
        return False
    a, b = _features(before), _features(after)
    if a == b:
        # Equal sizes can hide an exchange of two feature axes of one size; that is refused, not guessed.
        return len(set(a)) == len(a) or len(a) < 2 or sum(map(len, before)) == sum(map(len, after))
    size_a = int(np.prod(a)) if a else 1
    size_b = int(np.prod(b)) if b else 1
    return size_a == size_b and (len(a) <= 1 or len(b) <= 1)


def _relation(position: int, live: _Live, output: Layout | None, context: set[int]) -> str:
    if not lay.has_rows(live.layout):
        return "whole"
    if position in context or not lay.has_rows(output):
        return "context"
    return "row"


def _visible(call: Call, rows: lay.Rows) -> tuple[Tensor, Tensor]:
    """Names the columns of a score or mask tensor by token position, and says which of them each row may see."""
    batch = np.arange(1) if rows.batch is None else np.asarray(rows.batch)
    positions = call.positions
    slots = np.asarray(rows.slots)
    columns = np.asarray(rows.columns)
    width = positions.shape[1]
    padded = np.full((positions.shape[0], max(width, int(columns.max()) + 1, int(slots.max()) + 1)), -1, np.int64)
    padded[:, :width] = positions
    row_position = padded[np.ix_(batch, slots)].reshape(-1)
    column_position = np.repeat(padded[np.ix_(batch, columns)], len(slots), axis=0)
    visible = (column_position >= 0) & (column_position <= row_position[:, None])
    return torch.from_numpy(column_position), torch.from_numpy(visible)


def _parameter_digest(tensor: Tensor) -> int:
    state = (_version(tensor), tensor.data_ptr())
    known = _parameter_digests.get(tensor)
    if known is not None and known[0] == state:
        return int(known[1])
    value = bits.digest(tensor.detach())
    _parameter_digests[tensor] = (state, value)
    return value


def _describe(model: nn.Module) -> dict[str, Any]:
    first = next(model.parameters(), None)
    return {
        "class": type(model).__name__,
        "dtype": str(first.dtype).removeprefix("torch.") if first is not None else "",
        "parameters": sum(p.numel() for p in model.parameters()),
    }


@contextmanager
def capture(
    model: nn.Module,
    save: Save = "digest",
    *,
    observer: Observer | None = None,
    context: CallContext | None = None,
    path: str | Path | None = None,
) -> Iterator[Trace]:
    """Records every op and module call that runs in the ``with`` block.

    Args:
        model: the model whose calls are recorded; other modules' ops appear under "(outside)".
        save: "digest" keeps digests only; "full" keeps every computed tensor too; a function of an `OpRecord` says which.
        observer: called for each computed tensor with its op, record, value, layout and call.
        context: which prompts and which step the calls serve; `run` sets it.
        path: where to save the trace on leaving; nothing is saved after an exception.

    Yields:
        The `Trace`, complete when the block ends.

    Raises:
        UsageError: ``save`` is neither of these.
        CaptureError: the model is already being captured, or is compiled (a compiled graph would run as eager code under
            a dispatch mode, and the trace would describe another program than the one that runs).
    """
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise CaptureError("capture: the model is compiled, and a dispatch mode would make it run eagerly. Capture model._orig_mod.")
    if model in _captured:
        raise CaptureError(f"capture: {type(model).__name__} is already being captured; nested captures are not defined.")
    recorder = Recorder(model, save=save, observer=observer)
    recorder.context = context
    _captured.add(model)
    try:
        with recorder:
            yield recorder.trace
    finally:
        _captured.discard(model)
    if path is not None:
        from detlab.trace.store import save_trace

        save_trace(recorder.trace, path)


_captured: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def named_rows_of(call: Call | None, record: TensorRecord, tensor: Tensor, layout: Layout | None,
                  wanted: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray, Tensor] | None:  # fmt: skip
    """Cuts a computed tensor into the rows that have names: (prompt, position, values [num_rows, width]).

    Scores and masks, whose columns differ between runs, and tensors without rows give None. ``wanted`` keeps some prompts.
    """
    if call is None or layout is None or record.status != "rows":
        return None
    rows = lay.rows_of(tensor, layout)
    if rows.columns is not None:
        return None
    prompt, position = call.row_names(rows.batch, rows.slots)
    keep = prompt >= 0 if wanted is None else np.isin(prompt, np.asarray(wanted))
    return prompt[keep], position[keep], rows.grid[torch.from_numpy(keep)]
