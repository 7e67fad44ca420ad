"""Linear layers whose rows do not depend on the other rows: packed weights, called with row counts of one class.

``y[m] = x[m] @ W.T + b`` has the bits of the same kernel called, on one thread, with the unit of its class map.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detlab.engine.canonical import aligned, one_thread
from detlab.engine.classes import Probe, RowClasses, row_classes
from detlab.engine.probes import cancelling
from detlab.errors import MachineError

__all__ = ["CanonicalLinear", "reference_linear", "weight_of"]


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own layout, which it does not hand out to others; None where it cannot be packed.

    These are private operators of torch: where they are missing or refuse, the plain kernel does.
    """
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 4)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(4, weight.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    return packed


def _chain(terms: int, most: int) -> int | None:
    """The length of at least two equal chains of at most so many terms, a multiple of 16; None where half of it holds all."""
    return None if 2 * terms <= most else -(-terms // max(2, -(-terms // most)) // 16) * 16


class _Packed:
    """oneDNN's product with a weight in its own layout, in chains of its columns where asked for."""

    __slots__ = ("bias", "block", "num_in", "parts")

    def __init__(self, parts: list[Tensor], bias: Tensor | None, num_in: int, block: int | None) -> None:
        self.parts, self.bias, self.num_in, self.block = parts, bias, num_in, block

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, block: int | None) -> _Packed | None:
        """None where the weight cannot be packed."""
        cut = weight.split(block, 1) if block else [weight]  # type: ignore[no-untyped-call]
        parts = [part for part in map(_pack, cut) if part is not None]
        return cls(parts, bias, weight.shape[1], block) if len(parts) == len(cut) else None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, K] -> [rows, N]."""
        first, *others = self.parts
        linear = torch.ops.mkldnn._linear_pointwise
        if self.block is None:
            return cast(Tensor, linear.default(x, first, self.bias, "none", [], ""))
        result = linear.default(x[..., : self.block], first, self.bias, "none", [], "")
        for start, packed in zip(range(self.block, self.num_in, self.block), others, strict=True):
            result = linear.binary(x[..., start : start + self.block], result, packed, None, "add")
        return cast(Tensor, result)


def _plain(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, weight=weight, bias=bias)


class CanonicalLinear:
    """One weight, and the kernel and class map by which it is applied.

    Attributes:
        kernel: "packed" (oneDNN, its own weight layout) or "plain" (torch's linear).
        classes: the class map, for the number of threads that were set when it was made or last `tune`d.
    """

    __slots__ = ("block", "classes", "kernel", "num_in", "num_out", "_call", "_has_bias", "_is_padded", "_kind")

    def __init__(self, weight: Tensor, bias: Tensor | None, what: str = "linear", is_padded: bool = True,
                 block: int | None = None) -> None:  # fmt: skip
        """Packs a weight.

        Args:
            weight: [N, K].
            bias: [N], or None.
            what: names the layer in an error.
            is_padded: False calls the kernel with any number of rows, whatever the bits.
            block: in float32, the most terms that are added in one chain. Sums of more than half as many are cut in two chains
                at least, of one length (the last may be shorter), whose sums are added one after the other. None: one chain,
                which is fastest.

        Raises:
            MachineError: on this machine no number of rows gives stable bits for this size.
        """
        self.num_out, self.num_in = weight.shape
        self._has_bias = bias is not None
        bias = None if bias is None else bias.detach()
        self._kind = (weight.dtype, weight.device)
        self._is_padded = is_padded
        self.block = _chain(self.num_in, block) if block and weight.dtype == torch.float32 else None
        packed = _Packed.of(weight, bias, self.block)
        classes = None
        if packed is not None:
            self.kernel, self._call = "packed", cast(Callable[[Tensor], Tensor], packed)
            classes = self._look_up()
        if classes is None:
            self.kernel, self._call = "plain", _plain(aligned(weight.detach()), bias)
            classes = self._look_up()
        if classes is None:
            raise MachineError(
                f"{what}: no row count gives stable bits for a {str(weight.dtype).removeprefix('torch.')} product with "
                f"K={self.num_in}, N={self.num_out} on this machine, so this layer cannot be made invariant here."
            )
        self.classes: RowClasses = classes

    def tune(self) -> None:
        """Looks up the map for the number of threads that is set now; the kernel, and so the bits, stay."""
        classes = self._look_up()
        assert classes is not None  # the kernel was chosen on one thread, whatever the number
        self.classes = classes

    def _look_up(self) -> RowClasses | None:
        dtype, device = self._kind
        what = f"linear/{self.kernel}{' bias' * self._has_bias}"
        if self.block is not None and self.kernel == "packed":
            what += f" block={self.block}"
        make = partial(_probe, self.kernel, (self.num_in, self.num_out), self._has_bias, self.block, dtype, device)
        return row_classes(
            what, dtype, (self.num_in, self.num_out), make, work=self.num_in * self.num_out,
            row_bytes=self.num_in * dtype.itemsize, device=device,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the layer to [..., K]; returns [..., N]."""
        rows = x.numel() // self.num_in
        flat = x.reshape(rows, self.num_in)
        if not self._is_padded or not rows:
            return self._call(flat).view(*x.shape[:-1], self.num_out)
        return self.classes.run(self._call, flat).view(*x.shape[:-1], self.num_out)


def _probe(kernel: str, sizes: tuple[int, int], has_bias: bool, block: int | None, dtype: torch.dtype, device: torch.device,
           seed: int) -> Probe:  # fmt: skip
    """The kernel with a weight of its own, of the layer's size, and rows whose products with it cancel."""
    num_in, num_out = sizes
    x, weight, bias = cancelling(Probe.ROWS, num_in, num_out, dtype, has_bias=has_bias, seed=seed)
    weight, bias = weight.to(device), None if bias is None else bias.to(device)
    call: Any = _Packed.of(weight, bias, block) if kernel == "packed" else _plain(weight, bias)
    return Probe(call, x.to(device))


def reference_linear(layer: CanonicalLinear, x: Tensor) -> Tensor:
    """What a `CanonicalLinear` means, slowly: each row alone, in the first place of a tile of zeros, on one thread."""
    rows = []
    with one_thread():
        for row in x.reshape(-1, x.shape[-1]):
            tile = row.new_zeros(layer.classes.map.unit, layer.num_in)
            tile[0] = row
            rows.append(layer._call(tile)[0])
    return torch.stack(rows).view(*x.shape[:-1], layer.num_out)


def weight_of(module: Any) -> Tensor:
    """The weight of an ``nn.Linear`` or a transformers ``Conv1D``, as [N, K]."""
    weight: Tensor = module.weight
    return weight if isinstance(module, nn.Linear) else weight.t()
