"""Serves conditions under remedies: in this process, or in fresh ones where a library must start with other variables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from detlab import bits
from detlab.condition import Condition
from detlab.errors import UsageError
from detlab.process import child, send_model
from detlab.prompts import Prompt
from detlab.remedies.registry import REMEDIES
from detlab.remedies.remedy import Plan, Setup
from detlab.runner import Run, execute, load_trace
from detlab.serving import served_model, under_tier
from detlab.telemetry import timed_calls

__all__ = ["Served", "serve", "serve_here"]

WORKER = "detlab.remedies.worker"


@dataclass
class Served:
    """One condition, run.

    Attributes:
        logits: per prompt [num_steps, vocab].
        tokens: per prompt, one a step.
        steps: when each call of the model began and ended, by ``time.perf_counter``.
        traced: the condition once more, with a trace; None where none was asked for.
    """

    logits: list[Tensor]
    tokens: list[list[int]]
    steps: list[tuple[float, float]]
    traced: Run | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Spent in calls of the model, the loop around them left out."""
        return sum(end - begin for begin, end in self.steps)

    @property
    def md5(self) -> list[str]:
        """MD5 of each prompt's logits, dtype and shape included."""
        return [bits.md5(logits) for logits in self.logits]


def serve(model: nn.Module, inputs: list[list[int]], conditions: Sequence[Condition], new_tokens: int, plan: Plan,
          trace: bool = False) -> list[Served]:  # fmt: skip
    """Runs conditions one after another under a plan's remedies.

    Args:
        model: as for `detlab.run`.
        inputs: token ids of each prompt.
        conditions: as the plan changed them already; those that share environment variables share a process.
        new_tokens: tokens decoded after prefill.
        plan: remedies that are put in for the length of the call.
        trace: adds a traced run of each condition, to its last run.

    Raises:
        CaptureError, MachineError: a fresh process is needed, and the model cannot be sent, or the process failed.
    """
    found: dict[int, Served] = {}
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for index, condition in enumerate(conditions):
        groups.setdefault(tuple((condition.variables | plan.variables).items()), []).append(index)
    for variables, members in groups.items():
        chosen = [conditions[i] for i in members]
        if variables:
            made = _in_child(model, inputs, chosen, new_tokens, plan, dict(variables), trace)
        else:
            made = serve_here(model, inputs, chosen, new_tokens, plan, trace)
        found.update(zip(members, made, strict=True))
    return [found[index] for index in range(len(conditions))]


def serve_here(model: nn.Module, inputs: list[list[int]], conditions: Sequence[Condition], new_tokens: int, plan: Plan,
               trace: bool) -> list[Served]:  # fmt: skip
    """`serve` in this process, whose environment variables are set already."""
    made = []
    with plan.entered(Setup(model, inputs, tuple(conditions), new_tokens)) as served, _compiled(served, conditions) as chosen:
        with ExitStack() as stack:
            if len({c.tier for c in chosen}) == 1 and chosen[0].tier != "stock":  # the tier is put in once, not once a run
                for condition in dict.fromkeys(chosen):
                    with served_model(served, condition) as twin:
                        stack.enter_context(under_tier(twin, condition))
            for condition in chosen:
                # Without what the run will compile itself: the same module, whose calls are all that is looked at.
                bare = replace(condition, compile=None)
                with served_model(served, bare) as twin, timed_calls(twin, condition.tier != "stock") as steps:
                    run = _execute(served, inputs, condition, new_tokens, with_trace=False)
                made.append(Served(run.logits, run.tokens, steps))
            if trace:
                for condition, one in dict(zip(chosen, made, strict=True)).items():  # the last run of each
                    one.traced = _execute(served, inputs, condition, new_tokens, with_trace=True)
                    one.traced._source = None  # a comparison must not execute it again once the remedy is taken out
    return made


@contextmanager
def _compiled(model: nn.Module, conditions: Sequence[Condition]) -> Iterator[list[Condition]]:
    """Compiles once for all runs where all are compiled alike, and yields their conditions without it.

    A run that compiles for itself forgets what was compiled before, so that every run would be compiled anew.
    """
    names = {condition.compile for condition in conditions}
    if len(names) != 1 or None in names:
        yield list(conditions)
        return
    bare = [replace(condition, compile=None) for condition in conditions]
    with ExitStack() as stack:
        copies = []
        for condition in dict.fromkeys(bare):
            with served_model(model, replace(condition, attention=None)) as twin:
                copies.append(twin)
        for twin in {id(twin): twin for twin in copies}.values():
            stack.enter_context(served_model(twin, Condition(compile=conditions[0].compile)))
        yield bare


def _execute(model: nn.Module, inputs: list[list[int]], condition: Condition, new_tokens: int, *, with_trace: bool) -> Run:
    prompts = [Prompt(id=str(i), tokens=tuple(tokens)) for i, tokens in enumerate(inputs)]
    return execute(
        model, prompts, inputs, condition, new_tokens, None,
        save="digest", with_trace=with_trace, force=None, progress=None, keep=None, here=True,
    )  # fmt: skip


def _in_child(model: nn.Module, inputs: list[list[int]], conditions: list[Condition], new_tokens: int, plan: Plan,
              variables: dict[str, str], trace: bool) -> list[Served]:  # fmt: skip
    threads = torch.get_num_threads()
    unknown = [part.name for part in plan.parts if part.switch is not None and REMEDIES.get(part.name) is not part]
    if unknown:
        raise UsageError(f"the remedy {unknown[0]!r} is not in the registry, so a fresh process cannot find what it puts in.")
    request: dict[str, Any] = {
        "model": str(send_model(model)),
        "inputs": inputs,
        "conditions": [c.to_json() | {"threads": c.threads or threads} for c in conditions],
        "new_tokens": new_tokens,
        "plan": [part.name for part in plan.parts if part.switch is not None],
        "trace": trace,
    }
    made = []
    with child(request, variables, None, module=WORKER) as folder:
        logits = load_file(folder / "logits.safetensors")
        records = json.loads((folder / "served.json").read_text(encoding="utf-8"))
        for number, record in enumerate(records):
            rows = [logits[f"{number}.{prompt}"] for prompt in range(len(inputs))]
            served = Served(rows, record["tokens"], [(begin, end) for begin, end in record["steps"]])
            if record["is_traced"]:
                run = load_trace(folder / f"run-{number}")
                assert isinstance(run, Run)
                if run.trace is not None:
                    run.trace.saved = run.trace.saved.moved()  # its files go with the folder
                served.traced = run
            made.append(served)
    return made
