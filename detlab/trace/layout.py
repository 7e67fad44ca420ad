"""Which row is which: follows batch rows and token slots through every op, as einops follows axes.

Two runs with another batch size, padding, chunking or cache have tensors of other shapes. What they share are rows:
(prompt, token position). A *layout* says, for each dimension of a tensor, which part of it walks over batch rows, which
over token slots, and which over features, so that a tensor of any shape can be cut into comparable rows.

A dimension is a tuple of atoms, slowest first: ``[B*T, 576]`` is ``((batch, token), (feature,))``. Atoms of batch and
token carry the indices they walk over (``hidden[:, -1:]`` walks over the last slot only); token slots count from the first
token that the current call computes, so that cached slots are negative and every decode step has the same layouts. A
layout that cannot be followed is ``None`` (*unlaid*): the trace says so and the comparison never guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

Index = range | tuple[int, ...]


class Atom(NamedTuple):
    """One axis walked by a dimension: its kind, and the batch rows or token slots it walks over."""

    kind: str  # "batch", "token", "feature", or "row": picked (batch row, token slot) pairs, as `pair` numbers them
    index: Index  # type: ignore[assignment]  # a field, which hides tuple.index on purpose

    @property
    def is_row(self) -> bool:
        """Whether the atom walks over rows (batch or token) rather than over features."""
        return self.kind != "feature"


Dim = tuple[Atom, ...]
Layout = tuple[Dim, ...]


_SLOT_BITS, _SLOT_ZERO = 24, 1 << 23


def pair(batch: int, slot: int) -> int:
    """One number for a (batch row, token slot); slots may be negative, and adding to it moves the slot."""
    return (batch << _SLOT_BITS) + slot + _SLOT_ZERO


def unpair(number: int) -> tuple[int, int]:
    """The inverse of `pair`."""
    return number >> _SLOT_BITS, (number & ((1 << _SLOT_BITS) - 1)) - _SLOT_ZERO


def pick_rows(dim: Dim, where: Sequence[int]) -> Dim | None:
    """Picks rows by number out of a dimension that walks over (batch, token, features); None where it does not.

    This is how mixture-of-experts layers sort tokens: the rows come out in another order, each perhaps several times.
    """
    pairs = _pairs(dim)
    if pairs is None:
        return None
    width = dim_size(dim) // len(pairs) if pairs else 1  # features that share the dimension, such as a token's experts
    return rows_dim(tuple(pairs[i // width] for i in where))


def _pairs(dim: Dim) -> Sequence[int] | None:
    """The (batch row, token slot) pairs that a dimension walks over before its features; None where it does not."""
    kinds = [atom.kind for atom in dim]
    if kinds[:1] == ["row"]:
        return dim[0].index
    if kinds[:2] == ["batch", "token"]:
        return [pair(b, s) for b in dim[0].index for s in dim[1].index]
    return None


NO_SLOT = 1 << 22  # a slot that no token has: rows that only fill a shape up


def filled_up(dim: Dim, size: int) -> Dim | None:
    """A dimension with rows of no token behind its own; None where its rows are not pairs, or share it with features."""
    pairs = _pairs(dim)
    if pairs is None or len(pairs) != dim_size(dim):
        return None
    return (Atom("row", (*pairs, *(pair(0, NO_SLOT + i) for i in range(size - len(pairs))))),)


def join_rows(dims: Sequence[Dim]) -> Dim | None:
    """Rows of several dimensions, one after the other; None where one does not walk over pairs alone."""
    parts = [_pairs(dim) for dim in dims]
    if any(part is None or len(part) != dim_size(dim) for part, dim in zip(parts, dims, strict=True)):
        return None
    return rows_dim(tuple(number for part in parts if part is not None for number in part))


def rows_dim(pairs: tuple[int, ...]) -> Dim:
    """The dimension that walks over pairs: batch and token where they are all pairs of a range each, in order."""
    if not pairs:
        return (Atom("row", pairs),)
    (b0, s0), (b1, s1) = unpair(pairs[0]), unpair(pairs[-1])
    if len(pairs) == (b1 - b0 + 1) * (s1 - s0 + 1):
        batch, slots = range(b0, b1 + 1), range(s0, s1 + 1)
        if pairs == tuple(pair(b, s) for b in batch for s in slots):
            return (Atom("batch", batch), Atom("token", slots))
    return (Atom("row", pairs),)


def _split_rows(atom: Atom, outer: int) -> tuple[Dim, int] | None:
    """Splits picked rows that come in runs of one row each: (rows, length of a run)."""
    inner = len(atom.index) // outer
    index = tuple(atom.index)
    firsts = index[::inner]
    if index != tuple(i for i in firsts for _ in range(inner)):
        return None
    return rows_dim(firsts), inner


def feature(size: int) -> Dim:
    """A dimension of ``size`` features; size 1 carries no atom, so that broadcasting can give it a meaning."""
    return () if size == 1 else (Atom("feature", range(size)),)


def plain(shape: Sequence[int]) -> Layout:
    """The layout of a tensor that has no rows: features only."""
    return tuple(feature(size) for size in shape)


def has_rows(layout: Layout | None) -> bool:
    """Whether any dimension walks over batch rows or token slots."""
    return layout is not None and any(atom.is_row for dim in layout for atom in dim)


def dim_size(dim: Dim) -> int:
    """Number of elements a dimension spans."""
    size = 1
    for atom in dim:
        size *= len(atom.index)
    return size


def labelled(dim: Dim) -> bool:
    """Whether a dimension walks over batch rows or token slots."""
    return any(atom.is_row for atom in dim)


def _take(index: Index, where: slice | Sequence[int]) -> Index:
    """Sub-index by a slice or by positions; a range stays a range under a slice."""
    if isinstance(where, slice):
        return index[where]
    return tuple(index[i] for i in where)


def join(parts: Sequence[Index]) -> Index:
    """Concatenates indices, as one range where they follow one another."""
    parts = [part for part in parts if len(part)] or [range(0)]
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, range) and part.step == 1 for part in parts):
        if all(a[-1] + 1 == b[0] for a, b in zip(parts, parts[1:], strict=False)):
            return range(parts[0][0], parts[-1][-1] + 1)
    return tuple(i for part in parts for i in part)


def take(dim: Dim, where: slice | Sequence[int]) -> Dim | None:
    """Restricts a dimension to some of its elements; None where two axes share it and the cut would mix them."""
    wide = [i for i, atom in enumerate(dim) if len(atom.index) > 1]
    if not wide:
        size = len(range(1)[where]) if isinstance(where, slice) else len(where)
        return dim if size == 1 else None
    if len(wide) > 1:
        if isinstance(where, slice) and where.indices(dim_size(dim)) == (0, dim_size(dim), 1):
            return dim
        if not any(dim[i].is_row for i in wide):  # heads and their features, cut anywhere
            size = len(range(dim_size(dim))[where]) if isinstance(where, slice) else len(where)
            return tuple(atom for atom in dim if atom.is_row) + feature(size)
        pairs = _pairs(dim)
        return rows_dim(tuple(_take(tuple(pairs), where))) if pairs is not None and len(pairs) == dim_size(dim) else None
    at = wide[0]
    atom = dim[at]
    cut = _take(atom.index, where)
    if not atom.is_row:
        rest = feature(len(cut))
        return dim[:at] + rest + dim[at + 1 :]
    rows = rows_dim(tuple(cut)) if atom.kind == "row" else (Atom(atom.kind, cut),)
    return dim[:at] + rows + dim[at + 1 :]


def merge(dims: Sequence[Dim], size: int) -> Dim | None:
    """One dimension out of several aligned ones (broadcasting); None where two of them disagree about its rows.

    A single row that is repeated to ``size`` stays that row, with ``size`` copies as its features.
    """
    chosen: Dim | None = None
    repeated: Dim = ()
    for dim in dims:
        if not labelled(dim):
            continue
        if dim_size(dim) == size:
            if chosen is not None and chosen != dim:
                return None
            chosen = dim
        elif dim_size(dim) == 1:
            if repeated and repeated != dim:
                return None
            repeated = dim
    return repeated + feature(size) if chosen is None else chosen


def broadcast(layouts: Sequence[Layout], shape: Sequence[int]) -> Layout | None:
    """Layout of an elementwise op's output from its inputs' layouts, dimensions aligned from the right."""
    out: list[Dim] = []
    for axis, size in enumerate(shape):
        from_right = len(shape) - axis
        dim = merge([lay[len(lay) - from_right] for lay in layouts if len(lay) >= from_right], size)
        if dim is None:
            return None
        out.append(dim)
    return tuple(out)


def reshape(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Layout after a view to another shape; None where it would cut through batch rows or token slots.

    Axes of size 1 are the delicate part: ``[1, 1, 576]`` (batch, token, feature) seen as ``[1, 576]`` and back must
    give each of the two dimensions its meaning again, or a later ``cat`` along tokens would not find them.
    """
    atoms = [atom for dim in layout for atom in dim]
    atoms.reverse()  # a stack: the next atom is last
    out: list[Dim] = []
    axis = 0
    while axis < len(shape):
        ones: list[Atom] = []
        while atoms and len(atoms[-1].index) == 1:
            ones.append(atoms.pop())
        run = 0
        while axis + run < len(shape) and shape[axis + run] == 1:
            run += 1
        lead: Dim = ()
        if run:
            for i in range(run):
                last = i == run - 1
                out.append(tuple(ones[i:]) if last else tuple(ones[i : i + 1]))
            axis += run
        elif out:
            out[-1] += tuple(ones)
        else:
            lead = tuple(ones)
        if axis == len(shape):
            break
        size, dim, product = shape[axis], lead, 1
        while product < size:
            if not atoms:
                return None
            atom = atoms.pop()
            length = len(atom.index)
            if product * length <= size:
                if size % (product * length):
                    return None
                dim += (atom,)
                product *= length
            else:
                need = size // product
                if size % product or length % need:
                    return None
                if atom.kind == "row":
                    split = _split_rows(atom, need)
                    if split is None:
                        return None
                    dim += split[0]
                    atoms += feature(split[1])
                elif atom.is_row:
                    return None
                else:
                    dim += feature(need)
                    atoms.append(Atom("feature", range(length // need)))
                product = size
        out.append(dim)
        axis += 1
    if atoms:
        if any(len(atom.index) > 1 for atom in atoms) or not out:
            return None
        out[-1] += tuple(reversed(atoms))
    return tuple(out)


def shift_index(index: Index, by: int) -> Index:
    """An index whose numbers are all moved by ``by``."""
    if isinstance(index, range):
        return range(index.start + by, index.stop + by, index.step)
    return tuple(i + by for i in index)


def shift(layout: Layout, by: int) -> Layout:
    """A layout whose token slots are counted from another origin."""
    if not by or not has_rows(layout):
        return layout
    return tuple(
        tuple(Atom(a.kind, shift_index(a.index, by)) if a.kind in ("token", "row") else a for a in dim) for dim in layout
    )


def feature_sizes(layout: Layout) -> list[int]:
    """Sizes of the feature axes above 1, in order."""
    return [len(a.index) for dim in layout for a in dim if not a.is_row and len(a.index) > 1]


# --------------------------------------------------------------------------------------------------- tensor -> rows
class Cut(NamedTuple):
    """How tensors of one layout are cut into rows."""

    batch: Index | None
    slots: Index | None
    pairs: Index | None  # picked rows, instead of batch and slots
    columns: Index | None
    num_rows: int
    width: int
    split: tuple[int, ...]  # the shape with one dimension per atom
    order: tuple[int, ...]  # atoms: batch, token, features, columns
    is_flat: bool  # the order is the tensor's own, so that a reshape cuts it


class Rows(NamedTuple):
    """A tensor cut into rows: batch rows x token slots (a missing axis is None), and the cut itself."""

    batch: Index | None
    slots: Index | None
    columns: Index | None  # token slots of a second token axis: attention scores and masks
    grid: Tensor  # [num_rows, width] or, with columns, [num_rows, width, num_columns]


@lru_cache(maxsize=4096)
def cut_of(layout: Layout) -> Cut:
    """Finds how to cut a layout into rows; features keep the order of the tensor's dimensions."""
    atoms = [atom for dim in layout for atom in dim]
    picked = next((i for i, a in enumerate(atoms) if a.kind == "row"), None)
    batch = next((i for i, a in enumerate(atoms) if a.kind == "batch"), None)
    tokens = [i for i, a in enumerate(atoms) if a.kind == "token"]
    lead = [i for i in (batch, tokens[0] if tokens else None, picked) if i is not None]
    column = tokens[1] if len(tokens) > 1 else None
    rest = [i for i in range(len(atoms)) if i not in lead and i != column]
    order = lead + rest + ([column] if column is not None else [])
    num_rows = width = 1
    for i in lead:
        num_rows *= len(atoms[i].index)
    for i in rest:
        width *= len(atoms[i].index)
    wide = [i for i in order if len(atoms[i].index) > 1]
    return Cut(
        batch=atoms[batch].index if batch is not None else None,
        slots=atoms[tokens[0]].index if tokens else None,
        pairs=atoms[picked].index if picked is not None else None,
        columns=atoms[column].index if column is not None else None,
        num_rows=num_rows,
        width=width,
        split=tuple(len(atom.index) for atom in atoms),
        order=tuple(order),
        is_flat=wide == sorted(wide) and column is None,
    )


def rows_of(tensor: Tensor, layout: Layout) -> Rows:
    """Cuts a tensor into rows.

    Args:
        tensor: any shape that ``layout`` describes.
        layout: its layout; a tensor without row axes gives one row.

    Returns:
        `Rows`; row ``i * len(slots) + j`` is batch row ``batch[i]`` at token slot ``slots[j]``; features are in the order
        of the tensor's dimensions, so that ``[B, H, T, D]`` and ``[B*T, H*D]`` give the same rows.
    """
    cut = cut_of(layout)
    if not tensor.numel():
        grid = tensor.new_zeros((cut.num_rows, 0))
    elif cut.columns is not None:
        moved = tensor.reshape(cut.split).permute(cut.order)
        grid = moved.reshape(cut.num_rows, -1, len(cut.columns))
    elif cut.is_flat:
        grid = tensor.reshape(cut.num_rows, cut.width)
    else:
        grid = tensor.reshape(cut.split).permute(cut.order).reshape(cut.num_rows, cut.width)
    return Rows(cut.batch, cut.slots, cut.columns, grid)
