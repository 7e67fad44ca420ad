"""One op, taken out of its run: executed alone, with other rows beside it, at other addresses, in another precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from detlab.divergence.replay import Met, int_view, name_of
from detlab.trace.live import tensors_in

#: Where an argument stands: its position, or its name.
Place = int | str
_MATRIX: dict[str, dict[int, tuple[tuple[Place, int], ...]]] = {
    "mm": {0: ((0, 0),), 1: ((1, 1),)},
    "addmm": {0: ((1, 0),), 1: ((2, 1),)},
    "bmm": {0: ((0, 0), (1, 0)), 1: ((0, 1),)},
    "baddbmm": {0: ((1, 0), (2, 0)), 1: ((1, 1),)},
}
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_REDUCES = {"mean", "sum", "amax", "amin", "var", "std", "logsumexp", "prod", "any", "all"}


@dataclass
class Operation:
    """A call of one ATen op.

    Attributes:
        func, args, kwargs: the call; its tensors belong to nobody else.
        shape: of its first output.
        settings: a context in which the side's threads and flags hold.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    settings: Callable[[], Any]

    @classmethod
    def of(cls, met: Met, settings: Callable[[], Any]) -> Operation:
        """The call that was met in a run."""
        return cls(met.func, met.args, met.kwargs, tuple(met.output.shape), settings)

    @property
    def name(self) -> str:
        """The op's name as traces write it."""
        return name_of(self.func)

    @property
    def is_pointwise(self) -> bool:
        """Whether each element of the output depends on one element of each input."""
        return torch.Tag.pointwise in getattr(self.func, "tags", ())

    @property
    def is_mutable(self) -> bool:
        """Whether it writes to an argument, which is then copied before each call."""
        return bool(self.func._schema.is_mutable)

    def run(self) -> Tensor:
        """Executes the op; returns its first output."""
        return self.outputs()[0]

    def outputs(self) -> list[Tensor]:
        """Executes the op; returns all its outputs."""
        args, kwargs = self.args, self.kwargs
        if self.is_mutable:
            args, kwargs = self.changed(lambda place, tensor: tensor.clone())
        with torch.no_grad(), self.settings():
            return [made.detach() for made in tensors_in(self.func(*args, **kwargs))]

    def changed(self, change: Callable[[Place, Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with a function applied to every tensor."""

        def walk(place: Place, value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(place, value)
            if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
                return type(value)(walk(place, item) for item in value)
            return value

        return tuple(walk(i, v) for i, v in enumerate(self.args)), {name: walk(name, v) for name, v in self.kwargs.items()}

    def with_tensors(self, change: Callable[[Place, Tensor], Tensor]) -> Operation:
        """The same call with changed tensors, of the same shapes."""
        args, kwargs = self.changed(change)
        return replace(self, args=args, kwargs=kwargs)

    def argument(self, place: Place) -> Any:
        """An argument by position or name; None where it was not given."""
        if isinstance(place, str):
            return self.kwargs.get(place)
        return self.args[place] if place < len(self.args) else None

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """All tensor arguments."""
        given: list[tuple[Place, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        for place, value in given:
            for tensor in tensors_in(value):
                yield place, tensor

    def named(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        for at, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if at < len(self.args):
                    return self.args[at]
                return self.kwargs.get(name, default if default is not None else argument.default_value)
        return default

    # ------------------------------------------------------------------------------------------------------- rows
    def links(self, axis: int) -> tuple[tuple[Place, int], ...]:
        """Which axes of which arguments go with an axis of the output; none where taking rows would change the question."""
        name = self.name
        if name in _MATRIX:
            known: tuple[tuple[Place, int], ...] = _MATRIX[name].get(axis, ())
            bias = self.args[0] if name in ("addmm", "baddbmm") else None
            if isinstance(bias, Tensor) and bias.ndim == len(self.shape) and bias.shape[axis] == self.shape[axis] > 1:
                known = (*known, (0, axis))
            return known
        if name in ("linear", "mkldnn._linear_pointwise", "mkl._mkl_linear"):
            return ((0, axis),) if axis < len(self.shape) - 1 else ()
        if name == FLASH:
            if axis:
                return ()  # tokens see one another: `attention` takes them apart
            mask = self.named("attn_mask")
            has_rows = isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[0] == self.shape[0] > 1
            return ((0, 0), (1, 0), (2, 0)) + ((("attn_mask", 0),) if has_rows else ())
        if name == "embedding":
            return ((1, axis),) if axis < len(self.shape) - 1 else ()
        return self._broadcast_links(axis)

    def _broadcast_links(self, axis: int) -> tuple[tuple[Place, int], ...]:
        reduced = self._reduced()
        if reduced is None or (axis in reduced):
            return ()
        found = []
        for place, tensor in self.tensors():
            from_left = self.name in _REDUCES
            at = axis if from_left else tensor.ndim - (len(self.shape) - axis)
            if 0 <= at < tensor.ndim and tensor.shape[at] == self.shape[axis] and self.shape[axis] >= 1:
                if tensor.ndim == len(self.shape) or from_left or self.shape[axis] > 1:
                    found.append((place, at))
        return tuple(found)

    def _reduced(self) -> set[int] | None:
        """Axes along which elements meet; None where they are not known."""
        if self.is_pointwise:
            return set()
        first = next((t for _, t in self.tensors()), None)
        if first is None:
            return None
        if self.name in ("native_layer_norm", "_fused_rms_norm", "rms_norm"):
            count = len(self.named("normalized_shape") or ())
            return {first.ndim - 1 - i for i in range(count)}
        dims = self.named("dim")
        if dims is None:
            return None
        dims = {d % first.ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
        if self.name in _REDUCES:
            return dims if dims == set(range(first.ndim - len(dims), first.ndim)) else None
        return dims if self.name in ("_softmax", "_log_softmax", "cumsum", "logcumsumexp") else None

    def taking(self, axis: int, indices: Sequence[int]) -> Operation:
        """The call with these rows along an axis of the output, in this order; rows may be left out and repeated."""
        links = dict(self.links(axis))
        which = torch.tensor(list(indices))

        def take(place: Place, tensor: Tensor) -> Tensor:
            return _like(tensor, tensor.index_select(links[place], which.to(tensor.device))) if place in links else tensor

        args, kwargs = self.changed(take)
        shape = (*self.shape[:axis], len(which), *self.shape[axis + 1 :])
        return replace(self, args=args, kwargs=kwargs, shape=shape)

    def with_other_contents(self, axis: int, kept: int, seed: int) -> Operation:
        """The call with other numbers everywhere but in one row along an axis."""
        links = dict(self.links(axis))
        generator = torch.Generator().manual_seed(seed)

        def change(place: Place, tensor: Tensor) -> Tensor:
            if place not in links or not tensor.is_floating_point() or place == "attn_mask":
                return tensor
            noise = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-1.0, 1.0, generator=generator)
            made = tensor.clone()
            made.copy_(noise if seed else torch.zeros_like(noise))
            made.select(links[place], kept).copy_(tensor.select(links[place], kept))
            return _like(tensor, made)

        return self.with_tensors(change)

    # ----------------------------------------------------------------------------------------------------- memory
    def at_address(self, offset: int) -> Operation:
        """The call with every tensor at an address so many bytes past a multiple of 64."""
        return self.with_tensors(lambda place, tensor: realigned(tensor, offset))

    def addresses(self) -> list[int]:
        """Bytes past a multiple of 64 at which each tensor lies."""
        return [tensor.data_ptr() % 64 for _, tensor in self.tensors()]

    def at_addresses(self, offsets: Sequence[int]) -> Operation:
        """The call with its tensors at these addresses, in the order of `addresses`."""
        left = iter(offsets)
        return self.with_tensors(lambda place, tensor: realigned(tensor, next(left)))

    def laid_out(self, how: str) -> Operation:
        """The call with its tensors "contiguous", or "strided" (every second place of a larger memory)."""

        def change(place: Place, tensor: Tensor) -> Tensor:
            if how == "contiguous" or tensor.ndim < 2:
                return tensor.contiguous()
            room = torch.empty((*tensor.shape[:-2], 2 * tensor.shape[-2], tensor.shape[-1]), dtype=tensor.dtype)
            made = room[..., ::2, :]
            return made.copy_(tensor)

        return self.with_tensors(change)

    def in_float64(self) -> Tensor | None:
        """The output in float64 from the same inputs; None where the op does not take float64."""
        try:
            wide = self.with_tensors(lambda place, t: t.double() if t.is_floating_point() else t)
            return wide.run()
        except (RuntimeError, NotImplementedError):
            return None


def _like(model: Tensor, made: Tensor) -> Tensor:
    """Values with the memory format of another tensor, where that has dense strides; gathered rows are contiguous else."""
    strides = list(model.stride())
    order = sorted(range(model.ndim), key=lambda d: (-strides[d], d))
    if model.ndim and order != list(range(model.ndim)) and all(strides):
        inverse = [order.index(d) for d in range(model.ndim)]
        return made.permute(order).contiguous().permute(inverse)
    return made.contiguous()


def realigned(tensor: Tensor, offset: int) -> Tensor:
    """The same values and strides at an address that lies ``offset`` bytes past a multiple of 64."""
    size = tensor.element_size()
    if tensor.layout != torch.strided or offset % size or not tensor.numel():
        return tensor
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.empty(extent + 128 // size, dtype=tensor.dtype)
    start = (offset - room.data_ptr()) % 64 // size
    source = torch.as_strided(tensor, (extent,), (1,), tensor.storage_offset())
    room[start : start + extent].copy_(source)
    return torch.as_strided(room, tensor.shape, tensor.stride(), start)


@dataclass(frozen=True)
class Row:
    """One row of an output: flat indices of its elements, and its coordinate along each axis that has one.

    Attributes:
        key: its row key.
        at: flat indices, [width].
        where: axis -> coordinate; axes along which the row's elements lie are left out.
    """

    key: int
    at: Tensor
    where: dict[int, int] = field(default_factory=dict)

    def moved(self, shape: Sequence[int], axis: int, place: int, new_shape: Sequence[int]) -> Tensor:
        """Its elements' flat indices in an output of another size, where it stands at another place along an axis."""
        coordinates = list(torch.unravel_index(self.at, list(shape)))
        coordinates[axis] = torch.full_like(self.at, place)
        return ravel(coordinates, new_shape)


def ravel(coordinates: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Flat indices of coordinates."""
    flat = torch.zeros_like(coordinates[0])
    for coordinate, size in zip(coordinates, shape, strict=True):
        flat = flat * size + coordinate
    return flat


def row_of(key: int, at: Tensor, shape: Sequence[int]) -> Row:
    """A row by its elements."""
    coordinates = torch.unravel_index(at, list(shape))
    where = {axis: int(c[0]) for axis, c in enumerate(coordinates) if len(c) and bool((c == c[0]).all())}
    return Row(key, at, where)


def bits_at(output: Tensor, at: Tensor) -> bytes:
    """The bits of some elements, to be compared and to be keys."""
    return int_view(output.reshape(-1)[at.to(output.device)].cpu()).numpy().tobytes()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A number of intra-op threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
