"""Fresh processes for what cannot be changed in this one: threads, instruction sets, where weights lie in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detlab import bits
from detlab.engine.probes import draw

__all__ = ["ALIGNMENTS", "ISAS", "Elsewhere", "kernels_digest", "moved", "settings_of"]

#: Caps of the instruction sets: of ATen's own kernels, of MKL's (float32 products), of oneDNN's (16-bit and int8 products), and
#: of what Numba compiles for the exact tier.
ISAS: dict[str, dict[str, str]] = {
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "ATen avx2, MKL COMPATIBLE, oneDNN AVX2, Numba haswell": {
        "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2", "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
    },
    "ATen default, MKL COMPATIBLE, oneDNN SSE41, Numba generic": {
        "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NUMBA_CPU_NAME": "generic",
    },
}  # fmt: skip
#: Bytes past a multiple of 64, where torch puts what it allocates.
ALIGNMENTS = (4, 32)


@dataclass(frozen=True)
class Elsewhere:
    """A fresh process.

    Attributes:
        way: the fields of a `Way` that say what is another there.
        variables: environment variables, set before it starts.
        threads: intra-op threads.
        offset: of weights and of what modules take; -1 leaves them where they are.
    """

    way: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    offset: int = -1


def settings_of(axis: str, threads: Sequence[int]) -> list[Elsewhere]:
    """The processes of an axis.

    Args:
        axis: "threads", "isa" or "alignment".
        threads: numbers of threads, for their axis.
    """
    here = torch.get_num_threads()
    if axis == "threads":
        return [
            Elsewhere({"threads": n}, {"OMP_NUM_THREADS": str(n), "MKL_NUM_THREADS": str(n)}, threads=n) for n in threads
        ]
    if axis == "isa":
        return [Elsewhere({"isa": name}, variables, threads=here) for name, variables in ISAS.items()]
    return [Elsewhere({"offset": offset}, threads=here, offset=offset) for offset in ALIGNMENTS]


def kernels_digest() -> str:
    """MD5 of what stock kernels make of fixed numbers: whether a cap of instruction sets reached any of them."""
    found = hashlib.md5(usedforsecurity=False)
    single, half = torch.float32, torch.bfloat16
    x, w = draw(33, 515, dtype=single, seed=1), draw(40, 515, dtype=single, seed=2)
    results = (
        F.linear(x, w), F.linear(draw(3, 2048, dtype=half, seed=3), draw(16, 2048, dtype=half, seed=4)),
        torch.softmax(x * 9, -1), F.silu(x * 9), F.layer_norm(x, (515,)), torch.exp(x * 9),
    )  # fmt: skip
    for result in results:
        found.update(bits.md5(result).encode())
    return found.hexdigest()


def moved(model: nn.Module, offset: int) -> dict[str, int]:
    """Moves a model's weights, and from now on the floating-point tensors that its modules take, to addresses of an offset.

    Args:
        model: of this process alone; it stays so.
        offset: bytes past a multiple of 64; a multiple of the element size.

    Returns:
        Counts, which go on with the calls: tensors moved, and module inputs moved.
    """
    counts = {"tensors_moved": 0, "inputs_moved": 0}
    known: dict[int, Tensor] = {}
    for parameter in model.parameters():
        at = parameter.data_ptr()
        if at not in known:
            known[at] = bits.placed(parameter.data, offset)
            counts["tensors_moved"] += known[at].data_ptr() % 64 == offset
        parameter.data = known[at]

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        counts["inputs_moved"] += 1
        return bits.placed(value, offset)

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(place, args)), {name: place(value) for name, value in kwargs.items()}

    for module in model.modules():
        if not list(module.children()):  # what layers hand on; a cache and a mask are not theirs
            module.register_forward_pre_hook(before, with_kwargs=True)
    return counts
