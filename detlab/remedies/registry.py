"""The remedies: what is said to make a model repeat itself, each as a switch that can be tried."""

from __future__ import annotations

import html
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from detlab.condition import Condition
from detlab.engine.session import TIERS
from detlab.errors import UsageError
from detlab.remedies import switches
from detlab.remedies.remedy import ADVICE, CONDITION, FLAG, GENERATION, START, TIER, Pair, Plan, Remedy, Setup, entered
from detlab.remedies.window import WINDOW, attention_window
from detlab.serving import device_of

__all__ = ["REMEDIES", "Remedies", "applied", "plan_of", "remedies"]

_BOTH = ("cpu", "cuda")
_CUDA = ("cuda",)


# --------------------------------------------------------------------------------------------------- other conditions
def _resized(sizes: Callable[[int, int], Pair | tuple[int, int]]) -> Callable[[Condition, Condition], Pair]:
    """Fills both conditions' batches up; the rows that are added repeat the prompt, and are cut off again."""

    def change(a: Condition, b: Condition) -> Pair:
        found = []
        for condition, size in zip((a, b), sizes(a.batch_size, b.batch_size), strict=True):
            assert isinstance(size, int)
            grows = size > condition.batch_size
            found.append(replace(condition, batch_size=size, mates="repeat" if grows else condition.mates))
        return found[0], found[1]

    return change


def _fixed(a: int, b: int) -> tuple[int, int]:
    return max(a, b), max(a, b)


def _powers(a: int, b: int) -> tuple[int, int]:
    return 1 << (a - 1).bit_length(), 1 << (b - 1).bit_length()


def _tier(name: str) -> Callable[[nn.Module], str]:
    return lambda model: "" if name in TIERS else f"this version of detlab has no tier {name!r}"


def _has_cores(model: nn.Module) -> str:
    return "" if device_of(model).type == "cpu" else "the model is on a GPU, where threads of the CPU add nothing"


def _has_compiler(model: nn.Module) -> str:
    """Compiled execution generates C++ on a CPU."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = device_of(model).type != "cpu" or any(map(shutil.which, names))
    return "" if found else f"compiled execution needs a C++ compiler, and there is none ({', '.join(names)})"


_TIERS = ("tier-invariant", "tier-exact")
_OWN = ("float64", "autocast", "autocast-float16", "eager-attention", "attention-window", "compiled")
_COMPUTE = ("float64", "autocast", "autocast-float16", "half-storage", *_TIERS)

_ALL = (
    Remedy(
        "seeds", "one seed for every generator makes runs repeat", _BOTH, FLAG,
        "it fixes what is drawn; greedy decoding draws nothing, and a seed does not change the order of an addition",
        "A1, A4", settings={"seed": switches.SEED}, switch=switches.seeds,
    ),
    Remedy(
        "greedy", "greedy decoding is deterministic", _BOTH, GENERATION,
        "the largest logit is taken instead of a draw; the logits' own bits stay as they are, and near ties still flip",
        "B1, B2", settings={"temperature": 0.0, "top_k": 0},
    ),
    Remedy(
        "deterministic-algorithms", "torch.use_deterministic_algorithms(True) makes results repeat", _BOTH, FLAG,
        "ops that add in the order in which threads arrive are replaced or refused; the order within other kernels still "
        "follows the shape", "A4, A9", settings={"deterministic_algorithms": True},
    ),
    Remedy(
        "cudnn-deterministic", "cudnn.deterministic makes convolutions repeat", _CUDA, FLAG,
        "cuDNN leaves out algorithms with atomic additions; language models without convolutions call none of them",
        "A4, AB", switch=switches.cudnn_deterministic,
    ),
    Remedy(
        "cudnn-benchmark-off", "benchmark mode chooses another algorithm in each process", _CUDA, FLAG,
        "cuDNN no longer times its algorithms and takes the fastest, which may be another one next time",
        "A4, A6", switch=switches.cudnn_benchmark_off,
    ),
    Remedy(
        "cudnn-variable", "CUDNN_DETERMINISTIC=1 makes cuDNN deterministic", _BOTH, START,
        "none: no library reads this variable; torch.backends.cudnn.deterministic = True is the form that works",
        "AB", variables={"CUDNN_DETERMINISTIC": "1"},
    ),
    Remedy(
        "cublas-workspace", "CUBLAS_WORKSPACE_CONFIG=:4096:8 makes cuBLAS repeat", _CUDA, START,
        "each stream has its own workspace of a fixed size, so that cuBLAS does not choose by what is free",
        "B4", variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    Remedy(
        "launch-blocking", "CUDA_LAUNCH_BLOCKING=1 removes races", _CUDA, START,
        "kernels run one after the other; it could only help where a missing synchronisation is a bug",
        "A4, B4", variables={"CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Remedy(
        "tf32-off", "TF32 loses bits", _BOTH, FLAG,
        "float32 products keep all 24 bits of their factors; the order of the additions stays",
        "A6", switch=switches.full_float32,
    ),
    Remedy(
        "full-reductions", "reduced-precision reductions lose bits", _BOTH, FLAG,
        "partial sums of 16-bit products are kept in float32; how many partial sums there are still follows the shape",
        "A6", switch=switches.full_reductions,
    ),
    Remedy(
        "one-thread", "one thread adds in one order", ("cpu",), START,
        "the work is not cut among threads, so that no sum follows their number; it still follows the shape",
        "A1, A4", settings={"threads": 1}, variables={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, needs=_has_cores,
    ),
    Remedy(
        "mkl-compatible", "MKL_CBWR=COMPATIBLE gives the same bits on every CPU", ("cpu",), START,
        "MKL takes one code path for all instruction sets; it promises nothing over other shapes or places of a row",
        "A1, A4", settings={"mkl_isa": "COMPATIBLE"},
    ),
    Remedy(
        "static-batch", "a fixed batch, padded and trimmed, gives the same bits", _BOTH, CONDITION,
        "every call has the same number of rows, and so the same kernels and orders of addition",
        "A4", change=_resized(_fixed), conflicts=("power-of-two-batch",),
    ),
    Remedy(
        "power-of-two-batch", "batches of a power of two are stable", _BOTH, CONDITION,
        "fewer shapes occur; two powers of two may still be served by two kernels",
        "B11", change=_resized(_powers),
    ),
    Remedy(
        "warm-up", "the first runs differ from the later ones", _BOTH, FLAG,
        "whatever is chosen or allocated at the first call is chosen before it counts (autotuning, lazy initialisation)",
        "B11", switch=switches.warm_up,
    ),
    Remedy(
        "locked-memory", "locked memory keeps results stable", ("cpu",), FLAG,
        "pages cannot be swapped out, which changes when a number is read and not which; it could act only through addresses",
        "B11", switch=switches.locked_memory,
    ),
    Remedy(
        "preallocated-buffers", "a preallocated cache removes differences", _BOTH, CONDITION,
        "keys and values lie in buffers of the final length, so that attention sees one shape at every step",
        "A11", settings={"cache": "static"},
    ),
    Remedy(
        "caching-allocator-off", "the caching allocator moves tensors", _CUDA, START,
        "tensors lie where the driver puts them; a kernel that chooses by alignment would see other addresses",
        "A11", variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Remedy(
        "aligned", "unaligned inputs take another path", _BOTH, FLAG,
        "all weights begin at a multiple of 64 bytes, so that no kernel begins with a partial vector",
        "A1, A11", settings={"alignment": 0}, switch=switches.aligned,
    ),
    Remedy(
        "eager-attention", "eager attention is deterministic", _BOTH, CONDITION,
        "attention is two products and a softmax instead of a fused kernel that cuts queries and keys into tiles",
        "A12, B3", settings={"attention": "eager"}, conflicts=_TIERS,
    ),
    Remedy(
        "attention-window", "a fixed attention window keeps attention stable", _BOTH, FLAG,
        f"a token sees the last {WINDOW} tokens alone, so that its sums stop growing with the text, whose answer changes",
        "B8", switch=attention_window, conflicts=("eager-attention", *_TIERS),
    ),
    Remedy(
        "float64", "more precision removes differences", _BOTH, CONDITION,
        "each rounding is 2**29 times smaller; the orders of addition still differ, and so do the last bits",
        "A6", settings={"dtype": "float64"}, conflicts=_COMPUTE,
    ),
    Remedy(
        "half-storage", "16-bit weights with float32 arithmetic are stable", _BOTH, CONDITION,
        "weights hold 8 bits of precision, products and sums 24; sums still round, in an order that follows the shape",
        "A6", settings={"dtype": "float32"}, switch=switches.half_storage, conflicts=("float64", "autocast"),
    ),
    Remedy(
        "autocast", "mixed precision hides differences", _BOTH, CONDITION,
        "products are rounded to bfloat16, which hides most small differences and makes the others large",
        "A6", settings={"autocast": "bfloat16"}, conflicts=_COMPUTE,
    ),
    Remedy(
        "autocast-float16", "mixed precision hides differences", _BOTH, CONDITION,
        "products are rounded to float16, of 11 bits: it hides smaller differences than bfloat16, and overflows above 65,504",
        "A6", settings={"autocast": "float16"}, conflicts=_COMPUTE,
    ),
    Remedy(
        "pure-bfloat16", "pure 16-bit models repeat themselves", _BOTH, CONDITION,
        "weights, products and what passes between layers hold 8 bits; the sums inside a product still follow the shape",
        "A6", settings={"dtype": "bfloat16"},
    ),
    Remedy(
        "compiled", "compiled execution fixes the kernels", _BOTH, CONDITION,
        "the feed-forward parts become generated kernels, made for a shape or for all: what is fused rounds in other places, "
        "and the products inside are the vendor's as before",
        "A10, B8", settings={"compile": "mlp"}, needs=_has_compiler, conflicts=_TIERS,
    ),
    Remedy(
        "tier-invariant", "canonical shapes make a token's bits its own", _BOTH, TIER,
        "every kernel is called in shapes of which one order of addition is known to come",
        "A9, A10", settings={"tier": "invariant"}, conflicts=_OWN,
    ),
    Remedy(
        "tier-exact", "integer sums have one result in any order", _BOTH, TIER,
        "sums are of whole numbers, exactly, so that neither shape nor threads nor instruction set can move them",
        "B3", settings={"tier": "exact"}, needs=_tier("exact"), conflicts=_OWN,
    ),
    Remedy(
        "nccl-ring", "a fixed NCCL algorithm fixes the order over ranks", ("distributed",), START,
        "all-reduce adds the ranks' parts along one ring instead of an order chosen by size", "A13, B10",
        variables={"NCCL_ALGO": "Ring"},
    ),
    Remedy(
        "clock-lock", "boost clocks change results", _BOTH, ADVICE,
        "a clock decides when an addition happens, not its result; it could act through a race or a hardware fault",
        "A9, B4", advice="detlab never changes a clock; lock it (nvidia-smi -lgc, cpupower frequency-set), then compare",
    ),
    Remedy(
        "power-cap", "a power cap removes differences", _BOTH, ADVICE,
        "it keeps clocks and temperature steady; it could act only where the hardware computes wrong at its limits",
        "A9", advice="detlab never changes a power limit; set it (nvidia-smi -pl), then compare",
    ),
)  # fmt: skip

#: Name -> remedy.
REMEDIES: dict[str, Remedy] = {remedy.name: remedy for remedy in _ALL}


def plan_of(what: str | Remedy | Plan) -> Plan:
    """A remedy, or several joined by "+", by name.

    Raises:
        UsageError: a name is unknown, or remedies that are joined conflict.
    """
    if isinstance(what, Plan):
        return what
    if isinstance(what, Remedy):
        return Plan((what,))
    names = [name.strip() for name in what.split("+")]
    unknown = [name for name in names if name not in REMEDIES]
    if unknown:
        raise UsageError(f"unknown remedy {unknown[0]!r}; choose from {', '.join(REMEDIES)}, or join some by +.")
    return Plan(tuple(REMEDIES[name] for name in names))


@contextmanager
def applied(model: nn.Module, *names: str | Remedy) -> Any:
    """Puts remedies in by hand for the length of a block, and takes them out on leaving, whatever happens.

    Args:
        model: a transformers causal language model.
        names: remedies that are put in around calls: those that are applied by flags.

    Yields:
        The model to call: this one, or a copy.

    Raises:
        UsageError: a remedy is read when a library starts, or changes the condition or the tier, or cannot be had here.
    """
    plan = plan_of("+".join(n.name if isinstance(n, Remedy) else n for n in names)) if names else Plan(())
    for part in plan.parts:
        why = part.reason(model)
        if why:
            raise UsageError(f"the remedy {part.name!r} cannot be put in here: {why}.")
        if part.needs_restart:
            variables = dict(part.variables) or Condition(**part.settings).variables
            listed = " ".join(f"{name}={value}" for name, value in variables.items())
            raise UsageError(
                f"the remedy {part.name!r} needs a restart: libraries read {listed} when they start. Set it before Python "
                "starts, or use detlab.try_remedies, which starts a fresh process."
            )
        if part.switch is None and part.name != "deterministic-algorithms":
            settings = ", ".join(f"{name}={value!r}" for name, value in part.settings.items())
            advice = f"run with detlab.Condition({settings})" if settings else "use detlab.try_remedies"
            raise UsageError(f"the remedy {part.name!r} changes the condition, not the process: {advice}.")
    flag, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if any(part.settings.get("deterministic_algorithms") for part in plan.parts):
            torch.use_deterministic_algorithms(True)
        with entered(plan.parts, Setup(model, [], (), 0)) as served:
            yield served
    finally:
        torch.use_deterministic_algorithms(flag, warn_only=warn_only)


@dataclass(frozen=True)
class Remedies(Sequence[Remedy]):
    """The registry as a table; a sequence of `Remedy`."""

    items: tuple[Remedy, ...]

    def __getitem__(self, index: Any) -> Any:
        return REMEDIES[index] if isinstance(index, str) else self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def to_json(self) -> list[dict[str, Any]]:
        """One record a remedy, as JSON values."""
        return [
            {"remedy": r.name, "claim": r.claim, "where": list(r.where), "how": r.how, "mechanism": r.mechanism,
             "source": r.source, "variables": dict(r.variables)}
            for r in self.items
        ]  # fmt: skip

    def to_pandas(self) -> Any:
        """One row a remedy."""
        import pandas as pd

        return pd.DataFrame([record | {"where": ", ".join(record["where"])} for record in self.to_json()])

    def __str__(self) -> str:
        width = max(len(r.name) for r in self.items)
        return "\n".join(f"{r.name:<{width}}  {', '.join(r.where):<12} {r.how:<24} {r.claim}" for r in self.items)

    def _repr_html_(self) -> str:
        head = "<tr><th>remedy</th><th>claim</th><th>where</th><th>how</th><th>mechanism</th><th>source</th></tr>"
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in cells) + "</tr>"
            for cells in ((r.name, r.claim, ", ".join(r.where), r.how, r.mechanism, r.source) for r in self.items)
        )
        return f"<table>{head}{rows}</table>"


def remedies() -> Remedies:
    """Every remedy that `try_remedies` knows: its claim, where and how it is applied, its mechanism and its source.

    >>> remedies()["seeds"].claim
    'one seed for every generator makes runs repeat'
    """
    return Remedies(_ALL)
