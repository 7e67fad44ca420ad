"""Ops that rename or move elements."""

from __future__ import annotations

from collections.abc import Sequence

from detlab.trace.layout import Dim, Layout, broadcast, dim_size, feature, labelled, reshape, take
from detlab.trace.rules.registry import Op, axis_of, rule, shape_of


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten")
def _view(op: Op) -> Layout | None:
    lay = op.lay(0)
    return None if lay is None else reshape(lay, shape_of(op))


@rule("permute")
def _permute(op: Op) -> Layout | None:
    lay = op.lay(0)
    return None if lay is None else tuple(lay[axis_of(d, len(lay))] for d in op.args[1])


@rule("transpose", "swapaxes")
def _transpose(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    dims = list(lay)
    a, b = (axis_of(d, len(dims)) for d in op.args[1:3])
    dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


@rule("t", "numpy_T", "mT")
def _t(op: Op) -> Layout | None:
    lay = op.lay(0)
    return None if lay is None else tuple(reversed(lay))


@rule("unsqueeze")
def _unsqueeze(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = axis_of(op.args[1], len(lay) + 1)
    return (*lay[:at], (), *lay[at:])


@rule("squeeze")
def _squeeze(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    named = op.arg(1, "dim")
    which = range(len(lay)) if named is None else ([named] if isinstance(named, int) else named)
    gone = {axis_of(d, len(lay)) for d in which}
    out: list[Dim] = []
    pending: Dim = ()
    for axis, dim in enumerate(lay):
        if axis in gone and dim_size(dim) == 1:  # a batch row or token slot of one stays with its neighbour
            if out and labelled(out[-1]):
                out[-1] += dim
            else:
                pending += dim
        else:
            out.append(pending + dim)
            pending = ()
    if pending and out:
        out[-1] += pending
    return tuple(out)


@rule("expand")
def _expand(op: Op) -> Layout | None:
    lay = op.lay(0)
    return None if lay is None else broadcast([lay], shape_of(op))


@rule("repeat")
def _repeat(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    repeats = op.args[1]
    padded = ((),) * (len(repeats) - len(lay)) + lay
    out: list[Dim] = []
    for dim, times, size in zip(padded, repeats, shape_of(op), strict=True):
        if times != 1 and labelled(dim) and dim_size(dim) > 1:
            return None
        out.append(dim if times == 1 else tuple(atom for atom in dim if atom.is_row) + feature(size))
    return tuple(out)


@rule("slice")
def _slice(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = axis_of(op.arg(1, "dim", 0), len(lay))
    dim = take(lay[at], slice(op.arg(2, "start"), op.arg(3, "end"), op.arg(4, "step", 1)))
    return None if dim is None else (*lay[:at], dim, *lay[at + 1 :])


def drop(lay: Layout, at: int, picked: Dim) -> Layout:
    """Removes a dimension; what is left of its rows stays with a neighbour."""
    rest = tuple(atom for atom in picked if atom.is_row)
    out = [*lay[:at], *lay[at + 1 :]]
    if rest and out:
        if at and labelled(out[at - 1]):
            out[at - 1] += rest
        else:
            near = min(at, len(out) - 1)
            out[near] = rest + out[near]
    return tuple(out)


@rule("flip")
def _flip(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    out = list(lay)
    for at in (axis_of(d, len(lay)) for d in op.args[1]):
        if labelled(lay[at]):
            turned = take(lay[at], range(dim_size(lay[at]) - 1, -1, -1))
            if turned is None:
                return None
            out[at] = turned
    return tuple(out)


@rule("select")
def _select(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = axis_of(op.args[1], len(lay))
    i = op.args[2] % max(1, dim_size(lay[at]))
    dim = take(lay[at], slice(i, i + 1))
    return None if dim is None else drop(lay, at, dim)


@rule("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "split_with_sizes_copy", "tensor_split")
def _split(op: Op) -> Sequence[Layout | None] | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = axis_of(op.arg(2, "dim", 0), len(lay))
    out: list[Layout | None] = []
    start = 0
    for piece in op.outputs:
        size = piece.shape[at]
        dim = take(lay[at], slice(start, start + size))
        out.append(None if dim is None else (*lay[:at], dim, *lay[at + 1 :]))
        start += size
    return out


@rule("unbind")
def _unbind(op: Op) -> Sequence[Layout | None] | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = axis_of(op.arg(1, "dim", 0), len(lay))
    picks = [take(lay[at], slice(i, i + 1)) for i in range(len(op.outputs))]
    return [None if dim is None else drop(lay, at, dim) for dim in picks]
