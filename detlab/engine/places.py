"""Which buffer lengths give an element of an elementwise function the same bits at every place: probed at first sight.

A vectorised kernel has one formula for whole vectors and another for what is left over; most arguments do not show it (of all
65,280 finite bfloat16 numbers, gelu's two formulas part on four). So arguments are sought at which they do: a buffer of every
other element is not computed in vectors, nor is the end of a short one. A length is used only after these arguments, and some
others, were at its places and had the bits they have in a buffer of 64 elements on one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from detlab import bits
from detlab.engine.canonical import not_observed, one_thread
from detlab.engine.ledger import Finding, ledger
from detlab.engine.probes import draw
from detlab.errors import MachineError

__all__ = ["VECTOR", "Places", "places_of"]

VECTOR = 64  # elements: a multiple of all vector widths; 16-bit gelu takes two vectors of 32 at once, and its tail another way
_ARGUMENTS = 61  # a prime: each meets every place of every vector
_PLAIN = 16  # of them are drawn, whether or not they tell formulas apart
_TURNS = 3  # arguments that are tried at each place
_SHORT = 7  # elements of buffers without a whole vector
_INT = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Function = Callable[[Tensor], Tensor]


@lru_cache(maxsize=8)
def _arguments(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a 16-bit format; in others these of bfloat16, and numbers of all magnitudes that matter."""
    if dtype.itemsize == 2:
        found = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        return found[found.isfinite()]
    wide = torch.cat([draw(2**15, dtype=torch.float32, seed=s) * 2.0**s for s in (-4, 0, 1, 2, 3, 4)])
    return torch.cat([_arguments(torch.bfloat16).float(), wide]).to(dtype)


def _differ(a: Tensor, b: Tensor) -> Tensor:
    view = _INT[a.dtype.itemsize]
    return a.contiguous().view(view) != b.contiguous().view(view)


def telling(function: Function, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Arguments at which a function's formulas part, as far as they were found; none where they agree."""
    arguments = _arguments(dtype)
    arguments = arguments[: len(arguments) // VECTOR * VECTOR].to(device)
    body = function(arguments.clone())
    single = function(torch.stack([arguments, arguments], 1)[:, 0])
    if not body.is_floating_point() or body.shape != arguments.shape:
        return arguments[:0]
    some = torch.arange(0, len(arguments), max(1, len(arguments) // 2048), device=device)
    short = torch.cat([function(part.contiguous()) for part in arguments[some].split(_SHORT)])  # type: ignore[no-untyped-call]
    parted = _differ(body, single)
    parted[some] |= _differ(body[some], short)
    return arguments[parted]


class Places:
    """The lengths of one function's buffers in one dtype.

    Attributes:
        name: in the ledger's list of kernels.
        bank: arguments, [61], those at which formulas part first.
        ran: lengths that were called.
        seconds: spent on probing.
    """

    def __init__(self, function: Function, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Seeks arguments that tell formulas apart.

        Raises:
            MachineError: an element's bits depend on its place even in the shortest buffer.
        """
        self.function, self.name, self.dtype, self.device = function, name, dtype, device
        self._lock = threading.RLock()
        self._holds: dict[int, bool] = {}
        self._plans: dict[int, tuple[int, ...]] = {}
        self.ran: set[int] = set()
        self.seconds = 0.0
        started = time.perf_counter()
        with not_observed(), one_thread():
            self._telling = telling(function, dtype, device)
            self.bank, self.expected = self._made(0)
            if not self._has_the_bits(VECTOR, self.bank, self.expected):
                raise MachineError(
                    f"{name}: an element's bits depend on its place, even in a buffer of {VECTOR}, so the function cannot be "
                    "made invariant on this machine."
                )
        self._holds[VECTOR] = True
        self.seconds += time.perf_counter() - started

    def _made(self, seed: int) -> tuple[Tensor, Tensor]:
        """Arguments, and what they give in a buffer of 64: both [61]."""
        count = len(self._telling)
        kept = min(count, 1) * (_ARGUMENTS - _PLAIN)  # where there are few they come again: each place has one in some turn
        chosen = self._telling[(torch.arange(kept) * count // max(1, kept) + seed) % max(1, count)]
        plain = (4 * draw(_ARGUMENTS - kept, dtype=torch.float32, seed=seed + 1)).to(self.device, self.dtype)
        bank = torch.cat([chosen, plain])
        return bank, self.function(bank[torch.arange(VECTOR) % _ARGUMENTS])[:_ARGUMENTS]

    def plan(self, length: int) -> tuple[int, ...]:
        """Lengths of buffers that hold so many elements, a multiple of 64, one after the other."""
        found = self._plans.get(length)
        if found is None:
            with self._lock, not_observed(), one_thread():
                found = self._plans[length] = self._cut(length)
                self.ran.update(found)
        return found

    def _cut(self, length: int) -> tuple[int, ...]:
        if length == 0 or self.holds(length):
            return (length,) if length else ()
        most = VECTOR << ((length // VECTOR).bit_length() - 1)
        while most >= length or not self.holds(most):
            most //= 2
        return (most,) * (length // most) + self._cut(length % most)

    def holds(self, length: int) -> bool:
        """Whether elements have the same bits at every place of a buffer; probed where it is not known."""
        if length not in self._holds:
            started = time.perf_counter()
            self._holds[length] = self._has_the_bits(length, self.bank, self.expected)
            self.seconds += time.perf_counter() - started
        return self._holds[length]

    def _has_the_bits(self, length: int, bank: Tensor, expected: Tensor) -> bool:
        copies = -(-length // _ARGUMENTS)
        for turn in range(_TURNS):
            x, y = (t.roll(-20 * turn).repeat(copies)[:length] for t in (bank, expected))
            if not bits.equal(self.function(x), y):
                return False
        return True

    def fresh(self) -> None:
        """Forgets which lengths ran."""
        with self._lock:
            self.ran.clear()
            self._plans.clear()

    def recheck(self, seed: int = 1) -> list[Finding]:
        """Looks at each length that ran once more, with other arguments."""
        with self._lock, not_observed(), one_thread():
            bank, expected = self._made(seed)
            return [Finding(self.name, f"{n} elements", self._has_the_bits(n, bank, expected)) for n in sorted(self.ran)]

    def __str__(self) -> str:
        held = [n for n, holds in self._holds.items() if holds]
        return f"{self.name}: {len(held)} buffer lengths of one class, {len(self._holds) - len(held)} of others"


_known: dict[Any, Places] = {}
_lock = threading.RLock()


def _identity(function: Any) -> tuple[Any, str] | None:
    """What two functions share that compute the same, and a name; None for a function that has no name of its own."""
    owner, name = getattr(function, "__self__", None), str(getattr(function, "__qualname__", ""))
    if isinstance(owner, nn.Module):
        state = {k: repr(v) for k, v in vars(owner).items() if not k.startswith("_") and k not in ("forward", "training")}
        return (type(owner), name, tuple(sorted(state.items()))), repr(owner).partition("\n")[0]
    if not name or "<" in name or getattr(function, "__closure__", None):
        return None
    return function, name.rpartition(".")[2]


def places_of(function: Function, dtype: torch.dtype, device: torch.device | str = "cpu") -> Places:
    """The lengths of a function's buffers: one object for all layers that compute the same.

    Raises:
        MachineError: the function cannot be made invariant here.
    """
    shared = _identity(function)
    short = str(dtype).removeprefix("torch.")
    if shared is None:
        return Places(function, f"elementwise function {short} threads=1", dtype, device)
    with _lock:
        key = (shared[0], dtype, str(device))
        found = _known.get(key)
        if found is None:
            names = {places.name for places in _known.values()}
            name, count = f"elementwise {shared[1]} {short} threads=1", 2
            while name in names:  # two of a class that differ in what their text does not show
                name, count = f"elementwise {shared[1]} no. {count} {short} threads=1", count + 1
            found = _known[key] = Places(function, name, dtype, device)
        ledger().kernels[found.name] = found
        return found
