"""Moves a computation's timing for real: other processes that compute, fewer cores, pauses. All of it is undone on leaving."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from detlab.errors import UsageError

__all__ = ["QUIET", "TIMINGS", "Timing"]

QUIET = "quiet"
TIMINGS = {
    QUIET: "as the machine is",
    "load": "beside a process for each core that computes all the time",
    "one-core": "on one core, which another process shares",
    "pauses": "with pauses of up to 20 ms between steps",
}
LONGEST_PAUSE = 0.02  # seconds

# Hashes without end, and ends with its parent: Linux kills it then (1 is PR_SET_PDEATHSIG), also while it is made to wait.
_BUSY = """
import hashlib, os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
except Exception:
    pass
parent, data = os.getppid(), bytes(1 << 20)
sys.stdout.write("!")
sys.stdout.flush()
while os.getppid() == parent:
    hashlib.sha256(data)
"""


class Timing:
    """Processes that wait until their timing is asked for.

    Args:
        names: keys of `TIMINGS`.
        model: between whose calls pauses go; None has them before a run.
        seed: of the pauses' lengths.

    Raises:
        UsageError: a name is unknown, or none is given.
    """

    def __init__(self, names: Sequence[str], model: nn.Module | None, seed: int) -> None:
        unknown = [name for name in names if name not in TIMINGS]
        if unknown or not names or isinstance(names, str):
            raise UsageError(f"timings={names!r} is not possible; give a list of some of {', '.join(TIMINGS)}.")
        reasons = {name: self._why_not(name) for name in dict.fromkeys(names)}
        self.names = [name for name, why in reasons.items() if not why]
        self.notes = [why for why in reasons.values() if why]
        if not self.names:
            raise UsageError(f"none of timings={list(names)} can be had here: {' '.join(self.notes)}")
        self._model, self._draw = model, random.Random(seed)
        self._all: list[subprocess.Popen[bytes]] = []
        self._one: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def _why_not(name: str) -> str:
        if name == "one-core" and not hasattr(os, "sched_setaffinity"):
            return f"{name} was left out: this system does not let a process choose its cores."
        if name in ("load", "one-core") and not hasattr(signal, "SIGSTOP"):
            return f"{name} was left out: this system cannot make a process wait."
        return ""

    def __enter__(self) -> Timing:
        try:
            if "load" in self.names:
                for _ in range(_usable_cores()):  # one by one: an interruption must find those that were started
                    self._all.append(_busy())
            if "one-core" in self.names:
                self._one.append(_busy({min(os.sched_getaffinity(0))}))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for process in (*self._all, *self._one):
            process.kill()
            process.wait()

    @contextmanager
    def put_in(self, name: str) -> Iterator[None]:
        """Lets a block run under a timing."""
        if name == "load":
            with _woken(self._all):
                yield
        elif name == "one-core":
            with _woken(self._one), _confined(min(os.sched_getaffinity(0))):
                yield
        elif name == "pauses":
            handle = None
            if self._model is None:
                self._pause()
            else:
                handle = self._model.register_forward_pre_hook(lambda *_: self._pause())
            try:
                yield
            finally:
                if handle is not None:
                    handle.remove()
        else:
            yield

    def _pause(self) -> None:
        time.sleep(self._draw.uniform(0, LONGEST_PAUSE))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _busy(cores: set[int] | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _BUSY], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        with process.stdout as said:
            said.read(1)  # it has started
        process.send_signal(signal.SIGSTOP)
        if cores:
            os.sched_setaffinity(process.pid, cores)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


@contextmanager
def _woken(processes: list[Any]) -> Iterator[None]:
    try:
        for process in processes:
            process.send_signal(signal.SIGCONT)
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGSTOP)


@contextmanager
def _confined(core: int) -> Iterator[None]:
    """Keeps every thread of this process on one core; each has its own cores again afterwards."""
    own = os.sched_getaffinity(0)
    before = {thread: cores for thread in _threads() if (cores := _cores_of(thread))}
    try:
        for thread in _threads():
            _confine(thread, {core})
        yield
    finally:
        for thread in _threads():  # one that was started meanwhile has its cores from the one that started it
            _confine(thread, before.get(thread, own))


def _threads() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]


def _cores_of(thread: int) -> set[int] | None:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:  # it has ended
        return None


def _confine(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:  # it has ended
        return
