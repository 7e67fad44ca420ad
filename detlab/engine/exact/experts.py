"""Mixtures of experts: exact products, a router whose softmax and choice are portable, a fixed order of addition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from detlab.engine.exact.functions import softmax
from detlab.engine.exact.linear import ExactLinear, Prepared, Unprepared, rounded
from detlab.engine.exact.shown import shown
from detlab.engine.experts import has_own_gate
from detlab.errors import UsageError

__all__ = ["ExactExperts", "ExactRouter", "chosen", "combined"]

_LAYOUT = {"is_transposed": False, "has_bias": False, "has_post_expert_norm": False, "is_concatenated": True, "has_gate": True}


def combined(results: Tensor, weights: Tensor) -> Tensor:
    """The sum of a token's experts, the first chosen first.

    Each product is exact in float64 (24 times 24 bits), each addition rounded to float64, the sum to the results' dtype.

    Args:
        results: [tokens, chosen, hidden].
        weights: [tokens, chosen].
    """
    parts = results.double() * weights.double().unsqueeze(-1)
    total = parts[:, 0]
    for choice in range(1, parts.shape[1]):
        total = total + parts[:, choice]
    return rounded(total, results.dtype)


class ExactExperts:
    """The forward of a module of stacked experts, [experts, out, in]."""

    def __init__(self, module: Any, activation: Callable[[Tensor], Tensor], what: str, kernel: str,
                 ready: Mapping[str, Prepared]) -> None:  # fmt: skip
        """Prepares the experts' weights, but for those that are ready, by name and number.

        Raises:
            UsageError: the experts are stored or computed in a way that is not covered.
        """
        odd = [name for name, usual in _LAYOUT.items() if bool(getattr(module, name, usual)) != usual]
        if has_own_gate(module):
            odd.append("a gate of its own")
        if odd or getattr(module, "_is_expert_parallel", False):
            raise UsageError(
                f"{what}: experts of this layout ({', '.join(odd) or 'split over processes'}) are not covered by the exact "
                "tier; Mixtral's and Qwen's are."
            )
        self.activation = activation

        def layers(kind: str) -> list[ExactLinear]:
            made = []
            for number, weight in enumerate(getattr(module, kind).detach()):
                name = f"{what}.{kind}.{number}"
                made.append(ExactLinear([ready.get(name) or Unprepared(weight, name)], [None], kernel))
            return made

        self.up, self.down = layers("gate_up_proj"), layers("down_proj")

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the module's forward: [tokens, hidden] and each token's experts and weights, [tokens, chosen]."""
        return shown("experts", self._apply, hidden_states, top_k_index, top_k_weights)

    def _apply(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, count = top_k_index.shape
        experts = top_k_index.reshape(-1)
        order = experts.argsort(stable=True)
        sizes = torch.bincount(experts, minlength=len(self.up)).tolist()
        results = hidden_states.new_zeros(tokens * count, hidden_states.shape[-1])
        start = 0
        for expert, size in enumerate(sizes[: len(self.up)]):
            if size:
                mine = order[start : start + size]
                gate, up = self.up[expert](hidden_states[mine // count]).chunk(2, -1)
                results[mine] = self.down[expert](self.activation(gate) * up)
                start += size
        return combined(results.view(tokens, count, -1), top_k_weights)


def chosen(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of the last dimension and where they are, the largest first; of equal ones, the one of lower index."""
    ordered, index = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered[..., :count], index[..., :count]


def _sum_in_order(x: Tensor) -> Tensor:
    """The sum over the last dimension, one addition after the other in float64, rounded once: [..., 1]."""
    wide = x.double()
    total = wide[..., :1]
    for index in range(1, x.shape[-1]):
        total = total + wide[..., index : index + 1]
    return rounded(total, x.dtype)


_MOVES = {"reshape", "view", "float", "to", "__get__", "size", "__getitem__", "dim", "type", "contiguous", "squeeze"}
_ONCE = {"div", "div_", "__itruediv__", "__truediv__", "true_divide", "mul", "mul_", "__mul__", "__imul__", "__rmul__"}


class _Replaced(TorchFunctionMode):
    """Sends a router's product, softmax, choice and sum to exact ones, and refuses what it does not know."""

    def __init__(self, router: ExactRouter) -> None:
        super().__init__()
        self.router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if func is torch.nn.functional.linear and len(args) == 2 and args[1] is self.router.weight:
            with torch._C.DisableTorchFunction():
                return self.router.layer(args[0])
        if name == "softmax" and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, args[0].ndim - 1):
            dtype = kwargs.get("dtype") or args[0].dtype
            return rounded(softmax(args[0].float()).double(), dtype)
        if name == "topk" and len(args) == 2 and not set(kwargs) - {"dim"} and kwargs.get("dim", -1) in (-1, args[0].ndim - 1):
            return chosen(args[0], args[1])
        if name == "sum" and kwargs == {"dim": -1, "keepdim": True} and len(args) == 1:
            return _sum_in_order(args[0])
        if name in _MOVES or name in _ONCE:
            return func(*args, **kwargs)
        raise UsageError(
            f"{self.router.what} is a {type(self.router.module).__name__} that computes {name}, which the exact tier does not "
            "know of routers; it covers Mixtral's and Qwen's (softmax, top-k, division by the sum)."
        )


class ExactRouter:
    """The forward of a router, its own but for what it adds up, and for how it chooses between equals."""

    def __init__(self, module: Any, what: str, kernel: str, ready: Mapping[str, Prepared]) -> None:
        """Prepares the router's weight, unless it is ready."""
        self.module, self.what, self.original = module, what, module.forward
        self.weight = module.weight
        self.layer = ExactLinear([ready.get(what) or Unprepared(module.weight, what)], [None], kernel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward."""
        with _Replaced(self):
            return self.original(*args, **kwargs)
