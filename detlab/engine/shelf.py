"""Puts weights aside in a file that is mapped into memory: they need no memory of their own, and can be read all the same.

While a packed copy of a weight computes, the weight itself is only asked for (saving, adapters, digests). Its parameter keeps
its name, shape and values; the values lie in an unnamed temporary file, and the system reads them when someone looks.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
import warnings
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


def _bytes(data: Tensor) -> Any:
    return data.detach().view(-1).view(torch.uint8).numpy()
