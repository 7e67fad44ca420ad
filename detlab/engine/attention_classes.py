"""Which shapes of attention calls give a query row one class of bits: probed at first sight, and kept in the ledger.

The class of a kernel, head size and dtype is that of calls of one granule of query rows against whole blocks of keys, on one
thread. Nothing is interpolated: before a shape's result is used, a call of that shape was made with data that show the order of
additions (`attention_probes`), and every row of it, at every place, had the bits of the class. What a shape is:

    rows       query rows of each head, the granule's padding included
    keys       key slots of the call
    mask       "one" for all rows, "rows": each its own, "causal": none given, the kernel's own
    heads      "single": one head of one batch row alone, "many", "shared": several query heads for each KV head
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab import bits
from detlab.engine.attention_probes import KINDS, ROWS, AttentionData, Kernel, attention_data, largest_weight
from detlab.engine.cache import BLOCK
from detlab.engine.canonical import not_observed, one_thread
from detlab.engine.ledger import Finding, Ledger, ledger, name_of

__all__ = ["AttentionClasses", "AttentionMap", "Shape", "attention_classes"]

_STEP = 16  # key counts are multiples of this
_GRANULES = (4, 8, 16, 32)
_TILES = 24  # of a causal call, so many tiles of a granule are compared at least
_CAUSAL_KEYS = 3  # numbers of keys that are tried for a causal call


class Shape(NamedTuple):
    """Of a call, as the module says."""

    rows: int
    keys: int
    mask: str
    heads: str

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.keys} keys, mask {self.mask}, heads {self.heads}"


@dataclass(frozen=True)
class AttentionMap:
    """What is known of the shapes of one kernel, head size, dtype and number of threads.

    Attributes:
        granule: query rows of a call of the class.
        members: shapes of the class, as "rows mask heads: keys keys-keys" in units of 16 keys.
        others: shapes that are not of it.
        digest: of the class's bits for the probe's data.
    """

    granule: int
    members: tuple[str, ...]
    others: tuple[str, ...]
    digest: str

    def __post_init__(self) -> None:
        if self.granule not in _GRANULES:
            raise ValueError(f"not an attention map: {self}")
        for text in (*self.members, *self.others):
            if not list(_read(text)):
                raise ValueError(f"not shapes of attention: {text!r}")


def _read(text: str) -> Iterator[Shape]:
    """Shapes of a line of the map."""
    about, _, counts = text.partition(":")
    rows, mask, heads = about.split()
    for part in counts.split():
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield Shape(int(rows), _STEP * number, mask, heads)


def _lines(shapes: Iterable[Shape]) -> tuple[str, ...]:
    """Shapes as lines of the map; what `_read` undoes.

    >>> _lines([Shape(4, 16, "one", "many"), Shape(4, 32, "one", "many"), Shape(4, 512, "one", "many")])
    ('4 one many: 1-2 32',)
    """
    found: dict[tuple[int, str, str], list[list[int]]] = {}
    for rows, keys, mask, heads in sorted(shapes):
        runs = found.setdefault((rows, mask, heads), [])
        number = keys // _STEP
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return tuple(
        f"{rows} {mask} {heads}: " + " ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)
        for (rows, mask, heads), runs in found.items()
    )


class _Probe:
    """Data for calls of so many keys, and each row's bits in the class."""

    def __init__(self, kernel: Kernel, granule: int, keys: int, data: AttentionData) -> None:
        self.kernel, self.granule, self.keys = kernel, granule, keys
        self.q, self.k, self.v = data
        self._known: dict[int, Tensor] = {}

    def mask(self, counts: Tensor | int, total: int) -> Tensor:
        """[1, 1, rows or 1, total]: each row sees its first ``counts`` keys."""
        seen = torch.as_tensor(counts, device=self.q.device).view(-1, 1)
        hidden = torch.arange(total, device=self.q.device) >= seen
        return self.q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[None, None]

    def tile(self, q: Tensor, counts: Tensor | int) -> Tensor:
        """One call of the class: [kinds, granule, size] of queries that see so many keys."""
        total = -(-int(torch.as_tensor(counts).max()) // BLOCK) * BLOCK
        q = F.pad(q, (0, 0, 0, self.granule - q.shape[1]))
        if isinstance(counts, Tensor):
            counts = F.pad(counts, (0, self.granule - len(counts)), value=1)
        with one_thread():
            return self.kernel(q[None], self.k[None, :, :total], self.v[None, :, :total], self.mask(counts, total), 1.0)[0]

    def expected(self, count: int) -> Tensor:
        """All rows after the first ``count`` keys: [kinds, ROWS, size]."""
        if count not in self._known:
            parts = self.q.split(self.granule, 1)  # type: ignore[no-untyped-call]
            self._known[count] = torch.cat([self.tile(p, count)[:, : p.shape[1]] for p in parts], 1)
        return self._known[count]

    def call(self, heads: str, q: Tensor, mask: Tensor | None, turn: int) -> Tensor:
        """A call as the model makes it: [copies * kinds, rows, size] of as many queries; a kind has another head each turn."""
        kinds, copies = len(KINDS), q.shape[0] // len(KINDS)
        k, v = self.k[:, : self.keys], self.v[:, : self.keys]
        if heads == "single":
            return torch.cat([self.kernel(q[None, i : i + 1], k[None, i : i + 1], v[None, i : i + 1], mask, 1.0)[0]
                              for i in range(kinds)])  # fmt: skip
        if turn:
            q, k, v = q.roll(turn * copies, 0), k.roll(turn, 0), v.roll(turn, 0)
        return self.kernel(q[None], k[None], v[None], mask, 1.0)[0].roll(-turn * copies, 0)


class AttentionClasses:
    """The shapes of one kernel, head size and dtype at the number of threads now set, probed as they are asked for.

    Attributes:
        name: in the ledger.
        map: what is known.
        granule: query rows are padded to a multiple of it.
        is_threaded: the shapes were found at the threads now set; otherwise calls are made on one thread.
        ran: shapes that were planned.
        seconds: spent on probing by this process.
    """

    def __init__(self, dtype: torch.dtype, size: int, kernel: Kernel, *, device: torch.device | str = "cpu",
                 book: Ledger | None = None) -> None:  # fmt: skip
        """Reads what is known, and chooses the class where nothing is.

        Raises:
            LookupError: no granule gives stable bits.
        """
        self.name = name_of("attention", dtype, size, device=device)
        self._book = ledger() if book is None else book
        self._dtype, self._size, self._kernel, self._device = dtype, size, kernel, torch.device(device)
        self._lock = threading.RLock()
        self._counts: dict[tuple[int, int, str, str], int | None] = {}
        self.ran: set[Shape] = set()
        self.seconds = 0.0
        self.is_threaded = self._is_kept = True
        self._write_again = 0.0
        where = self.name.rpartition(" ")[2]
        alone = where if self._device.type != "cpu" else "threads=1"
        self._key = alone_key = f"{self.name.rpartition(' ')[0]} {alone}"
        with self._lock, not_observed():
            self._weight = largest_weight(kernel, size, dtype, device)
            base = self._book.known(alone_key, AttentionMap)
            if base is None or base.digest != self._digest(base.granule):
                with one_thread():
                    base = self._found()
                self._book.keep(alone_key, base)
            if base is None:
                raise LookupError(f"no shape gives {self.name} stable bits")
            self._use(base)
            if where == alone:
                return
            shared = self._book.known(self.name, AttentionMap)
            if shared is None or (shared.granule, shared.digest) != (base.granule, base.digest):
                self._use(replace(base, members=(), others=()))
                shared = self.map if all(self._try(shape) for shape in _wanted(base.granule)[:2]) else None
            if shared is None:
                self.is_threaded = False
                self._use(base)
                return
            self._key = self.name
            self._use(shared)

    def _use(self, found: AttentionMap) -> None:
        self.map, self.granule = found, found.granule
        self._members = {shape for line in found.members for shape in _read(line)}
        self._others = {shape for line in found.others for shape in _read(line)}
        self._counts.clear()

    # ------------------------------------------------------------------------------------------------------- planning
    def keys(self, count: int, rows: int, mask: str, heads: str) -> int | None:
        """A number of keys that holds so many, for which calls of so many rows are of the class; None where none is.

        Args:
            count: keys that are seen.
            rows: of each head; calls are made of the next multiple of the granule.
            mask, heads: as in `Shape`.
        """
        name = (rows, (count + _STEP - 1) // _STEP, mask, heads)
        if name not in self._counts:
            with self._lock, not_observed(), self.placed():
                self._counts[name] = self._first(-(-rows // self.granule) * self.granule, name[1], mask, heads)
        return self._counts[name]

    def _first(self, rows: int, number: int, mask: str, heads: str) -> int | None:
        whole = -(-number * _STEP // BLOCK) * BLOCK
        candidates = [keys for keys in range(number * _STEP, whole + 1, _STEP) if self._may(rows, keys, mask, heads)]
        if mask == "causal":
            candidates = [*dict.fromkeys([*candidates[: _CAUSAL_KEYS - 1], whole])]
        known, found = len(self._members) + len(self._others), None
        for number, keys in enumerate(candidates):
            if number == 1 and not self.holds(Shape(rows, whole, mask, heads)):  # then it is not the keys that are to blame
                break
            if self.holds(Shape(rows, keys, mask, heads)):
                found = keys
                break
        if found is not None:
            self.ran.add(Shape(rows, found, mask, heads))
        if known != len(self._members) + len(self._others):
            self.map = replace(self.map, members=_lines(self._members), others=_lines(self._others))
            self._book.measured[self._key], self._is_kept = asdict(self.map), False
            if time.perf_counter() > self._write_again:
                self.flush()
        return found

    def flush(self) -> None:
        """Writes what was found to the ledger's file; in between, this is done as often as takes a twentieth of the time."""
        with self._lock:
            if not self._is_kept:
                started = time.perf_counter()
                self._book.keep(self._key, self.map)
                self._is_kept, self._write_again = True, time.perf_counter() + 20 * (time.perf_counter() - started)

    def _may(self, rows: int, keys: int, mask: str, heads: str) -> bool:
        """Whether a shape is worth a probe: the same part of a block was not found wrong behind fewer blocks."""
        first = Shape(rows, (keys - 1) % BLOCK + 1, mask, heads)
        return mask == "causal" or first.keys == BLOCK or first not in self._others

    def holds(self, shape: Shape) -> bool:
        """Whether a shape is of the class; probed where it is not known."""
        return shape in self._members or (shape not in self._others and self._try(shape))

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Runs a block at the number of threads at which the shapes were found."""
        if self.is_threaded:
            yield
            return
        with one_thread():
            yield

    # -------------------------------------------------------------------------------------------------------- probing
    def _probe(self, keys: int, counts: tuple[int, ...], seed: int, is_causal: bool = False, granule: int = 0) -> _Probe:
        slots = -(-keys // BLOCK) * BLOCK
        data = attention_data(counts, slots, self._size, self._dtype, is_causal=is_causal, weight=self._weight, seed=seed,
                              device=self._device)  # fmt: skip
        return _Probe(self._kernel, granule or self.granule, keys, data)

    def _digest(self, granule: int) -> str:
        probe = self._probe(BLOCK, (BLOCK, 100), 0, granule=granule)
        return bits.md5(torch.cat([probe.expected(count) for count in (BLOCK, 100)], 1))

    def _found(self) -> AttentionMap | None:
        """The granule whose class holds most of the shapes that are wanted."""
        best: tuple[int, AttentionMap] | None = None
        for granule in _GRANULES:
            self._use(AttentionMap(granule, (), (), ""))
            wanted = _wanted(granule)
            if not self._try(wanted[0]):
                continue
            score = sum(self._try(shape) for shape in wanted)
            if best is None or score > best[0]:
                best = score, AttentionMap(granule, _lines(self._members), _lines(self._others), self._digest(granule))
            if score == len(wanted):
                break
        return None if best is None else best[1]

    def _try(self, shape: Shape) -> bool:
        """Probes a shape and remembers what was found."""
        started = time.perf_counter()
        found = self._has_the_bits(shape, seed=0)
        (self._members if found else self._others).add(shape)
        self.seconds += time.perf_counter() - started
        return found

    def _has_the_bits(self, shape: Shape, seed: int) -> bool:
        if shape.mask == "causal":
            return self._causal_has_the_bits(shape, seed)
        generator = torch.Generator().manual_seed(shape.keys + seed)
        some = int(torch.randint(1, shape.keys + 1, (), generator=generator))
        counts = (shape.keys, max(1, shape.keys - 1 - shape.keys % 13), some)
        probe = self._probe(shape.keys, counts, seed)
        copies = 2 if shape.heads == "shared" else 1
        for turn in range(len(KINDS)):
            places = torch.arange(shape.rows)
            chosen = [(places + 3 * turn + 5 * copy) % ROWS for copy in range(copies)]
            q = torch.stack([probe.q[:, rows] for rows in chosen], 1).flatten(0, 1)
            if shape.mask == "one":
                count = counts[turn % len(counts)]
                mask = probe.mask(count, shape.keys)
                expected = [probe.expected(count)[:, rows] for rows in chosen]
            else:
                which = (places + turn) % len(counts)
                mask = probe.mask(torch.tensor(counts)[which], shape.keys)
                known = torch.stack([probe.expected(count) for count in counts], 2)
                expected = [known[:, rows, which] for rows in chosen]
            if not bits.equal(probe.call(shape.heads, q, mask, turn), torch.stack(expected, 1).flatten(0, 1)):
                return False
        return True

    def _causal_has_the_bits(self, shape: Shape, seed: int) -> bool:
        """The kernel's own mask against tiles of the class, in which each row sees as many keys as it does there."""
        tiles = shape.rows // self.granule
        tile = Shape(self.granule, -(-shape.rows // BLOCK) * BLOCK, "rows", "many")
        if not (self._has_the_bits(tile, seed) if seed else self.holds(tile)):
            return False
        probe = self._probe(shape.keys, (min(shape.rows, shape.keys),), seed, is_causal=True)
        generator = torch.Generator().manual_seed(shape.rows + seed)
        copies = 2 if shape.heads == "shared" else 1
        for turn in range(2 // copies):
            rows = [(torch.arange(shape.rows) + 3 * turn + 5 * copy) % ROWS for copy in range(copies)]
            q = torch.stack([probe.q[:, r] for r in rows], 1).flatten(0, 1)
            made = probe.call(shape.heads, q, None, turn)
            q, made = (t.view(len(KINDS), copies, shape.rows, -1) for t in (q, made))
            edges = [at // self.granule for at in (0, 32, 64, *range(128, shape.rows + 1, 128))]
            drawn = torch.randint(0, tiles, (_TILES,), generator=generator).tolist()
            chosen = sorted({t for t in (*edges, *(at - 1 for at in edges), *drawn, tiles - 1) if 0 <= t < tiles})
            for number, at in enumerate(chosen):
                places = slice(at * self.granule, (at + 1) * self.granule)
                copy = number % copies
                counts = torch.arange(places.start, places.stop) + 1
                if not bits.equal(probe.tile(q[:, copy, places].contiguous(), counts), made[:, copy, places].contiguous()):
                    return False
        return True

    def fresh(self) -> None:
        """Forgets which shapes ran."""
        with self._lock:
            self.ran.clear()
            self._counts.clear()

    def recheck(self, seed: int = 1) -> list[Finding]:
        """Looks at each shape that ran once more, with other data."""
        with self._lock, not_observed(), self.placed():
            return [Finding(self._key, str(shape), self._has_the_bits(shape, seed)) for shape in sorted(self.ran)]

    def __str__(self) -> str:
        return f"{self._key}: {len(self._members)} shapes of one class, {len(self._others)} of others"


def _wanted(granule: int) -> list[Shape]:
    """Shapes that a class should hold; without the first there is none."""
    return [
        Shape(granule, BLOCK, "one", "many"), Shape(granule, 2 * BLOCK, "rows", "many"), Shape(64, BLOCK, "one", "many"),
        Shape(256, BLOCK, "rows", "many"), Shape(32, BLOCK, "rows", "shared"), Shape(64, 64, "causal", "many"),
    ]  # fmt: skip


_known: dict[tuple[str, str, int], AttentionClasses] = {}
_lock = threading.RLock()


def _flush_all() -> None:
    for known in _known.values():
        known.flush()


def attention_classes(dtype: torch.dtype, size: int, kernel: Kernel,
                      device: torch.device | str = "cpu") -> AttentionClasses | None:  # fmt: skip
    """The classes of a kernel at the number of threads now set, one object for all layers; None where nothing is stable."""
    book = ledger()
    key = (str(book.path), name_of("attention", dtype, size, device=device), id(book))
    with _lock:
        if key not in _known:
            if not _known:
                atexit.register(_flush_all)
            try:
                _known[key] = AttentionClasses(dtype, size, kernel, device=device)
            except LookupError:
                return None
        found = _known[key]
        book.kernels[key[1]] = found
        book.asked.add(key[1])
        return found
