"""What is known of the tensors that exist now: their record, layout and version.

Inputs are resolved through their producers, so that an op costs the hashing of its output only.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from detlab import bits
from detlab.trace import layout as lay
from detlab.trace.hashing import Hasher, stored_digest
from detlab.trace.layout import Index, Layout
from detlab.trace.plans import Kind, OpInfo, Plans
from detlab.trace.records import NO_DIGESTS, Call, TensorRecord, Trace

#: A model's modules with their names, as `named_modules` gives them.
Modules = Sequence[tuple[str, nn.Module]]


@dataclass(slots=True)
class Live:
    """What is known of a tensor that exists now."""

    ref: weakref.ref[Tensor]
    kind: Kind
    base: int  # first query slot of the call in which the kind's layout was made
    root: int  # the record whose rows it shows
    exact: bool  # its rows are the root's rows, element by element and in that order
    version: int
    other_version: int  # a view takes over its base's counter only after the dispatcher returns
    clock: int  # number of writes before it


class LiveTensors:
    """The tensors that a trace has seen and that still exist, by identity.

    Attributes:
        trace: gets the records.
        base: first query slot of the present call; layouts count token slots from it.
        known: what is known of each tensor, by id; `find` tells whether it is of this tensor or of one that is gone.
        named: parameters and buffers of the model, by identity: (kind, name).
        stored: number of elements of each record that is a parameter or buffer.
    """

    def __init__(self, trace: Trace, modules: Modules, plans: Plans) -> None:
        self.trace = trace
        self.base = 0
        self.known: dict[int, Live] = {}
        self.named: dict[int, tuple[str, str]] = {}
        self.stored: dict[int, int] = {}
        self.kinds = plans.kinds
        self.hasher = Hasher()
        self._parts: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._writes: dict[int, int] = {}  # storage -> number of the last write to it
        self._clock = 0
        self._places: dict[Kind, tuple[Index | None, tuple[int, ...] | None]] = {}  # of the present call
        for prefix, module in modules:
            lead = f"{prefix}." if prefix else ""
            for what, own in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in own.items():
                    if tensor is not None:
                        self.named.setdefault(id(tensor), (what, lead + name))

    def begin_call(self, base: int) -> None:
        """Counts token slots from the first that the present call computes."""
        self.base = base
        self._places.clear()

    def note_writes(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remembers which storages an op writes to: what was known of tensors that share them is out of date then."""
        self._clock += 1
        for position, name in info.writes:
            for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name)):
                self._writes[_storage(tensor)] = self._clock

    def find(self, tensor: Tensor) -> Live | None:
        """What is known of a tensor, if anything."""
        known = self.known.get(id(tensor))
        return known if known is not None and known.ref() is tensor else None

    def is_current(self, known: Live, tensor: Tensor) -> bool:
        """Whether a tensor has not been written to since, be it through a view that shares no version with it."""
        version = version_of(tensor)
        if version != known.version and version != known.other_version:
            return False
        return not self._writes or self._writes.get(_storage(tensor), 0) <= known.clock

    def current(self, tensor: Tensor) -> Live | None:
        """What is known of a tensor, where it has not been written to since."""
        known = self.find(tensor)
        return known if known is not None and self.is_current(known, tensor) else None

    def resolve(self, tensor: Tensor) -> Live:
        """The live record of an input, made now where it was not seen before or has changed since."""
        known = self.known.get(id(tensor))
        if known is None or known.ref() is not tensor:
            what, name = self.named.get(id(tensor), ("constant", ""))
            return self.enter(what, name, tensor, self.kinds.plain(tensor))
        if known.base != self.base:
            self._shift(known, tensor)
        if self.is_current(known, tensor):
            return known
        # Written to through another view, or behind the dispatcher: its rows are new inputs.
        name = self.trace.tensors[known.root].name or "tensor"
        kind = known.kind if known.kind.shape == tensor.shape else self.kinds.plain(tensor)
        changed = self.enter("constant", f"{name} (changed in place)", tensor, kind)
        self.trace.tensors[changed.root].op = len(self.trace.ops) - 1  # the last op that could have written it
        return changed

    def _shift(self, live: Live, tensor: Tensor) -> None:
        """Counts a layout's token slots from the present call's first query slot."""
        layout = live.kind.layout
        if layout is not None and live.kind.status == "rows":
            live.kind = self.kinds.of(tensor, lay.shift(layout, live.base - self.base))
        live.base = self.base

    def enter(self, what: str, name: str, tensor: Tensor, kind: Kind) -> Live:
        """Records a tensor that no op of the trace computed."""
        record = self.new_record(what, name, kind, -1)
        version = version_of(tensor)
        if what in ("parameter", "buffer"):
            record.status, record.width = "whole", kind.numel
            record.digests = stored_digest(tensor)
            self.stored[record.number] = kind.numel
        else:
            self.hash(record, tensor, kind)
        return self.track(tensor, kind, record.number, True, version, version)

    def part(self, whole: int, tensor: Tensor) -> int:
        """A part of a parameter as a record of its own: one expert's weight is another input than the next one's."""
        offset = int(tensor.storage_offset())
        at = (whole, offset, tuple(tensor.shape))
        known = self._parts.get(at)
        if known is None:
            source = self.trace.tensors[whole]
            name = f"{source.name}[{offset // max(1, tensor.numel())}]"
            record = self.new_record(source.kind, name, self.kinds.plain(tensor), -1)
            record.status, record.width = "whole", tensor.numel()
            record.digests = stored_digest(tensor)
            known = self._parts[at] = record.number
            self.stored[known] = tensor.numel()
        return known

    def new_record(self, what: str, name: str, kind: Kind, op: int) -> TensorRecord:
        """Adds a record; its rows are filled in by `hash` or `collect`."""
        tensors = self.trace.tensors
        record = TensorRecord(
            len(tensors), what, name, len(self.trace.calls) - 1, op, kind.shape, kind.dtype_name, "unlaid", None, None, 0,
            NO_DIGESTS, (),
        )  # fmt: skip
        tensors.append(record)
        return record

    def track(self, tensor: Tensor, kind: Kind, root: int, exact: bool, version: int, other: int) -> Live:
        """Remembers a tensor that exists now; ``other`` is a second version counter that it may turn out to have."""
        live = Live(weakref.ref(tensor), kind, self.base, root, exact, version, other, self._clock)
        self.known[id(tensor)] = live
        return live

    def layout_of(self, tensor: Tensor) -> Layout | None:
        """The layout of a tensor; features only where it was not seen before."""
        known = self.known.get(id(tensor))
        return known.kind.layout if known is not None else lay.plain(tensor.shape)

    def hash(self, record: TensorRecord, tensor: Tensor, kind: Kind) -> None:
        """Lays a record out in rows and sees to it that they are hashed."""
        record.width = kind.width
        if kind.is_opaque:
            return
        record.status = kind.status
        record.batch = kind.batch
        record.slots, record.pairs = self._place(kind)
        if not kind.numel:
            return
        if kind.has_columns:
            assert kind.layout is not None
            rows = lay.rows_of(tensor, kind.layout)
            columns, visible = _visible(self.trace.calls[record.call], rows, self.base)
            grid = bits.project_named_columns(rows.grid, columns.to(tensor.device), visible.to(tensor.device))
            self.hasher.add_projections([record], grid)
        else:
            self.hasher.add(record, tensor, kind)

    def _place(self, kind: Kind) -> tuple[Index | None, tuple[int, ...] | None]:
        """Slots and pairs of a kind's rows, counted from the start of the cache."""
        found = self._places.get(kind)
        if found is None:
            slots = None if kind.slots is None else lay.shift_index(kind.slots, self.base)
            pairs = None if kind.pairs is None else tuple(lay.shift_index(kind.pairs, self.base))
            found = self._places[kind] = (slots, pairs)
        return found

    def _num_rows(self, record: TensorRecord) -> int:
        if record.parts:
            return sum(self._num_rows(self.trace.tensors[part]) for part in record.parts)
        if record.pairs is not None:
            return len(record.pairs)
        return (1 if record.batch is None else len(record.batch)) * (1 if record.slots is None else len(record.slots))

    def collect(self, record: TensorRecord, kind: Kind, inputs: list[Live]) -> bool:
        """Makes a record that only collects other tensors' rows, where a ``cat`` put rows one after another."""
        parts = [live for live in inputs if live.kind.numel]
        if kind.status != "rows" or kind.has_columns or not parts:
            return False
        numbers: list[int] = []
        for live in parts:
            source = self.trace.tensors[live.root]
            if not live.exact or source.status != "rows" or source.width != kind.width:
                return False
            # A slice (a sliding window) shows some of its source's rows only: it is hashed for itself.
            if live.kind.layout is None or lay.cut_of(live.kind.layout).num_rows != self._num_rows(source):
                return False
            numbers += source.parts or (live.root,)
        record.status, record.width, record.parts = "rows", kind.width, tuple(numbers)
        return True


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _storage(tensor: Tensor) -> int:
    """A number for the memory that a tensor shares with its views; 0 where it is opaque."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return []


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
