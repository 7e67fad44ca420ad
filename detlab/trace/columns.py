"""Takes traces apart into columns and puts them together again.

A trace is hundreds of thousands of small records. Kept by columns, each in the narrowest integers that hold it, with names,
shapes and layouts numbered, an op costs about 25 bytes and a row digest its 8.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from detlab.errors import TraceCorrupt
from detlab.trace.layout import Index
from detlab.trace.records import Array, Call, ModuleRecord, OpRecord, TensorRecord, Trace
from detlab.trace.tensors import TensorStore

_KINDS = ("op", "parameter", "buffer", "input", "cache", "constant")
_STATUS = ("rows", "whole", "unlaid")
_RELATIONS = ("row", "context", "whole", "place")

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------------- packing
def _narrow(values: Iterable[int] | Array) -> Tensor:
    """Numbers as a column of the narrowest signed integers that hold them."""
    array = values if isinstance(values, np.ndarray) else np.array(list(values), np.int64)
    array = array.reshape(-1)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    kind = next(k for k in (np.int8, np.int16, np.int32, np.int64) if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    return torch.from_numpy(array.astype(kind))


class _Numbers:
    """Numbers things in the order in which they first come."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self.known.setdefault(thing, len(self.known))


def _pack_index(index: Index | None) -> list[int]:
    """An index as numbers: [] none, [0, start, stop, step] a range, [1, i, j, ...] a list."""
    if index is None:
        return []
    if isinstance(index, range):
        return [0, index.start, index.stop, index.step]
    return [1, *index]


def _unpack_index(values: Sequence[int]) -> Index | None:
    if not values:
        return None
    return range(values[1], values[2], values[3]) if values[0] == 0 else tuple(values[1:])


def pack_trace(trace: Trace) -> tuple[dict[str, Any], dict[str, Tensor], list[Path]]:
    """Turns a trace into a JSON part, columns, and the shards of the full tensors that were kept."""
    names, shapes, layouts = _Numbers(), _Numbers(), _Numbers()
    columns: dict[str, Tensor] = {}

    def ragged(name: str, rows: Sequence[Sequence[int]]) -> None:
        columns[name] = _narrow(chain.from_iterable(rows))
        columns[f"{name}.num"] = _narrow(map(len, rows))

    def named(name: str, rows: Sequence[Sequence[tuple[Any, ...]]]) -> None:
        """(name, tensor, ...) per input."""
        flat = list(chain.from_iterable(rows))
        columns[f"{name}.name"] = _narrow(names(row[0]) for row in flat)
        columns[f"{name}.tensor"] = _narrow(row[1] for row in flat)
        columns[f"{name}.num"] = _narrow(map(len, rows))
        if name == "ops.inputs":
            columns[f"{name}.relation"] = _narrow(_RELATIONS.index(row[2]) for row in flat)

    ops, tensors, modules = trace.ops, trace.tensors, trace.modules
    columns["ops.call"] = _narrow(op.call for op in ops)
    columns["ops.module"] = _narrow(names(op.module) for op in ops)
    columns["ops.op"] = _narrow(names(op.op) for op in ops)
    columns["ops.occurrence"] = _narrow(op.occurrence for op in ops)
    columns["ops.flags"] = _narrow(op.is_view + 2 * op.is_factory for op in ops)
    named("ops.inputs", [op.inputs for op in ops])
    ragged("ops.outputs", [op.outputs for op in ops])
    columns["tensors.kind"] = _narrow(_KINDS.index(t.kind) for t in tensors)
    columns["tensors.name"] = _narrow(names(t.name) for t in tensors)
    columns["tensors.call"] = _narrow(t.call for t in tensors)
    columns["tensors.op"] = _narrow(t.op for t in tensors)
    columns["tensors.dtype"] = _narrow(names(t.dtype) for t in tensors)
    columns["tensors.status"] = _narrow(_STATUS.index(t.status) for t in tensors)
    columns["tensors.width"] = _narrow(t.width for t in tensors)
    columns["tensors.shape"] = _narrow(shapes(tuple(t.shape)) for t in tensors)
    columns["tensors.layout"] = _narrow(layouts((t.batch, t.slots, t.pairs)) for t in tensors)
    ragged("tensors.parts", [t.parts for t in tensors])
    ragged("shapes", list(shapes.known))
    for place, name in enumerate(("batch", "slots", "pairs")):
        ragged(f"layouts.{name}", [_pack_index(layout[place]) for layout in layouts.known])
    columns["digests"] = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(t.digests for t in tensors)]))
    columns["digests.num"] = _narrow(len(t.digests) for t in tensors)
    columns["modules.call"] = _narrow(m.call for m in modules)
    columns["modules.module"] = _narrow(names(m.module) for m in modules)
    columns["modules.class"] = _narrow(names(m.class_name) for m in modules)
    columns["modules.first"] = _narrow(m.first_op for m in modules)
    columns["modules.end"] = _narrow(m.end_op for m in modules)
    columns["modules.output"] = _narrow(m.output for m in modules)
    named("modules.inputs", [m.inputs for m in modules])
    calls = []
    for call in trace.calls:
        tables = {"prompts": call.prompts, "positions": call.positions, "tokens": call.tokens}
        for name, table in tables.items():
            columns[f"call.{call.index}.{name}"] = _narrow(table)
        sizes = {name: list(table.shape) for name, table in tables.items()}
        calls.append({"step": call.step, "query": [call.query.start, call.query.stop], "sizes": sizes})
    content = {"model": trace.model, "notes": trace.notes, "names": list(names.known), "calls": calls}
    return content, columns, trace.saved.shards()


# ----------------------------------------------------------------------------------------------------------- unpacking
def unpack_trace(content: dict[str, Any], columns: dict[str, Tensor], shards: Sequence[Path]) -> Trace:
    """Rebuilds the trace that `pack_trace` took apart.

    Raises:
        TraceCorrupt: the parts do not fit together.
    """
    try:
        with _collector_paused():
            return _unpack(content, columns, shards)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise TraceCorrupt(f"the trace's parts do not fit together ({error!r}); save it again.") from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keeps the garbage collector from walking through all records again and again while they are made."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _unpack(content: dict[str, Any], columns: dict[str, Tensor], shards: Sequence[Path]) -> Trace:
    def numbers(name: str) -> list[int]:
        values: list[int] = columns[name].tolist()
        return values

    def words(name: str, of: Sequence[T]) -> list[T]:
        return list(map(of.__getitem__, numbers(name)))

    def cut(name: str, flat: Any, make: Callable[[Any], Any] = tuple) -> list[Any]:
        """Cuts a sequence as ``name.num`` says."""
        ends = list(accumulate(numbers(f"{name}.num"), initial=0))
        if ends[-1] != len(flat):
            raise ValueError(f"{name} has {len(flat)} values for {ends[-1]}")
        return [make(flat[start:end]) for start, end in pairwise(ends)]

    def indices(name: str) -> list[Index | None]:
        return cut(name, numbers(name), _unpack_index)

    names: list[str] = content["names"]
    trace = Trace(model=content["model"], notes=list(content["notes"]))
    for index, meta in enumerate(content["calls"]):
        prompts, positions, tokens = (
            columns[f"call.{index}.{name}"].numpy().astype(np.int64).reshape(meta["sizes"][name])
            for name in ("prompts", "positions", "tokens")
        )
        trace.calls.append(Call(index, meta["step"], prompts, positions, range(*meta["query"]), tokens))
    flags = numbers("ops.flags")
    relations = words("ops.inputs.relation", _RELATIONS)
    inputs = tuple(zip(words("ops.inputs.name", names), numbers("ops.inputs.tensor"), relations, strict=True))
    op_columns: tuple[Iterable[Any], ...] = (
        numbers("ops.call"), words("ops.module", names), words("ops.op", names), numbers("ops.occurrence"),
        cut("ops.inputs", inputs), cut("ops.outputs", numbers("ops.outputs")),
        [bool(flag & 1) for flag in flags], [bool(flag & 2) for flag in flags],
    )  # fmt: skip
    trace.ops = [OpRecord(*fields) for fields in zip(range(len(flags)), *op_columns, strict=True)]
    layouts = list(zip(*(indices(f"layouts.{name}") for name in ("batch", "slots", "pairs")), strict=True))
    laid = words("tensors.layout", layouts)
    tensor_columns: tuple[Iterable[Any], ...] = (
        words("tensors.kind", _KINDS), words("tensors.name", names), numbers("tensors.call"), numbers("tensors.op"),
        words("tensors.shape", cut("shapes", numbers("shapes"))), words("tensors.dtype", names),
        words("tensors.status", _STATUS), [layout[0] for layout in laid], [layout[1] for layout in laid],
        numbers("tensors.width"), cut("digests", columns["digests"].numpy(), lambda digests: digests),
        cut("tensors.parts", numbers("tensors.parts")), [layout[2] for layout in laid],
    )  # fmt: skip
    trace.tensors = [TensorRecord(*fields) for fields in zip(range(len(laid)), *tensor_columns, strict=True)]
    given = tuple(zip(words("modules.inputs.name", names), numbers("modules.inputs.tensor"), strict=True))
    module_columns: tuple[Iterable[Any], ...] = (
        numbers("modules.call"), words("modules.module", names), words("modules.class", names),
        numbers("modules.first"), numbers("modules.end"), numbers("modules.output"), cut("modules.inputs", given),
    )  # fmt: skip
    trace.modules = [ModuleRecord(*fields) for fields in zip(*module_columns, strict=True)]
    trace.saved = TensorStore(shards)
    return trace
