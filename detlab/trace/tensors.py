"""Full tensors that a trace keeps: written to disk as they come, read back one at a time."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from detlab.errors import TraceError

#: Tensors wait in memory until so much has come together.
SHARD_BYTES = 32 << 20
_ALIGNMENT = 64


class TensorStore(Mapping[int, Tensor]):
    """Tensors by number, in safetensors shards; memory holds one shard at most, however many ops a model has.

    A store that is being filled writes to a temporary folder, which goes when the store does; a loaded one reads its
    trace's folder.
    """

    def __init__(self, shards: Sequence[Path] = ()) -> None:
        self._folder: Path | None = None
        self._shards: list[Path] = []
        self._where: dict[int, Path] = {}
        self._waiting: dict[int, Tensor] = {}
        self._buffer: Tensor | None = None
        self._filled = 0
        for shard in shards:
            self._adopt(shard)

    def add(self, number: int, tensor: Tensor) -> None:
        """Keeps a copy of a tensor.

        Raises:
            TraceError: the disk refuses.
        """
        size = tensor.numel() * tensor.element_size()
        if self._filled + size + _ALIGNMENT > SHARD_BYTES:
            self.flush()
        if size > SHARD_BYTES or not size:
            copy = tensor.detach().cpu().clone().contiguous()
        else:  # into one buffer: copies strewn among a model's tensors would keep their memory from being used again
            if self._buffer is None:
                self._buffer = torch.empty(SHARD_BYTES, dtype=torch.uint8)
            place = self._buffer[self._filled : self._filled + size]
            copy = place.view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor.detach())
            self._filled += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._waiting[number] = copy
        if size > SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        if not self._waiting:
            return
        try:
            shard = self._own_folder() / f"tensors-{len(self._shards):05}.safetensors"
            save_file({str(number): tensor for number, tensor in self._waiting.items()}, shard)
        except OSError as error:
            raise TraceError(
                f"cannot keep full tensors: {error}. They go to the temporary folder ({tempfile.gettempdir()}); "
                'set TMPDIR to a larger disk, or use save="digest".'
            ) from error
        self._waiting, self._filled = {}, 0
        self._adopt(shard)

    def shards(self) -> list[Path]:
        """All files, everything written."""
        self.flush()
        return list(self._shards)

    def moved(self) -> TensorStore:
        """The same tensors in a temporary folder of their own, for a trace whose folder is about to go."""
        store = TensorStore()
        for shard in self.shards():
            store._adopt(Path(shutil.move(shard, store._own_folder() / shard.name)))
        return store

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="detlab-tensors-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def _adopt(self, shard: Path) -> None:
        with safe_open(shard, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                self._where[int(key)] = shard
        self._shards.append(shard)

    def __getitem__(self, number: int) -> Tensor:
        """Reads one tensor."""
        if number in self._waiting:
            return self._waiting[number].clone()
        with safe_open(self._where[number], framework="pt") as file:
            tensor: Tensor = file.get_tensor(str(number))
        return tensor

    def __iter__(self) -> Iterator[int]:
        """The numbers of the tensors, in order."""
        return iter(sorted({*self._where, *self._waiting}))

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._where.keys() | self._waiting.keys())
