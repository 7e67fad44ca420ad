"""Which shapes of a call give the same bits on this machine: measured, not assumed.

A vendor's kernel chooses its order of additions from the *shape* of the call. If it is called in canonical shapes only
(row counts that are multiples of a granule, say), then the row's own values alone decide the row's bits. Which granule
does it is a property of the machine, its instruction sets, the library and the sizes. It is measured here against a
reference: the same kernel on one thread, on tiles of one granule of rows. What was measured is kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from detlab import bits
from detlab.environment import cache_dir, environment

__all__ = ["Ledger", "RowRule", "draw", "find_row_rule", "ledger", "one_thread", "pad_rows", "unobserved"]

P = ParamSpec("P")
R = TypeVar("R")
_FORMAT = 4  # raise it when what is measured, or how, changes: older measurements are then made again
MOST_ROWS = 2048  # more rows than were measured at once are computed in pieces


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs the block on one intra-op thread: what a kernel cuts among threads, it does not cut here."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Uniform numbers in (-1, 1) whose bits are the same on every machine; float32 first, then rounded to the dtype."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
    return ((2 * integers + 1).float() / 2**16).to(device=device, dtype=dtype)


def pad_rows(x: Tensor, granule: int) -> Tensor:
    """Appends rows of zeros to [rows, K] until their number is a multiple of the granule."""
    spare = -x.shape[0] % granule
    return torch.nn.functional.pad(x, (0, 0, 0, spare)) if spare else x


# ------------------------------------------------------------------------------------------------------- row counts
@dataclass(frozen=True)
class RowRule:
    """How a row-wise kernel must be called so that a row's bits depend on the row alone.

    Attributes:
        granule: row counts are padded with zeros to a multiple of it.
        most: more rows are computed in pieces of this many.
        is_threaded: the bits are those of one thread at the number of threads it was measured for; otherwise the call
            is made on one thread.
    """

    granule: int
    most: int
    is_threaded: bool


RowKernel = Callable[[Tensor], Tensor]


def _row_counts(granule: int, most: int) -> list[int]:
    """Row counts to be measured: the first eight multiples, and some around the tile edges of known kernels."""
    edges = (12, 16, 20, 24, 28, 32, 36, 48, 60, 64, 68, 96, 100, 128, 160, 192, 196, 256, 260, 512, 516, 1024, MOST_ROWS)
    counts = {granule * k for k in range(1, 9)} | {-(-edge // granule) * granule for edge in edges}
    return sorted(count for count in counts if count <= most)


def find_row_rule(kernel: RowKernel, width: int, dtype: torch.dtype, granules: tuple[int, ...], *, heavy: bool = False,
                  device: torch.device | str = "cpu") -> RowRule | None:  # fmt: skip
    """Measures the smallest granule at which a row-wise kernel is one bit class; None where no granule is.

    The reference is the kernel on one thread and one granule of rows. All the row counts measured must give its bits for
    every row: at one thread, which decides on the granule, and then at the number of threads now set.

    Args:
        kernel: [rows, width] -> [rows, N]; each row of the result depends on the same row of its argument.
        width: length of a row.
        dtype: the argument's.
        granules: candidates, the cheapest first.
        heavy: the kernel is large: fewer row counts are measured.
        device: where it runs.
    """
    base = draw(128 if heavy else 256, width, dtype=dtype, seed=width, device=device)
    most = MOST_ROWS // 2 if heavy else MOST_ROWS
    # Last of all, calls of one single shape: they can differ by the place in the call alone.
    for granule, largest in [*((granule, most) for granule in granules), *((tile, tile) for tile in _TILES)]:
        with one_thread():
            reference = torch.cat([kernel(base[i : i + granule].clone()) for i in range(0, len(base), granule)])
            stable = _is_one_class(kernel, base, reference, granule, largest, heavy)
        if not stable:
            continue
        threaded = torch.get_num_threads() == 1 or _is_one_class(kernel, base, reference, granule, largest, heavy)
        return RowRule(granule, largest, threaded)
    return None


_TILES = (32, 128)


def _is_one_class(kernel: RowKernel, base: Tensor, reference: Tensor, granule: int, most: int, heavy: bool) -> bool:
    size = len(base)
    if granule > 1:  # another place inside the tile
        if not bits.equal(kernel(base[:granule].roll(1, 0)), reference[:granule].roll(1, 0)):
            return False
    counts = _row_counts(granule, most)
    if heavy:
        counts = [count for count in counts if count <= 8 * granule or count in (64, 128, most)]
    for count in counts:
        if count > size:
            wide, expected = base.repeat(-(-count // size), 1)[:count], reference.repeat(-(-count // size), 1)[:count]
            if not bits.equal(kernel(wide), expected):
                return False
            continue
        for start in {0, (size - count) // granule * granule}:
            if not bits.equal(kernel(base[start : start + count].clone()), reference[start : start + count]):
                return False
    return True


def run_by_rule(kernel: RowKernel, x: Tensor, rule: RowRule) -> Tensor:
    """Calls a row-wise kernel on [rows, K] as its rule says."""
    if not rule.is_threaded:
        with one_thread():
            return _in_pieces(kernel, x, rule)
    return _in_pieces(kernel, x, rule)


def _in_pieces(kernel: RowKernel, x: Tensor, rule: RowRule) -> Tensor:
    rows = x.shape[0]
    if rows <= rule.most:
        spare = -rows % rule.granule
        return kernel(pad_rows(x, rule.granule))[:rows] if spare else kernel(x)
    return torch.cat([_in_pieces(kernel, piece, rule) for piece in torch.split(x, rule.most)])


# ------------------------------------------------------------------------------------------------ what was measured
@lru_cache(maxsize=1)
def _machine() -> dict[str, Any]:
    """What decides which kernels this process has: CPU, instruction sets, libraries and their caps. Not the threads."""
    record = environment()
    return {
        "cpu": {key: record.cpu.get(key) for key in ("model", "stepping", "isa", "capability", "caches")},
        "versions": {key: record.versions.get(key) for key in ("torch", "mkl", "onednn", "cuda")},
        "variables": {
            key: value
            for key, value in record.variables.items()
            if key.startswith(("ATEN_", "MKL_CBWR", "MKL_ENABLE", "ONEDNN_", "DNNL_"))
        },
        "cores": os.cpu_count(),
    }


class Ledger:
    """Measurements of this machine, kept in one JSON file per (CPU, instruction sets, torch, libraries).

    A file that is damaged, or that was measured elsewhere, is not believed: its measurements are made again.

    Attributes:
        path: the file.
        measured: what this process measured or read, by name.
        asked: names that were looked up by this process.
    """

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        text = json.dumps({"format": _FORMAT, "machine": machine}, sort_keys=True)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path = folder / f"{self.key}.json"
        self.measured: dict[str, dict[str, Any] | None] = {}
        self.asked: set[str] = set()
        self._read()

    def _read(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(self.path.read_text())
            body = json.dumps(content["measured"], sort_keys=True)
            if content["key"] == self.key and content["sha256"] == hashlib.sha256(body.encode()).hexdigest():
                self.measured = {**content["measured"], **self.measured}

    def look_up(self, name: str, kind: type[Any], measure: Callable[[], Any | None]) -> Any | None:
        """Returns what is known under a name, a dataclass of that kind; measures it where nothing is."""
        self.asked.add(name)
        if name in self.measured:
            known = self.measured[name]
            with suppress(TypeError):  # of another layout: measured again
                return None if known is None else kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})
        with _unobserved():
            found = measure()
        self.measured[name] = None if found is None else asdict(found)
        self._write()
        return found

    def _write(self) -> None:
        """Other processes measure, too: theirs are read first, and the file is replaced in one step."""
        self._read()
        body = json.dumps(self.measured, sort_keys=True)
        content = {"key": self.key, "sha256": hashlib.sha256(body.encode()).hexdigest(), "measured": self.measured}
        with suppress(OSError):  # a cache that cannot be written costs time, not correctness
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(content, file, indent=1, sort_keys=True)
                os.replace(name, self.path)
            except OSError:
                Path(name).unlink(missing_ok=True)


def unobserved(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose ops a trace does not see: what it makes is kept, so that only its first call would show any."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _unobserved():
            return function(*args, **kwargs)

    return call


def _unobserved() -> Any:
    """Measuring is no part of what a model computes: a trace that is being captured does not see it."""
    try:
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        return nullcontext()
    return _disable_current_modes()


@lru_cache(maxsize=1)
def ledger() -> Ledger:
    """The ledger of this machine."""
    return Ledger(cache_dir() / "calibration", _machine())


def name_of(what: str, dtype: torch.dtype, *sizes: int, device: torch.device | str = "cpu") -> str:
    """The name of a measurement, the number of threads among it."""
    kind = torch.device(device).type
    where = f"threads={torch.get_num_threads()}" if kind == "cpu" else kind
    return f"{what} {str(dtype).removeprefix('torch.')} {'x'.join(map(str, sizes))} {where}"
