"""Hashes rows in bulk: small tensors of one width wait for each other, and digests reach the host once a call."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor, nn

from detlab import bits
from detlab.trace.layout import rows_of
from detlab.trace.plans import Kind
from detlab.trace.records import TensorRecord

#: Outputs up to this size wait, so that many of one kind are hashed by one kernel.
SMALL_BYTES = 16 << 10
#: At most this much waits: small tensors kept alive among big ones would pin the memory between them.
PENDING_BYTES = 256 << 10
#: Rows whose projections wait to be folded into digests; many more would not fit into a core's cache.
UNFOLDED_ROWS = 1 << 12


class Hasher:
    """Collects rows to be hashed and writes digests into their records on `flush`."""

    def __init__(self) -> None:
        self._pending: dict[Kind, list[tuple[TensorRecord, Tensor]]] = {}
        self._pending_bytes = 0
        self._projected: list[Tensor] = []  # projections that wait to be folded,
        self._owners: list[tuple[list[TensorRecord], int]] = []  # the records that own them, and how many rows there are
        self._num_rows = 0
        self._on_device: list[tuple[list[TensorRecord], Tensor]] = []  # the host is not made to wait for these

    def add(self, record: TensorRecord, tensor: Tensor, kind: Kind) -> None:
        """Hashes a tensor's rows, now, or later where it is small; the caller flushes before anything is overwritten.

        Args:
            record: gets the digests.
            tensor: any strides.
            kind: its kind, which tells its rows.
        """
        if not kind.is_flat:
            assert kind.layout is not None
            tensor = rows_of(tensor, kind.layout).grid
        if kind.num_bytes > SMALL_BYTES:
            if tensor.ndim != 2 or tensor.shape[1] != kind.width:
                tensor = tensor.reshape(kind.num_rows, kind.width)
            self.add_projections([record], bits.project_rows(tensor))
            return
        waiting = self._pending.get(kind)
        if waiting is None:
            waiting = self._pending[kind] = []
        waiting.append((record, tensor))
        self._pending_bytes += kind.num_bytes
        if self._pending_bytes > PENDING_BYTES:
            self.settle()

    def add_projections(self, records: list[TensorRecord], projections: Tensor) -> None:
        """Takes projections that were computed already; each record owns an equal share of their rows.

        Few of them wait at a time: many small tensors kept alive among a model's big ones would keep the allocator from using
        their memory again.
        """
        if not projections.is_cpu:
            self._on_device.append((records, projections))
            return
        num_rows, width = projections.shape
        if width != bits.NUM_PROJECTIONS or num_rows > UNFOLDED_ROWS:
            _share(records, bits.fold(projections))
            return
        self._projected.append(projections)
        self._owners.append((records, num_rows))
        self._num_rows += num_rows
        if self._num_rows > UNFOLDED_ROWS:
            self._fold()

    def _fold(self) -> None:
        digests = bits.fold(torch.cat(self._projected))
        start = 0
        for records, num_rows in self._owners:
            _share(records, digests[start : start + num_rows])
            start += num_rows
        self._projected.clear()
        self._owners.clear()
        self._num_rows = 0

    def settle(self) -> None:
        """Hashes what waits: the tensors may be written to from here on."""
        for kind, entries in self._pending.items():
            stacked = entries[0][1] if len(entries) == 1 else torch.stack([tensor for _, tensor in entries])
            projections = bits.project_rows(stacked.reshape(kind.num_rows * len(entries), kind.width))
            self.add_projections([record for record, _ in entries], projections)
        self._pending.clear()
        self._pending_bytes = 0

    def flush(self) -> None:
        """Hashes what waits and fills in all records."""
        if self._pending:
            self.settle()
        if self._on_device:
            moved, self._on_device = self._on_device, []
            for records, projections in moved:
                self.add_projections(records, projections.cpu())
        if self._projected:
            self._fold()


def _share(records: list[TensorRecord], digests: np.ndarray) -> None:
    """Gives each record its share of digests."""
    if len(records) == 1:
        records[0].digests = digests
        return
    num_rows = len(digests) // len(records)
    for index, record in enumerate(records):
        record.digests = digests[index * num_rows : (index + 1) * num_rows]


#: Parameters and buffers by id: whose digest it is, in which state that was, and the digest, int64 [1].
_stored: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], np.ndarray]] = {}


def stored_digest(tensor: Tensor) -> np.ndarray:
    """Digest of a parameter or buffer, int64 [1]; computed once per version.

    A version is what autograd takes for one: writes through ``.data`` (merging an adapter, say) do not count. `run` calls
    `forget_stored` first, so that only two bare captures with such a write between them are taken in.
    """
    at = id(tensor)
    state = (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
    known = _stored.get(at)
    if known is not None and known[0]() is tensor and known[1] == state:
        return known[2]
    digests = np.array([bits.digest(tensor.detach())], np.int64)
    ref = weakref.ref(tensor, lambda ref: _forget(at, ref))
    _stored[at] = (ref, state, digests)
    return digests


def _forget(at: int, ref: weakref.ref[Tensor]) -> None:
    known = _stored.get(at)
    if known is not None and known[0] is ref:
        del _stored[at]


def forget_stored(model: nn.Module) -> None:
    """Has a model's parameters and buffers hashed anew when they are next used."""
    for tensor in (*model.parameters(), *model.buffers()):
        _stored.pop(id(tensor), None)
