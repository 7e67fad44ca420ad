"""What a tier costs against the stock model: interleaved in one process, medians with their spread.

Two copies of the model run the same calls in turn: one as it is, one under the tier. The wall clock is read around each call.
"""

from __future__ import annotations

import copy
import html
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from detlab.deterministic import deterministic
from detlab.engine.kernels import probing_seconds
from detlab.engine.session import Options
from detlab.environment import Environment, environment
from detlab.errors import UsageError
from detlab.serving import check_model

__all__ = ["Bench", "Cell", "bench"]

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Cell:
    """One workload, timed.

    Attributes:
        name: such as "decode, batch 8, context 100" or "prefill, 512 tokens".
        stock_ms, tier_ms: medians, milliseconds a call.
        ratio: median over the rounds of tier / stock; low, high: its quartiles.
        rounds: how often each was called.
        probing_seconds: of its set-up and first call under the tier, spent on probing shapes that were not known; they are
            in none of the times above. Next to nothing where the ledger knew them.
    """

    name: str
    stock_ms: float
    tier_ms: float
    ratio: float
    low: float
    high: float
    rounds: int
    probing_seconds: float = 0.0


@dataclass
class Bench:
    """What `bench` measured.

    Attributes:
        model, dtype, tier, threads: of what.
        cells: the workloads.
        parts: the first decode workload again with single parts of the tier: "only attention", "without padding", ...
        enter_seconds: entering the context for the first time: probing what the ledger does not know, packing, coverage.
        again_seconds: entering it again.
        environment: the machine's record.
    """

    model: str
    dtype: str
    tier: str
    threads: int
    cells: list[Cell] = field(default_factory=list)
    parts: list[Cell] = field(default_factory=list)
    enter_seconds: float = 0.0
    again_seconds: float = 0.0
    environment: Environment | None = None

    @property
    def median_ratio(self) -> float:
        """Median of the cells' ratios."""
        return statistics.median(cell.ratio for cell in self.cells)

    @property
    def probing_seconds(self) -> float:
        """Seconds that first calls spent on probing shapes that were not known, all cells and parts; entering not counted."""
        return sum(cell.probing_seconds for cell in (*self.cells, *self.parts))

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        record = asdict(self)
        record["environment"] = None if self.environment is None else self.environment.to_json()
        return record | {"median_ratio": self.median_ratio, "probing_seconds": self.probing_seconds}

    def to_pandas(self) -> Any:
        """One row for each cell and part."""
        import pandas as pd

        return pd.DataFrame([asdict(cell) for cell in (*self.cells, *self.parts)])

    def __str__(self) -> str:
        head = f"{self.model}, {self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}: {self.tier} against stock"
        lines = [head, f"{'':36}{'stock ms':>10}{'tier ms':>10}{'ratio':>8}  {'quartiles':14}first call probed"]
        for cell in (*self.cells, *self.parts):
            lines.append(
                f"{cell.name:36}{cell.stock_ms:10.2f}{cell.tier_ms:10.2f}{cell.ratio:8.2f}  "
                f"{f'{cell.low:.2f} to {cell.high:.2f}':14}{cell.probing_seconds:.1f} s"
            )
        lines.append(
            f"median ratio {self.median_ratio:.2f}; entering {self.enter_seconds:.1f} s, again {self.again_seconds:.1f} s; "
            f"probing new shapes in first calls {self.probing_seconds:.1f} s"
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(c.name)}</td><td>{c.stock_ms:.2f}</td><td>{c.tier_ms:.2f}</td><td>{c.ratio:.2f}</td>"
            f"<td>{c.low:.2f} to {c.high:.2f}</td><td>{c.probing_seconds:.1f}</td></tr>"
            for c in (*self.cells, *self.parts)
        )
        titles = ("", "stock ms", "tier ms", "ratio", "quartiles", "seconds of probing in the first call")
        head = "<tr>" + "".join(f"<th>{title}</th>" for title in titles) + "</tr>"
        first, *_, last = (html.escape(line) for line in str(self).splitlines())
        return f"<p>{first}</p><table>{head}{rows}</table><p>{last}</p>"


#: A workload: makes, for one model, the call that is timed.
Workload = Callable[[Any], Callable[[], Any]]


def bench(model: nn.Module, tier: str = "invariant", *, batch_sizes: Sequence[int] = (1, 8, 32),
          contexts: Sequence[int] = (100,), prefills: Sequence[int] = (64, 512, 2048), padded: bool = False,
          parts: bool = False, seconds: float = 4.0, progress: Progress | None = None) -> Bench:  # fmt: skip
    """Times a tier against the stock model.

    Args:
        model: a transformers causal language model in eval mode; it is copied, so there must be room for two.
        tier: as for `deterministic`.
        batch_sizes: of decode steps: one new token a row, on a cache of each context.
        contexts: tokens in the cache.
        prefills: prompt lengths, batch 1.
        padded: adds a ragged, left-padded batch of the largest size: prefill, and decode.
        parts: times the first decode workload also with single parts of the tier, and with its padding off.
        seconds: time for each workload; at least 5 rounds are run.
        progress: called with (workloads done, in all, what).

    Returns:
        A `Bench`.

    Raises:
        UsageError: a length does not fit into the model's positions, or a number is not positive.
    """
    numbers = (*batch_sizes, *contexts, *prefills)
    if not numbers or min(numbers) < 1 or seconds <= 0:
        raise UsageError(f"bench needs sizes of at least 1 and a positive time; got {numbers} and {seconds}.")
    check_model(model)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr,operator]
    if limit is not None and max((*contexts, *prefills)) + 64 > limit:
        raise UsageError(f"bench needs {max((*contexts, *prefills)) + 64} positions; the model holds {limit}. Ask for less.")
    work: dict[str, Workload] = {}
    for context in contexts:
        for size in batch_sizes:
            work[f"decode, batch {size}, context {context}"] = partial(_decode, batch=size, context=context)
    for length in prefills:
        work[f"prefill, {length} tokens"] = partial(_prefill, length=length)
    if padded:
        size, context = max(batch_sizes), max(contexts)
        work[f"padded prefill, batch {size}, to {context}"] = partial(_padded, batch=size, longest=context, decodes=False)
        work[f"padded decode, batch {size}, to {context}"] = partial(_padded, batch=size, longest=context, decodes=True)
    first = next(iter(work))
    steps = len(work) + (len(_PARTS) + 1) * parts
    result = Bench(
        type(model).__name__, str(next(model.parameters()).dtype).removeprefix("torch."), tier, torch.get_num_threads()
    )
    result.environment = environment()
    with torch.no_grad(), ExitStack() as stack:
        twin = copy.deepcopy(model)
        started = time.perf_counter()
        with deterministic(twin, tier):
            result.enter_seconds = time.perf_counter() - started
        started = time.perf_counter()
        stack.enter_context(deterministic(twin, tier))
        result.again_seconds = time.perf_counter() - started
        for done, (name, make) in enumerate(work.items()):
            if progress is not None:
                progress(done, steps, name)
            result.cells.append(_timed(name, make, model, twin, seconds))
        stack.close()
        if parts:
            options = {f"{first}: only {kind}": Options(only=_only(kind)) for kind in _PARTS}
            options[f"{first}: without padding"] = Options(is_padded=False)
            for done, (name, option) in enumerate(options.items(), len(work)):
                if progress is not None:
                    progress(done, steps, name)
                with deterministic(twin, tier, strict=False, options=option):
                    result.parts.append(_timed(name, work[first], model, twin, seconds))
    if progress is not None:
        progress(steps, steps, "done")
    return result


_PARTS = ("linear", "attention", "activation", "rotary", "experts")


def _only(kind: str) -> Callable[[str, str], bool]:
    kinds = (kind, "router") if kind == "experts" else (kind,)
    return lambda name, other: other in kinds


def _timed(name: str, make: Workload, model: Any, twin: Any, seconds: float) -> Cell:
    """Calls a workload of both models in turn, the first alternating, until the time is up."""
    before_probing = probing_seconds()
    calls = {"stock": make(model), "tier": make(twin)}
    for call in calls.values():
        call()
    probing = probing_seconds() - before_probing
    taken: dict[str, list[float]] = {"stock": [], "tier": []}
    started = time.perf_counter()
    rounds = 0
    while rounds < 5 or time.perf_counter() - started < seconds:
        for which in ("stock", "tier") if rounds % 2 else ("tier", "stock"):
            before = time.perf_counter()
            calls[which]()
            taken[which].append(time.perf_counter() - before)
        rounds += 1
    ratios = [t / s for t, s in zip(taken["tier"], taken["stock"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    stock_ms, tier_ms = (1e3 * statistics.median(taken[which]) for which in ("stock", "tier"))
    return Cell(name, stock_ms, tier_ms, middle, low, high, rounds, probing)


# ---------------------------------------------------------------------------------------------------------- workloads
def _ids(model: Any, batch: int, length: int) -> torch.Tensor:
    vocabulary = int(model.config.get_text_config().vocab_size)
    numbers = torch.arange(batch * length, device=next(model.parameters()).device).view(batch, length)
    return (numbers * 7919 + 11) % vocabulary


def _prefill(model: Any, length: int) -> Callable[[], Any]:
    ids = _ids(model, 1, length)
    return lambda: model(ids, cache=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)


def _decode(model: Any, batch: int, context: int) -> Callable[[], Any]:
    """Steps on a cache that begins with so many tokens, and grows by one a call, for both models alike."""
    cache = DynamicCache(config=model.config)
    model(_ids(model, 1, context), cache=cache, use_cache=True, logits_to_keep=1)
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    ids = _ids(model, batch, 1)

    def step() -> None:
        model(ids, cache=cache, use_cache=True, logits_to_keep=1)

    return step


def _padded(model: Any, batch: int, longest: int, decodes: bool) -> Callable[[], Any]:
    """Prompts of lengths from a quarter of the longest to the longest, padded on the left."""
    ids = _ids(model, batch, longest)
    lengths = torch.linspace(longest // 4, longest, batch).long()
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long().to(ids.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)

    def prefill(cache: Any) -> Any:
        return model(ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)

    if not decodes:
        return lambda: prefill(DynamicCache(config=model.config))
    cache = DynamicCache(config=model.config)
    prefill(cache)
    state = {"mask": mask}

    def step() -> None:
        state["mask"] = torch.cat([state["mask"], state["mask"].new_ones(batch, 1)], 1)
        places = state["mask"].sum(1, keepdim=True) - 1
        model(ids[:, :1], attention_mask=state["mask"], position_ids=places, cache=cache, use_cache=True, logits_to_keep=1)

    return step
