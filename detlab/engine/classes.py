"""Class maps: which numbers of rows give a row the same bits, and how any number of rows is cut or padded into such calls.

A vendor's kernel chooses its order of additions from the *shape* of the call: one row of a product against four is another
kernel, and forty rows may be another again. The row counts that share one order form a **class**. A class map says of one
kernel, size, dtype, number of threads and machine which counts are members of the class that is used here. It has holes, and
large counts may belong to it again where middling ones do not:

    packed bfloat16 576x576 on a CPU with AMX:    members 1..32, 768..2048    another class 40..512

Nothing is interpolated: a count is called only after it was probed, with data that show the order of additions (`probes`),
many rows of data at every place of the call. Small counts are probed when a map is made, larger ones when they are first
needed. The class is that of calls of ``unit`` rows on one thread; a planner covers the rows of a call by members at the least
cost that was measured. Which plan it is cannot change a bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab import bits
from detlab.engine.canonical import aligned, not_observed, one_thread
from detlab.engine.class_map import LARGE, SMALL, ClassMap, cheapest, words
from detlab.engine.ledger import Finding, Ledger, ledger, name_of

__all__ = ["ClassMap", "Finding", "Probe", "RowClasses", "RowKernel", "row_classes", "words"]

#: [rows, K] -> [rows, N]; each row of the result is computed from the same row of the argument.
RowKernel = Callable[[Tensor], Tensor]

_SMALL_HEAVY = (1, 2, 4, 8, 16, 32)
_DEVICE = (16, 32, 64, 128, 256)
_HEAVY = 8_000_000  # multiplications a row from which on fewer counts are probed, with fewer rows of data at each place
_MOST_WORK = 4_000_000_000  # multiplications of the largest call that is probed; more rows are computed in pieces
_LARGE_WEIGHT = 1 << 20  # bytes
_CACHES = 64 << 20  # bytes that are read to displace a weight from the caches


@dataclass(frozen=True)
class Probe:
    """A kernel of one size, with data of its own.

    Attributes:
        call: the kernel.
        bank: rows of data, [ROWS, K]. Their number is a prime, so that each meets every place of every tile.
    """

    ROWS: ClassVar[int] = 61
    call: RowKernel
    bank: Tensor


#: seed -> the kernel with data that are drawn from it.
MakeProbe = Callable[[int], Probe]


class RowClasses:
    """The class map of one kernel at the number of threads now set, grown as shapes are asked for.

    Attributes:
        name: of the measurement, threads left out.
        map: what is known.
        is_threaded: the members were found at the threads now set; otherwise calls are made on one thread.
        ran: counts that were called, or are planned to be.
        seconds: spent on probing by this process.
    """

    def __init__(self, what: str, dtype: torch.dtype, sizes: tuple[int, ...], make: MakeProbe, *, work: int, row_bytes: int,
                 device: torch.device | str = "cpu", has_grid: bool = True, book: Ledger | None = None) -> None:  # fmt: skip
        """Reads what is known of a kernel, and probes its small row counts where nothing is.

        Args:
            what: names the kernel.
            dtype, sizes: of its operands.
            make: makes the kernel with data of its own, which are dropped when a probe is done.
            work: multiplications a row.
            row_bytes: size of a row of x.
            device: where it runs.
            has_grid: large counts are rounded up to those of a grid; False probes each count that is asked for, which suits a
                kernel whose call costs no more than a copy of its rows.
            book: the ledger; None for this machine's.

        Raises:
            LookupError: no number of rows gives stable bits.
        """
        self.name = name_of(what, dtype, *sizes, device=device, threads=0).rpartition(" ")[0]
        self._book = ledger() if book is None else book
        self._make, self._row_bytes, self._has_grid = make, row_bytes, has_grid
        is_device = torch.device(device).type != "cpu"
        self._is_heavy, self._is_large = work > _HEAVY, work * dtype.itemsize > _LARGE_WEIGHT
        self._small = _DEVICE if is_device else _SMALL_HEAVY if self._is_heavy else SMALL
        large = [c for c in LARGE if c * work <= _MOST_WORK and c > self._small[-1]]
        self._grid = (*self._small, *large)
        self._lock = threading.RLock()
        self._plans: dict[int, tuple[int, ...]] = {}
        self.ran: set[int] = set()
        self.seconds = 0.0
        where = name_of("", dtype, device=device).split()[-1]
        alone = where if is_device else "threads=1"
        self._key, self._alone = f"{self.name} {where}", f"{self.name} {alone}"
        with self._lock, not_observed():
            base = self._known(self._alone) or self._found()
            self.map, self.is_threaded = base, True
            if where == alone:
                return
            shared = self._known(self._key)
            if shared is None or (shared.unit, shared.digest) != (base.unit, base.digest):
                shared = self._grown(replace(base, members=(), micros=(), others=()), self._small)
                self._book.keep(self._key, shared)
            if shared.members:
                self.map = shared
            else:
                self._key, self.is_threaded = self._alone, False

    def _known(self, key: str) -> ClassMap | None:
        found: ClassMap | None = self._book.known(key, ClassMap)
        return found

    # ------------------------------------------------------------------------------------------------------- planning
    def plan(self, rows: int) -> tuple[int, ...]:
        """Counts that cover so many rows, one call each; the last may be larger than what is left, and is padded."""
        found = self._plans.get(rows)
        if found is None:
            with self._lock:
                is_new = self._explore(rows)
                found = self._cheapest(rows)
                if is_new and len(found) > 1:
                    self._race(found, rows)
                    found = self._cheapest(rows)
                self._plans[rows] = found
            self.ran.update(found)
        return found

    def run(self, kernel: RowKernel, x: Tensor) -> Tensor:
        """Calls a kernel of this map on [rows, K] as planned; returns [rows, N]."""
        if self.is_threaded:
            return self._run(kernel, x)
        with one_thread():
            return self._run(kernel, x)

    def _run(self, kernel: RowKernel, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if not rows:
            return kernel(x)
        plan = self.plan(rows)
        if len(plan) == 1:
            spare = plan[0] - rows
            return kernel(F.pad(x, (0, 0, 0, spare)))[:rows] if spare else kernel(aligned(x))
        pieces, at = [], 0
        for count in plan:
            piece = x[at : at + count]
            spare = count - piece.shape[0]
            pieces.append(kernel(F.pad(piece, (0, 0, 0, spare)) if spare else aligned(piece)))
            at += count
        return torch.cat(pieces)[:rows]

    def _cheapest(self, rows: int) -> tuple[int, ...]:
        if not self._has_grid and rows in self.map.members:
            return (rows,)
        return cheapest(self.map, rows, self._row_bytes)

    def _explore(self, rows: int) -> bool:
        """Probes what a plan for so many rows may use: the neighbours on the grid; larger ones where the next is no member.

        Returns:
            Whether there was something to probe.
        """
        most, before = self._grid[-1], self.map
        if not self._has_grid:
            self._learn([rows])
            if rows in self.map.members:
                return False  # nothing to choose from
        if rows > most:
            self._explore(most)
            rows = rows % most or most
        above = [c for c in self._grid if c >= rows]
        below = [c for c in self._grid if c <= rows]
        self._learn([*below[-1:], above[0]])
        for count in above[1:]:
            if count > 4 * rows or any(c in self.map.members for c in above):
                break
            self._learn([count])
        return self.map is not before

    def _learn(self, counts: list[int]) -> None:
        unknown = [c for c in dict.fromkeys(counts) if not self.map.knows(c)]
        if unknown:
            with not_observed():
                self.map = self._grown(self.map, unknown)
            self._plans.clear()
            self._book.keep(self._key, self.map)

    def _race(self, plan: tuple[int, ...], least_rows: int) -> None:
        """Times several calls against one that holds all their rows, in turn: times of different moments may mislead."""
        single = next((c for c in self.map.members if c >= least_rows), None)
        if single is None:
            return
        started = time.perf_counter()
        with not_observed(), nullcontext() if self.is_threaded else one_thread():
            probe = self._make(0)
            places = [[torch.arange(c, device=probe.bank.device) % Probe.ROWS for c in way] for way in (plan, (single,))]
            ways = [[probe.bank[rows] for rows in way] for way in places]
            least = [float("inf")] * 2
            for _ in range(5):
                for number, pieces in enumerate(ways):
                    before = time.perf_counter()
                    for x in pieces:
                        probe.call(x)
                    least[number] = min(least[number], time.perf_counter() - before)
        cost = dict(zip(self.map.members, self.map.micros, strict=True))
        self.map = self.map.with_count(single, round(sum(cost[c] for c in plan) * least[1] / least[0], 2))
        self._book.keep(self._key, self.map)
        self.seconds += time.perf_counter() - started

    # -------------------------------------------------------------------------------------------------------- probing
    def _tries(self, count: int) -> int:
        """Rows of data that are tried at each place of a call."""
        tries = 32 if count <= 32 else 16 if count <= 256 else 8 if count <= 4096 else 2
        return tries // 2 if self._is_heavy else tries

    def _found(self) -> ClassMap:
        """Chooses the class on one thread: of the small counts, the one that serves 1 to 32 rows with the least work."""
        started = time.perf_counter()
        probe = self._make(0)
        groups: list[tuple[Tensor, list[int]]] = []
        refused = []
        with one_thread():
            for counts in (self._small, (64, 128)):
                for count in reversed(counts):
                    if not self._joins(groups, probe, count):
                        refused.append(count)
                if groups:
                    break
            if not groups:
                self._book.keep(self._alone, None)
                raise LookupError(f"no number of rows gives {self.name} stable bits")
            expected, members = min(groups, key=lambda group: _work(tuple(group[1])))
            members.sort()
            made = ClassMap(
                members[-1], tuple(members), tuple(round(self._micros(probe, count), 2) for count in members),
                tuple(sorted([*refused, *(c for _, group in groups if group is not members for c in group)])),
                bits.md5(expected),
            )  # fmt: skip
        self.seconds += time.perf_counter() - started
        self._book.keep(self._alone, made)
        return made

    def _joins(self, groups: list[tuple[Tensor, list[int]]], probe: Probe, count: int) -> bool:
        """Puts a count into the group whose bits it has, or into a new one; False where its rows have no bits of their own."""
        for expected, members in groups:
            if self._agrees(probe, count, expected):
                members.append(count)
                return True
        expected = _tiles(probe, count)
        if not self._agrees(probe, count, expected) or not _ignores_neighbours(probe, count, expected):
            return False
        groups.append((expected, [count]))
        return True

    def _grown(self, known: ClassMap, counts: tuple[int, ...] | list[int]) -> ClassMap:
        """The map with these counts probed, at the threads now set or on one, as the map is."""
        if not counts:
            return known
        started = time.perf_counter()
        probe = self._make(0)
        with one_thread():
            expected = _tiles(probe, known.unit)
        if bits.md5(expected) != known.digest:  # the file says that it is of this machine, and its bits are not
            known = self._found()
            if self._key != self._alone:
                known = replace(known, members=(), micros=(), others=())
                counts = [*self._small, *counts]
            with one_thread():
                expected = _tiles(probe, known.unit)
        with nullcontext() if getattr(self, "is_threaded", True) else one_thread():
            for count in counts:
                if self._agrees(probe, count, expected):
                    micros = self._micros(probe, count) / self._pace(probe, known)
                    known = known.with_count(count, round(micros, 2))
                else:
                    known = known.with_count(count, None)
        self.seconds += time.perf_counter() - started
        return known

    def _agrees(self, probe: Probe, count: int, expected: Tensor) -> bool:
        """Whether a call of so many rows gives each row at each place the bits expected, [ROWS, N]."""
        tries = self._tries(count)
        places = torch.arange(count, device=probe.bank.device)
        for number in range(tries):
            rows = (places + number * Probe.ROWS // tries) % Probe.ROWS
            if not bits.equal(probe.call(probe.bank[rows]), expected[rows]):
                return False
        return True

    def _micros(self, probe: Probe, count: int) -> float:
        """Time of a call of so many rows. Few rows of a large weight are timed as a model calls them: it is not in a cache."""
        x = probe.bank[torch.arange(count, device=probe.bank.device) % Probe.ROWS]
        others = torch.ones(_CACHES // 4) if self._is_large and count <= 32 and x.device.type == "cpu" else None
        least = float("inf")
        for _ in range(8 if others is None else 4):
            if others is not None:
                others.sum()
            started = time.perf_counter()
            probe.call(x)
            least = min(least, time.perf_counter() - started)
        return 1e6 * least

    def _pace(self, probe: Probe, known: ClassMap) -> float:
        """How much slower the machine is now than when the map was begun: times are kept as they would have been then."""
        if known.unit not in known.members:
            return 1.0
        return self._micros(probe, known.unit) / known.micros[known.members.index(known.unit)]

    def fresh(self) -> None:
        """Forgets which counts ran, so that `recheck` looks at those alone that run from now on."""
        with self._lock:
            self._plans.clear()  # a plan that is known is not noted again
            self.ran.clear()

    def recheck(self, seed: int = 1) -> list[Finding]:
        """Looks at each count that ran once more, with other data, against calls of ``unit`` rows on one thread."""
        with self._lock, not_observed():
            probe = self._make(seed)
            with one_thread():
                expected = _tiles(probe, self.map.unit)
            with nullcontext() if self.is_threaded else one_thread():
                return [
                    Finding(self._key, f"{count} rows", self._agrees(probe, count, expected)) for count in sorted(self.ran)
                ]

    def __str__(self) -> str:
        others = f"; not of it: {words(self.map.others)}" if self.map.others else ""
        return f"{self._key}: one class at {words(self.map.members)} rows{others}"


def _tiles(probe: Probe, unit: int) -> Tensor:
    """The bank's rows in calls of ``unit`` rows: [61, N]."""
    made, size = [], len(probe.bank)
    for start in range(0, size, unit):
        rows = torch.arange(start, start + unit, device=probe.bank.device) % size
        made.append(probe.call(probe.bank[rows])[: size - start])
    return torch.cat(made)


def _ignores_neighbours(probe: Probe, count: int, expected: Tensor) -> bool:
    """Whether a row among zeros has the bits it has among others."""
    tile = probe.bank.new_zeros(count, probe.bank.shape[1])
    for row in range(0, Probe.ROWS, 8):
        tile[0] = probe.bank[row]
        if not bits.equal(probe.call(tile)[0], expected[row]):
            return False
    return True


def _work(members: tuple[int, ...]) -> int:
    """Work of serving 1 to 32 rows with calls of these counts: rows computed, at least four a call, and three for the call."""
    total = 0
    for rows in range(1, 33):
        fitting = [max(c, 4) + 3 for c in members if c >= rows]
        cut = [-(-rows // c) * (max(c, 4) + 3) for c in members]
        total += min([*fitting, *cut])
    return total


_known: dict[tuple[str, str, int], RowClasses] = {}
_lock = threading.RLock()


def row_classes(what: str, dtype: torch.dtype, sizes: tuple[int, ...], make: MakeProbe, *, work: int, row_bytes: int,
                device: torch.device | str = "cpu", has_grid: bool = True) -> RowClasses | None:  # fmt: skip
    """The classes of a kernel at the number of threads now set, one object for all layers of a size; None where none is stable.

    Args are those of `RowClasses`.
    """
    book = ledger()
    key = (str(book.path), name_of(what, dtype, *sizes, device=device), id(book))
    with _lock:
        if key not in _known:
            try:
                _known[key] = RowClasses(
                    what, dtype, sizes, make, work=work, row_bytes=row_bytes, device=device, has_grid=has_grid
                )
            except LookupError:
                return None
        found = _known[key]
        book.kernels[key[1]] = found
        book.asked.add(key[1])
        return found
