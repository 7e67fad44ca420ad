"""Every op of a model under a tier: covered by it, safe without it, or not covered.

A tier makes the parts it knows independent of the batch. What else a model computes is looked at here, op by op, while it
prefills and decodes a padded batch: an op that moves data or rounds each element alone is safe by construction; a row-wise
op is safe if it is measured to be, on this model's own values; all others are uncovered.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache

from detlab import bits
from detlab.engine import session as engine
from detlab.engine.kernels import KernelMap, watching
from detlab.errors import CoverageError, UsageError

__all__ = ["Coverage", "OpCoverage", "coverage"]

_MOVES = """
    view _unsafe_view reshape t transpose permute expand slice select unsqueeze squeeze split split_with_sizes chunk unbind
    alias detach as_strided diagonal narrow unfold repeat repeat_interleave cat stack clone copy contiguous _to_copy to
    lift_fresh _reshape_alias index index_select gather index_copy index_fill scatter masked_fill masked_scatter
    where embedding constant_pad_nd flip roll tril triu fill zero zeros ones full empty new_zeros new_empty new_full
    new_ones zeros_like ones_like empty_like full_like empty_strided new_empty_strided arange scalar_tensor eye one_hot
    resize pin_memory _local_scalar_dense item lift sort argsort nonzero bincount searchsorted histc unique2 movedim
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


@dataclass(frozen=True)
class OpCoverage:
    """One op of one module.

    Attributes:
        module: the module that called it; "" for the model itself.
        op: its name.
        status: "covered" (the tier computes it), "safe", or "uncovered".
        reason: why.
        count: calls seen.
    """

    module: str
    op: str
    status: str
    reason: str
    count: int


@dataclass(frozen=True)
class Coverage:
    """What `coverage` found.

    Attributes:
        tier: the tier the model ran under.
        model: the model's class.
        ops: one record for each (module, op, status, reason), in the order of execution.
        class_maps: what was measured of the tier's kernels that ran: which of their shapes share one order of additions.
    """

    tier: str
    model: str
    ops: list[OpCoverage]
    class_maps: list[KernelMap] = field(default_factory=list)

    @property
    def uncovered(self) -> list[OpCoverage]:
        """Ops whose bits may depend on the batch."""
        return [op for op in self.ops if op.status == "uncovered"]

    @property
    def holds(self) -> bool:
        """Whether every op is covered or safe."""
        return not self.uncovered

    def counts(self) -> dict[str, int]:
        """Calls by status."""
        return {status: sum(op.count for op in self.ops if op.status == status) for status in ("covered", "safe", "uncovered")}

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            "tier": self.tier, "model": self.model, "counts": self.counts(), "ops": [asdict(op) for op in self.ops],
            "class_maps": [asdict(known) for known in self.class_maps],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Coverage:
        """Reads back what `to_json` gave."""
        ops, maps = [OpCoverage(**op) for op in data["ops"]], [KernelMap.from_json(known) for known in data["class_maps"]]
        return cls(data["tier"], data["model"], ops, maps)

    def to_pandas(self) -> Any:
        """One row for each record."""
        import pandas as pd

        return pd.DataFrame([asdict(op) for op in self.ops])

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.counts().items())
        lines = [f"{self.model} under tier {self.tier}: {counts}"]
        lines += [f"  uncovered: {op.module or 'the model'} · {op.op}: {op.reason}" for op in self.uncovered]
        lines += [f"  {known}" for known in self.class_maps]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        kinds = {(op.op, op.status, op.reason): 0 for op in self.ops}
        for op in self.ops:
            kinds[op.op, op.status, op.reason] += op.count
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{status}</td><td>{count}</td><td>{html.escape(reason)}</td></tr>"
            for (name, status, reason), count in sorted(kinds.items(), key=lambda item: (item[0][1] != "uncovered", item[0]))
        )
        head = "<tr><th>op</th><th>status</th><th>calls</th><th>reason</th></tr>"
        maps = "".join(f"<li>{html.escape(str(known))}</li>" for known in self.class_maps)
        return f"<p>{html.escape(str(self).splitlines()[0])}</p><table>{head}{rows}</table><ul>{maps}</ul>"


def coverage(model: nn.Module, tier: str = "invariant") -> Coverage:
    """Runs a padded batch through prefill and decode under a tier, and says of every op whether its bits are safe.

    Args:
        model: a transformers causal language model in eval mode; it is left as it was.
        tier: the tier to run under.

    Returns:
        A `Coverage`.

    Raises:
        UsageError: the tier cannot be applied to this model at all.
    """
    current = engine.session_of(model)
    options = current.options if current is not None and current.tier == tier else None
    with watching() as running:
        found = _judged(model, tier, options)
        maps = [KernelMap.of(name, kernel) for name, kernel in running().items()]
    return Coverage(tier, type(model).__name__, found, maps)


def _judged(model: nn.Module, tier: str, options: engine.Options | None) -> list[OpCoverage]:
    """One record for each (module, op, status, reason); one more where the whole is not what its ops promise."""
    with engine.applied(model, tier, options) as session, torch.no_grad(), ExitStack() as stack:
        _warm_up(model)
        here = stack.enter_context(_modules(model))
        parts = stack.enter_context(_marked(model, session))
        observer = stack.enter_context(_Observer(here, parts, is_portable=tier == "exact"))
        try:
            _prefill_and_decode(model)
        finally:
            session.forget()
        found = observer.found()
    if session.is_whole and not any(op.status == "uncovered" for op in found):
        with engine.applied(model, tier, options) as session, torch.no_grad():
            try:
                failure = _compare_rows(model)
            finally:
                session.forget()
        if failure is not None:
            found.append(OpCoverage("", "logits", "uncovered", failure, 1))
    return found


def require_coverage(model: nn.Module, tier: str) -> Coverage:
    """`coverage`, as a condition.

    Raises:
        CoverageError: an op is uncovered; the message names the first with its module.
    """
    result = coverage(model, tier)
    if not result.holds:
        first, more = result.uncovered[0], len(result.uncovered) - 1
        raise CoverageError(
            f"{first.module or type(model).__name__} · {first.op} is not covered by tier {tier!r}: {first.reason}"
            f"{f' ({more} more ops are not covered, see detlab.coverage(model))' if more else ''}. "
            "Its bits may depend on the batch. Use strict=False to run without this op's invariance."
        )
    return result


def _warm_up(model: Any) -> None:
    """One token: what is measured on first use would be counted as the model's ops."""
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device))


def _prefill_and_decode(model: Any) -> None:
    """A batch of three rows, one of them padded, prefilled and decoded for two steps."""
    ids, mask = _batch(model)
    kept: dict[str, Any] = {"cache": DynamicCache(config=model.config)}
    for _ in range(3):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **kept,
        )
        kept = _kept(model, output, kept)
        ids = output.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)


def _kept(model: Any, output: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What the next call is given of this one's tokens, by name: what the model returned, or the cache that it was given."""
    if getattr(output, "state", None) is not None:
        return {"state": output.state}
    cache = getattr(output, "cache", None) or getattr(output, "past_key_values", None)
    if cache is not None:
        return {"cache": cache}
    if not any(getattr(layer, "seen", 0) for layer in given["cache"].layers):
        raise UsageError(f"{type(model).__name__} returns no cache; the tier covers models that keep keys and values.")
    return given


def _batch(model: Any) -> tuple[Tensor, Tensor]:
    """Token ids and mask of three rows of 37 tokens, the second one padded on the left."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    length = min(37, limit - 3) if limit else 37
    device = next(model.parameters()).device
    ids = (torch.arange(3 * length, device=device).view(3, length) * 7919 + 11) % int(config.vocab_size)
    mask = torch.ones(3, length, dtype=torch.long, device=device)
    mask[1, : length // 4] = 0
    return ids, mask


def _compare_rows(model: Any) -> str | None:
    """Judges the whole: what moves rows, as an op, may mix them, as a model. None where each row's logits are its own."""
    ids, mask = (t[:2, :21] for t in _batch(model))  # few: with a large vocabulary, logits are what takes memory
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    together = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for row in range(len(ids)):
        real = mask[row].bool()
        alone = model(input_ids=ids[row : row + 1, real], position_ids=positions[row : row + 1, real], use_cache=False).logits[
            0
        ]
        if not bits.equal(alone.contiguous(), together[row, real].contiguous()):
            return "measured here: a text's logits change with the batch or with its padding, though each op alone looks safe"
    half = ids.shape[1] // 2
    kept: dict[str, Any] = {"cache": DynamicCache(config=model.config)}
    first = model(input_ids=ids[:1, :half], position_ids=positions[:1, :half], use_cache=True, **kept)
    kept = _kept(model, first, kept)
    second = model(input_ids=ids[:1, half:], position_ids=positions[:1, half:], use_cache=True, **kept)
    if not bits.equal(torch.cat([first.logits, second.logits], 1)[0], together[0].contiguous()):
        return "measured here: a text's logits change with the pieces of its prefill, though each op alone looks safe"
    return None


# --------------------------------------------------------------------------------------------------- who calls an op
@contextmanager
def _modules(model: nn.Module) -> Iterator[list[str]]:
    """Names of the modules that are being called, the innermost last."""
    stack: list[str] = [""]
    handles = []

    def leave(*_: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _marked(model: nn.Module, session: engine.Session) -> Iterator[list[str]]:
    """The tier's parts that are being called: while there is one, an op is the tier's own."""
    parts: list[str] = []

    def marked(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def forward(*args: Any, **kwargs: Any) -> Any:
            parts.append(kind)
            try:
                return call(*args, **kwargs)
            finally:
                parts.pop()

        return forward

    with session.wrapped(marked):
        yield parts


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Judges each op as it is called."""

    def __init__(self, here: list[str], parts: list[str], is_portable: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.here, self.parts, self.is_portable = here, parts, is_portable
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
        self.seen[key] = self.seen.get(key, 0) + 1
        return func(*args, **kwargs)

    def found(self) -> list[OpCoverage]:
        return [OpCoverage(*key, count) for key, count in self.seen.items()]

    def _judge(self, func: Any, args: Any, kwargs: Any) -> tuple[str, str]:
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0].rstrip("_") or name
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        for group in (a for a in args if isinstance(a, (list, tuple))):
            tensors += [a for a in group if isinstance(a, Tensor)]
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
        many = many.contiguous()
        expected = _first(func(many, *arguments, **kwargs))
        for count in (1, 2, 3, 5, 7):
            for start in (0, len(many) // 2, len(many) - count):
                part = many[start : start + count].clone()
                if not bits.equal(
                    _first(func(part, *arguments, **kwargs)).contiguous(), expected[start : start + count].contiguous()
                ):
                    return "uncovered", "measured here: a row's bits change with the rows around it"
        if not _threads_agree(lambda: _first(func(many, *arguments, **kwargs))):
            return "uncovered", "measured here: a row's bits change with the number of threads"
    except (RuntimeError, IndexError, TypeError) as error:
        return "uncovered", f"could not be measured row by row ({type(error).__name__})"
    return "safe", "measured on this model's values: each row has its own bits, alone and among many"


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
