"""How often answers part when the conditions change from run to run."""

from __future__ import annotations

import hashlib
import html
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from detlab.condition import Condition
from detlab.environment import Environment, environment
from detlab.errors import MachineError, UsageError
from detlab.remedies.attempt import prepared
from detlab.remedies.registry import plan_of
from detlab.remedies.remedy import Plan, Remedy
from detlab.remedies.serve import Served, serve
from detlab.runner import Progress
from detlab.telemetry import Sample, telemetry

__all__ = ["BeforeAfter", "Rate", "RunRecord", "rate", "upper_bound"]


@dataclass(frozen=True)
class RunRecord:
    """One run of all prompts.

    Attributes:
        run: its number, from 0.
        condition: as text, with the remedy.
        batch_size: rows a call.
        logits_md5: per prompt, of all logits, dtype and shape included.
        tokens_md5: per prompt, of the greedy tokens.
        seconds: spent in calls of the model.
        started: when its first call began, in seconds since that of the reference.
        machine: means of the sensors over the run (see `detlab.telemetry`): "cpu_busy", "memory_mib", "gpu0_busy", ...
    """

    run: int
    condition: str
    batch_size: int
    logits_md5: list[str]
    tokens_md5: list[str]
    seconds: float
    started: float
    machine: Sample = field(repr=False)


@dataclass(frozen=True)
class Rate:
    """Divergence over many runs, against the first condition's answer.

    Attributes:
        prompts: how many.
        conditions: those that were drawn from, as text.
        remedy: its name; "" for none.
        seed: of the draw.
        reference: the first condition's answers; not one of the runs.
        runs: what was run, in the order drawn.
        sensors: name -> "read", with a remark where there is one, or "absent: why".
        environment: the machine's record.
    """

    prompts: int
    conditions: list[str]
    remedy: str
    seed: int
    reference: RunRecord = field(repr=False)
    runs: list[RunRecord] = field(repr=False)
    sensors: dict[str, str] = field(repr=False)
    environment: Environment = field(repr=False)

    @property
    def outputs(self) -> int:
        """Answers compared: runs times prompts."""
        return len(self.runs) * self.prompts

    def _differing(self, which: str) -> int:
        expected = getattr(self.reference, which)
        return sum(x != y for run in self.runs for x, y in zip(getattr(run, which), expected, strict=True))

    @property
    def logits_differ(self) -> int:
        """Answers whose logits differ from the reference in any bit."""
        return self._differing("logits_md5")

    @property
    def tokens_differ(self) -> int:
        """Answers whose tokens differ from the reference."""
        return self._differing("tokens_md5")

    @property
    def divergent_runs(self) -> int:
        """Runs in which any prompt's logits differ."""
        return sum(run.logits_md5 != self.reference.logits_md5 for run in self.runs)

    @property
    def rate(self) -> float:
        """Share of runs in which any prompt's logits differ."""
        return self.divergent_runs / len(self.runs)

    @property
    def bound(self) -> float:
        """Upper bound of `rate` at 95 %, over draws of these conditions: 3/n where no run differs."""
        return upper_bound(self.divergent_runs, len(self.runs))

    @property
    def distinct(self) -> list[int]:
        """Different answers to each prompt, by the bits of the logits, the reference among them."""
        answers = [self.reference, *self.runs]
        return [len({run.logits_md5[prompt] for run in answers}) for prompt in range(self.prompts)]

    @property
    def batch_sizes(self) -> dict[str, float]:
        """How far the batch size moved: min, max, mean, standard deviation, and that over the mean (0: it did not move)."""
        return _spread([run.batch_size for run in self.runs])

    @property
    def utilisation(self) -> dict[str, dict[str, float]]:
        """How far the use of processors and memory moved from run to run, per sensor; as for `batch_sizes`."""
        found = {}
        for name in self.sensors:
            values = [run.machine[name] for run in self.runs if name in run.machine]
            if values and name.endswith(_USE):
                found[name] = _spread(values)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "prompts": self.prompts, "conditions": self.conditions, "remedy": self.remedy, "seed": self.seed,
            "outputs": self.outputs, "logits_differ": self.logits_differ, "tokens_differ": self.tokens_differ,
            "divergent_runs": self.divergent_runs, "rate": self.rate, "bound": self.bound, "distinct": self.distinct,
            "batch_sizes": self.batch_sizes, "utilisation": self.utilisation, "sensors": self.sensors,
            "reference": asdict(self.reference), "runs": [asdict(run) for run in self.runs],
            "environment": self.environment.to_json(),
        }  # fmt: skip

    def to_pandas(self) -> Any:
        """One row a run and prompt."""
        import pandas as pd

        rows = [
            {"run": run.run, "condition": run.condition, "batch_size": run.batch_size, "prompt": prompt,
             "logits_md5": run.logits_md5[prompt], "tokens_md5": run.tokens_md5[prompt],
             "logits_differ": run.logits_md5[prompt] != self.reference.logits_md5[prompt],
             "tokens_differ": run.tokens_md5[prompt] != self.reference.tokens_md5[prompt], "seconds": run.seconds,
             "started": run.started} | run.machine
            for run in self.runs for prompt in range(self.prompts)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def _lines(self) -> list[str]:
        sizes, remedy = self.batch_sizes, f" with {self.remedy}" if self.remedy else ""
        return [
            f"{len(self.runs)} runs of {self.prompts} prompts under {len(self.conditions)} conditions{remedy}",
            f"divergent runs: {self.divergent_runs} ({100 * self.rate:.1f} %; at most {100 * self.bound:.3g} % at 95 %)",
            f"answers: logits differ in {self.logits_differ} of {self.outputs}, tokens in {self.tokens_differ}",
            f"distinct answers a prompt: {', '.join(map(str, self.distinct[:12]))}{' ...' if self.prompts > 12 else ''}",
            f"batch size: {sizes['min']:g} to {sizes['max']:g}, mean {sizes['mean']:.2f}, "
            f"standard deviation {100 * sizes['variation']:.0f} % of it",
            f"utilisation: {self._use()}",
        ]

    def _use(self) -> str:
        found = [f"{name} {of['mean']:.3g} ± {of['std']:.2g}" for name, of in self.utilisation.items()]
        absent = [f"{name} {how}" for name, how in self.sensors.items() if how.startswith("absent") and name.startswith("gpu")]
        return "; ".join((*found, *absent)) or "no sensor of it here"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        counts: dict[str, list[int]] = {}
        for run in self.runs:
            found = counts.setdefault(run.condition, [0, 0])
            found[0] += 1
            found[1] += run.logits_md5 != self.reference.logits_md5
        rows = "".join(f"<tr><td>{html.escape(c)}</td><td>{n}</td><td>{d}</td></tr>" for c, (n, d) in counts.items())
        words = "".join(f"<p>{html.escape(line)}</p>" for line in self._lines())
        return f"{words}<table><tr><th>condition</th><th>runs</th><th>divergent</th></tr>{rows}</table>"


@dataclass(frozen=True)
class BeforeAfter:
    """A rate without a remedy and the one with it; None where none was asked for."""

    before: Rate
    after: Rate | None

    @property
    def holds(self) -> bool:
        """Whether no run differs: with the remedy, where there is one."""
        return not (self.after or self.before).divergent_runs

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"before": self.before.to_json(), "after": None if self.after is None else self.after.to_json()}

    def __str__(self) -> str:
        return "\n".join(map(str, filter(None, (self.before, self.after))))


_USE = ("cpu_busy", "process_cores", "memory_mib", "_busy", "_memory_mib")


def _spread(values: Sequence[float]) -> dict[str, float]:
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    variation = deviation / mean if mean else 0.0
    return {"min": min(values), "max": max(values), "mean": mean, "std": deviation, "variation": variation}


def upper_bound(count: int, of: int) -> float:
    """Upper bound of a share at 95 %, one-sided: 3/n where nothing was counted, else Clopper and Pearson's exact one.

    >>> upper_bound(0, 100), upper_bound(100, 100), round(upper_bound(1, 100), 3)
    (0.03, 1.0, 0.047)
    """
    if not 0 <= count <= of or not of:
        raise UsageError(f"a share needs 0 <= count <= of and of at least 1; got {count} of {of}.")
    if count == 0:
        return min(1.0, 3 / of)
    if count == of:
        return 1.0
    low, high = count / of, 1.0
    for _ in range(60):  # the share at which so few would be seen once in twenty times
        share = (low + high) / 2
        terms = (math.lgamma(of + 1) - math.lgamma(i + 1) - math.lgamma(of - i + 1) + i * math.log(share)
                 + (of - i) * math.log1p(-share) for i in range(count + 1))  # fmt: skip
        if sum(map(math.exp, terms)) > 0.05:
            low = share
        else:
            high = share
    return high


def rate(model: nn.Module, prompts: Any, conditions: Sequence[Condition | str], runs: int = 100,
         remedy: str | Remedy | None = None, seed: int = 0, *, new_tokens: int = 8, tokenizer: Any = None,
         progress: Progress | None = None) -> Rate:  # fmt: skip
    """Runs the prompts again and again under conditions drawn at random, and counts the answers that part.

    Every run is executed, also where its condition was drawn before: what moves from run to run is seen, too. The answers are
    held against the first condition's. The bound is of draws of these conditions, not of conditions that are not among them.

    Args:
        model: a transformers causal language model in eval mode; it is left as it was.
        prompts: what `load_prompts` returns, or strings, or lists of token ids.
        conditions: what is drawn from, each as likely; the first is the reference.
        runs: how many.
        remedy: put in for all of them (see `detlab.remedies`): a name, or several joined by "+".
        seed: of the draw.
        new_tokens: tokens to decode after prefill.
        tokenizer: needed for text where the model was not loaded by `load_model`.
        progress: called with (runs done, runs in all, what).

    Returns:
        A `Rate`.

    Raises:
        UsageError: there is no condition or no run, or one of them cannot be used.
        MachineError: the remedy cannot be had on this machine.
    """
    if isinstance(conditions, str) or not conditions:
        raise UsageError(f'rate needs a list of conditions, such as ["batch_size=1", "batch_size=4"]; got {conditions!r}.')
    chosen = [Condition.parse(c) if isinstance(c, str) else c for c in conditions]
    if runs < 1:
        raise UsageError(f"runs={runs!r} is not possible; give a whole number of at least 1.")
    inputs = prepared(model, prompts, new_tokens, tokenizer)
    plan = Plan(()) if remedy is None else plan_of(remedy)
    if why := plan.reason(model):
        raise MachineError(f"the remedy {plan.name!r} cannot be had here: {why}.")
    changed = _changed(plan, chosen)
    draw = random.Random(seed)
    drawn = [changed[0], *(draw.choice(changed) for _ in range(runs))]
    served: list[Served] = []
    step = len(drawn) if plan.variables or any(c.variables for c in drawn) else max(10, len(drawn) // 10)
    with telemetry() as record:
        for start in range(0, len(drawn), step):  # a fresh process is started once for all runs, a tier entered once a step
            if progress is not None:
                progress(max(0, start - 1), runs, plan.name)
            served += serve(model, inputs, drawn[start : start + step], new_tokens, plan)
    if progress is not None:
        progress(runs, runs, plan.name)
    first = served[0].steps[0][0]
    records = []
    for number, (condition, one) in enumerate(zip(drawn, served, strict=True)):
        begin, end = (at - record.origin for at in (one.steps[0][0], one.steps[-1][1]))
        tokens = [hashlib.md5(repr(t).encode(), usedforsecurity=False).hexdigest() for t in one.tokens]
        records.append(
            RunRecord(number - 1, str(condition), condition.batch_size, one.md5, tokens, one.seconds,
                      one.steps[0][0] - first, record.between(begin, end))
        )  # fmt: skip
    return Rate(
        prompts=len(inputs), conditions=[str(c) for c in changed], remedy=plan.name, seed=seed, reference=records[0],
        runs=records[1:], sensors=record.sensors, environment=environment(),
    )  # fmt: skip


def _changed(plan: Plan, conditions: list[Condition]) -> list[Condition]:
    """The conditions with the remedy. A remedy that sizes batches is told of the largest."""
    largest = max(conditions, key=lambda c: c.batch_size)
    return [plan.changed(condition, largest)[0] for condition in conditions]

