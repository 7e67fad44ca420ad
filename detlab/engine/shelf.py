"""Puts weights aside in a file that is mapped into memory: they need no memory of their own, and can be read all the same.

A weight that lies in a mapped file already, as safetensors leaves it, stays there; its pages are given back to the system.
While a packed copy of a weight computes, the weight itself is only asked for (saving, adapters, digests). Its parameter keeps
its name, shape and values; the values lie in an unnamed temporary file, and the system reads them when someone looks.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Shelf"]

_PAGE = mmap.ALLOCATIONGRANULARITY
_SPARE = 64 << 20  # bytes of the disk that are left alone


@dataclass
class _Place:
    parameter: nn.Parameter
    address: int
    map: mmap.mmap


class Shelf:
    """Parameters put aside; `give_back` returns them to memory."""

    def __init__(self) -> None:
        self._file: Any = None
        self._places: list[_Place] = []
        self._known: set[int] = set()
        self._is_full = False
        self._clean: list[tuple[int, int]] | None = None

    def put(self, parameter: nn.Parameter) -> bool:
        """Moves a parameter's values to the file; False where that is not possible (no room, another device)."""
        data = parameter.data
        if id(parameter) in self._known or self._is_full:
            return False
        if (
            data.device.type != "cpu"
            or not data.is_contiguous()
            or data.numel() == 0
            or data.untyped_storage().nbytes() != data.nbytes
        ):
            return False
        if self._clean is None:
            self._clean = _clean_files()
        if any(first <= data.data_ptr() and data.data_ptr() + data.nbytes <= last for first, last in self._clean):
            _drop_pages(data.data_ptr(), data.nbytes)
            return True
        size = -(-data.nbytes // _PAGE) * _PAGE
        try:
            place = self._map(parameter, data, size)
        except OSError as error:
            self._is_full = True
            warnings.warn(
                f"weights stay in memory beside their packed copies: the temporary folder cannot hold them ({error}).",
                stacklevel=2,
            )
            return False
        self._places.append(place)
        self._known.add(id(parameter))
        return True

    def _map(self, parameter: nn.Parameter, data: Tensor, size: int) -> _Place:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="detlab-")
        if shutil.disk_usage(tempfile.gettempdir()).free < size + _SPARE:
            raise OSError("no space left")
        start = self._file.seek(0, 2)
        self._file.truncate(start + size)
        self._file.write(memoryview(_bytes(data)))
        self._file.flush()
        view = mmap.mmap(self._file.fileno(), size, offset=start)
        view.madvise(mmap.MADV_DONTNEED)
        array = np.frombuffer(view, dtype=np.uint8, count=data.nbytes)
        mapped = torch.from_numpy(array).view(data.dtype).view(data.shape)
        parameter.data = mapped
        return _Place(parameter, mapped.data_ptr(), view)

    def tidy(self) -> None:
        """Has the allocator return to the system what was freed (glibc keeps small blocks)."""
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)

    def give_back(self) -> None:
        """Returns the values, as they are now, to memory of their own, unless a parameter got other values meanwhile."""
        while self._places:
            place = self._places.pop()
            if place.parameter.data_ptr() == place.address:
                place.parameter.data = place.parameter.data.clone()
        self._known.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


def _clean_files() -> list[tuple[int, int]]:
    """Address ranges that show a file as it is, with no page changed in memory (Linux; elsewhere none)."""
    ranges: list[tuple[int, int]] = []
    current: tuple[int, int] | None = None
    try:
        with open("/proc/self/smaps", encoding="utf-8") as file:
            for line in file:
                head, *rest = line.split(maxsplit=5)
                if "-" in head and not head.endswith(":"):
                    first, _, last = head.partition("-")
                    current = (int(first, 16), int(last, 16)) if rest[3] != "0" else None
                elif head == "Anonymous:" and rest[0] == "0" and current is not None:
                    ranges.append(current)
    except (OSError, ValueError, IndexError):
        return []
    return ranges


def _drop_pages(address: int, size: int) -> None:
    """Gives whole pages of a clean file back to the system, which reads them again when they are needed."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _bytes(data: Tensor) -> Any:
    return data.detach().view(-1).view(torch.uint8).numpy()
