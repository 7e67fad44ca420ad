"""The invariant tier: which module of a model is replaced by which canonical part."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from detlab.engine.attention import canonical_attention, unpadded_attention
from detlab.engine.elementwise import RotaryTable, canonical_elementwise, is_activation
from detlab.engine.experts import (
    CanonicalExperts,
    ParallelExperts,
    StackedIn,
    SummedExperts,
    gated,
    has_own_gate,
    is_experts,
    is_gateless_experts,
    is_router,
)
from detlab.engine.install import SIBLINGS, install_attention, is_plain_linear, release
from detlab.engine.linear import CanonicalLinear, weight_of
from detlab.engine.mixers import GatedNorm, is_gated_norm
from detlab.engine.mixing import mixer_part
from detlab.engine.norms import CanonicalNorm, is_norm
from detlab.engine.own_attention import OwnAttention, own_attention
from detlab.engine.own_ops import OwnOps, calls_by_name
from detlab.engine.session import Session
from detlab.engine.watch import NoCopy, version_of

__all__ = ["install"]


def install(session: Session, model: PreTrainedModel) -> None:
    """Puts the parts in.

    Raises:
        UsageError: a module is one that the tier does not know how to make invariant.
        MachineError: this machine has no stable shape for one of its products.
    """
    groups = _groups(session, model)
    for name, module in list(model.named_modules()):
        if name in groups:
            group, place = groups[name]
            session.replace(module, name, "linear", functools.partial(group.part, place))
            continue
        kind, part = _part_for(session, name, module)
        if part is not None:
            session.replace(module, name, kind, part)
    if session.wants("", "attention"):
        is_padded = session.options.is_padded
        name, attention = ("detlab_invariant", canonical_attention) if is_padded else ("detlab_unpadded", unpadded_attention)
        install_attention(session, model, name, attention)
    session.tidy()


def _part_for(session: Session, name: str, module: Any) -> tuple[str, Callable[..., Any] | None]:
    """What replaces a module's forward, and its kind; None leaves the module as it is."""
    mixer = mixer_part(module, name)
    if mixer is not None:
        if not session.wants(name, "mixer"):
            return "mixer", None
        mixing = mixer(module, name, session)
        session.take(mixing)
        return "mixer", mixing
    if own_attention(module):
        return "own", OwnAttention(module, name, session) if session.wants("", "attention") else None
    if is_gated_norm(module):
        return "norm", GatedNorm(module) if session.wants(name, "norm") else None
    if module in session.parts_of:  # a part of the module around it computes what this one would
        return "", None
    if isinstance(module, (nn.Linear, Conv1D)):
        if not session.wants(name, "linear"):
            return "linear", None
        if not is_plain_linear(module):
            own_linear = OwnOps(module, name, session)
            session.take(own_linear)
            return "own", own_linear
        linear = _Linear(module, name, session)
        session.take(linear)
        return "linear", linear
    if type(module).__name__ == "Llama4TextMoe" and session.wants(name, "experts"):
        activation = module.experts.act_fn
        summed = SummedExperts(module, canonical_elementwise(activation.forward), name, session)
        session.take(summed)
        return "experts", summed
    if type(module).__name__ == "JetMoeParallelExperts" and session.wants(name, "experts"):
        parallel = ParallelExperts(module, name, session.options)
        session.take(parallel)
        return "experts", parallel
    if type(module).__name__ == "DbrxExperts" and session.wants(name, "experts"):
        between = gated(canonical_elementwise(module.mlp.activation_fn.forward))
        stacked = CanonicalExperts(StackedIn(module), between, name, session.options)
        stacked.owners = [module.mlp]
        session.take(stacked)
        return "experts", stacked
    if is_experts(module) or is_gateless_experts(module):
        return "experts", _experts(session, name, module) if session.wants(name, "experts") else None
    if is_router(module):
        if not session.wants(name, "router"):
            return "router", None
        router = OwnOps(module, name, session)
        session.take(router)
        return "router", router
    if is_norm(module) and session.options.is_padded:
        return "norm", CanonicalNorm(module, name) if session.wants(name, "norm") else None
    if is_activation(module):
        return "activation", canonical_elementwise(module.forward) if session.wants(name, "activation") else None
    if type(module).__name__.endswith("RotaryEmbedding") and session.wants(name, "rotary"):
        table = RotaryTable(module)
        session.forgetters.append(table.refresh)
        session.parts_of[module] = table
        return "rotary", table
    if calls_by_name(cast(Any, type(module))) and session.wants(name, "own"):
        own = OwnOps(module, name, session)
        session.take(own)
        return "own", own
    return "", None


def _experts(session: Session, name: str, module: Any) -> CanonicalExperts:
    """The experts, with what the module computes between their two products."""
    between: Callable[[Tensor], Tensor]
    if has_own_gate(module):
        between = OwnOps(module, name, session, module._apply_gate)
    else:
        activation = getattr(module, "act_fn", nn.functional.silu)
        # Its forward, not the module: the experts share it, and a trace is to see each expert's own.
        activation = canonical_elementwise(activation.forward if isinstance(activation, nn.Module) else activation)
        between = gated(activation) if getattr(module, "has_gate", True) else activation
    experts = CanonicalExperts(module, between, name, session.options)
    session.take(experts)
    for number, expert in enumerate(experts.experts):
        module.add_module(str(number), expert)
        session.on_undo(functools.partial(module._modules.pop, str(number)))
    first = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj
    _release(session, [first, module.down_proj], experts.layers())
    return experts


def _release(session: Session, parameters: list[nn.Parameter], layers: list[CanonicalLinear]) -> None:
    """Puts weights aside whose packed copies compute; the plain kernel computes of the weight itself."""
    if all(layer.kernel == "packed" for layer in layers):
        release(session, parameters)


class _Linear(NoCopy):
    """The forward of a linear module."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        self.module, self.name, self.options = module, name, session.options
        self.owners = [module]
        self.refresh()
        _release(session, [module.weight], [self.layer])

    def refresh(self) -> None:
        """Packs the weight as it is now."""
        self.layer = CanonicalLinear(
            weight_of(self.module), self.module.bias, self.name, self.options.is_padded, self.options.block
        )

    def tune(self) -> None:
        """Looks up the rule for the number of threads now set."""
        self.layer.tune()

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name under which nn.Linear takes it
        return self.layer(input)


class _Group(NoCopy):
    """Linear siblings that are given the same tensor one after the other: one product computes all of them.

    The first that is called computes, the others find their part. A part is handed out once, to the thread that computed it.
    """

    def __init__(self, modules: list[nn.Linear], name: str, session: Session) -> None:
        self.modules, self.name, self.options = modules, name, session.options
        self.sizes = [module.out_features for module in modules]
        self.ready = threading.local()
        self.owners: list[nn.Module] = list(modules)
        self.refresh()
        _release(session, [cast(nn.Parameter, module.weight) for module in modules], [self.layer])

    def refresh(self) -> None:
        """Packs the weights as they are now."""
        self.ready.__dict__.clear()
        weight = torch.cat([module.weight.detach() for module in self.modules])
        biases: list[Any] = [module.bias for module in self.modules]
        bias = None if biases[0] is None else torch.cat(biases).detach()
        self.layer = CanonicalLinear(weight, bias, self.name, self.options.is_padded, self.options.block)

    def tune(self) -> None:
        """Looks up the rule for the number of threads now set."""
        self.layer.tune()

    def part(self, index: int, x: Tensor) -> Tensor:
        """One module's result."""
        ready = self.ready
        if getattr(ready, "x", None) is x and ready.version == version_of(x) and ready.parts[index] is not None:
            part: Tensor = ready.parts[index]
            ready.parts[index] = None
            ready.left -= 1
            if not ready.left:
                ready.x = None  # an activation is not kept alive for nothing
            return part
        parts: list[Tensor | None] = list(self.layer(x).split(self.sizes, -1))  # type: ignore[no-untyped-call]
        mine, parts[index] = parts[index], None
        ready.x, ready.version, ready.parts, ready.left = x, version_of(x), parts, len(parts) - 1
        assert mine is not None
        return mine


def _groups(session: Session, model: PreTrainedModel) -> dict[str, tuple[_Group, int]]:
    """Module name -> its group, and its place there."""
    found: dict[str, tuple[_Group, int]] = {}
    for name, parent in model.named_modules():
        for siblings in SIBLINGS:
            modules = [getattr(parent, sibling, None) for sibling in siblings]
            names = [f"{name}.{sibling}" for sibling in siblings]
            if any(type(m) is not nn.Linear for m in modules) or not all(session.wants(n, "linear") for n in names):
                continue
            linears = [m for m in modules if isinstance(m, nn.Linear)]
            if len({(m.in_features, m.bias is None, m.weight.dtype) for m in linears}) > 1:
                continue
            group = _Group(linears, f"{name}.{'+'.join(siblings)}", session)
            session.take(group)
            found |= {n: (group, place) for place, n in enumerate(names)}
    return found
