"""What a remedy is: a named switch that may restore equality, and what it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from detlab.condition import Condition
from detlab.errors import UsageError
from detlab.serving import device_of

__all__ = ["FLAG", "GENERATION", "Plan", "Remedy", "Setup", "entered"]

# How a remedy is applied.
START, FLAG, CONDITION = "environment before start", "flag", "condition"
TIER, GENERATION, ADVICE = "tier", "generation config", "advice"

Pair = tuple[Condition, Condition]


@dataclass(frozen=True)
class Setup:
    """The experiment into which a remedy is put.

    Attributes:
        model: the model as the caller has it.
        inputs: token ids of each prompt.
        conditions: those that will be run, as the remedy changed them.
        new_tokens: tokens decoded after prefill.
    """

    model: nn.Module
    inputs: list[list[int]]
    conditions: tuple[Condition, ...]
    new_tokens: int


#: Puts a remedy in for the length of a block, yields the model to run (the caller's, or a copy), and takes it out.
Switch = Callable[[Setup], AbstractContextManager[nn.Module]]


@dataclass(frozen=True)
class Remedy:
    """A named switch that may restore equality.

    Attributes:
        name: by which `detlab.try_remedies` takes it.
        claim: what is said of it.
        where: "cpu", "cuda", "distributed": where there is something that it can act on.
        how: "environment before start", "flag", "condition", "tier", "generation config" or "advice".
        mechanism: how it could move bits, in one sentence; for a folk remedy, how the claim could come true.
        source: rows of the requirements.
        settings: the condition's settings that it makes the same on both sides.
        variables: environment variables that a library reads when it starts: they need a fresh process.
        change: what it makes of two conditions beyond ``settings``.
        switch: what it does around the runs; undone on leaving.
        needs: what this machine must have beyond a device of ``where``; returns why it is not to be had, or "".
        conflicts: names of remedies that cannot be combined with it, beyond those that change the same settings.
        advice: what to do by hand where detlab does not do it.
    """

    name: str
    claim: str
    where: tuple[str, ...]
    how: str
    mechanism: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Condition, Condition], Pair] | None = None
    switch: Switch | None = None
    needs: Callable[[nn.Module], str] | None = None
    conflicts: tuple[str, ...] = ()
    advice: str = ""

    def reason(self, model: nn.Module) -> str:
        """Why it cannot be tried on this machine with this model; "" where it can."""
        if self.how == ADVICE:
            return f"advice: {self.advice}"
        kind = device_of(model).type
        if kind not in self.where:
            if "cuda" in self.where:
                here = "the model is on the CPU" if torch.cuda.is_available() else "this machine has none"
                return f"needs CUDA: {here}"
            return f"needs {' or '.join(self.where)}; the model is on {kind}, in one process"
        return "" if self.needs is None else self.needs(model)

    @property
    def needs_restart(self) -> bool:
        """Whether it is read when a library starts."""
        return bool(self.variables) or bool({"aten_isa", "mkl_isa", "onednn_isa"} & set(self.settings))


@dataclass(frozen=True)
class Plan:
    """One or more remedies that are tried together.

    Raises:
        UsageError: they contradict one another.
    """

    parts: tuple[Remedy, ...]

    def __post_init__(self) -> None:
        for index, first in enumerate(self.parts):
            for second in self.parts[index + 1 :]:
                why = _conflict(first, second)
                if why:
                    raise UsageError(f"the remedies {first.name!r} and {second.name!r} conflict: {why}. Try one at a time.")

    @property
    def name(self) -> str:
        """Their names, joined by "+"."""
        return "+".join(part.name for part in self.parts)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of all parts."""
        return {name: value for part in self.parts for name, value in part.variables.items()}

    def reason(self, model: nn.Module) -> str:
        """Why it cannot be tried here; "" where it can."""
        return next((why for part in self.parts if (why := part.reason(model))), "")

    def changed(self, a: Condition, b: Condition) -> Pair:
        """The conditions with the remedies.

        Raises:
            ConditionError: no run can have the result.
        """
        for part in self.parts:
            if part.change is not None:
                a, b = part.change(a, b)
            a, b = replace(a, **part.settings), replace(b, **part.settings)
        return a, b

    @contextmanager
    def entered(self, setup: Setup) -> Iterator[nn.Module]:
        """The model with every part's switch put in; all are taken out on leaving, whatever happens."""
        with entered(self.parts, setup) as model:
            yield model


@contextmanager
def entered(parts: tuple[Remedy, ...], setup: Setup) -> Iterator[nn.Module]:
    """Puts switches in, the last around the model that the first ones yield."""
    with ExitStack() as stack:
        for part in parts:
            if part.switch is not None:
                setup = replace(setup, model=stack.enter_context(part.switch(setup)))
        yield setup.model


def _conflict(first: Remedy, second: Remedy) -> str:
    """Why two remedies cannot be combined; "" where they can."""
    if first.name == second.name:
        return "it is named twice"
    if second.name in first.conflicts or first.name in second.conflicts:
        return "each decides what the other is to decide"
    for kind, ours, theirs in (("setting", first.settings, second.settings), ("variable", first.variables, second.variables)):
        for name in sorted(ours.keys() & theirs.keys()):
            if ours[name] != theirs[name]:
                return f"the {kind} {name} would be {ours[name]} and {theirs[name]}"
    return ""
