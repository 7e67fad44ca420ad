"""Mixtures of experts: each expert's rows are a canonical linear call, each token's experts are added in a fixed order.

How many rows an expert sees depends on what else is in the batch, so the stock kernels' row classes bite inside one
prefill. Here a token's result is the sum over its chosen experts, the likeliest first, in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from detlab.engine.linear import CanonicalLinear
from detlab.engine.session import Options, Session
from detlab.engine.watch import NoCopy
from detlab.errors import UsageError

__all__ = ["CanonicalExperts", "ParallelExperts", "StackedIn", "SummedExperts", "is_experts", "is_router"]


def is_experts(module: nn.Module) -> bool:
    """Whether a module keeps its experts' weights stacked, as transformers does: [experts, out, in]."""
    weights = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    return all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights)


def is_gateless_experts(module: nn.Module) -> bool:
    """Whether a module keeps stacked experts that have one product before their activation, and no gate."""
    weights = (getattr(module, "up_proj", None), getattr(module, "down_proj", None))
    return not getattr(module, "has_gate", True) and all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights)


def has_own_gate(module: nn.Module) -> bool:
    """Whether experts compute something else between their products than an activation and its product with the other half."""
    gate = getattr(module, "_apply_gate", None)
    return bool(getattr(module, "has_gate", True)) and gate is not None and gate.__name__ != "_default_apply_gate"


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router that applies its own weight, [experts, hidden], by a plain ``F.linear``."""
    weight = vars(module).get("_parameters", {}).get("weight")
    return type(module).__name__.endswith(("Router", "Gate")) and isinstance(weight, nn.Parameter) and weight.ndim == 2


class CanonicalExpert(nn.Module):
    """One expert: a module of its own, so that a trace names it, whichever other experts have rows."""

    def __init__(self, up: CanonicalLinear, down: CanonicalLinear, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = up, down, between

    def forward(self, x: Tensor) -> Tensor:
        """The expert's result for [rows, hidden]."""
        return self.down(self.between(self.up(x)))


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What most experts compute between their products: the activation of one half, times the other."""

    def between(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return between


class CanonicalExperts(NoCopy):
    """The forward of a module of stacked experts.

    Attributes:
        experts: one module each, for the model to take in as children while the tier is in force.
    """

    def __init__(self, module: Any, between: Callable[[Tensor], Tensor], what: str, options: Options) -> None:
        """Packs the experts' weights.

        Args:
            module: keeps the weights.
            between: computed of the first product's result, [rows, N]; the second product is applied to it.
            what: the module's name.
            options: how the tier is put in.

        Raises:
            UsageError: the experts are stored or computed in a way that is not covered.
        """
        self.owners: list[nn.Module] = [module]
        self._source, self._between, self._what, self._options = module, between, what, options
        if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
            odd = "split over processes" if getattr(module, "_is_expert_parallel", False) else "a norm after each expert"
            raise UsageError(f"{what}: experts of this kind ({odd}) are not covered by the invariant tier.")
        self.refresh()

    def refresh(self) -> None:
        """Packs the weights as they are now; the experts' modules stay."""
        module, options = self._source, self._options
        packed = []
        for name in ("gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj", "down_proj"):
            weights = getattr(module, name).detach()
            if getattr(module, "is_transposed", False):
                weights = weights.transpose(1, 2)
            biases = getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else [None] * len(weights)
            packed.append([
                CanonicalLinear(w, b, f"{self._what}.{name}", options.is_padded) for w, b in zip(weights, biases, strict=True)
            ])  # fmt: skip
        if not hasattr(self, "experts"):
            self.experts = [CanonicalExpert(u, d, self._between).eval() for u, d in zip(*packed, strict=True)]
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
        shape, hidden_states = hidden_states.shape, hidden_states.reshape(-1, hidden_states.shape[-1])
        return self._computed(hidden_states, top_k_index, top_k_weights).view(shape)

    def _computed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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


class SummedExperts(NoCopy):
    """The forward of Llama 4's mixture: every expert computes of every token times its score, 0 where it was not chosen.

    A token's experts are added in the order of their numbers, in float32, and rounded once. Those that make 0 of 0 are left
    out.
    """

    is_open = True

    def __init__(self, module: Any, activation: Callable[[Tensor], Tensor], what: str, session: Session) -> None:
        """Packs the experts' weights; the router and the shared expert have parts of their own."""
        self.module, self._what, self._options, self._activation = module, what, session.options, activation
        self.owners: list[nn.Module] = [module.experts]
        self._run: Callable[[Tensor, Tensor], Tensor] = self._compute
        self.refresh()
        session.wrappers.append(self._register)

    def _register(self, wrap: Callable[..., Callable[..., Any]]) -> Callable[[], None]:
        self._run = wrap(self._compute, "experts")

        def undo() -> None:
            self._run = self._compute

        return undo

    def refresh(self) -> None:
        """Packs the weights as they are now."""
        self.layers: list[tuple[CanonicalLinear, CanonicalLinear]] = []
        for up, down in zip(self.module.experts.gate_up_proj.detach(), self.module.experts.down_proj.detach(), strict=True):
            first, second = (CanonicalLinear(w.t(), None, self._what, self._options.is_padded) for w in (up, down))
            self.layers.append((first, second))

    def tune(self) -> None:
        """Looks up the rules for the number of threads now set."""
        for layers in self.layers:
            for layer in layers:
                layer.tune()

    def _compute(self, x: Tensor, scores: Tensor) -> Tensor:
        """The sum of all experts, [tokens, hidden], after scores [tokens, experts]."""
        total = torch.zeros_like(x, dtype=torch.float32)
        for number, (first, second) in enumerate(self.layers):
            chosen = (scores[:, number] != 0).nonzero()[:, 0]
            if len(chosen):
                gate, up = first(x[chosen] * scores[chosen, number : number + 1]).chunk(2, -1)
                total[chosen] += second(up * self._activation(gate)).float()
        return total.to(x.dtype)

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """As the module's forward."""
        x = hidden_states.reshape(-1, self.module.hidden_dim)
        scores, logits = self.module.router(x)
        return self.module.shared_expert(x) + self._run(x, scores), logits


class ParallelExperts(NoCopy):
    """The forward of one product of experts whose rows come sorted by expert, as JetMoE has it."""

    def __init__(self, module: Any, what: str, options: Options) -> None:
        """Packs the experts' weights, [experts, out, in]."""
        self.owners: list[nn.Module] = [module]
        self._what, self._options = what, options
        self.refresh()

    def refresh(self) -> None:
        """Packs the weights as they are now."""
        weights: Any = self.owners[0].weight
        self.layers = [CanonicalLinear(w, None, self._what, self._options.is_padded) for w in weights.detach()]

    def tune(self) -> None:
        """Looks up the rules for the number of threads now set."""
        for layer in self.layers:
            layer.tune()

    def __call__(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """As the module's forward: [rows, in], so many for each expert."""
        parts: list[Tensor] = list(inputs.split(expert_size))  # type: ignore[no-untyped-call]
        return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True) if len(part)])


class StackedIn:
    """DBRX's experts as others store them: what `CanonicalExperts` reads of a module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def _view(self, name: str) -> Tensor:
        module = self.module
        weight: Tensor = getattr(module.mlp, name).view(module.num_experts, module.ffn_hidden_size, module.hidden_size)
        return weight

    @property
    def gate_up_proj(self) -> Tensor:
        """[experts, 2 * inner, hidden]."""
        return torch.cat([self._view("w1"), self._view("v1")], 1)

    @property
    def down_proj(self) -> Tensor:
        """[experts, hidden, inner]."""
        return self._view("w2").transpose(1, 2)
