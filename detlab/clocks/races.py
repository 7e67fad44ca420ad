"""Where timing does reach the bits: sums in the order of arrival, and kernels chosen by the clock. Each as it is, and fixed.

The arithmetic is a linear layer's, x @ w: the product over k terms is cut into parts, as kernels for few rows are, and what
differs is who decides the order in which the parts are added, or which of several kernels makes them.
"""

from __future__ import annotations

import html
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab.errors import MachineError

__all__ = ["Mechanism", "Mechanisms", "mechanisms"]

ROWS, TERMS, COLUMNS, PARTS = 4, 4096, 512, 8
Work = Callable[[], Tensor | str]


@dataclass(frozen=True)
class Mechanism:
    """A way in which timing reaches the bits.

    Attributes:
        name: by which `mechanisms` gives it.
        claim: what happens, in a sentence.
        where: "cpu" or "cuda".
        fix: what makes it repeat itself.
        work: one run; takes nothing, returns what was computed. For `clock_experiment`.
        fixed: the same computation with the fix.
    """

    name: str
    claim: str
    where: str
    fix: str
    work: Work
    fixed: Work

    def reason(self) -> str:
        """Why it cannot be run on this machine; "" where it can."""
        return "" if self.where == "cpu" or torch.cuda.is_available() else "needs CUDA: this machine has none"


# --------------------------------------------------------------------------------------------------- order of arrival
@lru_cache(maxsize=1)
def _product() -> tuple[Tensor, Tensor]:
    """Factors x [ROWS, TERMS] and w [COLUMNS, TERMS], float32; the same on every machine: integers, scaled once."""
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**15), 2**15, (ROWS + COLUMNS, TERMS), generator=draw, dtype=torch.int32)
    return (2 * numbers[:ROWS] + 1).float() / 2**16, (2 * numbers[ROWS:] + 1).float() / 2**22


@lru_cache(maxsize=8)
def _parts(count: int) -> list[tuple[Tensor, Tensor]]:
    x, w = _product()
    return [(a.contiguous(), b.contiguous()) for a, b in zip(x.chunk(count, 1), w.chunk(count, 1), strict=True)]


def _deliver(deliver: Callable[[int, Tensor], None]) -> None:
    """Computes each part of the product in a thread of its own."""

    def part(number: int) -> None:
        x, w = _parts(PARTS)[number]
        deliver(number, F.linear(x, w))

    threads = [threading.Thread(target=part, args=(number,)) for number in range(PARTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def arrival_order() -> Tensor:
    """Adds each part to the sum as soon as its thread has it, as atomic additions do: float32 [ROWS, COLUMNS]."""
    total, lock = torch.zeros(ROWS, COLUMNS), threading.Lock()

    def deliver(number: int, part: Tensor) -> None:
        with lock:
            total.add_(part)

    _deliver(deliver)
    return total


def slot_order() -> Tensor:
    """Keeps each part in its slot, and adds the slots from the first to the last once all are there."""
    slots: dict[int, Tensor] = {}
    _deliver(slots.__setitem__)
    total = torch.zeros(ROWS, COLUMNS)
    for number in range(PARTS):
        total.add_(slots[number])
    return total


# ------------------------------------------------------------------------------------------------- chosen by the clock
def split(count: int) -> Tensor:
    """The product in so many parts, added from the first to the last: one kernel of several for the same question."""
    first, *others = (F.linear(x, w) for x, w in _parts(count))
    for other in others:
        first = first + other
    return first


KERNELS, USES = (1, 2, 4, PARTS), 16  # by their number of parts


def timed_kernel() -> Tensor:
    """Runs every kernel once to warm it up and once by the clock, and answers with the fastest, as benchmark modes do."""
    seconds = {}
    for count in KERNELS:
        split(count)
        begin = time.perf_counter()
        split(count)
        seconds[count] = time.perf_counter() - begin
    return _answer(min(KERNELS, key=seconds.__getitem__))


def named_kernel() -> Tensor:
    """Answers with the kernel that was named once for this shape, whatever the clock says."""
    return _answer(KERNELS[0])


def _answer(count: int) -> Tensor:
    """The kernel that was chosen, used for a while as a choice is: float32 [USES, ROWS, COLUMNS]."""
    return torch.stack([split(count) for _ in range(USES)])


# ----------------------------------------------------------------------------------------------------------------- GPU
def indexed_sum(device: str = "cuda", is_fixed: bool = False) -> Tensor:
    """Adds a million numbers into 64 sums by ``index_add_``: on CUDA by atomic additions, unless they are forbidden."""
    sums, index, numbers = _scattered(device)
    return _forbidding(is_fixed, lambda: sums.index_add_(0, index, numbers))


def scattered_sum(device: str = "cuda", is_fixed: bool = False) -> Tensor:
    """The same by ``scatter_add_``."""
    sums, index, numbers = _scattered(device)
    return _forbidding(is_fixed, lambda: sums.scatter_add_(0, index, numbers))


def _scattered(device: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**15), 2**15, (1 << 20,), generator=draw, dtype=torch.int32)
    index = torch.arange(1 << 20) % 64
    return torch.zeros(64, device=device), index.to(device), ((2 * numbers + 1).float() / 2**16).to(device)


def _forbidding(is_forbidden: bool, work: Callable[[], Tensor]) -> Tensor:
    """Runs with ``torch.use_deterministic_algorithms(is_forbidden)``, and sets it back."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_forbidden)
    try:
        return work()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# cuDNN keeps what it chose for a shape as long as the process lives, so that each choice needs a process of its own.
_CONVOLUTION = """
import hashlib, sys, torch
torch.backends.cudnn.benchmark = sys.argv[1] == "benchmark"
torch.backends.cudnn.deterministic = sys.argv[1] == "fixed"
torch.backends.cudnn.allow_tf32 = False
draw = torch.Generator().manual_seed(0)
shapes = (8, 64, 56, 56), (64, 64, 3, 3)
x, w = (torch.randint(-2**15, 2**15, shape, generator=draw).float().div(2**16).cuda() for shape in shapes)
print(hashlib.md5(torch.nn.functional.conv2d(x, w, padding=1).cpu().numpy().tobytes()).hexdigest())
"""


def convolution(mode: str) -> str:
    """MD5 of a convolution in a fresh process: in "benchmark" mode cuDNN times its algorithms; "fixed" takes one by rule.

    Raises:
        MachineError: the process failed.
    """
    done = subprocess.run([sys.executable, "-c", _CONVOLUTION, mode], capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MachineError(f"the convolution failed in its own process: {words}")
    return done.stdout.strip()


_ALL = (
    Mechanism(
        "arrival-order", "parts of a sum are added in the order in which threads deliver them", "cpu",
        "each part has its slot, and the slots are added from the first to the last", arrival_order, slot_order,
    ),
    Mechanism(
        "timed-kernel", "the fastest of several kernels answers, as timed in this run", "cpu",
        "the kernel is named once for a shape, and not timed again", timed_kernel, named_kernel,
    ),
    Mechanism(
        "atomic-index-add", "index_add_ adds by atomic operations, in the order in which threads arrive", "cuda",
        "torch.use_deterministic_algorithms(True)", indexed_sum, lambda: indexed_sum(is_fixed=True),
    ),
    Mechanism(
        "atomic-scatter-add", "scatter_add_ adds by atomic operations, in the order in which threads arrive", "cuda",
        "torch.use_deterministic_algorithms(True)", scattered_sum, lambda: scattered_sum(is_fixed=True),
    ),
    Mechanism(
        "cudnn-benchmark", "each process times cuDNN's algorithms and takes the fastest", "cuda",
        "torch.backends.cudnn.benchmark = False and deterministic = True",
        lambda: convolution("benchmark"), lambda: convolution("fixed"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Mechanisms(Sequence[Mechanism]):
    """The mechanisms as a table; a sequence of `Mechanism`, also by name."""

    items: tuple[Mechanism, ...]

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, str):
            return self.items[index]
        for item in self.items:
            if item.name == index:
                return item
        raise KeyError(f"no mechanism {index!r}; there are {', '.join(item.name for item in self.items)}")

    def __len__(self) -> int:
        return len(self.items)

    def _cells(self) -> list[tuple[str, ...]]:
        return [(m.name, m.claim, m.fix, m.reason() or "can be run here") for m in self.items]

    def __str__(self) -> str:
        width = max(len(m.name) for m in self.items)
        return "\n".join(f"{name:<{width}}  {claim}; fix: {fix} ({here})" for name, claim, fix, here in self._cells())

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("mechanism", "what happens", "fix", "here"))
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>" for cells in self._cells())
        return f"<table><tr>{head}</tr>{rows}</table>"


def mechanisms() -> Mechanisms:
    """The ways in which timing reaches the bits, each with its fix; to be held against the clock by `clock_experiment`.

    Those of the GPU are written for CUDA and have been run on none so far.

    >>> mechanisms()["arrival-order"].fix
    'each part has its slot, and the slots are added from the first to the last'
    """
    return Mechanisms(_ALL)
