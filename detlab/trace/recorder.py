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
from detlab.trace.live import Live, LiveTensors, Modules, tensors_in, version_of
from detlab.trace.plans import OpInfo, Plan, shared_plans
from detlab.trace.records import OpRecord, Trace

# Attention's kernels also return what a backward pass needs (the softmax's log-sum-exp, random states). No forward pass reads
# it, and it may differ where the attention does not: it is no part of what the model computes.
_ONE_RESULT = frozenset(
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable",
    )
)  # fmt: skip


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every op of a model's calls into ``trace``."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets a compiled region run as it would without us; it is recorded as one op."""
        return True

    def __init__(self, model: nn.Module, modules: Modules, trace: Trace, observer: Observer | None,
                 context: CallContext | None) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self._plans = shared_plans()
        self._live = LiveTensors(trace, modules, self._plans)
        self._hooks = ModuleHooks(model, modules, self._live, context, observer, records_outputs=False)
        self._between_calls = context is None  # whether ops outside the model's calls are recorded
        self._observer = observer
        self._infos = self._plans.infos
        self._resolve = self._live.resolve

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
        hooks = self._hooks
        if hooks.region is not None or (hooks.call is None and not self._between_calls):
            return func(*args, **(kwargs or {}))  # a compiled region's, or the runner's
        info = self._infos.get(id(func)) or self._plans.info(func)
        if info.is_composite and torch.is_inference_mode_enabled():
            # Elsewhere autograd's dispatch takes such ops apart before they come here: do the same, and see the same ops.
            with self._entered_again():
                return func.decompose(*args, **(kwargs or {}))
        # What is known of the tensors among the arguments, and a key for what the op will do to rows.
        resolve = self._resolve
        inputs: list[Live] = []
        key: list[Any] = []
        for value in args if not kwargs else (*args, *kwargs.items()):
            if isinstance(value, Tensor):
                live = resolve(value)
                inputs.append(live)
                key.append(live.kind)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, Tensor):
                        live = resolve(item)
                        inputs.append(live)
                        key.append(live.kind)
                    else:
                        key.append(tuple(item) if isinstance(item, list) else item)
                key.append(len(value))
            else:
                key.append(value)
        if info.writes:
            self._live.hasher.settle()  # an output that waits to be hashed may be about to change
            self._live.note_writes(info, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        outputs = (result,) if isinstance(result, Tensor) else tuple(tensors_in(result))
        if info.name in _ONE_RESULT:
            outputs = outputs[:1]
        if outputs:
            plan = self._plans.find(info, key, args, kwargs or {}, outputs, self._live.layout_of)
            self._record(info, plan, args, inputs, outputs)
        return result

    def _record(self, info: OpInfo, plan: Plan, args: tuple[Any, ...], inputs: list[Live],
                outputs: tuple[Tensor, ...]) -> None:  # fmt: skip
        trace, live, hooks = self.trace, self._live, self._hooks
        name = info.name
        occurrence = hooks.occurrence.get(name, 0)
        hooks.occurrence[name] = occurrence + 1
        index = len(trace.ops)
        seen = tuple([(name, source.root, relation) for (name, relation), source in zip(plan.inputs, inputs, strict=True)])
        op = OpRecord(index, len(trace.calls) - 1, hooks.module, name, occurrence, seen, (), plan.is_move, not inputs)
        trace.ops.append(op)
        numbers = []
        if plan.is_move:
            source = inputs[0]
            base_version = version_of(args[0])
            stored = live.stored.get(source.root, 0)
            for tensor, kind, keeps_rows in zip(outputs, plan.outputs, plan.keeps_rows, strict=True):
                root = source.root if kind.numel >= stored else live.part(source.root, tensor)
                live.track(tensor, kind, root, source.exact and keeps_rows, version_of(tensor), base_version)
                numbers.append(root)
            op.outputs = tuple(numbers)
            return
        for tensor, kind in zip(outputs, plan.outputs, strict=True):
            record = live.new_record("op", "", kind, index)
            numbers.append(record.number)
            if info.is_cat and live.collect(record, kind, inputs):
                op.is_view = True
            elif info.is_hashed:
                live.hash(record, tensor, kind)
            version = version_of(tensor)
            live.track(tensor, kind, record.number, True, version, version + bool(info.writes))
        op.outputs = tuple(numbers)
        if self._observer is not None and not op.is_view:
            for tensor, kind, number in zip(outputs, plan.outputs, numbers, strict=True):
                self._observer(op, trace.tensors[number], tensor, kind.layout, hooks.call)
