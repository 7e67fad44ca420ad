"""What each op does to rows: one rule per op, from its inputs' layouts to its outputs'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detlab.trace.layout import (
    Atom,
    Dim,
    Layout,
    broadcast,
    dim_size,
    feature,
    has_rows,
    join,
    labelled,
    merge,
    plain,
    reshape,
    take,
)


class Op(NamedTuple):
    """What a rule sees: positional and keyword arguments, the outputs, and how to ask an input for its layout."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    layout_of: Callable[[Tensor], Layout | None]

    def lay(self, position: int) -> Layout | None:
        """Layout of the tensor argument at ``position``; None where it is no tensor or is unlaid."""
        value = self.args[position] if position < len(self.args) else None
        return self.layout_of(value) if isinstance(value, Tensor) else None

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Argument by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Rule = Callable[[Op], Sequence[Layout | None] | Layout | None]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def _shape(op: Op, i: int = 0) -> tuple[int, ...]:
    return tuple(op.outputs[i].shape)


def _axis(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


@_rule(
    "clone", "_to_copy", "alias", "detach", "contiguous", "lift_fresh", "lift_fresh_copy", "_softmax", "_log_softmax", "cumsum",
    "cumprod", "native_dropout", "dropout", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "empty_like", "bernoulli", "bernoulli_", "dropout_", "tril", "triu", "flip", "zero_", "fill_", "normal_", "uniform_",
    "masked_fill_", "_safe_softmax", "view_as_real_copy", "logcumsumexp",
)  # fmt: skip
def _same(op: Op) -> Sequence[Layout | None]:
    return [op.lay(0)] * len(op.outputs)


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten")
def _view(op: Op) -> Layout | None:
    lay = op.lay(0)
    return None if lay is None else reshape(lay, _shape(op))


@_rule("permute")
def _permute(op: Op) -> Layout | None:
    lay = op.lay(0)
    return None if lay is None else tuple(lay[_axis(d, len(lay))] for d in op.args[1])


@_rule("transpose", "swapaxes")
def _transpose(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    dims = list(lay)
    a, b = (_axis(d, len(dims)) for d in op.args[1:3])
    dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


@_rule("t", "numpy_T", "mT")
def _t(op: Op) -> Layout | None:
    lay = op.lay(0)
    return None if lay is None else tuple(reversed(lay))


@_rule("unsqueeze")
def _unsqueeze(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = _axis(op.args[1], len(lay) + 1)
    return (*lay[:at], (), *lay[at:])


@_rule("squeeze")
def _squeeze(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    named = op.arg(1, "dim")
    which = range(len(lay)) if named is None else ([named] if isinstance(named, int) else named)
    gone = {_axis(d, len(lay)) for d in which}
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


@_rule("expand")
def _expand(op: Op) -> Layout | None:
    lay = op.lay(0)
    return None if lay is None else broadcast([lay], _shape(op))


@_rule("repeat")
def _repeat(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    repeats = op.args[1]
    padded = ((),) * (len(repeats) - len(lay)) + lay
    out: list[Dim] = []
    for dim, times, size in zip(padded, repeats, _shape(op), strict=True):
        if times != 1 and labelled(dim) and dim_size(dim) > 1:
            return None
        out.append(dim if times == 1 else feature(size))
    return tuple(out)


@_rule("slice")
def _slice(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = _axis(op.arg(1, "dim", 0), len(lay))
    dim = take(lay[at], slice(op.arg(2, "start"), op.arg(3, "end"), op.arg(4, "step", 1)))
    return None if dim is None else (*lay[:at], dim, *lay[at + 1 :])


def _drop(lay: Layout, at: int, picked: Dim) -> Layout:
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


@_rule("select")
def _select(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = _axis(op.args[1], len(lay))
    i = op.args[2] % max(1, dim_size(lay[at]))
    dim = take(lay[at], slice(i, i + 1))
    return None if dim is None else _drop(lay, at, dim)


@_rule("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "split_with_sizes_copy", "tensor_split")
def _split(op: Op) -> Sequence[Layout | None] | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = _axis(op.arg(2, "dim", 0), len(lay))
    out: list[Layout | None] = []
    start = 0
    for piece in op.outputs:
        size = piece.shape[at]
        dim = take(lay[at], slice(start, start + size))
        out.append(None if dim is None else (*lay[:at], dim, *lay[at + 1 :]))
        start += size
    return out


@_rule("unbind")
def _unbind(op: Op) -> Sequence[Layout | None] | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = _axis(op.arg(1, "dim", 0), len(lay))
    picks = [take(lay[at], slice(i, i + 1)) for i in range(len(op.outputs))]
    return [None if dim is None else _drop(lay, at, dim) for dim in picks]


@_rule("cat", "concat", "concatenate")
def _cat(op: Op) -> Layout | None:
    parts = [t for t in op.args[0] if t.numel() or t.ndim == op.outputs[0].ndim]
    lays = [op.layout_of(t) for t in parts]
    if not lays or any(lay is None for lay in lays):
        return None
    known = [lay for lay in lays if lay is not None]
    shape = _shape(op)
    at = _axis(op.arg(1, "dim", 0), len(shape))
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
    if any(len(dim) != 1 for dim in dims):
        return None
    kinds = {dim[0].kind for dim in dims}
    return (Atom(kinds.pop(), join([dim[0].index for dim in dims if len(dim[0].index)])),) if len(kinds) == 1 else None


@_rule("stack")
def _stack(op: Op) -> Layout | None:
    lays = [op.layout_of(t) for t in op.args[0]]
    if any(lay is None for lay in lays):
        return None
    at = _axis(op.arg(1, "dim", 0), op.outputs[0].ndim)
    shape = _shape(op)
    merged = broadcast([lay for lay in lays if lay is not None], shape[:at] + shape[at + 1 :])
    return None if merged is None else (*merged[:at], feature(shape[at]), *merged[at:])


@_rule("mm", "_int_mm")
def _mm(op: Op) -> Layout | None:
    a, b = op.lay(0), op.lay(1)
    return None if a is None or b is None else (a[0], b[1])


@_rule("addmm")
def _addmm(op: Op) -> Layout | None:
    a, b = op.lay(1), op.lay(2)
    return None if a is None or b is None else (a[0], b[1])


@_rule("mv")
def _mv(op: Op) -> Layout | None:
    a = op.lay(0)
    return None if a is None else (a[0],)


@_rule("bmm")
def _bmm(op: Op) -> Layout | None:
    return _batched(op.lay(0), op.lay(1), _shape(op))


@_rule("baddbmm")
def _baddbmm(op: Op) -> Layout | None:
    return _batched(op.lay(1), op.lay(2), _shape(op))


def _batched(a: Layout | None, b: Layout | None, shape: Sequence[int]) -> Layout | None:
    if a is None or b is None:
        return None
    lead = merge([a[0], b[0]], shape[0])
    return None if lead is None else (lead, a[1], b[2])


@_rule("linear", "_linear_pointwise", "mkldnn_linear")
def _linear(op: Op) -> Layout | None:
    a = op.lay(0)
    return None if a is None else (*a[:-1], feature(_shape(op)[-1]))


@_rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
def _attention(op: Op) -> Sequence[Layout | None]:
    q = op.lay(0)
    outs: list[Layout | None] = [None] * len(op.outputs)
    if q is not None:
        rest = tuple(atom for atom in q[-1] if atom.is_row)
        outs[0] = (*q[:-1], rest + feature(_shape(op)[-1]))
        if len(outs) > 1 and op.outputs[1].shape == op.outputs[0].shape[:-1]:  # the softmax's log-sum-exp
            outs[1] = q[:-1]
    return outs


@_rule("embedding")
def _embedding(op: Op) -> Layout | None:
    ids = op.lay(1)
    return None if ids is None else (*ids, feature(_shape(op)[-1]))


@_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm", "native_group_norm")
def _norm(op: Op) -> Sequence[Layout | None] | None:
    lay = op.lay(0)
    if lay is None:
        return None
    outs: list[Layout | None] = [lay]
    for extra in op.outputs[1:]:  # mean and 1/std keep the leading dimensions
        outs.append(tuple(d if extra.shape[i] > 1 or labelled(d) else () for i, d in enumerate(lay[: extra.ndim])))
    return outs


@_rule(
    "mean", "sum", "amax", "amin", "argmax", "argmin", "logsumexp", "var", "std", "prod", "all", "any", "max", "min",
    "linalg_vector_norm", "norm", "nansum", "var_mean", "median",
)  # fmt: skip
def _reduce(op: Op) -> Sequence[Layout | None] | Layout | None:
    lay = op.lay(0)
    if lay is None or len(op.args) > 1 and isinstance(op.args[1], Tensor):
        return _pointwise(op)
    position = 2 if "norm" in str(op.kwargs.get("_name", "")) else 1
    named = op.arg(position, "dim")
    if isinstance(named, float) or (named is None and not op.outputs[0].ndim):
        return [plain(o.shape) for o in op.outputs]
    dims = range(len(lay)) if named is None or named == [] else ([named] if isinstance(named, int) else named)
    gone = {_axis(d, len(lay)) for d in dims}
    keep = op.outputs[0].ndim == len(lay)
    out = tuple(() if axis in gone else dim for axis, dim in enumerate(lay) if keep or axis not in gone)
    if any(dim_size(dim) != size for dim, size in zip(out, _shape(op), strict=False)) or len(out) != op.outputs[0].ndim:
        return None
    return [out] * len(op.outputs)


@_rule("topk", "sort", "kthvalue", "argsort")
def _topk(op: Op) -> Sequence[Layout | None] | None:
    lay = op.lay(0)
    if lay is None:
        return None
    changed = [a for a, dim in enumerate(lay) if dim_size(dim) != op.outputs[0].shape[a]]
    dim = op.kwargs.get("dim", next((a for a in op.args[1:] if isinstance(a, int) and a < 0), -1))
    at = changed[0] if changed else _axis(dim, len(lay))
    if labelled(lay[at]) and dim_size(lay[at]) > 1:
        return [None] * len(op.outputs)
    out = (*lay[:at], feature(op.outputs[0].shape[at]), *lay[at + 1 :])
    return [out] * len(op.outputs)


@_rule("gather")
def _gather(op: Op) -> Layout | None:
    source, index = op.lay(0), op.lay(2)
    lays = [lay for lay in (source, index) if lay is not None]
    return broadcast(lays, _shape(op)) if lays else None


@_rule("constant_pad_nd", "pad")
def _pad(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    shape = _shape(op)
    out: list[Dim] = []
    for dim, size in zip(lay, shape, strict=True):
        if dim_size(dim) == size:
            out.append(dim)
        elif labelled(dim) and dim_size(dim) > 1:
            return None
        else:
            out.append(feature(size))
    return tuple(out)


@_rule("index")
def _index(op: Op) -> Layout | None:
    """Advanced indexing, where it looks rows up in a table or picks an outer grid of elements (as masks are built)."""
    table, indices = op.lay(0), op.args[1]
    if table is None or any(index is None for index in indices):
        return None
    lays = [op.layout_of(index) for index in indices]
    if not has_rows(table) and len(indices) == 1 and lays[0] is not None:
        return (*lays[0], *table[1:])
    if any(lay is None or has_rows(lay) for lay in lays) or any(i.device.type != "cpu" for i in indices):
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


@_rule("index_select")
def _index_select(op: Op) -> Layout | None:
    lay = op.lay(0)
    if lay is None:
        return None
    at = _axis(op.args[1], len(lay))
    if labelled(lay[at]):
        if op.args[2].device.type != "cpu":  # reading the index would wait for the device
            return None
        dim = take(lay[at], op.args[2].tolist())
        return None if dim is None else (*lay[:at], dim, *lay[at + 1 :])
    return (*lay[:at], feature(_shape(op)[at]), *lay[at + 1 :])


@_rule("copy_", "index_copy_", "index_copy", "scatter", "scatter_", "index_add", "index_add_")
def _write(op: Op) -> Layout | None:
    """A write keeps the target's layout; a plain target (a static cache) takes the row axes of what is written."""
    target = op.lay(0)
    source = next((op.layout_of(a) for a in reversed(op.args) if isinstance(a, Tensor)), None)
    if target is None or source is None or has_rows(target) or len(source) != len(target):
        return target
    out: list[Dim] = []
    for old, new, size in zip(target, source, _shape(op), strict=True):
        if dim_size(new) == size:
            out.append(new)
        elif len(new) == 1 and new[0].kind == "token":  # slots of a preallocated cache
            out.append((Atom("token", range(size)),))
        else:
            out.append(old)
    return tuple(out)


_FACTORIES = {
    "arange", "full", "zeros", "ones", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty",
    "linspace", "eye", "rand", "randn", "randint", "tril_indices", "triu_indices", "empty_strided", "new_empty_strided",
    "_efficientzerotensor", "randperm", "tensor", "empty_permuted",
}  # fmt: skip

#: Ops that only rename or move elements: they make no new bits, so their rows keep their digests.
VIEWS = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "swapaxes", "t", "numpy_T", "unsqueeze",
    "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "alias", "detach", "unflatten",
    "flatten", "mT", "unsafe_chunk", "unsafe_split", "lift_fresh", "as_strided", "unfold", "diagonal", "view_as_real",
    "view_as_complex", "_conj", "_neg_view", "movedim", "tensor_split",
}  # fmt: skip
MOVES = VIEWS | {"clone", "contiguous", "repeat", "lift_fresh_copy", "split_with_sizes_copy"}


def _pointwise(op: Op) -> Layout | None:
    tensors = [a for a in (*op.args, *op.kwargs.values()) if isinstance(a, Tensor)]
    lays = [op.layout_of(t) for t in tensors]
    known = [lay for lay in lays if lay is not None]
    return None if len(known) < len(lays) else broadcast(known, _shape(op))


def propagate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor],
              layout_of: Callable[[Tensor], Layout | None]) -> list[Layout | None]:  # fmt: skip
    """Finds the layouts of an op's outputs.

    Args:
        func: the ``OpOverload`` that ran.
        args, kwargs: what it was called with.
        outputs: its output tensors, flattened.
        layout_of: tells an input tensor's layout (None: unlaid).

    Returns:
        One layout an output; None where this op's effect on rows is not known.
    """
    name = func._schema.name.removeprefix("aten::").rpartition("::")[2]
    op = Op(args, kwargs, outputs, layout_of)
    rule = RULES.get(name)
    found: Any = None
    if rule is not None:
        found = rule(op)
    elif name in _FACTORIES:
        found = [plain(o.shape) for o in outputs]
    elif torch.Tag.pointwise in func.tags or func._schema.name.endswith("_") and len(outputs) == 1:
        found = [_pointwise(op)]
    if found is None:
        return [None] * len(outputs)
    if isinstance(found, tuple):
        found = [found]
    result = list(found) + [None] * (len(outputs) - len(found))
    # A wrong layout is worse than none: sizes must agree.
    return [
        lay if lay is not None and tuple(dim_size(d) for d in lay) == tuple(out.shape) else None
        for lay, out in zip(result, outputs, strict=False)
    ]
