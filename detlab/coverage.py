"""Every op of a model under a tier: covered by it, safe without it, or not covered.

A tier makes the parts it knows independent of the batch. What else a model computes is looked at here, op by op, while it
prefills and decodes a padded batch: an op that moves data or rounds each element alone is safe by construction; a row-wise
op is safe if it is measured to be, on this model's own values; all others are uncovered.
"""

from __future__ import annotations

import functools
import html
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from detlab import bits
from detlab.engine import session as engine
from detlab.engine.kernels import KernelMap, watching
from detlab.engine.observer import CALLS, Observer
from detlab.errors import CoverageError, UsageError

__all__ = ["Coverage", "OpCoverage", "coverage"]

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
        observer = stack.enter_context(Observer(model, here, parts, is_portable=tier == "exact"))
        try:
            _prefill_and_decode(model, observer.begin)
        finally:
            session.forget()
        found = [OpCoverage(*record) for record in observer.found()]
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


def _prefill_and_decode(model: Any, begin: Callable[[], None]) -> None:
    """A batch of three rows, one of them padded, prefilled and decoded for two steps; ``begin`` is called before each call."""
    ids, mask = _batch(model)
    kept: dict[str, Any] = {"cache": DynamicCache(config=model.config)} if _has_cache(model) else {}
    for _ in range(CALLS):
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": _positions(mask)[:, -ids.shape[1] :]}
        begin()
        if not _has_cache(model):  # the whole text anew for each token
            ids = torch.cat([ids, model(**given).logits[:, -1:].argmax(-1)], 1)
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            continue
        output = model(**given, use_cache=True, **kept)
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
    apart = _apart(model, ids, mask)
    if apart > _OTHER and "position_ids" not in inspect.signature(model.forward).parameters:
        # Some of these count padding on the left as positions, which makes it another question: then it is on the right.
        apart = _apart(model, ids, mask.flip(1))
    if apart:
        return "measured here: a text's logits change with the batch or with its padding, though each op alone looks safe"
    if not _has_cache(model):
        return None
    positions, half = _positions(mask), ids.shape[1] // 2
    together = model(input_ids=ids[:1], position_ids=positions[:1], use_cache=False).logits
    kept: dict[str, Any] = {"cache": DynamicCache(config=model.config)}
    first = model(input_ids=ids[:1, :half], position_ids=positions[:1, :half], use_cache=True, **kept)
    kept = _kept(model, first, kept)
    second = model(input_ids=ids[:1, half:], position_ids=positions[:1, half:], use_cache=True, **kept)
    if not bits.equal(torch.cat([first.logits, second.logits], 1)[0], together[0].contiguous()):
        return "measured here: a text's logits change with the pieces of its prefill, though each op alone looks safe"
    return None


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


_OTHER = 0.02  # relative: larger differences are no rounding


def _apart(model: Any, ids: Tensor, mask: Tensor) -> float:
    """How far the rows of a padded batch are from what they are alone, relative; 0.0 where all bits are the same."""
    positions, found = _positions(mask), 0.0
    more = {"use_cache": False} if _has_cache(model) else {}
    together = model(input_ids=ids, attention_mask=mask, position_ids=positions, **more).logits
    for row in range(len(ids)):
        real = mask[row].bool()
        one = {"input_ids": ids[row : row + 1, real], "position_ids": positions[row : row + 1, real]}
        alone, among = model(**one, **more).logits[0].contiguous(), together[row, real].contiguous()
        if not bits.equal(alone, among):
            error = (among.double() - alone.double()).norm() / alone.double().norm()
            found = max(found, float(error), torch.finfo(torch.float32).tiny)
    return found


def _has_cache(model: Any) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters


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
