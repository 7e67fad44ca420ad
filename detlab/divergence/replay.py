"""Runs one side of a comparison again, to look at one op's full inputs or to put other rows into its output.

A dispatch mode below the capture meets every op after the capture has said which ops came before it. So an op is found by
its number in the trace, whatever else runs in between (digests are computed with ops, too), and its name, dtype and shape
must agree; otherwise the replay says that it did not meet it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from detlab.divergence.result import Comparison, Divergence
from detlab.errors import ModelError, TraceError, UsageError
from detlab.runner import Run, execute
from detlab.serving import device_of, served_model, settings
from detlab.trace.capture import capture
from detlab.trace.keep import RowKeeper
from detlab.trace.layout import Layout, rows_of
from detlab.trace.live import tensors_in
from detlab.trace.records import Array, Call, OpRecord, TensorRecord, Trace, split_keys

#: Repeats the calls that a bare trace recorded.
Again = Callable[[], Any]


@dataclass
class Side:
    """One side of a comparison, which can be executed again.

    Attributes:
        name: "a" or "b".
        trace: what was recorded.
        run: the run, or None for a bare trace.
        model: the model.
        again: repeats the calls of a bare trace.
    """

    name: str
    trace: Trace
    run: Run | None
    model: nn.Module
    again: Again | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the side's condition needs from the start of a process."""
        return {} if self.run is None else self.run.condition.variables

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Threads and flags of the side's condition."""
        if self.run is None:
            yield
            return
        with settings(replace(self.run.condition, autocast=None), device_of(self.model)):
            yield

    def execute(self, keep: Any, model: nn.Module | None = None) -> Trace:
        """Executes the side again in this process, its settings included, and returns what was recorded.

        Args:
            keep: an observer, as `capture` takes it.
            model: another model in place of the side's own.
        """
        model = self.model if model is None else model
        if self.run is None:
            assert self.again is not None
            with capture(model, observer=keep) as trace:
                self.again()
            return trace
        source = self.run._source
        assert source is not None
        here = replace(self.run.condition, aten_isa=None, mkl_isa=None, onednn_isa=None)
        made = execute(
            model, source.prompts, self.run.inputs, here, self.run.num_steps, source.tokenizer,
            save="digest", with_trace=True, force=self.run.forced, progress=None, keep=keep,
        )  # fmt: skip
        assert made.trace is not None
        return made.trace


def sides_of(comparison: Comparison, again: Sequence[Again] | None = None, model: nn.Module | None = None) -> tuple[Side, Side]:
    """Both sides of a comparison, ready to be executed again.

    Args:
        comparison: what `compare` returned.
        again: for bare traces, two functions that repeat the calls of a and of b.
        model: for bare traces, the model that was captured.

    Raises:
        UsageError: there is nothing to execute again.
        ModelError: the model is gone.
    """
    if comparison.sides is None:
        raise UsageError("this comparison does not hold its runs; take it from detlab.compare(a, b).")
    made = []
    for at, (name, side) in enumerate(zip("ab", comparison.sides, strict=True)):
        if isinstance(side, Trace):
            if again is None or model is None:
                raise UsageError(
                    "bare traces cannot be executed again by themselves: give the model and again=(f, g), two functions that "
                    "repeat the calls of a and of b, or compare runs (detlab.run)."
                )
            made.append(Side(name, side, None, model, again[at]))
            continue
        found = side._source.model() if side._source is not None else None
        if found is None:
            raise ModelError("the model of these runs is gone (or they were loaded from disk); run both conditions again.")
        if side.trace is None:
            raise TraceError("a run has no trace; run it again with trace=True.")
        made.append(Side(name, side.trace, side, found))
    return made[0], made[1]


def comparison_of(what: Divergence | Comparison) -> tuple[Comparison, Divergence | None]:
    """A divergence and its comparison; the first one of a comparison.

    Raises:
        UsageError: it is neither, or a divergence that no comparison made.
    """
    if isinstance(what, Comparison):
        return what, what.first
    if not isinstance(what, Divergence):
        raise UsageError(f"explain takes a Divergence or a Comparison; got {type(what).__name__}. Try detlab.compare(a, b).")
    if what.comparison is None:
        raise UsageError("this divergence was made by hand: nothing is known of its runs. Take it from detlab.compare(a, b).")
    return what.comparison, what


# -------------------------------------------------------------------------------------------------------- one op, met again
@dataclass
class Met:
    """An op as it was met.

    Attributes:
        func, args, kwargs: the ATen op and what it was called with, before it ran.
        output: a copy of its first output.
        layout, record, call: of that output, as the capture says.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    layout: Layout | None = None
    record: TensorRecord | None = None
    call: Call | None = None

    def elements(self) -> Elements:
        """Named rows of the output, as places in it."""
        assert self.layout is not None and self.call is not None and self.record is not None
        return elements_of(self.output.shape, self.layout, self.record, self.call)


@dataclass
class Elements:
    """Where the named rows of a tensor stand in it.

    Attributes:
        keys: sorted row keys, [num_rows].
        at: flat indices of all rows' elements, one row after another; of scores, those that the row may see, by position.
        lengths: elements of each row, [num_rows].
    """

    keys: Array
    at: Tensor
    lengths: Tensor

    def of(self, keys: Array) -> Elements:
        """Some of the rows, which must all be there."""
        return Elements(keys, self.at[self.mask(keys)], self.lengths[torch.from_numpy(np.searchsorted(self.keys, keys))])

    def mask(self, keys: Array) -> Tensor:
        """[num_elements], whether each element belongs to one of some rows, which must all be there."""
        chosen = torch.zeros(len(self.keys), dtype=torch.bool)
        chosen[torch.from_numpy(np.searchsorted(self.keys, keys))] = True
        return chosen.repeat_interleave(self.lengths)

    def rows(self) -> Tensor:
        """[num_elements], the row that each element belongs to."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)


def elements_of(shape: Sequence[int], layout: Layout, record: TensorRecord, call: Call) -> Elements:
    """Named rows of a tensor, as places in it."""
    cut = rows_of(torch.arange(int(np.prod(shape))).view(*shape), layout)
    keys, at = call.keys(record.batch, record.slots, record.pairs)
    grid = cut.grid[torch.from_numpy(at)]
    if cut.columns is None:
        grid = grid.reshape(len(keys), -1)
        return Elements(keys, grid.reshape(-1), torch.full((len(keys),), grid.shape[1]))
    columns = np.asarray(cut.columns) + call.query.start  # scores and masks: the columns are tokens, too
    prompts, positions = split_keys(keys)
    row_of = {int(prompt): row for row, prompt in enumerate(call.prompts.tolist())}
    parts = []
    for row, (prompt, position) in enumerate(zip(prompts.tolist(), positions.tolist(), strict=True)):
        held = call.positions[row_of.get(prompt, 0)]
        names = np.where(columns < len(held), held[np.minimum(columns, len(held) - 1)], -1)
        order = np.argsort(names, kind="stable")
        seen = order[(names[order] >= 0) & (names[order] <= position)]
        parts.append(grid[row][:, torch.from_numpy(seen)].reshape(-1))
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.long)
    return Elements(keys, torch.cat([torch.zeros(0, dtype=torch.long), *parts]), lengths)


@dataclass
class Target:
    """Rows to be put into one of an op's outputs: places, the value of each element, and whether to keep what they replace."""

    elements: Elements
    values: Tensor
    keeps: bool = False


#: (op, number of its output) -> what is put in.
Targets = dict[tuple[int, int], Target]


@dataclass
class Replaced:
    """What an op computed where rows were put in: how many of the rows differed, and by how much at most."""

    num_rows: int
    differing: int
    max_abs: float


class _EnoughError(BaseException):
    """Ends a repetition once everything that was wanted of it has been met; no handler of a model's own is meant to stop it."""


class Spot(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meets ops of a trace again: copies what they are called with, or replaces rows of what they return.

    Args:
        trace: the side's trace, which the replay repeats op by op.
        wanted: numbers of the ops to copy.
        targets: rows to put in, by numbers of the op and of its output.
        stored: data pointers of parameters and buffers, which are not copied.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled region runs as it would without us."""
        return True

    def __init__(self, trace: Trace, wanted: Sequence[int], targets: Targets | None = None,
                 stored: frozenset[int] = frozenset()) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.wanted, self.targets, self.stored = trace, set(wanted), targets or {}, stored
        replacing = {op for op, _ in self.targets}
        self.met: dict[int, Met] = {}
        self.replaced: dict[int, Replaced] = {}
        self.kept: dict[tuple[int, int], Tensor] = {}  # what was replaced, where a target asks for it
        self._after: dict[int, int] = {}  # the op observed last -> the one that may come now
        last = -1
        for op in trace.ops:
            if op.is_view or not op.outputs:
                continue
            if op.index in self.wanted or op.index in replacing:
                self._after[last] = op.index
            last = op.index
        self._next = self._after.get(-1, -1)

    def observe(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        """Hears from the capture which op has just run."""
        met = self.met.get(op.index)
        if met is not None and met.record is None and record.number == op.outputs[0]:
            met.layout, met.record, met.call = layout, record, call
        if op.outputs[-1:] == (record.number,):
            self._next = self._after.get(op.index, -1)
            if self.is_enough:
                raise _EnoughError

    @property
    def is_enough(self) -> bool:
        """Whether ops were to be copied only, and all of them have been."""
        return bool(self.wanted) and not self.targets and self.wanted <= self.met.keys()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs the op; the one that is waited for is copied or changed."""
        kwargs = kwargs or {}
        if self._next < 0 or name_of(func) != self.trace.ops[self._next].op:
            return func(*args, **kwargs)
        index = self._next
        copied = self._copies(args, kwargs) if index in self.wanted else None
        result = func(*args, **kwargs)
        first = next(iter(tensors_in(result)), None)
        record = self.trace.tensors[self.trace.ops[index].outputs[0]]
        if first is None or tuple(first.shape) != record.shape or str(first.dtype) != f"torch.{record.dtype}":
            return result
        self._next = -1
        if copied is not None:
            self.met[index] = Met(func, *copied, first.detach().clone())
        for slot, output in enumerate(tensors_in(result)):
            if (index, slot) in self.targets:
                self._replace(index, slot, output)
        return result

    def _replace(self, index: int, slot: int, output: Tensor) -> None:
        target = self.targets[index, slot]
        flat = output.detach().reshape(-1).clone()
        at = target.elements.at.to(flat.device)
        before, after = flat[at], target.values.to(flat.device)
        if target.keeps:
            self.kept[index, slot] = before.cpu()
        unequal = int_view(before) != int_view(after)
        rows = set(target.elements.rows()[unequal.cpu()].tolist())
        largest = 0.0
        if len(rows):
            gap = (before[unequal].double() - after[unequal].double()).abs()
            largest = float(gap.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
            flat[at] = after
            output.copy_(flat.view(output.shape))
        old = self.replaced.get(index, Replaced(0, 0, 0.0))  # of an earlier output
        num_rows = max(old.num_rows, len(target.elements.keys))
        self.replaced[index] = Replaced(num_rows, max(old.differing, len(rows)), max(old.max_abs, largest))

    def _copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments whose tensors nobody else can write to, with the strides and alignment that they had."""
        storages: dict[int, Any] = {}

        def copy(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self._copy(value, storages)
            if isinstance(value, (list, tuple)):
                return type(value)(copy(item) for item in value)
            return value

        return tuple(copy(a) for a in args), {name: copy(v) for name, v in kwargs.items()}

    def _copy(self, tensor: Tensor, storages: dict[int, Any]) -> Tensor:
        plain = tensor.detach()
        if tensor.layout != torch.strided:
            return plain
        storage = plain.untyped_storage()
        if storage.data_ptr() in self.stored:
            return plain
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        made = torch.empty(0, dtype=plain.dtype, device=plain.device)
        return made.set_(storages[storage.data_ptr()], plain.storage_offset(), plain.size(), plain.stride())


class _Observer(RowKeeper):
    """Passes on to a spot what the capture says."""

    def __init__(self, spot: Spot) -> None:
        super().__init__(set(), [])
        self.spot = spot

    def __call__(self, op: OpRecord, record: TensorRecord, tensor: Tensor, layout: Layout | None, call: Call | None) -> None:
        """Hears of one output."""
        self.spot.observe(op, record, tensor, layout, call)


def name_of(func: Any) -> str:
    """An op's name as traces write it."""
    schema = getattr(func, "_schema", None)
    return str(func) if schema is None else str(schema.name).removeprefix("aten::").replace("::", ".")


def int_view(tensor: Tensor) -> Tensor:
    """Bits as integers; what is no float as it is."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]) if tensor.is_floating_point() else tensor


def stored_in(model: nn.Module) -> frozenset[int]:
    """Addresses of the storages of a model's parameters."""
    return frozenset(p.untyped_storage().data_ptr() for p in model.parameters())


def replay(side: Side, wanted: Sequence[int] = (), targets: Targets | None = None) -> tuple[Trace | None, Spot]:
    """Executes a side again, copying what some ops are called with and putting rows into others' outputs.

    Returns:
        What was recorded, and the spot with what it met. Where ops are copied only, the execution ends with the last of them,
        and there is no record.
    """
    context: Any = nullcontext(side.model)
    if side.run is not None:
        context = served_model(side.model, replace(side.run.condition, compile=None))
    with context as served:
        stored = stored_in(served)
    spot = Spot(side.trace, wanted, targets, stored)
    trace: Trace | None = None
    with suppress(_EnoughError), torch.no_grad(), spot:
        trace = side.execute(_Observer(spot))
    return trace, spot


def meet(side: Side, op: int) -> Met:
    """One op's full inputs and output, from executing a side again.

    Raises:
        TraceError: the repetition did not come by this op.
    """
    _, spot = replay(side, [op])
    met = spot.met.get(op)
    if met is None or met.record is None:
        record = side.trace.ops[op]
        raise TraceError(f"executing {side.name} again did not come by {record.module or '(model)'} · {record.op}.")
    return met
