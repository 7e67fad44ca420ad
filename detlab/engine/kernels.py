"""The kernels that serve a model within a block: their class maps in words, and a second look at every shape that ran.

A kernel whose order of additions was measured is registered in the ledger under its name (`Ledger.kernels`), and notes the
shapes that it is called in. Here they are told apart by when they ran, whatever model they are shared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from detlab.engine.canonical import one_thread
from detlab.engine.classes import ClassMap
from detlab.engine.ledger import Finding, ledger

__all__ = ["Kernel", "KernelCheck", "KernelMap", "check_again", "probing_seconds", "watching"]


class Kernel(Protocol):
    """What can look at its shapes again.

    Attributes:
        ran: the shapes that were called, or are planned to be.
    """

    ran: set[Any]

    def fresh(self) -> None:
        """Forgets which shapes ran."""

    def recheck(self, seed: int) -> list[Finding]:
        """Looks at each shape that ran once more, with data that are drawn from the seed."""


@contextmanager
def watching() -> Iterator[Callable[[], dict[str, Kernel]]]:
    """Within the block, kernels know only the shapes that run in it; afterwards also those that ran before.

    Yields:
        A function: the kernels that ran since the block began, by name.
    """
    known: dict[str, Kernel] = ledger().kernels
    before = {name: set(kernel.ran) for name, kernel in known.items()}
    for kernel in known.values():
        if hasattr(kernel, "fresh"):  # one that cannot forget is looked at in all the shapes that it ever ran in
            kernel.fresh()
    try:
        yield lambda: {name: kernel for name, kernel in sorted(known.items()) if kernel.ran}
    finally:
        for name, shapes in before.items():
            known[name].ran.update(shapes)


def probing_seconds() -> float:
    """Seconds that this process has spent on probing kernels, so far."""
    return float(sum(getattr(kernel, "seconds", 0.0) for kernel in ledger().kernels.values()))


# ------------------------------------------------------------------------------------------------------ a second look
@dataclass(frozen=True)
class KernelCheck:
    """A kernel that was probed again.

    Attributes:
        kernel: its name.
        shapes: the shapes that ran, in words.
        failed: those of them in which a row had other bits than those of the kernel's class.
        file: the ledger's file that says otherwise; "" where all shapes hold.
        where: what is another in the process that looked, such as "threads=3"; "" for the one that asked.
    """

    kernel: str
    shapes: tuple[str, ...]
    failed: tuple[str, ...] = ()
    file: str = ""
    where: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelCheck:
        """Reads back what `asdict` gave."""
        return cls(data["kernel"], tuple(data["shapes"]), tuple(data["failed"]), data["file"], data["where"])

    @property
    def holds(self) -> bool:
        """Whether all shapes hold."""
        return not self.failed

    def __str__(self) -> str:
        name = f"{self.kernel} ({self.where})" if self.where else self.kernel
        if self.holds:
            return f"{name}: holds at {', '.join(self.shapes)}"
        return (
            f"{name}: at {', '.join(self.failed)} it has other bits than those of its class. Delete {self.file} and start "
            "again, in a new process: the kernel is then measured anew. If that does not help, its order of additions follows "
            "more than the shape of the call, and no row count can be relied on here."
        )


def check_again(kernels: Mapping[str, Kernel], seed: int, where: str = "") -> list[KernelCheck]:
    """Probes each shape that kernels ran in once more.

    Args:
        kernels: by name, as `watching` gives them.
        seed: of the data; the ledger's own measurements use small ones.
        where: as in a `KernelCheck`.
    """
    made = []
    for name, kernel in kernels.items():
        with one_thread() if name.endswith(" threads=1") else nullcontext():  # some are called on one thread, whatever is set
            found = kernel.recheck(seed)
        failed = tuple(f.shape for f in found if not f.holds)
        shapes = tuple(f.shape for f in found)
        made.append(KernelCheck(name, shapes, failed, str(ledger().path) if failed else "", where))
    return made


# ------------------------------------------------------------------------------------------------------------- in words
@dataclass(frozen=True)
class KernelMap:
    """A kernel's class map, as it is shown.

    Attributes:
        kernel: its name.
        words: the map in one line, the kernel's name first.
        members: row counts of the class.
        others: row counts that are not of it; of a count in neither nothing is known. Both are empty for a kernel whose
            shapes are more than a number of rows.
    """

    kernel: str
    words: str
    members: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, kernel: Kernel) -> KernelMap:
        """What a registered kernel knows."""
        known = getattr(kernel, "map", None)
        counts = (known.members, known.others) if isinstance(known, ClassMap) else ((), ())
        return cls(name, str(kernel), *counts)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelMap:
        """Reads back what `asdict` gave."""
        return cls(data["kernel"], data["words"], tuple(data["members"]), tuple(data["others"]))

    def __str__(self) -> str:
        return self.words
