"""A compiled region as an origin: the module alone, eager and compiled, on the inputs that the run gave it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from detlab.divergence.explain_factors import Factor
from detlab.divergence.explain_result import KERNEL, NOT_REPRODUCED, Explanation, Mechanism
from detlab.divergence.kernels import Kernel
from detlab.divergence.replay import Side
from detlab.divergence.result import Divergence
from detlab.divergence.rows import OpComparison
from detlab.errors import TraceError
from detlab.serving import served_model
from detlab.trace.live import tensors_in
from detlab.trace.records import REGION

EAGER, COMPILED, EMULATED = "eager", "compiled", "compiled, precision casts emulated"


def explain_region(a: Side, b: Side, found: OpComparison, divergence: Divergence) -> Explanation:
    """Executes a module alone: as it is, compiled, and compiled with every rounding that separate ops would make.

    Raises:
        TraceError: the repetition did not come by the module.
    """
    started = time.perf_counter()
    compiled_side = a if _is_region(a, found.a) else b
    eager_side = b if compiled_side is a else a
    call = eager_side.trace.calls[_call(eager_side, found, a)].index
    name = compiled_side.trace.ops[found.a if compiled_side is a else found.b].module
    module, args, kwargs, output = _met(eager_side, name, call)
    made = {EAGER: _called(module, args, kwargs)}
    for way, options in ((COMPILED, False), (EMULATED, True)):
        torch._dynamo.reset()
        with torch._inductor.config.patch(emulate_precision_casts=options):
            made[way] = _called(torch.compile(module.forward), args, kwargs)
    torch._dynamo.reset()
    classes: dict[bytes, list[str]] = {}
    for way, tensor in made.items():
        classes.setdefault(_bytes(tensor), []).append(way)
    ours, theirs = (EAGER, COMPILED) if eager_side is a else (COMPILED, EAGER)
    groups = tuple(map(tuple, classes.values()))
    like = {way: group for group in groups for way in group}
    factor = Factor("compilation", groups, like[ours], like[theirs], ours, theirs)
    result = Explanation(divergence, Mechanism(KERNEL, ""), factors=[factor], num_rows=divergence.num_rows)
    is_same = _bytes(output) == _bytes(made[EAGER])
    result.is_faithful = (is_same, is_same)
    result.reproduced = (is_same, factor.moves)
    result.differs_alone = factor.moves
    kernels = ([Kernel("ATen", f"separate ops of {name}")], [Kernel("inductor", REGION)])
    result.kernels = kernels if eager_side is a else kernels[::-1]
    result.mechanism = _mechanism(name, like, is_same, factor)
    result.seconds = time.perf_counter() - started
    return result


def _mechanism(name: str, like: dict[str, tuple[str, ...]], is_same: bool, factor: Factor) -> Mechanism:
    if not is_same or not factor.moves:
        return Mechanism(
            NOT_REPRODUCED, f"Not explained: {name}, executed alone on the captured inputs, does not show the "
            "difference between eager and compiled code.",
        )  # fmt: skip
    start = f"Another kernel: {name} is one compiled region on one side, whose generated code fuses its ops"
    if EMULATED in like[EAGER]:
        return Mechanism(
            KERNEL, f"{start} and keeps intermediate results in float32, where separate ops round each of them to the model's "
            "dtype; compiled with these roundings emulated (emulate_precision_casts) it gives the eager bits.",
        )  # fmt: skip
    return Mechanism(
        KERNEL, f"{start}; emulating the roundings of separate ops (emulate_precision_casts) does not restore the eager bits."
    )  # fmt: skip


def _is_region(side: Side, op: int) -> bool:
    return 0 <= op < len(side.trace.ops) and side.trace.ops[op].op == REGION


def _call(side: Side, found: OpComparison, a: Side) -> int:
    """The call of the eager side: of its own op where it has one, else where the module's output was made."""
    op = found.a if side is a else found.b
    return side.trace.ops[op].call if 0 <= op < len(side.trace.ops) else 0


def _met(side: Side, name: str, call: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]:
    """A module of the eager side, and what it was called with and returned in one call of the model."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []
    counts = {"calls": -1}
    context: Any = nullcontext(side.model) if side.run is None else served_model(side.model, replace(side.run.condition))
    with context as served:
        module = served.get_submodule(name)

    def root(*_: Any) -> None:
        counts["calls"] += 1

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if counts["calls"] == call and not seen:
            seen.append((_copied(args), _copied(kwargs), tensors_in(_listed(output))[0].clone()))

    handles = [served.register_forward_pre_hook(root), module.register_forward_hook(after, with_kwargs=True)]
    try:
        side.execute(None)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise TraceError(f"executing {side.name} again did not come by {name}.")
    return module, *seen[0]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return type(value)(_copied(item) for item in value) if type(value) in (list, tuple) else value


def _listed(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value


def _called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return tensors_in(_listed(function(*_copied(args), **_copied(kwargs))))[0].clone()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
