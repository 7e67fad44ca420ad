"""Ops that compute: products, attention, norms, reductions, look-ups, writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from detlab.trace.layout import (
    Atom,
    Dim,
    Layout,
    broadcast,
    dim_size,
    feature,
    filled_up,
    has_rows,
    join,
    join_rows,
    labelled,
    merge,
    pick_rows,
    plain,
    take,
)
from detlab.trace.rules.registry import Op, axis_of, rule, shape_of
from detlab.trace.rules.views import drop


def pointwise(op: Op) -> Layout | None:
    """An elementwise op: all its tensors are aligned from the right."""
    tensors = [a for a in (*op.args, *op.kwargs.values()) if isinstance(a, Tensor)]
    lays = [op.layout_of(t) for t in tensors]
    known = [lay for lay in lays if lay is not None]
    return None if len(known) < len(lays) else broadcast(known, shape_of(op))


@rule(
    "clone", "_to_copy", "alias", "detach", "contiguous", "lift_fresh", "lift_fresh_copy", "_softmax", "_log_softmax", "cumsum",
    "cumprod", "native_dropout", "dropout", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "empty_like", "bernoulli", "bernoulli_", "dropout_", "tril", "triu", "zero_", "fill_", "normal_", "uniform_",
    "masked_fill_", "_safe_softmax", "view_as_real_copy", "logcumsumexp",
    "exact_norm", "exact_activation", "exact_softmax", "exact_experts",
)  # fmt: skip
def _same(op: Op) -> Sequence[Layout | None]:
    return [op.lay(0)] * len(op.outputs)


@rule("cat", "concat", "concatenate")
def _cat(op: Op) -> Layout | None:
    parts = [t for t in op.args[0] if t.numel() or t.ndim == op.outputs[0].ndim]
    lays = [op.layout_of(t) for t in parts]
    if not lays or any(lay is None for lay in lays):
        return None
    known = [lay for lay in lays if lay is not None]
    shape = shape_of(op)
    at = axis_of(op.arg(1, "dim", 0), len(shape))
    out: list[Dim] = []
    for axis, size in enumerate(shape):
        dims = [lay[axis] for lay in known]
        merged = merge(dims, size) if axis != at else _cat_dim(dims, size)
        if merged is None:
            return None
        out.append(merged)
    return tuple(out)


def _cat_dim(dims: Sequence[Dim], size: int) -> Dim | None:
    if not any(labelled(dim) for dim in dims):
        return feature(size)
    if any(len(dim) != 1 or dim[0].kind == "row" for dim in dims):
        return join_rows(dims)
    kinds = {dim[0].kind for dim in dims}
    return (Atom(kinds.pop(), join([dim[0].index for dim in dims if len(dim[0].index)])),) if len(kinds) == 1 else None


@rule("stack")
def _stack(op: Op) -> Layout | None:
    lays = [op.layout_of(t) for t in op.args[0]]
    if any(lay is None for lay in lays):
        return None
    at = axis_of(op.arg(1, "dim", 0), op.outputs[0].ndim)
    shape = shape_of(op)
    merged = broadcast([lay for lay in lays if lay is not None], shape[:at] + shape[at + 1 :])
    return None if merged is None else (*merged[:at], feature(shape[at]), *merged[at:])


@rule("mm", "_int_mm")
def _mm(op: Op) -> Layout | None:
    a, b = op.lay(0), op.lay(1)
    return None if a is None or b is None else (a[0], b[1])


@rule("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def _grouped_mm(op: Op) -> Layout | None:
    """Rows sorted by group against one matrix a group."""
    a = op.lay(0)
    return None if a is None or len(a) != 2 or op.outputs[0].ndim != 2 else (a[0], feature(shape_of(op)[1]))


@rule("addmm")
def _addmm(op: Op) -> Layout | None:
    a, b = op.lay(1), op.lay(2)
    return None if a is None or b is None else (a[0], b[1])


@rule("mv")
def _mv(op: Op) -> Layout | None:
    a = op.lay(0)
    return None if a is None else (a[0],)


@rule("bmm")
def _bmm(op: Op) -> Layout | None:
    return _batched(op.lay(0), op.lay(1), shape_of(op))


@rule("baddbmm")
def _baddbmm(op: Op) -> Layout | None:
    return _batched(op.lay(1), op.lay(2), shape_of(op))


def _batched(a: Layout | None, b: Layout | None, shape: Sequence[int]) -> Layout | None:
    if a is None or b is None:
        return None
    lead = merge([a[0], b[0]], shape[0])
    return None if lead is None else (lead, a[1], b[2])


@rule("linear", "_linear_pointwise", "mkldnn_linear", "exact_linear", "exact_encode")
def _linear(op: Op) -> Layout | None:
    a = op.lay(0)
    return None if a is None else (*a[:-1], feature(shape_of(op)[-1]))


@rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_fused_attention_overrideable", "exact_attention",
)  # fmt: skip
def _attention(op: Op) -> Sequence[Layout | None]:
    q = op.lay(0)
    outs: list[Layout | None] = [None] * len(op.outputs)
    if q is not None:
        rest = tuple(atom for atom in q[-1] if atom.is_row)
        outs[0] = (*q[:-1], rest + feature(shape_of(op)[-1]))
        if len(outs) > 1 and op.outputs[1].shape == op.outputs[0].shape[:-1]:  # the softmax's log-sum-exp
            outs[1] = q[:-1]
    return outs


@rule("embedding")
def _embedding(op: Op) -> Layout | None:
    ids = op.lay(1)
    return None if ids is None else (*ids, feature(shape_of(op)[-1]))


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm", "native_group_norm")
def _norm(op: Op) -> Sequence[Layout | None] | None:
    lay = op.lay(0)
    if lay is None:
        return None
    outs: list[Layout | None] = [lay]
    for extra in op.outputs[1:]:  # mean and 1/std keep the leading dimensions
        outs.append(tuple(d if extra.shape[i] > 1 or labelled(d) else () for i, d in enumerate(lay[: extra.ndim])))
    return outs


@rule(
    "mean", "sum", "amax", "amin", "argmax", "argmin", "logsumexp", "var", "std", "prod", "all", "any", "max", "min",
    "linalg_vector_norm", "norm", "nansum", "var_mean", "median",
)  # fmt: skip
def _reduce(op: Op) -> Sequence[Layout | None] | Layout | None:
    lay = op.lay(0)
    if lay is None or len(op.args) > 1 and isinstance(op.args[1], Tensor):
        return pointwise(op)
    position = 2 if "norm" in op.name else 1  # norms take their order first
    named = op.arg(position, "dim")
    if isinstance(named, float) or (named is None and not op.outputs[0].ndim):
        return [plain(o.shape) for o in op.outputs]
    dims = range(len(lay)) if named is None or named == [] else ([named] if isinstance(named, int) else named)
    gone = {axis_of(d, len(lay)) for d in dims}
    if any(atom.kind == "batch" and len(atom.index) > 1 for axis in gone for atom in lay[axis]) and any(
        labelled(dim) for axis, dim in enumerate(lay) if axis not in gone
    ):
        return None  # rows that mix prompts are no prompt's rows
    keep = op.outputs[0].ndim == len(lay)
    out = lay
    for axis in sorted(gone, reverse=True):
        left = tuple(atom for atom in lay[axis] if atom.is_row) if dim_size(lay[axis]) == 1 else ()
        out = (*out[:axis], left, *out[axis + 1 :]) if keep else drop(out, axis, left)
    if any(dim_size(dim) != size for dim, size in zip(out, shape_of(op), strict=False)) or len(out) != op.outputs[0].ndim:
        return None
    return [out] * len(op.outputs)


@rule("topk", "sort", "kthvalue", "argsort")
def _topk(op: Op) -> Sequence[Layout | None] | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = axis_of(op.arg(2 if op.name in ("topk", "kthvalue") else 1, "dim", -1), len(lay))
    if labelled(lay[at]) and dim_size(lay[at]) > 1:
        return [None] * len(op.outputs)
    if op.outputs[0].ndim < len(lay):
        return [drop(lay, at, lay[at] if dim_size(lay[at]) == 1 else ())] * len(op.outputs)
    size = op.outputs[0].shape[at]
    out = (*lay[:at], lay[at] if labelled(lay[at]) else feature(size), *lay[at + 1 :])
    return [out] * len(op.outputs)


@rule("gather")
def _gather(op: Op) -> Layout | None:
    """Picks along one axis, and from the front of the others; what it picks along a row axis is known to the index only."""
    source, index = op.lay(0), op.lay(2)
    if source is None or index is None or not source:
        return None
    at = axis_of(op.args[1], len(source))
    if labelled(source[at]) and dim_size(source[at]) > 1:
        return None
    out: list[Dim] = []
    for axis, (dim, other, size) in enumerate(zip(source, index, shape_of(op), strict=True)):
        front: Dim | None = dim
        if axis == at:
            front = tuple(atom for atom in dim if atom.is_row)
        elif dim_size(dim) != size:
            front = take(dim, slice(0, size))
        merged = None if front is None else merge([front, other], size)
        if merged is None:
            return None
        out.append(merged)
    return tuple(out)


@rule("constant_pad_nd", "pad")
def _pad(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    lay = _with_its_token(lay)
    pads = [0] * (2 * len(lay) - len(op.args[1])) + list(reversed(op.args[1]))  # (behind, in front) of each dimension
    out: list[Dim] = []
    for axis, (dim, size) in enumerate(zip(lay, shape_of(op), strict=True)):
        behind, before = pads[2 * axis], pads[2 * axis + 1]
        if not behind and not before:
            out.append(dim)
        elif not labelled(dim):
            out.append(feature(size))
        elif len(dim) == 1 and dim[0].kind == "token" and not before and behind > 0 and isinstance(dim[0].index, range):
            # Slots that no token holds yet, as a mask for a preallocated cache has them.
            start, step = dim[0].index.start, dim[0].index.step
            out.append((Atom("token", range(start, start + step * size, step)),))
        elif not before and behind > 0 and any(len(a.index) > 1 and not a.is_row for a in dim):
            if any(len(a.index) > 1 for a in dim if a.is_row):
                return None
            out.append(tuple(a for a in dim if a.is_row) + feature(size))  # heads that share the axis with one row
        else:
            rows = filled_up(dim, size) if not before and behind > 0 else None
            if rows is None:
                return None
            out.append(rows)
    return tuple(out)


def _with_its_token(lay: Layout) -> Layout:
    """A decode step's single token slot beside the batch rows, wherever a view left it: [batch, heads x token x size]."""
    tokens = [(axis, atom) for axis, dim in enumerate(lay) for atom in dim if atom.kind == "token"]
    if not lay or [atom.kind for atom in lay[0]] != ["batch"] or len(tokens) != 1 or len(tokens[0][1].index) != 1:
        return lay
    return tuple(
        (*dim, tokens[0][1]) if not axis else tuple(atom for atom in dim if atom.kind != "token")
        for axis, dim in enumerate(lay)
    )


@rule("index")
def _index(op: Op) -> Layout | None:
    """Advanced indexing, where it looks rows up in a table or picks an outer grid of elements (as masks are built)."""
    table, indices = op.lay(0), op.args[1]
    if table is None or any(index is None for index in indices):
        return None
    lays = [op.layout_of(index) for index in indices]
    if not has_rows(table) and len(indices) == 1 and lays[0] is not None:
        return (*lays[0], *table[1:])
    if any(i.device.type != "cpu" for i in indices):  # reading the index would wait for the device
        return None
    if labelled(table[0]) and all(i.ndim == 1 and i.dtype != torch.bool for i in indices):
        others_plain = not any(labelled(dim) for dim in table[1 : len(indices)])
        picked = pick_rows(table[0], indices[0].tolist()) if others_plain else None
        if picked is not None:
            return (picked, *table[len(indices) :])
    if any(lay is None or has_rows(lay) for lay in lays):
        return None
    ndim = max(index.ndim for index in indices)
    out: list[Dim] = [()] * ndim
    for dim, index in zip(table, indices, strict=False):
        wide = [ndim - index.ndim + axis for axis, size in enumerate(index.shape) if size > 1]
        if len(wide) > 1 or index.dtype == torch.bool:
            return None
        at = wide[0] if wide else None
        cut = take(dim, index.reshape(-1).tolist())
        if cut is None or (at is not None and out[at] != ()):
            return None
        if at is not None:
            out[at] = cut
        elif out and cut:
            out[0] = cut + out[0]
    return (*out, *table[len(indices) :])


@rule("index_select")
def _index_select(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = axis_of(op.args[1], len(lay))
    if labelled(lay[at]):
        if op.args[2].device.type != "cpu":  # reading the index would wait for the device
            return None
        dim = take(lay[at], op.args[2].tolist())
        return None if dim is None else (*lay[:at], dim, *lay[at + 1 :])
    return (*lay[:at], feature(shape_of(op)[at]), *lay[at + 1 :])


@rule("copy_", "index_copy_", "index_copy", "scatter", "scatter_", "index_add", "index_add_")
def _write(op: Op) -> Layout | None:
    """A write keeps the target's layout; a plain target (a static cache) takes the row axes of what is written."""
    target = op.lay(0)
    source = next((op.layout_of(a) for a in reversed(op.args) if isinstance(a, Tensor)), None)
    if target is None or source is None or has_rows(target) or len(source) != len(target):
        return target
    out: list[Dim] = []
    for old, new, size in zip(target, source, shape_of(op), strict=True):
        if dim_size(new) == size:
            out.append(new)
        elif len(new) == 1 and new[0].kind == "token" and op.name.startswith("index_copy") and op.args[2].device.type == "cpu":
            # Slots of a preallocated cache: the index says where the new tokens go, and so where slot 0 lies.
            first = new[0].index[0] - int(op.args[2][0])
            out.append((Atom("token", range(first, first + size)),))
        else:
            out.append(old)
    return tuple(out)
