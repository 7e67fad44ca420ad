"""Hashes rows in bulk: small tensors of one width wait for each other, and digests reach the host once a call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from detlab import bits
from detlab.trace.records import TensorRecord

#: Outputs up to this size wait, so that many of one width are hashed by one kernel.
SMALL_BYTES = 64 << 10
#: At most this much waits: small tensors kept alive among big ones would pin the memory between them.
PENDING_BYTES = 256 << 10
#: Rows whose projections wait to be folded into digests.
BUFFER_ROWS = 1 << 15


class Hasher:
    """Collects rows to be hashed and writes digests into their records on `flush`."""

    def __init__(self) -> None:
        self._pending: dict[tuple[torch.dtype, torch.Size], list[tuple[TensorRecord, Tensor]]] = {}
        self._pending_bytes = 0
        self._buffer = np.empty((BUFFER_ROWS, bits.NUM_PROJECTIONS), np.int32)
        self._filled = 0
        self._waiting: list[tuple[TensorRecord, int]] = []  # whose projections are in the buffer
        self._on_device: list[tuple[TensorRecord, Tensor]] = []  # the host is not made to wait for these

    def add(self, record: TensorRecord, tensor: Tensor, num_rows: int, width: int) -> None:
        """Hashes a tensor's rows, now, or later where it is small; the caller flushes before anything is overwritten.

        Args:
            record: gets the digests.
            tensor: a reshape to [num_rows, width] gives its rows.
            num_rows, width: its rows.
        """
        size = num_rows * width * tensor.element_size()
        if size > SMALL_BYTES:
            self.add_projections(record, bits.project_rows(tensor.reshape(num_rows, width)))
            return
        key = (tensor.dtype, tensor.shape)
        waiting = self._pending.get(key)
        if waiting is None:
            waiting = self._pending[key] = []
        # One shape can stand for rows of different widths (a batch row of a mask, a token's row of a score).
        if waiting and waiting[0][0].width != width:
            self.flush()
            waiting = self._pending.setdefault(key, [])
        waiting.append((record, tensor))
        self._pending_bytes += size
        if self._pending_bytes > PENDING_BYTES:
            self.flush()

    def add_projections(self, record: TensorRecord, projections: Tensor) -> None:
        """Takes projections that were computed already.

        They are copied into one buffer and let go: many small tensors kept alive among a model's big ones would keep the
        allocator from using their memory again.
        """
        num_rows = projections.shape[0]
        if projections.device.type != "cpu":
            self._on_device.append((record, projections))
        elif projections.shape[1] != bits.NUM_PROJECTIONS or num_rows > BUFFER_ROWS:
            record.digests = bits.fold(projections)
        else:
            if self._filled + num_rows > BUFFER_ROWS:
                self._fold()
            self._buffer[self._filled : self._filled + num_rows] = projections.numpy()
            self._waiting.append((record, num_rows))
            self._filled += num_rows

    def _fold(self) -> None:
        digests = bits.fold(torch.from_numpy(self._buffer[: self._filled]))
        start = 0
        for record, num_rows in self._waiting:
            record.digests = digests[start : start + num_rows]
            start += num_rows
        self._waiting.clear()
        self._filled = 0

    def flush(self) -> None:
        """Hashes what waits and fills in all records."""
        for entries in self._pending.values():
            if not entries:
                continue
            record, tensor = entries[0]
            stacked = tensor if len(entries) == 1 else torch.stack([tensor for _, tensor in entries])
            projections = bits.project_rows(stacked.reshape(-1, record.width))
            num_rows = projections.shape[0] // len(entries)
            for index, (record, _) in enumerate(entries):
                self.add_projections(record, projections[index * num_rows : (index + 1) * num_rows])
        self._pending.clear()
        self._pending_bytes = 0
        if self._on_device:
            moved, self._on_device = self._on_device, []
            for record, projections in moved:
                self.add_projections(record, projections.cpu())
        if self._filled:
            self._fold()


_stored: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def stored_digest(tensor: Tensor) -> np.ndarray:
    """Digest of a parameter or buffer, int64 [1]; computed once per version.

    A version is what autograd takes for one: writes through ``.data`` (merging an adapter, say) do not count. `run` calls
    `forget_stored` first, so that only two bare captures with such a write between them are taken in.
    """
    plain = tensor.detach()
    state = (plain.data_ptr(), 0 if tensor.is_inference() else tensor._version)
    known = _stored.get(tensor)  # type: ignore[no-untyped-call]
    if known is None or known[0] != state:
        known = _stored[tensor] = (state, np.array([bits.digest(plain)], np.int64))
    digests: np.ndarray = known[1]
    return digests


def forget_stored(model: nn.Module) -> None:
    """Has a model's parameters and buffers hashed anew when they are next used."""
    for tensor in (*model.parameters(), *model.buffers()):
        _stored.pop(tensor, None)  # type: ignore[no-untyped-call]
