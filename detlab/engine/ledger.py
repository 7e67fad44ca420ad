"""What was measured of this machine's kernels, kept on disk by CPU, instruction sets and libraries.

A file that is damaged, of another layout, or measured elsewhere is not believed: its measurements are made again.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from detlab.engine.canonical import not_observed
from detlab.environment import cache_dir, environment

__all__ = ["Finding", "Ledger", "ledger", "name_of"]

_FORMAT = 5  # raise it when what is measured, or how, changes: older measurements are then made again


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


@dataclass(frozen=True)
class Finding:
    """A kernel's shape, looked at once more.

    Attributes:
        kernel: its name in the ledger.
        shape: in words.
        holds: whether it still gives the bits of the class.
    """

    kernel: str
    shape: str
    holds: bool


class Ledger:
    """Measurements of this machine in one JSON file.

    Attributes:
        path: the file.
        measured: what this process measured or read, by name.
        asked: names that were looked up by this process.
        kernels: what can look at its shapes again, by name.
    """

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        text = json.dumps({"format": _FORMAT, "machine": machine}, sort_keys=True)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.path = folder / f"{self.key}.json"
        self.measured: dict[str, dict[str, Any] | None] = {}
        self.asked: set[str] = set()
        self._is_written, self._write_again = True, 0.0
        atexit.register(_flush, weakref.ref(self))
        self.kernels: dict[str, Any] = {}
        self._read()

    def _read(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(self.path.read_text())
            body = json.dumps(content["measured"], sort_keys=True)
            if content["key"] == self.key and content["sha256"] == hashlib.sha256(body.encode()).hexdigest():
                self.measured = {**content["measured"], **self.measured}

    def known(self, name: str, kind: type[Any]) -> Any | None:
        """What is known under a name, a dataclass of that kind; None where nothing is, or where it is of another layout."""
        self.asked.add(name)
        found = self.measured.get(name)
        if found is not None:
            with suppress(TypeError, ValueError):
                return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})
        return None

    def keep(self, name: str, found: Any | None) -> None:
        """Keeps a measurement, a dataclass; None says that nothing was found.

        The file is written at once where that takes little of this process's time, and else later, at the latest when it ends.
        """
        self.measured[name] = None if found is None else asdict(found)
        self._is_written = False
        started = time.perf_counter()
        if started >= self._write_again:
            self.flush()
            self._write_again = time.perf_counter() + 20 * (time.perf_counter() - started)

    def flush(self) -> None:
        """Writes the file, if there is something to write."""
        if not self._is_written:
            self._write()
            self._is_written = True

    def look_up(self, name: str, kind: type[Any], measure: Callable[[], Any | None]) -> Any | None:
        """Returns what is known under a name; measures it, and keeps it, where nothing is."""
        found = self.known(name, kind)
        if found is not None or (name in self.measured and self.measured[name] is None):
            return found
        with not_observed():
            found = measure()
        self.keep(name, found)
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


def _flush(reference: weakref.ref[Ledger]) -> None:
    book = reference()
    if book is not None:
        book.flush()


@lru_cache(maxsize=1)
def ledger() -> Ledger:
    """The ledger of this machine."""
    return Ledger(cache_dir() / "calibration", _machine())


def name_of(what: str, dtype: torch.dtype, *sizes: int, device: torch.device | str = "cpu", threads: int | None = None) -> str:
    """The name of a measurement, the number of threads among it (None: those now set)."""
    kind = torch.device(device).type
    where = f"threads={threads or torch.get_num_threads()}" if kind == "cpu" else kind
    return f"{what} {str(dtype).removeprefix('torch.')} {'x'.join(map(str, sizes))} {where}"
