"""What a trace holds: calls, ops, module calls, and one digest per row of every tensor.

Rows are named (prompt, position): a prompt's number in the run, and a token's place in that prompt, whatever slot of a
padded or chunked tensor it was computed in. Padding and batch mates have no name and are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from detlab.trace.layout import Index, unpair
from detlab.trace.tensors import TensorStore

Array = np.ndarray

#: Name of the one op that stands for a compiled module.
REGION = "compiled_region"
#: Name of the one op that stands for a module's call where ops are not recorded.
MODULE = "module"

# A row key: prompt, copy (a token that a mixture of experts sends to several of them), position + 2.
_PROMPT_SHIFT, _COPY_SHIFT = 32, 24
_COPIES = ((1 << _PROMPT_SHIFT) - 1) ^ ((1 << _COPY_SHIFT) - 1)


def row_keys(prompt: Array, position: Array) -> Array:
    """One sortable number per row; the position -2 ("the whole prompt") sorts before every token."""
    keys: Array = (prompt << _PROMPT_SHIFT) + (position + 2)
    return keys


def split_keys(keys: Array) -> tuple[Array, Array]:
    """The inverse of `row_keys`: (prompt, position)."""
    return keys >> _PROMPT_SHIFT, (keys & ((1 << _COPY_SHIFT) - 1)) - 2


def without_copy(keys: Array) -> Array:
    """Keys of the tokens that rows stand for, whichever copy they are."""
    return keys & ~_COPIES


def _number_copies(keys: Array) -> Array:
    """Makes repeated keys distinct, in order of appearance."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    copies = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    numbered = keys.copy()
    numbered[order] += copies << _COPY_SHIFT
    return numbered


NO_DIGESTS = np.zeros(0, np.int64)


@dataclass(slots=True)
class Call:
    """One call of the model: which prompt each batch row serves, and which position each token slot holds.

    Attributes:
        index: number of the call within its trace.
        step: 0 for prefill (every chunk of it), then 1, 2, ... for decode steps; the call's own index in a bare capture.
        prompts: [batch], prompt number, -1 for a mate that is not part of the question.
        positions: [batch, slots], token position, -1 for padding; slots count from the start of the cache.
        query: slots of the tokens that this call computes.
        tokens: [batch, len(query)], token ids; -1 where the call was given embeddings.
    """

    index: int
    step: int
    prompts: Array
    positions: Array
    query: range
    tokens: Array
    _keys: dict[Any, tuple[Array, Array]] = field(default_factory=dict, repr=False)

    def keys(self, batch: Index | None, slots: Index | None, pairs: Index | None = None) -> tuple[Array, Array]:
        """The named rows of a tensor: (sorted row keys, where each row stands in the tensor); the same arrays every time."""
        found = self._keys.get((batch, slots, pairs))
        if found is None:
            prompt, position = self._pair_names(pairs) if pairs is not None else self.row_names(batch, slots)
            at = np.flatnonzero(prompt >= 0)
            keys = row_keys(prompt[at], position[at])
            if pairs is not None:
                keys = _number_copies(keys)
            order = np.argsort(keys, kind="stable")
            found = self._keys[batch, slots, pairs] = (keys[order], at[order])
        return found

    def _pair_names(self, pairs: Index) -> tuple[Array, Array]:
        """Names picked rows: (prompt, position)."""
        split = np.array([unpair(number) for number in pairs], np.int64).reshape(-1, 2)
        is_slot = (split[:, 1] >= 0) & (split[:, 1] < self.positions.shape[1])  # other rows fill a shape up
        positions = np.where(is_slot, self.positions[split[:, 0], np.where(is_slot, split[:, 1], 0)], -1)
        prompts = np.where(positions >= 0, self.prompts[split[:, 0]], -1)
        return prompts.astype(np.int64), positions.astype(np.int64)

    def row_names(self, batch: Index | None, slots: Index | None) -> tuple[Array, Array]:
        """Names the rows of a tensor: (prompt, position), each int64 [len(batch) * len(slots)]; -1 where there is none.

        A tensor without a batch axis is broadcast over the batch: it is named by the first prompt where all prompts hold the
        same positions, and not at all where padding sets them apart. A missing token axis leaves the position at -2, "the
        whole prompt".
        """
        if batch is None:
            served = np.flatnonzero(self.prompts >= 0)
            agree = len(served) and (self.positions[served] == self.positions[served[:1]]).all()
            rows = served[:1] if agree else np.zeros(1, np.int64)
            prompts = self.prompts[rows] if agree else np.full(1, -1)
        else:
            rows = np.asarray(batch, dtype=np.int64)
            prompts = self.prompts[rows]
        if slots is None:
            return prompts.astype(np.int64), np.where(prompts < 0, -1, -2).astype(np.int64)
        columns = np.asarray(slots, dtype=np.int64)
        inside = columns < self.positions.shape[1]
        positions = np.full((len(rows), len(columns)), -1, dtype=np.int64)
        positions[:, inside] = self.positions[np.ix_(rows, columns[inside])]
        named = np.where(positions >= 0, prompts[:, None], -1)
        return named.reshape(-1).astype(np.int64), np.where(named >= 0, positions, -1).reshape(-1)


@dataclass(slots=True)
class TensorRecord:
    """One tensor that was computed, or that entered from outside.

    Attributes:
        number: index into ``Trace.tensors``.
        kind: "op" (computed by an op), "parameter", "buffer", "input" (of the call), "cache" (filled before the capture
            began) or "constant" (made by the caller's Python code).
        name: the parameter's, buffer's or input's name; "" for "op".
        call: the call that made it; -1 before the first.
        op: index into ``Trace.ops`` of the op that made it; -1 for the other kinds.
        status: "rows" (cut into rows), "whole" (has none: one digest for all of it) or "unlaid" (rows could not be
            followed; digested whole).
        batch, slots: the batch rows and token slots its rows stand for; or ``pairs`` of them, picked and reordered.
        width: elements in a row.
        digests: int64; one per row, batch-major.
        parts: tensors whose rows this one only collects (a cache that grew); it has no digests of its own then.
    """

    number: int
    kind: str
    name: str
    call: int
    op: int
    shape: tuple[int, ...]
    dtype: str
    status: str
    batch: Index | None = None
    slots: Index | None = None
    width: int = 0
    digests: Array = field(default_factory=lambda: NO_DIGESTS)
    parts: tuple[int, ...] = ()
    pairs: tuple[int, ...] | None = None


@dataclass(slots=True)
class OpRecord:
    """One op that ran.

    Attributes:
        module: dotted name of the innermost module it ran in; "" is the model itself.
        op: the op's name without its overload, "mm"; other libraries' ops keep their prefix, "mkldnn._linear_pointwise".
        occurrence: how many ops of this name ran before it in this module and call.
        inputs: (argument, tensor, relation): relation is "row" where row r of the output sees row r of the input,
            "context" where it may see every row up to its own (keys, values), "whole" for tensors without rows, "place"
            for an index that only says where rows go.
        outputs: tensors it made; for a view, the tensor whose rows it shows.
        is_view: it only renames or moves elements.
        is_factory: it made its output from numbers alone (arange, zeros).
    """

    index: int
    call: int
    module: str
    op: str
    occurrence: int
    inputs: tuple[tuple[str, int, str], ...]
    outputs: tuple[int, ...]
    is_view: bool = False
    is_factory: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        """What the op is called in every call: (module, op, occurrence)."""
        return self.module, self.op, self.occurrence


@dataclass(slots=True)
class ModuleRecord:
    """One call of a module.

    Attributes:
        call, module, class_name: when, where, what.
        first_op, end_op: the ops that ran in it, [first_op, end_op).
        output: the tensor whose rows its first output shows; -1 where it returned none.
        inputs: (argument, tensor) of the tensors it was called with.
    """

    call: int
    module: str
    class_name: str
    first_op: int
    end_op: int
    output: int
    inputs: tuple[tuple[str, int], ...] = ()


@dataclass
class Trace:
    """Everything that was captured between entering and leaving `capture`.

    Attributes:
        calls, ops, modules, tensors: the records, in the order in which things ran.
        model: class, dtype and size of the model.
        saved: full tensors by tensor number, where ``save`` asked for them; they are on disk and read one at a time.
        notes: what could not be followed, in words.
    """

    model: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    ops: list[OpRecord] = field(default_factory=list)
    modules: list[ModuleRecord] = field(default_factory=list)
    tensors: list[TensorRecord] = field(default_factory=list)
    saved: TensorStore = field(default_factory=TensorStore)
    notes: list[str] = field(default_factory=list)

    def rows(self, number: int) -> tuple[Array, Array]:
        """Rows of a tensor: (sorted row keys, digests), both int64 [num_rows]; unnamed rows are left out, "whole" has none.

        Tensors of one call and layout share the array of keys.
        """
        record = self.tensors[number]
        if record.status != "rows":
            empty = np.zeros(0, np.int64)
            return empty, empty
        if record.parts:
            parts = [self.rows(part) for part in record.parts]
            keys = np.concatenate([part[0] for part in parts])
            order = np.argsort(keys, kind="stable")
            return keys[order], np.concatenate([part[1] for part in parts])[order]
        keys, at = self.calls[max(0, record.call)].keys(record.batch, record.slots, record.pairs)
        return keys, record.digests[at]

    def producer(self, number: int) -> OpRecord | None:
        """The op that computed a tensor, or None where it entered from outside."""
        record = self.tensors[number]
        return self.ops[record.op] if record.kind == "op" and record.op >= 0 else None

    @property
    def num_digests(self) -> int:
        """How many row digests the trace holds."""
        return sum(len(t.digests) for t in self.tensors)

    @property
    def unlaid(self) -> list[OpRecord]:
        """Ops that computed a tensor whose rows could not be followed."""
        lost = {t.number for t in self.tensors if t.status == "unlaid"}
        return [op for op in self.ops if not (op.is_view or lost.isdisjoint(op.outputs) or op.module == "(outside)")]

    def save(self, path: str | Path) -> Path:
        """Saves the trace in a folder that `load_trace` reads; `Run.save` saves a whole run."""
        from detlab.trace.store import save_trace  # the store builds on these records

        return save_trace(self, path)

    def summary(self) -> str:
        """One line in words: calls, ops, rows, and what is unlaid."""
        views = sum(op.is_view for op in self.ops)
        lost = len(self.unlaid)
        tail = f"; {lost} ops unlaid (rows could not be followed)" if lost else ""
        return (
            f"{len(self.calls)} calls, {len(self.ops) - views} ops and {views} views in {len(self.modules)} module calls, "
            f"{self.num_digests} row digests{tail}"
        )

    def __repr__(self) -> str:
        return f"Trace({self.summary()})"
