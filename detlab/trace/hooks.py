"""Module hooks: where in the model an op runs, where a call begins and ends, and what modules take and return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from detlab.trace import layout as lay
from detlab.trace.calls import NAMED_BY_ROWS, CallContext, begin_call, cache_tensors, input_layout
from detlab.trace.layout import Atom, Layout
from detlab.trace.live import LiveTensors, tensors_in, version_of
from detlab.trace.plans import Output
from detlab.trace.records import MODULE, REGION, Call, ModuleRecord, OpRecord, TensorRecord

#: Called for each tensor computed: its op, record, value, layout and call.
Observer = Callable[[OpRecord, TensorRecord, Tensor, Layout | None, Call | None], None]


@dataclass(slots=True)
class _Frame:
    """A module that is running: its name, the first op in it, what it was called with, what its children returned."""

    name: str
    first: int
    inputs: tuple[tuple[str, int], ...]
    children: list[tuple[str, int]] = field(default_factory=list)


class ModuleHooks:
    """Follows the modules of a model through its calls.

    Attributes:
        call: the call that is going on, if any.
        region: name of the compiled module that is running, if any; what runs inside it is not seen.
        occurrence: per module and op name of the present call, how many ran.
    """

    def __init__(self, model: nn.Module, live: LiveTensors, context: CallContext | None, observer: Observer | None,
                 records_outputs: bool) -> None:  # fmt: skip
        self.model, self.live, self.context, self.observer = model, live, context, observer
        self.records_outputs = records_outputs
        self.call: Call | None = None
        self.region: str | None = None
        self.occurrence: dict[tuple[str, str], int] = {}
        self._outputs: dict[torch.Size, Output] = {}  # of the present call, by shape
        self._stack: list[_Frame] = []
        self._handles: list[Any] = []

    @property
    def module(self) -> str:
        """Name of the innermost module that is running; "(outside)" between calls."""
        return self._stack[-1].name if self._stack else "(outside)"

    def attach(self) -> None:
        """Hooks every module."""
        for name, module in self.model.named_modules():
            # Dynamo marks what it compiled: such a module runs as one region, and is recorded as one op.
            is_region = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
            before = self._before_root if module is self.model else self._before(name, is_region)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(self._after(name), always_call=True))

    def detach(self) -> None:
        """Removes the hooks, and completes the digests."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.live.hasher.flush()
        self.live.known.clear()

    def _before(self, name: str, is_region: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.region is not None:
                return
            if self.call is not None:
                if kwargs:
                    self._relabel(kwargs, self.call)
                if isinstance(module, nn.Embedding) and args:  # looked up with one index a token: positions, types
                    self._relabel({"position_ids": args[0]}, self.call)
            self._stack.append(_Frame(name, len(self.live.trace.ops), self._arguments(args, kwargs, is_region)))
            if is_region:
                self.region = name

        return hook

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_region: bool) -> tuple[tuple[str, int], ...]:
        """The tensors that a module is called with: (name, record).

        Where ops are not recorded, one that no module returned is an input whose rows are hashed here.
        """
        found = []
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor):
                known = self.live.known.get(id(value))
                if known is not None and self.live.is_current(known, value):
                    found.append((str(name), known.root))
                elif (self.records_outputs or is_region) and self.call is not None:
                    with self.live.pause():
                        entered = self.live.enter("input", str(name), value, self._output_layout(value))
                    found.append((str(name), entered.root))
        return tuple(found)

    def _relabel(self, kwargs: dict[str, Any], call: Call) -> None:
        """Gives rows to positions and masks that the model made itself, by the names under which it passes them on."""
        for name in NAMED_BY_ROWS:
            tensor = kwargs.get(name)
            if not isinstance(tensor, Tensor):
                continue
            known = self.live.known.get(id(tensor))
            layout = input_layout(name, tensor, call)
            if name == "position_ids" and known is not None and lay.has_rows(known.layout):
                continue
            if layout is not None and (known is None or known.layout != layout):
                with self.live.pause():
                    self.live.enter("input", name, tensor, layout)

    def _before_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        live = self.live
        with live.pause():
            live.hasher.flush()
            self.occurrence.clear()
            self._outputs.clear()
            call, inputs, note = begin_call(module, args, kwargs, len(live.trace.calls), self.context)
            live.trace.calls.append(call)
            self.call, live.base = call, call.query.start
            if note and note not in live.trace.notes:
                live.trace.notes.append(note)
            for name, tensor, layout in inputs:
                is_cache = name.startswith("cache.layers")
                known = live.known.get(id(tensor))
                # What a call left behind is followed; a copy that the caller made of it has no rows until it is named here.
                if is_cache and known is not None and live.is_current(known, tensor) and lay.has_rows(known.layout):
                    continue
                live.enter("cache" if is_cache else "input", name, tensor, layout)
        self._stack.append(_Frame("", len(live.trace.ops), ()))

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._stack or (self.region is not None and self.region != name):
                return
            frame = self._stack.pop()
            live = self.live
            if self.region == name or self.records_outputs:
                kind = REGION if self.region == name else MODULE
                self.region = None
                with live.pause():
                    self._record_whole(module, kind, frame, tensors_in(_plain(output)))
            tensor = next(iter(tensors_in(_plain(output))), None)
            known = live.known.get(id(tensor)) if tensor is not None else None
            if tensor is not None and known is not None and not live.is_current(known, tensor):
                with live.pause():  # written to since an op made it: what is returned is something else
                    known = live.resolve(tensor)
            root = known.root if known is not None else -1
            calls, ops = len(live.trace.calls), len(live.trace.ops)
            class_name = type(module).__name__
            live.trace.modules.append(ModuleRecord(calls - 1, name, class_name, frame.first, ops, root, frame.inputs))
            if self._stack:
                self._stack[-1].children.append((name, root))
            if module is self.model:
                with live.pause():
                    live.hasher.flush()
                    # Tensors that live on in a cache keep their layout: a later call may take them as its inputs.
                    for tensor_name, cached, layout in cache_tensors(output, self.call):
                        if id(cached) not in live.known:
                            live.enter("cache", tensor_name, cached, layout)
                self.call = None

        return hook

    def _record_whole(self, module: nn.Module, kind: str, frame: _Frame, outputs: list[Tensor]) -> None:
        """Records a module's call as one op: a compiled region, or every module where ops are not recorded.

        Its inputs are its arguments, its own parameters, and what its children returned; of a module with children every
        row up to an output's own counts, since attention is among them.
        """
        trace, name = self.live.trace, frame.name
        occurrence = self.occurrence.get((name, kind), 0)
        self.occurrence[name, kind] = occurrence + 1
        op = OpRecord(len(trace.ops), len(trace.calls) - 1, name, kind, occurrence, (), (), False, False)
        trace.ops.append(op)
        numbers = []
        for tensor in outputs:
            known = self.live.known.get(id(tensor))
            if known is not None and self.live.is_current(known, tensor):  # it returns what it was given, or its child made
                numbers.append(known.root)
                continue
            shape = tensor.shape
            out = self._outputs.get(shape)
            if out is None:
                out = self._outputs[shape] = self.live.layouts.output(tensor, self._output_layout(tensor))
            record = self.live.new_record("op", "", tensor, op.index)
            numbers.append(record.number)
            self.live.hash(record, tensor, out)
            self.live.track(tensor, out.layout, out.layout_id, record.number, True, version_of(tensor))
            if self.observer is not None:
                self.observer(op, record, tensor, out.layout, self.call)
        op.outputs = tuple(numbers)
        relation = "context" if frame.children else "row"
        stored = module.named_parameters(recurse=kind == REGION)
        inputs = [*frame.inputs, *((n, t) for n, t in frame.children if t >= 0)]
        op.inputs = tuple((n, t, relation if trace.tensors[t].status == "rows" else "whole") for n, t in inputs)
        op.inputs += tuple((n, self.live.resolve(parameter).root, "whole") for n, parameter in stored)

    def _output_layout(self, tensor: Tensor) -> Layout | None:
        """The layout of a module's output by its shape: [batch or 1, tokens, features ...], as modules return them.

        Of four dimensions or more, heads may come before tokens; where both have one size, the shape does not tell.
        """
        if self.call is None or tensor.ndim < 2:
            return None
        tokens, batch = len(self.call.query), len(self.call.prompts)
        axes = [axis for axis in ((1,) if tensor.ndim < 4 else (1, 2)) if tensor.shape[axis] == tokens]
        if len(axes) != 1 or tensor.shape[0] not in (1, batch):
            return None
        layout = list(lay.plain(tensor.shape))
        layout[0] = (Atom("batch", range(batch)),) if tensor.shape[0] == batch else ()
        layout[axes[0]] = (Atom("token", range(tokens)),)
        return tuple(layout)


def _plain(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value
