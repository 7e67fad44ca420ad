"""Captures every op and module call of a model, with one digest per row, without changing what it observes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from detlab.errors import CaptureError, UsageError
from detlab.trace.calls import CallContext
from detlab.trace.recorder import Observer, Recorder
from detlab.trace.records import OpRecord, Trace
from detlab.trace.store import save_trace

Save = str | Callable[[OpRecord], bool]

_captured: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def capture(model: nn.Module, save: Save = "digest", *, observer: Observer | None = None, context: CallContext | None = None,
            path: str | Path | None = None) -> Iterator[Trace]:  # fmt: skip
    """Records every op and module call that runs in the ``with`` block.

    Args:
        model: the model whose calls are recorded; other modules' ops appear under "(outside)".
        save: "digest" keeps digests only; "full" keeps every computed tensor too; a function of an `OpRecord` says which.
        observer: called for each computed tensor with its op, record, value, layout and call.
        context: which prompts and which step the calls serve; `run` sets it, and ops between calls are left out then.
        path: where to save the trace on leaving; nothing is saved after an exception.

    Yields:
        The `Trace`, complete when the block ends.

    Raises:
        UsageError: ``save`` is none of these.
        CaptureError: the model is already being captured, or is compiled as a whole.
    """
    if not (callable(save) or save in ("digest", "full")):
        raise UsageError(f'capture: save is "digest", "full" or a function of an OpRecord; got {save!r}.')
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise CaptureError(
            "capture: the model is compiled as a whole, so its modules cannot be told apart. Capture model._orig_mod."
        )
    if model in _captured:
        raise CaptureError(f"capture: this {type(model).__name__} is being captured already; end that capture first.")
    chosen = save if callable(save) else (_every if save == "full" else None)
    recorder = Recorder(model, chosen, observer, context)
    _captured.add(model)
    try:
        with recorder:
            yield recorder.trace
    finally:
        _captured.discard(model)
    if path is not None:
        save_trace(recorder.trace, path)


def _every(op: OpRecord) -> bool:
    return True

