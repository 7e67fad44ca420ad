"""Investigations that figures, reports and panels are tested on: made once, and known to diverge on every machine."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from detlab.divergence.result import Comparison, Grid
from detlab.divergence.rows import Block, OpComparisons, TraceComparison
from detlab.investigate import Investigation, investigate
from detlab.models import load_model
from detlab.trace.records import Call, OpRecord, Trace, row_keys

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]
PLANTED = ("model.embed_tokens", "mul")  # the op that is an origin whatever the processor does


def _scaled(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """One op, the same inputs, and another output where the batch is larger: an origin by construction."""
    return output * (1.0 if output.shape[0] == 1 else 1.0 + 2.0**-12)


@cache
def tiny() -> Any:
    """A tiny model with a planted divergence."""
    model, _ = load_model("tiny-llama")
    model.get_input_embeddings().register_forward_hook(_scaled)
    return model


def ask(a: str, b: str, progress: Any = None, *, measure: bool = True) -> Investigation:
    """Investigates the tiny model; not remembered."""
    return investigate(tiny(), PROMPTS, a=a, b=b, new_tokens=2, measure=measure, progress=progress)


@cache
def diverged() -> Investigation:
    return ask("", "batch_size=2")


@cache
def identical() -> Investigation:
    return ask("", "")


@cache
def other_path() -> Investigation:
    """Two attention kernels: a difference of code paths, where the planted one is out of reach."""
    return ask("attention=sdpa", "attention=eager")


def renamed(source: Investigation, **changes: Any) -> Investigation:
    """The same investigation with another comparison: `renamed(diverged(), prompt_ids=["<b>", "x"])`."""
    return replace(source, comparison=replace(source.comparison, **changes))


@dataclass
class Made(Comparison):
    """A comparison whose grid is given, for sizes that no test wants to run."""

    made: Any = field(default=None, repr=False)

    def grid(self, prompt: int | None = None) -> Grid:
        return self.made


def made(grid: Grid) -> Made:
    """A comparison around a grid."""
    return Made(
        verdict="diverged", first=None, origins=[], carriers=[], token_flips=[], rows_compared=grid.state.size, controls={},
        cosine=None, num_nan=(0, 0), logits_equal=False, teacher_forced=False, notes=[], label_a="default",
        label_b="batch_size=4", prompt_ids=["made"], made=grid,
    )  # fmt: skip


def large_grid(num_layers: int = 30, ops_per_layer: int = 40, num_tokens: int = 1000, seed: int = 0) -> Grid:
    """As many ops and tokens as a real model has, each layer's ops in eight modules, and an origin in each layer."""
    draw = np.random.default_rng(seed)
    modules = [f"model.layers.{i}.part_{j * 8 // ops_per_layer}" for i in range(num_layers) for j in range(ops_per_layer)]
    ops = [f"op_{j}" for _ in range(num_layers) for j in range(ops_per_layer)]
    state = draw.choice(np.array([0, 1, 2], np.uint8), (len(ops), num_tokens), p=[0.05, 0.25, 0.7])
    state[::ops_per_layer, num_tokens // 2] = 3
    size = np.where(state > 1, 10.0 ** draw.uniform(-8, 2, state.shape), np.where(state == 1, 0.0, np.nan))
    size[draw.random(size.shape) < 0.1] = np.nan
    return Grid(0, modules, ops, list(range(num_tokens)), state, size)


def large_comparison(grid: Grid | None = None) -> Comparison:
    """The same as a comparison with everything that a panel looks up: traces' names, rows and sizes of every op."""
    grid = large_grid() if grid is None else grid
    keys = row_keys(np.zeros(len(grid.positions), np.int64), np.asarray(grid.positions))
    numbers = np.arange(len(grid.ops))
    call = Call(0, 0, np.zeros(1, np.int64), keys[None], range(len(keys)), np.zeros((1, len(keys)), np.int64))
    trace = Trace(calls=[call], ops=[OpRecord(i, 0, grid.modules[i], grid.ops[i], 0, (), ()) for i in numbers.tolist()])
    detail = TraceComparison(ops=OpComparisons([Block(numbers, numbers, keys, np.maximum(grid.state, 1), [])]))
    ulps = np.where(np.isnan(grid.max_abs), 0, 1).astype(np.int64)
    return Comparison(
        verdict="diverged", first=None, origins=[], carriers=[], token_flips=[], rows_compared=grid.state.size, controls={},
        cosine=None, num_nan=(0, 0), logits_equal=False, teacher_forced=False, notes=[], label_a="default",
        label_b="batch_size=4", prompt_ids=["made"], detail=detail, trace=trace,
        sizes={i: (keys, grid.max_abs[i], ulps[i]) for i in numbers.tolist()},
    )  # fmt: skip
