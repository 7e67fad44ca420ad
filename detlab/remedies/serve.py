"""Serves conditions under remedies: in this process, or in fresh ones where a library must start with other variables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from detlab.serving import device_of, served_model, under_tier

__all__ = ["Served", "serve", "serve_here"]

WORKER = "detlab.remedies.worker"


@dataclass
class Served:
    """One condition, run.

    Attributes:
        logits: per prompt [num_steps, vocab].
        tokens: per prompt, one a step.
        seconds: spent in calls of the model, the loop around them left out.
        traced: the condition once more, with a trace; None where none was asked for.
    """

    logits: list[Tensor]
    tokens: list[list[int]]
    seconds: float
    traced: Run | None = field(default=None, repr=False)

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
    with plan.entered(Setup(model, inputs, tuple(conditions), new_tokens)) as served:
        with ExitStack() as stack:
            if len({condition.tier for condition in conditions}) == 1:  # the tier is put in once, not once a run
                for condition in dict.fromkeys(conditions):
                    with served_model(served, condition) as twin:
                        stack.enter_context(under_tier(twin, condition))
            for condition in conditions:
                with served_model(served, condition) as twin, _clock(twin, condition.tier) as seconds:
                    run = _execute(served, inputs, condition, new_tokens, with_trace=False)
                made.append(Served(run.logits, run.tokens, sum(seconds)))
            if trace:
                for condition, one in dict(zip(conditions, made, strict=True)).items():  # the last run of each
                    one.traced = _execute(served, inputs, condition, new_tokens, with_trace=True)
                    one.traced._source = None  # a comparison must not execute it again once the remedy is taken out
    return made


def _execute(model: nn.Module, inputs: list[list[int]], condition: Condition, new_tokens: int, *, with_trace: bool) -> Run:
    prompts = [Prompt(id=str(i), tokens=tuple(tokens)) for i, tokens in enumerate(inputs)]
    return execute(
        model, prompts, inputs, condition, new_tokens, None,
        save="digest", with_trace=with_trace, force=None, progress=None, keep=None, here=True,
    )  # fmt: skip


@contextmanager
def _clock(model: nn.Module, tier: str) -> Iterator[list[float]]:
    """Seconds of each call of a model.

    Under a tier the hooks are those of all modules: a tier takes a model with other hooks of its own for another model, whose
    ops it would have to look at again. A stock model has its own hooks: others might get into what is compiled.
    """
    seconds: list[float] = []
    started: list[float] = []
    device = device_of(model)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def begin(module: nn.Module, *_: Any) -> None:
        if module is model:
            started.append(now())

    def end(module: nn.Module, *_: Any) -> None:
        if module is model:
            seconds.append(now() - started.pop())

    if tier == "stock":
        handles = [model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end)]
    else:
        handles = [
            nn.modules.module.register_module_forward_pre_hook(begin),
            nn.modules.module.register_module_forward_hook(end),
        ]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


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
            served = Served(rows, record["tokens"], record["seconds"])
            if record["is_traced"]:
                run = load_trace(folder / f"run-{number}")
                assert isinstance(run, Run)
                if run.trace is not None:
                    run.trace.saved = run.trace.saved.moved()  # its files go with the folder
                served.traced = run
            made.append(served)
    return made
