"""Captures every op and module call of a model, with one digest per row, without changing what it observes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detlab.errors import CaptureError, UsageError
from detlab.trace.calls import CallContext
from detlab.trace.hooks import ModuleHooks, Observer
from detlab.trace.layout import Layout
from detlab.trace.live import LiveTensors, Modules
from detlab.trace.plans import shared_plans
from detlab.trace.recorder import Recorder
from detlab.trace.records import Call, OpRecord, TensorRecord, Trace
from detlab.trace.store import save_trace

Save = str | Callable[[OpRecord], bool]

_captured: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def capture(model: nn.Module, save: Save = "digest", *, level: str = "ops", observer: Observer | None = None,
            context: CallContext | None = None, path: str | Path | None = None) -> Iterator[Trace]:  # fmt: skip
    """Records every op and module call that runs in the ``with`` block.

    Args:
        model: the model whose calls are recorded; other modules' ops appear under "(outside)".
        save: "digest" keeps digests only; "full" keeps every computed tensor too; a function of an `OpRecord` says which.
        level: "ops", or "modules" for what each module returns, which is faster and cannot say which op made it.
        observer: called for each computed tensor with its op, record, value, layout and call.
        context: which prompts and which step the calls serve; `run` sets it, and ops between calls are left out then.
        path: where to save the trace on leaving; nothing is saved after an exception.

    Yields:
        The `Trace`, complete when the block ends.

    Raises:
        UsageError: ``save`` or ``level`` is none of these.
        CaptureError: the model is already being captured, or is compiled as a whole.
    """
    if not (callable(save) or save in ("digest", "full")):
        raise UsageError(f'capture: save is "digest", "full" or a function of an OpRecord; got {save!r}.')
    if level not in ("ops", "modules"):
        raise UsageError(f'capture: level is "ops" or "modules"; got {level!r}.')
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise CaptureError(
            "capture: the model is compiled as a whole, so its modules cannot be told apart. Capture model._orig_mod."
        )
    if model in _captured:
        raise CaptureError(f"capture: this {type(model).__name__} is being captured already; end that capture first.")
    modules = list(model.named_modules())
    trace = Trace(model=_describe(model, modules))
    chosen = _saver(trace, save, observer)
    _captured.add(model)
    # A trace makes many small objects, and each full collection would walk through all that was there before it.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        if level == "ops":
            with Recorder(model, modules, trace, chosen, context):
                yield trace
        else:
            live = LiveTensors(trace, modules, shared_plans())
            hooks = ModuleHooks(model, modules, live, context, chosen, records_outputs=True)
            hooks.attach()
            try:
                yield trace
            finally:
                hooks.detach()
    finally:
        if freezes:
            gc.unfreeze()
        _captured.discard(model)
    if path is not None:
        save_trace(trace, path)


def _saver(trace: Trace, save: Save, observer: Observer | None) -> Observer | None:
    """An observer that keeps the tensors asked for, and passes everything on to the caller's observer."""
    if save == "digest":
        return observer

    def keep(op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        if observer is not None:
            observer(op, record, tensor, layout, call)
        if save == "full" or (callable(save) and save(op)):
            trace.saved.add(record.number, tensor)

    return keep


def _describe(model: nn.Module, modules: Modules) -> dict[str, Any]:
    parameters = {id(p): p for _, module in modules for p in module._parameters.values() if p is not None}
    first = next(iter(parameters.values()), None)
    return {
        "class": type(model).__name__,
        "dtype": str(first.dtype).removeprefix("torch.") if first is not None else "",
        "parameters": sum([p.numel() for p in parameters.values()]),
    }
