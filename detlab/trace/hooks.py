"""Module hooks: where in the model an op runs, where a call begins and ends, and what modules take and return."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detlab.trace import layout as lay
from detlab.trace.calls import NAMED_BY_ROWS, CallContext, begin_call, cache_tensors, input_layout
from detlab.trace.layout import Atom, Layout
from detlab.trace.live import Live, LiveTensors, Modules, tensors_in, version_of
from detlab.trace.plans import Kind
from detlab.trace.records import MODULE, REGION, Call, ModuleRecord, OpRecord, TensorRecord

#: Called for each tensor computed: its op, record, value, layout and call.
Observer = Callable[[OpRecord, TensorRecord, Tensor, Layout | None, Call | None], None]
#: Module name between calls.
OUTSIDE = "(outside)"


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
        module: name of the innermost module that is running; "(outside)" between calls.
        occurrence: per op name, how many ran in that module during the present call.
    """

    def __init__(self, model: nn.Module, modules: Modules, live: LiveTensors, context: CallContext | None,
                 observer: Observer | None, records_outputs: bool) -> None:  # fmt: skip
        self.model, self.modules, self.live, self.context, self.observer = model, modules, live, context, observer
        self.records_outputs = records_outputs
        self.call: Call | None = None
        self.region: str | None = None
        self.module = OUTSIDE
        self.occurrence: dict[str, int] = {}
        self._occurrences: dict[str, dict[str, int]] = {}  # of the present call, by module
        self._kinds: dict[Any, Kind] = {}  # of what modules take and return in the present call, by shape and dtype
        self._labelled: dict[tuple[str, int], Live] = {}  # likewise: positions and masks whose rows are settled
        self._stack: list[_Frame] = []
        self._key = RemovableHandle(OrderedDict()).id  # ours among the modules' hooks

    def attach(self) -> None:
        """Hooks every module."""
        for name, module in self.modules:
            # Dynamo marks what it compiled: such a module runs as one region, and is recorded as one op.
            is_region = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
            before = self._before_root if module is self.model else self._before(name, is_region)
            _hook(module, self._key, before, self._after(name))

    def detach(self) -> None:
        """Removes the hooks, and completes the digests."""
        for _, module in self.modules:
            _unhook(module, self._key)
        self.live.hasher.flush()
        self.live.known.clear()

    def _enter(self, name: str) -> None:
        self.module = name
        found = self._occurrences.get(name)
        if found is None:
            found = self._occurrences[name] = {}
        self.occurrence = found

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
            self._enter(name)
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
                known = self.live.current(value)
                if known is None and (self.records_outputs or is_region) and self.call is not None:
                    with torch._C._DisableTorchDispatch():
                        known = self.live.enter("input", str(name), value, self._kind(value))
                if known is not None:
                    found.append((str(name), known.root))
        return tuple(found)

    def _relabel(self, kwargs: dict[str, Any], call: Call) -> None:
        """Gives rows to positions and masks that the model made itself, by the names under which it passes them on."""
        for name in NAMED_BY_ROWS:
            tensor = kwargs.get(name)
            if not isinstance(tensor, Tensor):
                continue
            known = self.live.find(tensor)
            if known is not None and self._labelled.get((name, id(tensor))) is known:  # every layer is given the same ones
                continue
            layout = input_layout(name, tensor, call)
            is_settled = name == "position_ids" and known is not None and known.kind.status == "rows"
            if not is_settled and layout is not None and (known is None or known.kind.layout != layout):
                with torch._C._DisableTorchDispatch():
                    known = self.live.enter("input", name, tensor, self.live.kinds.of(tensor, layout))
            if known is not None:
                self._labelled[name, id(tensor)] = known

    def _before_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        live = self.live
        with torch._C._DisableTorchDispatch():
            live.hasher.flush()
            self._occurrences.clear()
            self._kinds.clear()
            self._labelled.clear()
            call, inputs, note = begin_call(module, args, kwargs, len(live.trace.calls), self.context)
            live.trace.calls.append(call)
            self.call = call
            live.begin_call(call.query.start)
            if note and note not in live.trace.notes:
                live.trace.notes.append(note)
            for name, tensor, layout in inputs:
                is_cache = name.startswith("cache.layers")
                known = live.current(tensor) if is_cache else None
                # What a call left behind is followed; a copy that the caller made of it has no rows until it is named here.
                if known is None or known.kind.status != "rows":
                    live.enter("cache" if is_cache else "input", name, tensor, live.kinds.of(tensor, layout))
        self._stack.append(_Frame("", len(live.trace.ops), ()))
        self._enter("")

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._stack or (self.region is not None and self.region != name):
                return
            frame = self._stack.pop()
            live = self.live
            outputs = [output] if isinstance(output, Tensor) else tensors_in(_plain(output))
            if self.region == name or self.records_outputs:
                kind = REGION if self.region == name else MODULE
                self.region = None
                with torch._C._DisableTorchDispatch():
                    self._record_whole(module, kind, frame, outputs)
            root = -1
            if outputs:
                known = live.find(outputs[0])
                if known is not None and not live.is_current(known, outputs[0]):
                    with torch._C._DisableTorchDispatch():  # written to since an op made it: what is returned is another
                        known = live.resolve(outputs[0])
                root = known.root if known is not None else -1
            calls, ops = len(live.trace.calls), len(live.trace.ops)
            class_name = type(module).__name__
            live.trace.modules.append(ModuleRecord(calls - 1, name, class_name, frame.first, ops, root, frame.inputs))
            if self._stack:
                self._stack[-1].children.append((name, root))
            self._enter(self._stack[-1].name if self._stack else OUTSIDE)
            if module is self.model:
                with torch._C._DisableTorchDispatch():
                    live.hasher.flush()
                    # Tensors that live on in a cache keep their layout: a later call may take them as its inputs.
                    for tensor_name, cached, layout in cache_tensors(output, self.call):
                        if live.find(cached) is None:
                            live.enter("cache", tensor_name, cached, live.kinds.of(cached, layout))
                self.call = None

        return hook

    def _record_whole(self, module: nn.Module, kind: str, frame: _Frame, outputs: list[Tensor]) -> None:
        """Records a module's call as one op: a compiled region, or every module where ops are not recorded.

        Its inputs are its arguments, its own parameters, and what its children returned; of a module with children every
        row up to an output's own counts, since attention is among them.
        """
        live, trace, name = self.live, self.live.trace, frame.name
        occurrence = self.occurrence.get(kind, 0)
        self.occurrence[kind] = occurrence + 1
        op = OpRecord(len(trace.ops), len(trace.calls) - 1, name, kind, occurrence, (), (), False, False)
        trace.ops.append(op)
        numbers = []
        for tensor in outputs:
            known = live.current(tensor)
            if known is not None:  # it returns what it was given, or its child made
                numbers.append(known.root)
                continue
            made = self._kind(tensor)
            record = live.new_record("op", "", made, op.index)
            numbers.append(record.number)
            live.hash(record, tensor, made)
            version = version_of(tensor)
            live.track(tensor, made, record.number, True, version, version)
            if self.observer is not None:
                self.observer(op, record, tensor, made.layout, self.call)
        op.outputs = tuple(numbers)
        relation = "context" if frame.children else "row"
        inputs = [*frame.inputs, *((n, t) for n, t in frame.children if t >= 0)]
        op.inputs = tuple([(n, t, relation if trace.tensors[t].status == "rows" else "whole") for n, t in inputs])
        if kind == REGION or module._parameters:
            stored = module.named_parameters(recurse=kind == REGION)
            op.inputs += tuple([(n, live.resolve(parameter).root, "whole") for n, parameter in stored])

    def _kind(self, tensor: Tensor) -> Kind:
        """The kind of a tensor that a module takes or returns."""
        at = (tensor.shape, tensor.dtype, tensor.layout)
        found = self._kinds.get(at)
        if found is None:
            found = self._kinds[at] = self.live.kinds.of(tensor, self._output_layout(tensor))
        return found

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


def _hook(module: nn.Module, key: int, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Hooks a module, first before and last after its own hooks; ``after`` also runs where the module raises.

    This is what `register_forward_pre_hook` and `register_forward_hook` do, without their handles, which cost more than
    all that a module's call does here.
    """
    module._forward_pre_hooks[key] = before
    module._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]  # it is an OrderedDict
    module._forward_pre_hooks_with_kwargs[key] = True
    module._forward_hooks[key] = after
    module._forward_hooks_always_called[key] = True


def _unhook(module: nn.Module, key: int) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks,
                  module._forward_hooks_always_called):  # fmt: skip
        hooks.pop(key, None)


def _plain(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value
