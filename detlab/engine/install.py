"""What both tiers do when they are put into a model: its attention, the weights put aside, siblings that share an input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from detlab.engine.experts import is_experts
from detlab.engine.probes import draw
from detlab.engine.session import Session
from detlab.engine.step import canonical_mask
from detlab.errors import UsageError

__all__ = ["SIBLINGS", "check_linear", "install_attention", "is_plain_linear", "release"]

#: Linear siblings that models feed one tensor.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def check_linear(module: Any, name: str, tier: str) -> None:
    """Refuses a linear layer that computes its product in a way of its own."""
    if type(module) not in (nn.Linear, Conv1D):
        raise UsageError(
            f"{name} is a {type(module).__name__}, a linear layer with a product of its own; the {tier} tier covers "
            "torch's Linear and transformers' Conv1D."
        )


def is_plain_linear(module: Any) -> bool:
    """Whether a linear layer computes ``x @ W.T + b``: torch's, transformers' Conv1D, or a subclass that is seen to do so."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    weight = module.weight.detach()
    x = draw(5, weight.shape[1], dtype=weight.dtype, seed=weight.shape[0], device=weight.device)
    try:
        found: Any = module(x)
    except Exception:  # it takes or gives something else
        return False
    if not isinstance(found, Tensor) or found.shape != (5, weight.shape[0]) or found.dtype != weight.dtype:
        return False
    product, most = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    given: Any = module.bias
    bias = torch.zeros_like(product) if given is None else given.double()
    allowed = 4 * weight.shape[1] ** 0.5 * torch.finfo(torch.float32).eps * most  # added in float32, rounded once or twice
    allowed += 2 * torch.finfo(weight.dtype).eps * (product.abs() + bias.abs())
    return bool(((found.double() - product - bias).abs() <= allowed).all())


def release(session: Session, parameters: Sequence[nn.Parameter]) -> None:
    """Puts weights aside of which copies compute, unless another module (an embedding) reads them, too."""
    model = session.model()
    if session.shelf is None or model is None:
        return
    for parameter in parameters:
        readers = [m for m in model.modules() if any(p is parameter for p in m.parameters(recurse=False))]
        if all(isinstance(m, (nn.Linear, Conv1D)) or is_experts(m) for m in readers):
            session.shelf.put(parameter)


def install_attention(session: Session, model: PreTrainedModel, name: str, attention: Callable[..., Any]) -> None:
    """Registers an attention with transformers under a name, and has the model use it until the session ends."""
    register = functools.partial(_register, name, attention)
    register(lambda call: call)
    configs: dict[int, Any] = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        before = getattr(config, "_attn_implementation_internal", None)
        config._attn_implementation = name
        session.on_undo(functools.partial(setattr, config, "_attn_implementation_internal", before))
    session.wrappers.append(register)
    session.parts["attention"] = "attention"


def _register(name: str, attention: Callable[..., Any],
              wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:  # fmt: skip
    """Registers the attention and its mask, wrapped; returns what registers them unwrapped."""
    AttentionInterface.register(name, wrap(attention))
    AttentionMaskInterface.register(name, wrap(canonical_mask))

    def undo() -> None:
        _register(name, attention, lambda call: call)

    return undo
