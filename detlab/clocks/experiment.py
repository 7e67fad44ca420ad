"""Moves the timing of a computation for real, records clock and time of each run, and tests the bits against both."""

from __future__ import annotations

import hashlib
import html
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from detlab import bits
from detlab.clocks.loads import QUIET, TIMINGS, Timing
from detlab.environment import Environment, environment
from detlab.errors import UsageError
from detlab.telemetry import Sample, Sensors

__all__ = ["ClockExperiment", "TimedRun", "clock_experiment", "permutation_p"]

STILL, MOVED, NOT_SHOWN = "bits did not move", "bits moved", "timing did not move"
ENOUGH = 0.2  # share by which the timing must move for a null to show anything
SHUFFLES = 9999

Answer = Tensor | str | Sequence["Answer"]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TimedRun:
    """One run.

    Attributes:
        run: its number, from 0.
        timing: how its timing was moved.
        digest: MD5 of the answer's bits.
        seconds: wall time of the work, pauses between steps included.
        speed: MiB hashed in a second of CPU time just before: proportional to the core's real clock, also where a virtual
            machine hides it; time that other processes take does not count.
        sensors: what the sensors of `detlab.telemetry` said just after: "cpu_mhz", "gpu0_sm_mhz", ...; absent ones left out.
    """

    run: int
    timing: str
    digest: str
    seconds: float
    speed: float
    sensors: Sample = field(repr=False)

    @property
    def cpu_mhz(self) -> float | None:
        """The CPU's clock as the system shows it; None where it shows none."""
        return self.sensors.get("cpu_mhz")

    @property
    def gpu_mhz(self) -> float | None:
        """The first GPU's clock; None where there is none."""
        return self.sensors.get("gpu0_sm_mhz")


@dataclass(frozen=True)
class ClockExperiment:
    """Bits against clocks. Made by `clock_experiment`.

    Attributes:
        runs: in the order in which they were made.
        reference: the digest that the runs are held against: the most frequent one of the quiet runs.
        p_value: how often chance alone would tie the differing runs to their times as closely (permutation test); 1 where no
            run differs, or all do.
        p_clock: the same with the clock: the GPU's or the CPU's where it is shown and moved, else `TimedRun.speed`.
        clock: which of these it was: "gpu_mhz", "cpu_mhz" or "speed".
        sensors: name -> "read", with a remark where there is one, or "absent: why".
        notes: timings that could not be had here.
        environment: the machine's record.
    """

    runs: list[TimedRun] = field(repr=False)
    reference: str
    p_value: float
    p_clock: float
    clock: str
    sensors: dict[str, str] = field(repr=False)
    notes: list[str]
    environment: Environment = field(repr=False)

    @property
    def divergent(self) -> int:
        """Runs whose bits are not the reference's."""
        return sum(run.digest != self.reference for run in self.runs)

    @property
    def distinct(self) -> int:
        """Different answers."""
        return len({run.digest for run in self.runs})

    @property
    def rate(self) -> float:
        """Share of runs whose bits are not the reference's."""
        return self.divergent / len(self.runs)

    @property
    def bound(self) -> float | None:
        """Where no run differs: at most this share does, at 95 % (3/n). None where some do."""
        return None if self.divergent else min(1.0, 3 / len(self.runs))

    @property
    def moved(self) -> float:
        """How much longer the slowest timing's median run took than the fastest's; 0.2: a fifth."""
        medians: list[float] = [of["seconds"] for of in self.by_timing().values()]
        return max(medians) / min(medians) - 1

    @property
    def clock_moved(self) -> float:
        """How far the clock moved: the range of the middle nine tenths of the runs, over its lower end."""
        low, *_, high = statistics.quantiles(_clocks(self.runs, self.clock) * 2, n=20)  # twice: one run is enough for it
        return high / low - 1

    @property
    def verdict(self) -> str:
        """"bits moved", "bits did not move", or "timing did not move": less than a fifth, so that nothing is shown."""
        if self.divergent:
            return MOVED
        return STILL if self.moved >= ENOUGH else NOT_SHOWN

    def by_timing(self) -> dict[str, dict[str, Any]]:
        """Per timing: runs, runs that differ, different answers, and medians of seconds and speed."""
        found: dict[str, dict[str, Any]] = {}
        for timing in dict.fromkeys(run.timing for run in sorted(self.runs, key=lambda r: list(TIMINGS).index(r.timing))):
            runs = [run for run in self.runs if run.timing == timing]
            found[timing] = {
                "runs": len(runs), "divergent": sum(run.digest != self.reference for run in runs),
                "distinct": len({run.digest for run in runs}), "seconds": statistics.median(run.seconds for run in runs),
                "speed": statistics.median(run.speed for run in runs),
            }  # fmt: skip
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("verdict", "divergent", "distinct", "rate", "bound", "p_value", "p_clock", "clock", "moved", "clock_moved",
                 "reference", "sensors", "notes")  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "by_timing": self.by_timing(), "runs": [asdict(run) for run in self.runs],
            "environment": self.environment.to_json(),
        }  # fmt: skip

    def to_pandas(self) -> Any:
        """One row a run."""
        import pandas as pd

        rows = []
        for run in self.runs:
            record = asdict(run)
            sensors = record.pop("sensors")
            rows.append(record | sensors | {"differs": run.digest != self.reference})
        return pd.DataFrame(rows)

    def _lines(self) -> list[str]:
        bound = "" if self.bound is None else f"; at most {100 * self.bound:.3g} % at 95 %"
        answers = f"{self.distinct} different answer{'' if self.distinct == 1 else 's'}"
        lines = [
            f"{self.verdict}: {self.divergent} of {len(self.runs)} runs differ ({answers}{bound})",
            f"the slowest timing's runs take {100 * self.moved:.0f} % longer than the fastest's; {self.clock} moved by "
            f"{100 * self.clock_moved:.0f} %",
        ]
        if self.divergent:
            lines.append(f"chance would tie the bits to time so closely with p = {self.p_value:.2g}, to {self.clock} with "
                         f"p = {self.p_clock:.2g}")  # fmt: skip
        if self.verdict == NOT_SHOWN:
            lines.append(f"less than {100 * ENOUGH:.0f} %: this shows nothing of timing; try a longer computation")
        return [*lines, *self.notes]

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (timing, f"{of['divergent']} of {of['runs']}", str(of["distinct"]), f"{1e3 * of['seconds']:.3g}",
             f"{of['speed']:.4g}")  # fmt: skip
            for timing, of in self.by_timing().items()
        ]

    def __str__(self) -> str:
        rows = [_HEAD, *self._cells()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        table = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join((*self._lines(), *table))

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>" for cells in self._cells())
        return f"{words}<table><tr>{head}</tr>{rows}</table>"


_HEAD = ("timing", "differ", "answers", "ms (median)", "speed, MiB/s")


def clock_experiment(work: Callable[[], Answer], runs: int = 100, *, model: nn.Module | None = None,
                     timings: Sequence[str] | None = None, seed: int = 0,
                     progress: Progress | None = None) -> ClockExperiment:  # fmt: skip
    """Tests whether timing reaches the bits: the same work again and again, its timing moved for real.

    The hypothesis "boost clocks change results" is tested through what a clock can do: make the same instructions take other
    times. Beside processes that compute, the clock itself moves too, on machines that boost; what it was is recorded.
    The order of the timings is drawn, so that a drift of the machine is not taken for their doing. Sensors are read between
    the runs. Clocks are never set: detlab records them.

    Args:
        work: called with nothing, once a run; returns what was computed: tensors, texts, or lists of these.
        runs: how many; after one that does not count.
        model: calls of this module are the steps between which pauses go; None has them before a run, not in its time.
        timings: of "quiet", "load" (processes that compute, on every core), "one-core" (shared with another process; where
            the system lets a process choose), "pauses"; None for all. Threads and their number stay as they are.
        seed: of the order and of the pauses.
        progress: called with (runs done, runs in all, timing).

    Returns:
        A `ClockExperiment`.

    Raises:
        UsageError: fewer runs than timings, an unknown timing, work that cannot be called, or an answer without bits.
    """
    if not callable(work):
        raise UsageError(f"work must be a function that takes nothing, such as lambda: model(**inputs).logits; got {work!r}.")
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"model must be a module, between whose calls pauses go; got {type(model).__name__}.")
    with Timing(tuple(TIMINGS) if timings is None else timings, model, seed) as timing:
        names = timing.names
        if runs < len(names):
            raise UsageError(f"runs={runs!r} is not possible; give at least {len(names)}, one for each timing.")
        order = (names * (runs // len(names) + 1))[:runs]
        random.Random(seed).shuffle(order)
        sensors = Sensors()
        made: list[TimedRun] = []
        try:
            _digest(work())
            for number, name in enumerate(order):
                if progress is not None:
                    progress(number, runs, name)
                with timing.put_in(name):
                    speed = _speed()
                    begin = time.perf_counter()
                    answer = work()
                    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                        torch.cuda.synchronize()
                    seconds = time.perf_counter() - begin
                    sample = sensors.read()
                made.append(TimedRun(number, name, _digest(answer), seconds, speed, sample))
        finally:
            sensors.close()
        if progress is not None:
            progress(runs, runs, "done")
    base = QUIET if QUIET in names else names[0]
    reference = Counter(run.digest for run in made if run.timing == base).most_common(1)[0][0]
    differs = [run.digest != reference for run in made]
    clock = next((name for name in ("gpu_mhz", "cpu_mhz") if len(set(_clocks(made, name))) > 1), "speed")
    return ClockExperiment(
        made, reference, permutation_p(differs, [run.seconds for run in made], seed),
        permutation_p(differs, _clocks(made, clock), seed), clock, sensors.found, timing.notes, environment(),
    )  # fmt: skip


def _clocks(runs: list[TimedRun], name: str) -> list[float]:
    """A clock of each run; none where a run lacks it."""
    values = [getattr(run, name) for run in runs]
    return [] if None in values else values


_BLOCK = bytes(1 << 20)


def _speed() -> float:
    """MiB hashed in a second of this thread's CPU time."""
    begin = time.thread_time()
    hashlib.sha256(_BLOCK).digest()
    return 1 / max(time.thread_time() - begin, 1e-9)


def _digest(answer: Answer) -> str:
    """MD5 of the bits of tensors and texts, in order."""
    if isinstance(answer, Tensor):
        return bits.md5(answer.detach().cpu())
    if isinstance(answer, str):
        return hashlib.md5(answer.encode(), usedforsecurity=False).hexdigest()
    if isinstance(answer, (list, tuple)) and answer:
        return hashlib.md5("".join(map(_digest, answer)).encode(), usedforsecurity=False).hexdigest()
    raise UsageError(f"work must return tensors, texts, or a list of these, whose bits can be compared; got {answer!r}.")


def permutation_p(differs: Sequence[bool], values: Sequence[float], seed: int = 0) -> float:
    """How often chance alone sets two groups of values as far apart, by the difference of their mean ranks.

    Args:
        differs: group of each value.
        values: what may have to do with it; ties share their mean rank.
        seed: of the 9,999 shufflings.

    Returns:
        A probability; 1.0 where one group is empty.

    Source: Phipson and Smyth, "Permutation p-values should never be zero", 2010: the order that was seen counts as one.

    >>> permutation_p([False] * 8 + [True] * 8, range(16)), permutation_p([False] * 5, range(5))
    (0.0004, 1.0)
    """
    count = sum(differs)
    if count in (0, len(differs)):
        return 1.0
    ranks = _ranks(values)
    total, draw = sum(ranks), random.Random(seed)

    def apart(chosen: Sequence[float]) -> float:
        return abs(sum(chosen) / count - (total - sum(chosen)) / (len(ranks) - count))

    seen = apart([rank for rank, is_other in zip(ranks, differs, strict=True) if is_other])
    # Sums of ranks in another order may differ in their last bits.
    as_far = sum(apart(draw.sample(ranks, count)) >= seen * (1 - 1e-12) for _ in range(SHUFFLES))
    return (as_far + 1) / (SHUFFLES + 1)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(order):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]
