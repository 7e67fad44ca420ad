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
        self._pending: dict[tuple[torch.dtype, int], list[tuple[TensorRecord, Tensor]]] = {}
        self._pending_bytes = 0
        self._staged: dict[int, list[tuple[TensorRecord, Tensor]]] = {}

    def add(self, record: TensorRecord, grid: Tensor) -> None:
        """Hashes [num_rows, width] now, or later where it is small; the caller flushes before anything is overwritten."""
        size = grid.numel() * grid.element_size()
        if size > SMALL_BYTES:
            self.add_projections(record, bits.project_rows(grid))
            return
        key = (grid.dtype, grid.shape[1])
        waiting = self._pending.get(key)
        if waiting is None:
            waiting = self._pending[key] = []
        waiting.append((record, grid))
        self._pending_bytes += size
        if self._pending_bytes > PENDING_BYTES:
            self.flush()

    def add_projections(self, record: TensorRecord, projections: Tensor) -> None:
        """Takes projections that were computed already."""
        self._staged.setdefault(projections.shape[1], []).append((record, projections))

    def flush(self) -> None:
        """Hashes what waits and fills in all records."""
        for entries in self._pending.values():
            grids = [grid for _, grid in entries]
            projections = bits.project_rows(grids[0] if len(grids) == 1 else torch.cat(grids))
            start = 0
            for record, grid in entries:
                end = start + grid.shape[0]
                self.add_projections(record, projections[start:end])
                start = end
        self._pending.clear()
        self._pending_bytes = 0
        for staged in self._staged.values():
            digests = bits.fold(torch.cat([projections for _, projections in staged]))
            start = 0
            for record, projections in staged:
                end = start + projections.shape[0]
                record.digests = digests[start:end]
                start = end
        self._staged.clear()


_parameter_digests: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def parameter_digest(tensor: Tensor, version: int) -> np.ndarray:
    """Digest of a parameter or buffer, int64 [1]; computed once per version."""
    state = (version, tensor.data_ptr())
    known = _parameter_digests.get(tensor)  # type: ignore[no-untyped-call]
    if known is None or known[0] != state:
        known = _parameter_digests[tensor] = (state, np.array([bits.digest(tensor.detach())], np.int64))
    digests: np.ndarray = known[1]
    return digests
