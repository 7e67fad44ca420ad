"""Mixtures of experts: each expert's rows are a canonical linear call, each token's experts are added in a fixed order.

How many rows an expert sees depends on what else is in the batch, so the stock kernels' row classes bite inside one
prefill. Here a token's result is the sum over its chosen experts, the likeliest first, in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from detlab.engine.linear import CanonicalLinear
from detlab.engine.session import Options
from detlab.engine.watch import NoCopy
from detlab.errors import UsageError

__all__ = ["CanonicalExperts", "CanonicalRouter", "is_experts", "is_router"]


def is_experts(module: nn.Module) -> bool:
    """Whether a module keeps its experts' weights stacked, as transformers does: [experts, out, in]."""
    weights = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    return all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights)


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router that applies its own weight, [experts, hidden], by a plain ``F.linear``."""
    weight = vars(module).get("_parameters", {}).get("weight")
    return type(module).__name__.endswith(("Router", "Gate")) and isinstance(weight, nn.Parameter) and weight.ndim == 2


class CanonicalExpert(nn.Module):
    """One expert: a module of its own, so that a trace names it, whichever other experts have rows."""

    def __init__(self, up: CanonicalLinear, down: CanonicalLinear, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        """The expert's result for [rows, hidden]."""
        gate, up = self.up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


class CanonicalExperts(NoCopy):
    """The forward of a module of stacked experts.

    Attributes:
        experts: one module each, for the model to take in as children while the tier is in force.
    """

    def __init__(self, module: Any, activation: Callable[[Tensor], Tensor], what: str, options: Options) -> None:
        """Packs the experts' weights.

        Raises:
            UsageError: the experts are stored or computed in a way that is not covered.
        """
        self.owners: list[nn.Module] = [module]
        self._source, self._activation, self._what, self._options = module, activation, what, options
        odd = [name for name in ("is_transposed", "has_bias", "has_post_expert_norm") if getattr(module, name, False)]
        odd += [name for name in ("is_concatenated", "has_gate") if not getattr(module, name, True)]
        if odd or getattr(module, "_is_expert_parallel", False):
            raise UsageError(
                f"{what}: experts of this layout ({', '.join(odd) or 'split over processes'}) are not covered by the "
                "invariant tier; Mixtral's and Qwen's are."
            )
        self.refresh()

    def refresh(self) -> None:
        """Packs the weights as they are now; the experts' modules stay."""
        module, options = self._source, self._options
        packed = []
        for name in ("gate_up_proj", "down_proj"):
            weights = getattr(module, name).detach()
            packed.append([CanonicalLinear(w, None, f"{self._what}.{name}", options.is_padded) for w in weights])
        if not hasattr(self, "experts"):
            self.experts = [CanonicalExpert(u, d, self._activation).eval() for u, d in zip(*packed, strict=True)]
        for expert, up, down in zip(self.experts, *packed, strict=True):
            expert.up, expert.down = up, down

    def layers(self) -> list[CanonicalLinear]:
        """All products."""
        return [layer for expert in self.experts for layer in (expert.up, expert.down)]

    def tune(self) -> None:
        """Looks up the rules for the number of threads now set."""
        for layer in self.layers():
            layer.tune()

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the module's forward: [tokens, hidden] and each token's experts and weights, [tokens, chosen]."""
        tokens, chosen = top_k_index.shape
        if tokens == 1:  # nothing to sort
            chosen_experts = [self.experts[expert] for expert in top_k_index[0].tolist()]
            return self._combine(torch.stack([expert(hidden_states) for expert in chosen_experts], 1), top_k_weights)
        choices = top_k_index.reshape(-1)
        order = choices.argsort(stable=True)
        counts = torch.bincount(choices, minlength=len(self.experts)).tolist()
        results, start = [], 0
        for expert, count in zip(self.experts, counts, strict=False):
            if count:
                mine = order[start : start + count]
                results.append(expert(hidden_states[mine // chosen]))
                start += count
        unsorted = torch.cat(results)[order.argsort()]
        return self._combine(unsorted.view(tokens, chosen, -1), top_k_weights)

    @staticmethod
    def _combine(results: Tensor, weights: Tensor) -> Tensor:
        """Adds each token's weighted results, [tokens, chosen, hidden], the likeliest first."""
        parts = results.float() * weights.float().unsqueeze(-1)
        total = parts[:, 0]
        for choice in range(1, parts.shape[1]):
            total = total + parts[:, choice]
        return total.to(results.dtype)


class _CanonicalWeights(TorchFunctionMode):
    """Sends ``F.linear`` of known weights to canonical layers."""

    def __init__(self, layers: dict[int, CanonicalLinear]) -> None:
        super().__init__()
        self.layers = layers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and len(args) == 2 and not kwargs:
            layer = self.layers.get(id(args[1]))
            if layer is not None:
                return layer(args[0])
        return func(*args, **(kwargs or {}))


class CanonicalRouter(NoCopy):
    """The forward of a router, its own but for the product with its weight."""

    def __init__(self, module: Any, what: str, options: Options) -> None:
        """Packs the router's weight."""
        self.original = module.forward
        self.owners: list[nn.Module] = [module]
        self._what, self._options = what, options
        self.refresh()

    def refresh(self) -> None:
        """Packs the weight as it is now."""
        weight: Any = self.owners[0].weight
        self.layer = CanonicalLinear(weight, None, self._what, self._options.is_padded)
        self.known = {id(weight): self.layer}

    def tune(self) -> None:
        """Looks up the rule for the number of threads now set."""
        self.layer.tune()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward."""
        with _CanonicalWeights(self.known):
            return self.original(*args, **kwargs)
