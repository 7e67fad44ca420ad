"""Questions with known answers for explain, graft and triage: models, calls and planted ops."""

from __future__ import annotations

import torch
from torch import nn

import detlab
from detlab import Condition
from detlab.trace.rules.registry import rule

C2_LENGTHS = (43, 56)


def tokens(length, seed=0):
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def compared(model, prompt, a, b, new_tokens=0, **options):
    """Two runs and their comparison; b is fed what a chose."""
    first = detlab.run(model, [prompt], a, new_tokens=new_tokens)
    second = detlab.run(model, [prompt], b, new_tokens=new_tokens, force=first.tokens if new_tokens else None)
    return first, second, detlab.compare(first, second, **options)


def batch_case(model):
    """C1: decode at batch 1 and 4."""
    return compared(model, tokens(24), Condition(), Condition(batch_size=4), new_tokens=2)


def padding_case(model, pad=3):
    """C3: left padding."""
    return compared(model, tokens(21, 4), Condition(), Condition(padding_side="left", padding=pad))


def cache_case(model):
    """C2: (two functions that repeat the calls, traces, comparison)."""
    ids = torch.tensor([tokens(max(C2_LENGTHS), 2)])

    def serve(length):
        with torch.no_grad():
            cache = model(ids[:, :length], use_cache=True).cache
            if length > C2_LENGTHS[0]:
                cache.crop(C2_LENGTHS[0] - length)
            model(torch.tensor([[77]]), cache=cache)

    again = [lambda length=length: serve(length) for length in C2_LENGTHS]
    traces = []
    for calls in again:
        with detlab.capture(model) as trace:
            calls()
        traces.append(trace)
    return again, traces, detlab.compare(*traces)


# --------------------------------------------------------------------------------------------------------- planted ops
_arrivals = [0]


@torch.library.custom_op("detlab_planted::sum_in_order", mutates_args=())
def sum_in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Adds each part of the last axis, then their sums in the order given; keeps the axis."""
    sums = [part.sum(-1, keepdim=True) for part in x.chunk(len(order), -1)]
    total = sums[order[0]]
    for at in order[1:]:
        total = total + sums[at]
    return total


@torch.library.custom_op("detlab_planted::racing_sum", mutates_args=())
def racing_sum(x: torch.Tensor, parts: int) -> torch.Tensor:
    """The same with the parts in another order each time, as they arrive."""
    _arrivals[0] += 1
    order = [(at * 3 + _arrivals[0]) % parts for at in range(parts)] if parts == 4 else list(range(parts))
    return sum_in_order(x, order)


@rule("sum_in_order", "racing_sum")
def _last_axis_is_gone(op):
    lay = op.lay(0)
    return None if lay is None else (*lay[:-1], ())


class Scaled(nn.Module):
    """Divides by a sum that a planted op makes."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return x / (2.0 + self.make(x).abs())


def with_sum(model, make, layer=0):
    """A copy of the model whose MLP input is scaled by a planted sum."""
    import copy

    twin = copy.deepcopy(model)
    block = twin.model.layers[layer]
    block.post_attention_layernorm = nn.Sequential(block.post_attention_layernorm, Scaled(make))
    return twin
