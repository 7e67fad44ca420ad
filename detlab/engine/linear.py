"""Linear layers whose rows do not depend on the other rows: packed weights, row counts padded to the measured granule.

``y[m] = x[m] @ W.T + b`` has the bits of the same kernel called, on one thread, with one granule of rows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detlab.engine.canonical import MOST_ROWS, RowRule, find_row_rule, ledger, name_of, one_thread, run_by_rule
from detlab.errors import MachineError

__all__ = ["CanonicalLinear", "reference_linear"]

_GRANULES = (4, 8, 16, 32)
_DEVICE_GRANULES = (16, 32, 64, 128, 256)
UNPADDED = RowRule(granule=1, most=MOST_ROWS, is_threaded=True)
_HEAVY = 8_000_000  # elements of a weight from which on fewer row counts are measured


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


def _pack_blocks(weight: Tensor, block: int | None) -> list[Tensor] | None:
    """The weight packed, in blocks of its columns where asked for; None where it cannot be packed."""
    parts = [_pack(part) for part in (weight.split(block, 1) if block else [weight])]  # type: ignore[no-untyped-call]
    packed = [part for part in parts if part is not None]
    return packed if len(packed) == len(parts) else None


def _chain(terms: int, most: int) -> int | None:
    """The length of equal chains of at most so many terms, a multiple of 16; None where one chain holds all."""
    return None if terms <= most else -(-terms // (-(-terms // most)) // 16) * 16


class CanonicalLinear:
    """One weight, and the kernel and row rule by which it is applied.

    Attributes:
        kernel: "packed" (oneDNN, its own weight layout) or "plain" (torch's linear).
        rule: how it is called; measured for the number of threads that were set when it was made or last `tune`d.
    """

    __slots__ = ("bias", "block", "kernel", "num_in", "num_out", "packed", "rule", "weight", "_call", "_is_padded", "_kind")

    def __init__(self, weight: Tensor, bias: Tensor | None, what: str = "linear", is_padded: bool = True,
                 block: int | None = None) -> None:  # fmt: skip
        """Packs a weight.

        Args:
            weight: [N, K].
            bias: [N], or None.
            what: names the layer in an error.
            is_padded: False calls the kernel with any number of rows, whatever the bits.
            block: in float32, the most terms that are added in one chain; a row's chains are of one length (the last may be
                shorter), and their sums are added one after the other. None: one chain, which is fastest.

        Raises:
            MachineError: on this machine no number of rows gives stable bits for this size.
        """
        self.num_out, self.num_in = weight.shape
        self.bias = None if bias is None else bias.detach()
        self._kind = (weight.dtype, weight.device)
        self.block = _chain(self.num_in, block) if block and weight.dtype == torch.float32 else None
        self.packed = _pack_blocks(weight, self.block)
        self.weight: Tensor | None = None
        self.kernel, self._call = "packed", self._packed_call
        rule = self._measure() if self.packed is not None else None
        if rule is None:
            self.packed, self.weight = None, weight.detach()
            self.kernel, self._call = "plain", self._plain_call
            rule = self._measure()
        if rule is None:
            raise MachineError(
                f"{what}: no row count gives stable bits for a {str(weight.dtype).removeprefix('torch.')} product with "
                f"K={self.num_in}, N={self.num_out} on this machine, so this layer cannot be made invariant here."
            )
        self._is_padded = is_padded
        self.rule = rule if is_padded else UNPADDED

    def tune(self) -> None:
        """Looks up the rule for the number of threads that is set now; the kernel, and so the bits, stay."""
        rule = self._measure() if self._is_padded else UNPADDED
        assert rule is not None  # the kernel was chosen on one thread, whatever the number
        self.rule = rule

    def _measure(self) -> RowRule | None:
        dtype, device = self._kind
        name = name_of(f"linear/{self.kernel}", dtype, self.num_in, self.num_out, device=device)
        if self.bias is not None:
            name += " bias"
        if self.block is not None and self.kernel == "packed":
            name += f" block={self.block}"
        if self.kernel == "packed":
            granules: tuple[int, ...] = _GRANULES
        else:
            granules = _DEVICE_GRANULES if device.type != "cpu" else (1, *_GRANULES)

        def measure() -> RowRule | None:
            heavy = self.num_in * self.num_out > _HEAVY
            return find_row_rule(self._call, self.num_in, dtype, granules, heavy=heavy, device=device)

        rule: RowRule | None = ledger().look_up(name, RowRule, measure)
        return rule

    def _packed_call(self, x: Tensor) -> Tensor:
        first, *others = cast(list[Tensor], self.packed)
        linear = torch.ops.mkldnn._linear_pointwise
        if self.block is None:
            return cast(Tensor, linear.default(x, first, self.bias, "none", [], ""))
        result = linear.default(x[..., : self.block], first, self.bias, "none", [], "")
        for start, packed in zip(range(self.block, self.num_in, self.block), others, strict=True):
            result = linear.binary(x[..., start : start + self.block], result, packed, None, "add")
        return cast(Tensor, result)

    def _plain_call(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the layer to [..., K]; returns [..., N]."""
        rows = x.numel() // self.num_in
        rule = self.rule
        if rows <= rule.most and rule.is_threaded:  # the short way, taken nearly always
            spare = -rows % rule.granule
            if not spare:
                return self._call(x)
            padded = F.pad(x.reshape(rows, self.num_in), (0, 0, 0, spare))
            return self._call(padded)[:rows].view(*x.shape[:-1], self.num_out)
        flat = run_by_rule(self._call, x.reshape(rows, self.num_in), rule)
        return flat.view(*x.shape[:-1], self.num_out)


def reference_linear(layer: CanonicalLinear, x: Tensor) -> Tensor:
    """What a `CanonicalLinear` means, slowly: each row alone, in the first place of a tile of zeros, on one thread."""
    rows = []
    with one_thread():
        for row in x.reshape(-1, x.shape[-1]):
            tile = row.new_zeros(layer.rule.granule, layer.num_in)
            tile[0] = row
            rows.append(layer._call(tile)[0])
    return torch.stack(rows).view(*x.shape[:-1], layer.num_out)


def weight_of(module: Any) -> Tensor:
    """The weight of an ``nn.Linear`` or a transformers ``Conv1D``, as [N, K]."""
    weight: Tensor = module.weight
    return weight if isinstance(module, nn.Linear) else weight.t()
