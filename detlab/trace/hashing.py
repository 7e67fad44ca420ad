"""Hashes rows in bulk: small tensors of one width wait for each other, and digests reach the host once a call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from detlab import bits
from detlab.trace.records import TensorRecord

#: Outputs up to this size wait, so that many of one width are hashed by one kernel.
SMALL_BYTES = 64 << 10
#: At most this much waits.
PENDING_BYTES = 4 << 20


class Hasher:
    """Collects rows to be hashed and writes digests into their records on `flush`."""

    def __init__(self) -> None:
        self._pending: dict[tuple[torch.dtype, torch.Size], list[tuple[TensorRecord, Tensor]]] = {}
        self._pending_bytes = 0
        self._staged: list[tuple[list[TensorRecord], int, Tensor]] = []

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
        """Takes projections that were computed already."""
        self._staged.append(([record], projections.shape[0], projections))

    def flush(self) -> None:
        """Hashes what waits and fills in all records."""
        for entries in self._pending.values():
            if not entries:
                continue
            record, tensor = entries[0]
            stacked = tensor if len(entries) == 1 else torch.stack([tensor for _, tensor in entries])
            projections = bits.project_rows(stacked.reshape(-1, record.width))
            self._staged.append(([record for record, _ in entries], projections.shape[0] // len(entries), projections))
        self._pending.clear()
        self._pending_bytes = 0
        widths: dict[int, list[tuple[list[TensorRecord], int, Tensor]]] = {}
        for entry in self._staged:
            widths.setdefault(entry[2].shape[1], []).append(entry)
        self._staged.clear()
        for staged in widths.values():
            digests = bits.fold(torch.cat([projections for _, _, projections in staged]))
            start = 0
            for records, num_rows, _ in staged:
                for record in records:
                    record.digests = digests[start : start + num_rows]
                    start += num_rows


_stored: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def stored_digest(tensor: Tensor) -> np.ndarray:
    """Digest of a parameter or buffer, int64 [1]; computed once per version.

    The version counter does not see what is written through ``.data`` (as merging an adapter does), so what is known is
    believed only while the sum of the tensor's words, which costs a fraction of the digest, stays what it was.
    """
    plain = tensor.detach()
    state = (plain.data_ptr(), _checksum(plain))
    known = _stored.get(tensor)  # type: ignore[no-untyped-call]
    if known is None or known[0] != state:
        known = _stored[tensor] = (state, np.array([bits.digest(plain)], np.int64))
    digests: np.ndarray = known[1]
    return digests


def _checksum(tensor: Tensor) -> int:
    """Digest of the column sums of the tensor's words modulo 2**32; an exchange within one column leaves it as it is."""
    if not tensor.is_contiguous() or not tensor.numel():
        return bits.digest(tensor)
    width = tensor.shape[-1] if tensor.ndim else 1
    row_bytes = width * tensor.element_size()
    if row_bytes % 4 or tensor.numel() * tensor.element_size() < 1 << 16:
        return bits.digest(tensor)
    words = tensor.reshape(-1, width).view(torch.int32)
    return bits.digest(words.sum(0, dtype=torch.int32))
