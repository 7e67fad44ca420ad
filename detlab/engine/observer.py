"""Judges each op of a model as it is called: covered by a tier, safe without it, or not covered.

An op that moves data or rounds each element alone is safe by construction; a row-wise op is safe if it is measured to be, on
the model's own values and others near them; all others are uncovered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from detlab import bits
from detlab.engine.probes import norm_rows, summands

__all__ = ["CALLS", "Observer"]

#: Calls of the model that are observed; an op of the weights alone must be the same one in each.
CALLS = 3

_MOVES = """
    view _unsafe_view reshape t transpose permute expand slice select unsqueeze squeeze split split_with_sizes chunk unbind
    alias detach as_strided diagonal narrow unfold repeat repeat_interleave cat stack clone copy contiguous _to_copy to
    lift_fresh _reshape_alias index index_select gather index_copy index_fill scatter masked_fill masked_scatter
    where embedding constant_pad_nd flip roll tril triu fill zero zeros ones full empty new_zeros new_empty new_full
    new_ones zeros_like ones_like empty_like full_like empty_strided new_empty_strided arange scalar_tensor eye one_hot
    resize pin_memory _local_scalar_dense item lift sort argsort nonzero bincount searchsorted histc unique2 movedim
    view_as_real view_as_complex real imag complex
    swapaxes split_copy _pin_memory is_pinned _assert_async _assert_tensor_metadata sym_size sym_stride sym_numel
""".split()
_ROUNDED_ONCE = """
    add sub rsub mul div neg abs sqrt rsqrt reciprocal square maximum minimum clamp clamp_min clamp_max relu hardtanh sign
    floor ceil round trunc frac fmod remainder eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and
    bitwise_or bitwise_not bitwise_xor isnan isinf isfinite leaky_relu threshold
    floor_divide __and__ __or__ __xor__ __lshift__ __rshift__ isneginf isposinf nan_to_num copysign hardswish hardsigmoid
    relu6
""".split()
# They pick one of their arguments, exactly; over the last dimension alone, each row picks among its own.
_PICKS = "amax amin max min argmax argmin all any".split()
# Of these, what kernels may approximate, or contract to fewer roundings, each in its own way.
_ROUNDED_HERE = "rsqrt reciprocal hardswish hardsigmoid remainder fmod floor_divide leaky_relu".split()
# Each row (all dimensions but the last) is computed from the same row of the arguments: to be measured.
_ROW_WISE = """
    mean sum var std var_mean softmax _softmax log_softmax _log_softmax logsumexp norm linalg_vector_norm native_layer_norm
    native_group_norm rms_norm _fused_rms_norm topk cumsum prod cumprod silu sigmoid tanh gelu exp exp2 expm1 log log2 log1p erf
    erfc sin cos tan pow softplus elu selu celu mish log_sigmoid_forward hypot atan2 glu logaddexp square_ erfinv sinh cosh
""".split()
_MATRIX = "mm bmm addmm baddbmm addbmm matmul linear convolution einsum dot mv addmv _grouped_mm".split()


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Judges each op as it is called."""

    def __init__(self, model: nn.Module, here: list[str], parts: list[str], is_portable: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.here, self.parts, self.is_portable = model, here, parts, is_portable
        self.call = 0
        self.fixed: dict[int, Tensor] = {}  # computed of weights and numbers alone; kept, so that no id is used again
        self.same: dict[Any, list[int]] = {}  # uncovered ops of these -> how often in which call
        self.seen: dict[tuple[str, str, str, str], int] = {}
        self.measured: dict[Any, tuple[str, str]] = {}
        self.is_measuring = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.parts:
            status, reason = "covered", f"computed by the tier ({self.parts[-1]})"
        else:
            status, reason = self._judge(func, args, kwargs)
        key = (self.here[-1], func.name().partition(".")[0], status, reason)
        tensors = _tensors(args, kwargs)
        is_fixed = all(id(tensor) in self.fixed for tensor in tensors)
        if status == "uncovered" and is_fixed and tensors:
            shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
            plain = tuple(str(a) for a in (*args, *kwargs.items()) if not isinstance(a, Tensor))
            self.same.setdefault((key, shapes, plain), [0] * (CALLS + 1))[self.call] += 1
        else:
            self.seen[key] = self.seen.get(key, 0) + 1
        result = func(*args, **kwargs)
        if is_fixed:
            self.fixed |= {id(tensor): tensor for tensor in _tensors((result,), {})}
        return result

    def begin(self) -> None:
        """A call of the model begins; what was made so far, is given to it."""
        self.call += 1
        self.fixed = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}

    def found(self) -> list[tuple[str, str, str, str, int]]:
        """All records; an op of the weights alone that is the same one in every call has the same bits in each."""
        for (key, _, _), counts in self.same.items():
            if len(set(counts[1:])) == 1:
                key = (*key[:2], "safe", "computed of the weights alone, in one shape in every call")
            self.seen[key] = self.seen.get(key, 0) + sum(counts)
        return [(*key, count) for key, count in self.seen.items()]

    def _judge(self, func: Any, args: Any, kwargs: Any) -> tuple[str, str]:
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0].rstrip("_") or name
        tensors = _tensors(args, kwargs)
        if space not in ("aten", "prim"):
            return "uncovered", "an operator of another library, which the tier does not know"
        if name in _MOVES:
            return "safe", "moves or makes data, computes nothing"
        if not any(t.is_floating_point() or t.is_complex() for t in tensors):
            return "safe", "computes with whole numbers, exactly"
        if self.is_portable and (name in _ROW_WISE or name in _ROUNDED_HERE or kwargs.get("alpha", 1) != 1):
            return "uncovered", "its last bit may follow the instruction set, whatever is measured on this machine"
        if name in _PICKS:
            is_own = len(tensors) == 2 or (len(args) > 1 and _for_rows(func, args[1:], tensors[0].ndim) is not None)
            return ("safe", "picks an argument, exactly") if is_own else ("uncovered", "it picks among the rows of the batch")
        if name == "index_put":
            is_sum = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            return ("uncovered", "adds in the order of an index") if is_sum else ("safe", "moves data, computes nothing")
        if name in ("mul", "div") and any(t.is_complex() for t in tensors):
            return "uncovered", "a complex product, whose steps kernels contract each in its own way"
        if name in _ROUNDED_ONCE:
            return "safe", "each element is rounded once, from its own arguments, whatever is around it"
        if name in _ROW_WISE:
            plain = tuple(str(a) for a in (*args[1:], *kwargs.items()) if not isinstance(a, Tensor))
            key = (func, tuple((t.shape[-1:], t.dtype) for t in tensors), plain)
            if key not in self.measured:
                self.measured[key] = _measure(func, args, kwargs)
            return self.measured[key]
        if name in _MATRIX:
            return (
                "uncovered",
                "a matrix product that the tier did not replace: its order of additions follows the number of rows",
            )
        return "uncovered", "not known to be independent of the batch"


# -------------------------------------------------------------------------------------------------------- measurement
_THREADS = (1, 3, 5, 7)  # a share of the work that ends in the middle of a vector shows at some of them
_WIDE = 200_000  # elements of the largest call: enough that the work is cut among threads


def _measure(func: Any, args: Any, kwargs: Any) -> tuple[str, str]:
    """Asks whether a row-wise op gives each row its own bits: alone, among few, among many."""
    x = args[0]
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point():
        return "uncovered", "not row-wise in these arguments: no rows to compare"
    rows = x.reshape(-1, x.shape[-1])
    others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    if any(o.ndim > 1 or o.shape[-1:] not in (x.shape[-1:], torch.Size([])) for o in others):
        return "uncovered", "not row-wise in these arguments: a second matrix takes part"
    arguments = _for_rows(func, args[1:], x.ndim)
    if arguments is None:
        return "uncovered", "it reduces over other dimensions than the last: its additions follow the batch"
    many = rows.repeat(-(-_WIDE // max(1, rows.numel())) + 1, 1)[: max(8, _WIDE // max(1, x.shape[-1])) | 1]
    try:
        # The model's values, and others near them: few values would miss the rare ones on which two formulas part.
        factors = torch.rand(many.shape, generator=torch.Generator().manual_seed(0)).to(many)
        shown = _showing_order(x.shape[-1], x.dtype, x.device)
        many = torch.cat([many[:8], many[8:] * (0.5 + factors[8:]), shown])
        expected = _first(func(many, *arguments, **kwargs))
        for count in (1, 2, 3, 5, 7):
            for start in (0, (len(many) - len(shown)) // 2, *range(len(many) - len(shown), len(many) - count + 1, count)):
                part = many[start : start + count].clone()
                if not bits.equal(
                    _first(func(part, *arguments, **kwargs)).contiguous(), expected[start : start + count].contiguous()
                ):
                    return "uncovered", "measured here: a row's bits change with the rows around it"
        if not _threads_agree(lambda: _first(func(many, *arguments, **kwargs))):
            return "uncovered", "measured here: a row's bits change with the number of threads"
    except (RuntimeError, IndexError, TypeError) as error:
        return "uncovered", f"could not be measured row by row ({type(error).__name__})"
    return "safe", "measured here, on rows that show the order of additions, too: each row has its own bits"


def _showing_order(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows on which sums, sums of squares and sums of exponentials show the order of their additions, [93, width]."""
    rows = torch.cat([norm_rows(62, width, torch.float32, seed=1), summands(31, width, seed=2).log()])
    return rows.to(device=device, dtype=dtype)


def _threads_agree(call: Callable[[], Tensor]) -> bool:
    """Whether a call gives the same bits on several numbers of threads; the number is given back."""
    before = torch.get_num_threads()
    try:
        results = []
        for threads in _THREADS:
            torch.set_num_threads(threads)
            results.append(call().contiguous())
    finally:
        torch.set_num_threads(before)
    return all(bits.equal(results[0], result) for result in results[1:])


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments, those in lists too."""
    found = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    for group in (a for a in args if isinstance(a, (list, tuple))):
        found += [a for a in group if isinstance(a, Tensor)]
    return found


def _first(result: Any) -> Tensor:
    tensor = result if isinstance(result, Tensor) else next(r for r in result if isinstance(r, Tensor))
    return tensor


def _for_rows(func: Any, rest: Any, ndim: int) -> list[Any] | None:
    """The op's other arguments for a matrix of rows: dimensions counted anew; None where it reduces over more than the last."""
    changed = []
    names = [argument.name for argument in func._schema.arguments[1:]]
    for name, value in zip(names, rest, strict=False):
        if name in ("dim", "dims"):
            dims = [value] if isinstance(value, int) else list(value or [])
            if not dims or any(d % ndim != ndim - 1 for d in dims):
                return None
            value = -1 if isinstance(value, int) else [-1]
        changed.append(value)
    return changed
