"""The exact tier: which module of a model is replaced by which exact part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from detlab.engine.elementwise import is_activation
from detlab.engine.exact.attention import exact_attention
from detlab.engine.exact.experts import ExactExperts, ExactRouter
from detlab.engine.exact.functions import activation_of
from detlab.engine.exact.linear import SPEC, ExactLinear, Prepared, Unprepared
from detlab.engine.exact.machine import choose_kernel
from detlab.engine.exact.norms import is_norm, norm_of
from detlab.engine.exact.rotary import ExactRotary
from detlab.engine.experts import is_experts, is_router
from detlab.engine.install import SIBLINGS, check_linear, install_attention, release
from detlab.engine.linear import weight_of
from detlab.engine.session import Session
from detlab.engine.watch import NoCopy, version_of

__all__ = ["SPEC", "install", "prepared_weights"]

_ATTENTION = "detlab_exact"
_PREPARED = ("linear", "experts")

_ready: dict[str, Prepared] = {}


@contextmanager
def prepared_weights(prepared: Mapping[str, Prepared]) -> Iterator[None]:
    """In this block a model is put under the tier with weights prepared before; layers not named are prepared as usual.

    Args:
        prepared: by name, as `store.prepare_model` names them; `store.load_prepared` checks that they are the model's.
    """
    _ready.update(prepared)
    try:
        yield
    finally:
        for name in prepared:
            _ready.pop(name, None)


def install(session: Session, model: PreTrainedModel) -> None:
    """Puts the parts in.

    Raises:
        UsageError: a module is one that the tier does not know how to compute exactly, or a weight is not finite.
        MachineError: this machine's arithmetic is not exact.
    """
    kernel = choose_kernel(next(model.parameters()).device)
    with _progress(session, model) as done:
        grouped = _groups(session, model, kernel, done)
        for name, module in model.named_modules():
            kind, part = _part_for(session, name, module, kernel, grouped)
            if part is not None:
                session.replace(module, name, kind, part)
            if kind in _PREPARED and name not in grouped:
                done(module)
    if session.wants("", "attention"):
        install_attention(session, model, _ATTENTION, exact_attention)


@contextmanager
def _progress(session: Session, model: nn.Module) -> Iterator[Callable[[Any], None]]:
    """Shows a bar, transformers' own, where preparing takes over five seconds; yields what a module adds to it."""
    total = sum(_size(module) for module in model.modules() if is_experts(module) or isinstance(module, (nn.Linear, Conv1D)))
    bar = transformers_logging.tqdm(
        total=total, desc="Preparing weights for the exact tier", unit="", unit_scale=True, delay=5, leave=False
    )

    def update(module: Any) -> None:
        session.tidy()  # what was freed is the system's again, before more is made
        bar.update(_size(module))

    try:
        yield update
    finally:
        bar.close()


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _part_for(session: Session, name: str, module: Any, kernel: str,
              grouped: dict[str, _Linear]) -> tuple[str, Callable[..., Any] | None]:  # fmt: skip
    """What replaces a module's forward, and its kind; None leaves the module as it is."""
    kind, make = _recipe(session, name, module, kernel, grouped)
    return (kind, make()) if kind and session.wants(name, kind) else (kind, None)


def _recipe(session: Session, name: str, module: Any, kernel: str,
            grouped: dict[str, _Linear]) -> tuple[str, Callable[[], Any]]:  # fmt: skip
    if isinstance(module, (nn.Linear, Conv1D)):
        return "linear", lambda: grouped.get(name) or _Group([module], [name], kernel, session).members[0]
    if is_experts(module):
        return "experts", lambda: _experts(session, name, module, kernel)
    if is_router(module):
        return "router", lambda: ExactRouter(module, name, kernel, _ready)
    if is_norm(module):
        return "norm", lambda: norm_of(module, name)
    if is_activation(module):
        return "activation", lambda: activation_of(module, name)
    if type(module).__name__.endswith("RotaryEmbedding"):
        return "rotary", lambda: _rotary(session, name, module)
    return "", lambda: None


def _rotary(session: Session, name: str, module: Any) -> ExactRotary:
    part = ExactRotary(module, name)
    session.forgetters.append(part.tables.clear)
    return part


def _experts(session: Session, name: str, module: Any, kernel: str) -> ExactExperts:
    activation = activation_of(getattr(module, "act_fn", nn.SiLU()), f"{name}.act_fn")
    part = ExactExperts(module, activation, name, kernel, _ready)
    release(session, [module.gate_up_proj, module.down_proj])
    return part


# ------------------------------------------------------------------------------------------------------------- linear
class _Group(NoCopy):
    """Linear layers that are given the same input: its digits are cut, and the products made, once for all of them."""

    def __init__(self, modules: Sequence[Any], names: Sequence[str], kernel: str, session: Session) -> None:
        for module, name in zip(modules, names, strict=True):
            check_linear(module, name, "exact")
        self.modules, self.names, self.kernel = modules, names, kernel
        self.members = [_Linear(self, index) for index in range(len(modules))]
        self.kept: tuple[Tensor, int, list[Tensor | None]] | None = None
        self.owners: list[nn.Module] = list(modules)
        self.refresh()
        session.take(self)
        release(session, [module.weight for module in modules])

    def tune(self) -> None:
        """Nothing: no number of threads changes what is exact."""

    def refresh(self) -> None:
        """Prepares the weights as they are now."""
        self.kept = None
        pairs = list(zip(self.modules, self.names, strict=True))
        weights = [_ready.get(name) or Unprepared(weight_of(module), name) for module, name in pairs]
        self.layer = ExactLinear(weights, [m.bias for m in self.modules], self.kernel)

    def result(self, index: int, x: Tensor) -> Tensor:
        """What one of the layers makes of x; the others' results are kept until they are asked for."""
        kept = self.kept  # read once: another thread may put its own in the meantime
        version = version_of(x)
        if kept is not None and kept[0] is x and kept[1] == version:
            out, kept[2][index] = kept[2][index], None
            if out is not None:
                if not any(r is not None for r in kept[2]):
                    self.kept = None
                return out
        made: list[Tensor] = list(torch.split_with_sizes(self.layer(x), self.layer.sizes, -1))
        if len(made) > 1:
            self.kept = x, version, [r if i != index else None for i, r in enumerate(made)]
        return made[index]


class _Linear:
    """The forward of a linear module."""

    def __init__(self, group: _Group, index: int) -> None:
        self.group, self.index = group, index

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name under which nn.Linear takes it
        return self.group.result(self.index, input)


def _groups(session: Session, model: nn.Module, kernel: str, done: Callable[[Any], None]) -> dict[str, _Linear]:
    """Layers of one parent that share their input, by name."""
    found: dict[str, _Linear] = {}
    for parent_name, parent in model.named_modules():
        for together in SIBLINGS:
            names = [f"{parent_name}.{n}" if parent_name else n for n in together]
            modules = [getattr(parent, n, None) for n in together]
            alike = all(type(m) is nn.Linear for m in modules) and len({m.in_features for m in modules}) == 1  # type: ignore[union-attr]
            if alike and all(session.wants(n, "linear") for n in names):
                group = _Group(modules, names, kernel, session)
                found.update(zip(names, group.members, strict=True))
                for module in modules:
                    done(module)
    return found
