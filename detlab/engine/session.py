"""Puts a tier's parts into an unmodified model, and takes them out again.

Nothing of a model is replaced but the ``forward`` of single modules, as attributes of the instances, the name of its attention
implementation, and the layers of the caches that it is given. Taking the parts out leaves no trace.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.pytorch_utils import Conv1D

from detlab.engine.attention import canonical_attention
from detlab.engine.cache import adopt
from detlab.engine.elementwise import RotaryTable, canonical_elementwise, is_activation
from detlab.engine.experts import CanonicalExperts, CanonicalRouter, is_experts, is_router
from detlab.engine.linear import CanonicalLinear, weight_of
from detlab.engine.step import canonical_mask
from detlab.errors import UsageError

__all__ = ["TIERS", "Session", "apply", "restore", "session_of"]

TIERS = ("invariant",)
_ATTENTION = "detlab_invariant"
_CACHES = ("cache", "past_key_values")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Session:
    """A model under a tier.

    Attributes:
        tier: its name.
        parts: what was replaced: module name -> "linear", "attention", "activation", "rotary", "experts", "router", "model".
    """

    def __init__(self, model: PreTrainedModel, tier: str) -> None:
        self.model = weakref.ref(model)
        self.tier = tier
        self.parts: dict[str, str] = {}
        self.products: list[CanonicalExperts | CanonicalRouter | _Linear] = []
        self.tables: list[RotaryTable] = []
        self.threads = torch.get_num_threads()
        self.depth = 0
        self._undo: list[Callable[[], None]] = []

    def replace(self, module: nn.Module, name: str, kind: str, forward: Callable[..., Any]) -> None:
        """Gives one module another forward."""
        if "forward" in vars(module):
            raise UsageError(
                f"the forward of {name or 'the model'} was replaced already (compiled, or wrapped by another tool?); "
                "undo that before detlab.deterministic."
            )
        module.forward = forward
        self._undo.append(lambda: vars(module).pop("forward", None) and None)
        self.parts[name] = kind

    def tune(self) -> None:
        """Sees to it that the rules are those of the number of threads now set: which shapes are stable depends on it."""
        threads = torch.get_num_threads()
        if threads != self.threads:
            for part in self.products:
                for layer in part.layers():
                    layer.tune()
            self.threads = threads

    def forget(self) -> None:
        """Drops what calls left behind (rotary tables), so that the next call computes what the first one did."""
        for table in self.tables:
            table.tables.clear()

    @contextmanager
    def wrapped(self, wrap: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> Iterator[None]:
        """Puts a wrapper, made by ``wrap(forward, kind)``, around each of the tier's parts for the length of a block."""
        model = self.model()
        assert model is not None
        modules = [(model.get_submodule(name), kind) for name, kind in self.parts.items() if kind != "model"]
        before = [module.forward for module, _ in modules]
        try:
            for module, kind in modules:
                module.forward = wrap(module.forward, kind)
            AttentionInterface.register(_ATTENTION, wrap(canonical_attention, "attention"))
            AttentionMaskInterface.register(_ATTENTION, wrap(canonical_mask, "mask"))
            yield
        finally:
            AttentionInterface.register(_ATTENTION, canonical_attention)
            AttentionMaskInterface.register(_ATTENTION, canonical_mask)
            for (module, _), forward in zip(modules, before, strict=True):
                module.forward = forward

    def undo(self) -> None:
        """Takes everything out again, the last first."""
        while self._undo:
            self._undo.pop()()


_sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def session_of(model: nn.Module) -> Session | None:
    """The session a model is in; None outside of any."""
    return _sessions.get(model)


def apply(model: nn.Module, tier: str = "invariant") -> Session:
    """Puts a tier into a model. Applied again, it counts: as many `restore` calls take it out.

    Raises:
        UsageError: the model, or its state, is not one that the tier covers; the model is then as before.
        MachineError: this machine has no stable shape for one of its products.
    """
    if tier not in TIERS:
        raise UsageError(f"tier={tier!r} is not known; choose from {', '.join(TIERS)}.")
    with _lock:
        session = _sessions.get(model)
        if session is not None:
            if session.tier != tier:
                raise UsageError(
                    f"the model is under tier {session.tier!r} already; leave that context before entering {tier!r}."
                )
            session.depth += 1
            return session
        _check(model)
        assert isinstance(model, PreTrainedModel)
        session = Session(model, tier)
        try:
            with torch.no_grad():
                _install(session, model)
        except BaseException:
            session.undo()
            raise
        session.depth = 1
        _sessions[model] = session
        return session


def restore(model: nn.Module) -> None:
    """Takes the tier out of a model, once it was called as often as `apply`."""
    with _lock:
        session = _sessions.get(model)
        if session is None:
            raise UsageError("this model is under no tier.")
        session.depth -= 1
        if not session.depth:
            del _sessions[model]
            session.undo()


@contextmanager
def applied(model: nn.Module, tier: str = "invariant") -> Iterator[Session]:
    """`apply` for the length of a block."""
    session = apply(model, tier)
    try:
        yield session
    finally:
        restore(model)


def _check(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"a tier needs a transformers model; got {type(model).__name__}.")
    if model.training:
        raise UsageError("the model is in training mode, where dropout makes every call another one. Call model.eval().")
    parameters = list(model.parameters())
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    if not dtypes <= set(_DTYPES):
        raise UsageError(
            f"the invariant tier covers float32, bfloat16 and float16; the model has {', '.join(sorted(map(str, dtypes)))}."
        )
    devices = {p.device for p in parameters}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UsageError(f"the tier covers a model on one CPU or CUDA device; this one is on {', '.join(map(str, devices))}.")
    if model.config.is_encoder_decoder:
        raise UsageError(f"{type(model).__name__} is an encoder-decoder; the tier covers decoder-only language models.")


def _install(session: Session, model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            _install_linear(session, name, module)
        elif is_experts(module):
            activation = canonical_elementwise(getattr(module, "act_fn", nn.functional.silu))
            experts = CanonicalExperts(module, activation, name)
            session.products.append(experts)
            session.replace(module, name, "experts", experts)
        elif is_router(module):
            router = CanonicalRouter(module, name)
            session.products.append(router)
            session.replace(module, name, "router", router)
        elif is_activation(module):
            session.replace(module, name, "activation", canonical_elementwise(module.forward))
        elif type(module).__name__.endswith("RotaryEmbedding"):
            table = RotaryTable(module)
            session.tables.append(table)
            session.replace(module, name, "rotary", table)
        elif isinstance(module, PreTrainedModel):
            session.replace(module, name, "model", _guarded(session, module))
    _install_attention(session, model)


def _install_linear(session: Session, name: str, module: Any) -> None:
    if type(module) not in (nn.Linear, Conv1D):
        raise UsageError(
            f"{name} is a {type(module).__name__}, a linear layer with a product of its own; the invariant tier covers "
            "torch's Linear and transformers' Conv1D."
        )
    linear = _Linear(module, name)
    session.products.append(linear)
    session.replace(module, name, "linear", linear)


class _Linear:
    """The forward of a linear module; its weight is packed anew when it was changed in place, or replaced."""

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name
        self._pack()

    def _pack(self) -> None:
        self.layer = CanonicalLinear(weight_of(self.module), self.module.bias, self.name)
        self.weight, self.version = self.module.weight, self.module.weight._version

    def layers(self) -> Iterator[CanonicalLinear]:
        """The packed layer."""
        yield self.layer

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name under which nn.Linear takes it
        weight = self.module.weight
        if weight is not self.weight or weight._version != self.version:
            self._pack()
        return self.layer(input)


def _install_attention(session: Session, model: PreTrainedModel) -> None:
    AttentionInterface.register(_ATTENTION, canonical_attention)
    AttentionMaskInterface.register(_ATTENTION, canonical_mask)
    configs: dict[int, Any] = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        before = getattr(config, "_attn_implementation_internal", None)
        config._attn_implementation = _ATTENTION
        session._undo.append(functools.partial(setattr, config, "_attn_implementation_internal", before))


def _guarded(session: Session, module: Any) -> Callable[..., Any]:
    """The forward of a whole model: refuses a call that the tier does not cover, sees to its cache, computes no gradients."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        _check_call(module)
        session.tune()
        with torch.no_grad():
            return original(*args, **_with_cache(module, kwargs))

    return forward


def _check_call(module: Any) -> None:
    if module.training:
        raise UsageError("the model was put in training mode inside detlab.deterministic. Call model.eval().")
    if torch.is_autocast_enabled(next(module.parameters()).device.type):
        raise UsageError("autocast is on: inside detlab.deterministic the model computes in its own dtype. Leave autocast.")


def _with_cache(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments with a canonical cache: the caller's, or a new one where the model would make one."""
    for name in _CACHES:
        if kwargs.get(name) is not None:
            adopt(kwargs[name])
            return kwargs
    use_cache = kwargs.get("use_cache")
    if not (getattr(module.config, "use_cache", False) if use_cache is None else use_cache):
        return kwargs
    cache = DynamicCache(config=module.config)
    adopt(cache)
    return kwargs | {"cache": cache}
