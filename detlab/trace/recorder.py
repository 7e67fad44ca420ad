"""The dispatch mode behind `capture`: sees each op, resolves its inputs, lays out and hashes its outputs.

A dispatch mode sees each ATen op after autograd and before the kernel; module hooks say where in the model it ran. Inputs
are resolved through their producers, so that an op costs the hashing of its output only; views cost nothing. What an op does
to rows depends on its inputs' layouts and plain arguments alone: that *plan* is made once and looked up from then on, which
is what makes capturing a decode loop cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from detlab.trace.calls import CallContext
from detlab.trace.hooks import ModuleHooks, Observer
from detlab.trace.live import LiveTensors, Source, tensors_in, version_of
from detlab.trace.plans import OpInfo, Plan, make_plan, op_info
from detlab.trace.records import OpRecord, Trace


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every op of a model's calls into ``trace``."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets a compiled region run as it would without us; it is recorded as one op."""
        return True

    def __init__(self, model: nn.Module, trace: Trace, observer: Observer | None, context: CallContext | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self._live = LiveTensors(trace, model)
        self._hooks = ModuleHooks(model, self._live, context, observer, records_outputs=False)
        self._between_calls = context is None  # whether ops outside the model's calls are recorded
        self._observer = observer
        self._infos: dict[Any, OpInfo] = {}

    def __enter__(self) -> Recorder:
        """Hooks every module and starts to see ops."""
        self._hooks.attach()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        """Unhooks, and completes the digests."""
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._hooks.detach()

    @contextmanager
    def _entered_again(self) -> Iterator[None]:
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs the op, and records it."""
        live, hooks = self._live, self._hooks
        if live.paused or hooks.region is not None or not (hooks.call is not None or self._between_calls):
            return func(*args, **(kwargs or {}))  # our own work, a compiled region's, or the runner's
        kwargs = kwargs or {}
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = op_info(func)
        if info.is_composite and torch.is_inference_mode_enabled():
            # Elsewhere autograd's dispatch takes such ops apart before they come here: do the same, and see the same ops.
            with self._entered_again():
                return func.decompose(*args, **kwargs)
        live.paused = True
        try:
            inputs, key = self._resolve_inputs(args, kwargs)
            if info.writes:
                live.hasher.flush()  # an output that waits to be hashed may be about to change
                live.note_writes(info, args, kwargs)
            result = func(*args, **kwargs)
            outputs = [result] if isinstance(result, Tensor) else tensors_in(result)
            if outputs:
                self._observe(info, args, kwargs, inputs, key, outputs)
        finally:
            live.paused = False
        return result

    def _resolve_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Source], list[Any]]:
        """The tensors among the arguments with their records, and a key for what the op will do to rows."""
        resolve = self._live.resolve
        found: list[Source] = []
        key: list[Any] = []
        for position, value in enumerate(args):
            if isinstance(value, Tensor):
                live = resolve(value)
                found.append((position, value, live))
                key.append(live.layout_id or tuple(value.shape))
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, Tensor):
                        live = resolve(item)
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
                live = resolve(value)
                found.append((-1, value, live))
                key.append(live.layout_id or tuple(value.shape))
            else:
                key.append(tuple(value) if isinstance(value, list) else value)
        return found, key

    def _observe(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Source], key: list[Any],
                 outputs: list[Tensor]) -> None:  # fmt: skip
        plan = self._plan(info, args, kwargs, inputs, key, outputs)
        trace, live = self.trace, self._live
        module, counts = self._hooks.module, self._hooks.occurrence
        slot = (module, info.name)
        occurrence = counts.get(slot, 0)
        counts[slot] = occurrence + 1
        index = len(trace.ops)
        seen = tuple([(name, source[2].root, relation) for (name, relation), source in zip(plan.inputs, inputs, strict=True)])
        op = OpRecord(index, len(trace.calls) - 1, module, info.name, occurrence, seen, (), plan.is_move, not inputs)
        trace.ops.append(op)
        numbers = []
        if plan.is_move:
            _, tensor, source = inputs[0]
            other = version_of(tensor)
            stored = live.stored.get(source.root, 0)
            for tensor, out in zip(outputs, plan.outputs, strict=True):
                root = source.root if tensor.numel() >= stored else live.part(source.root, tensor)
                live.track(tensor, out.layout, out.layout_id, root, source.exact and out.keeps_rows, other)
                numbers.append(root)
            op.outputs = tuple(numbers)
            return
        for tensor, out in zip(outputs, plan.outputs, strict=True):
            record = live.new_record("op", "", tensor, index)
            numbers.append(record.number)
            if info.is_cat and live.collect(record, out, inputs):
                op.is_view = True
            elif info.is_hashed:
                live.hash(record, tensor, out)
            live.track(tensor, out.layout, out.layout_id, record.number, True, version_of(tensor) + bool(info.writes))
        op.outputs = tuple(numbers)
        if self._observer is not None and not op.is_view:
            for tensor, out, number in zip(outputs, plan.outputs, numbers, strict=True):
                self._observer(op, trace.tensors[number], tensor, out.layout, self._hooks.call)

    def _plan(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Source], key: list[Any],
              outputs: list[Tensor]) -> Plan:  # fmt: skip
        if info.name == "_to_copy":  # it moves or computes, which its arguments do not say
            key.append(args[0].dtype)
        name: tuple[Any, ...] | None = tuple(key) if info.is_planned else None
        try:
            plan = info.plans.get(name)
        except TypeError:  # an argument that cannot be part of a key
            plan = name = None
        if plan is not None and len(plan.outputs) == len(outputs):
            for out, tensor in zip(plan.outputs, outputs, strict=True):
                if out.shape != tensor.shape:
                    break
            else:
                return plan
        sources = [(position, live.layout) for position, _, live in inputs]
        plan = make_plan(info, args, kwargs, sources, outputs, self._live.layout_of, self._live.layouts)
        if name is not None:
            info.plans[name] = plan
        return plan
