"""Rotary tables: the model's own float32 angles, their cosines and sines in portable float64 arithmetic, rounded once."""

from __future__ import annotations

from fractions import Fraction
from math import factorial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab.engine.canonical import unobserved
from detlab.engine.elementwise import RotaryTable
from detlab.engine.exact.constants import MAGIC
from detlab.engine.exact.linear import rounded
from detlab.errors import UsageError

__all__ = ["ExactRotary", "cos_sin"]

TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
# pi / 2 in three parts; the first two have 33 bits, so that their products with whole numbers below 2**20 are exact.
HALF_PI = tuple(map(float.fromhex, ("0x1.921fb54400000p+0", "0x1.0b4611a600000p-34", "0x1.3198a2e037073p-69")))
#: In powers of r**2; what is left out is below 2**-60 for |r| <= pi / 4.
SIN_TERMS = tuple(float(Fraction((-1) ** n, factorial(2 * n + 1))) for n in range(9))
COS_TERMS = tuple(float(Fraction((-1) ** n, factorial(2 * n))) for n in range(10))
MOST_ANGLE = 2.0**20


def _series(terms: tuple[float, ...], square: Tensor) -> Tensor:
    total = torch.full_like(square, terms[-1])
    for term in terms[-2::-1]:
        total.mul_(square).add_(term)
    return total


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of float64 angles within 0..2**20; error below 2**-50.

    k = round(angle * 2 / pi); r = ((angle - k * a) - k * b) - k * c with pi / 2 = a + b + c; then Taylor's series of r in
    Horner's form, and the quarter that k names.
    """
    k = (angle * TWO_OVER_PI + MAGIC) - MAGIC
    r = angle
    for part in HALF_PI:
        r = r - k * part
    square = r * r
    cosine, sine = _series(COS_TERMS, square), _series(SIN_TERMS, square).mul_(r)
    quarter = k.to(torch.int64) & 3
    is_odd = (quarter & 1).bool()
    c, s = torch.where(is_odd, sine, cosine), torch.where(is_odd, cosine, sine)
    return torch.where((quarter == 1) | (quarter == 2), -c, c), torch.where(quarter >= 2, -s, s)


class ExactRotary:
    """The forward of a rotary embedding module.

    A position's angles are the module's inverse frequencies (its buffers: state of the model, whatever computed them) times
    the position in float32, one rounding, as the model defines them; only what comes after is computed anew.
    """

    def __init__(self, module: Any, what: str) -> None:
        """Wraps a rotary embedding module.

        Raises:
            UsageError: its table changes with the length of what came before, or it keeps no inverse frequencies.
        """
        RotaryTable(module)  # refuses tables that have a history
        self.module, self.what = module, what
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self._named("", "inv_freq")

    def _named(self, layer_type: str, name: str) -> Any:
        for full in (f"{layer_type}_{name}", name):
            if hasattr(self.module, full):
                return getattr(self.module, full)
        if not layer_type and any(n.endswith(f"_{name}") for n, _ in self.module.named_buffers()):
            return None
        raise UsageError(
            f"{self.what} is a {type(self.module).__name__} without {name}; the exact tier takes position * inv_freq as angles."
        )

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str = "") -> tuple[Tensor, Tensor]:
        """As the module's forward: [batch, tokens, head size] cosines and sines in x's dtype."""
        if position_ids.ndim != 2 or position_ids.is_floating_point():
            raise UsageError(
                f"position_ids must be whole numbers [batch, tokens]; got {position_ids.dtype} {list(position_ids.shape)}."
            )
        needed = int(position_ids.max()) + 1 if position_ids.numel() else 0
        if position_ids.numel() and int(position_ids.min()) < 0:
            raise UsageError(f"position_ids count from 0; got {int(position_ids.min())}.")
        key = (x.dtype, x.device, layer_type)
        known = self.tables.get(key)
        if known is None or len(known[0]) < needed:
            known = self.tables[key] = self._make(x, -(-max(needed, 1) // 512) * 512, layer_type)
        return F.embedding(position_ids, known[0]), F.embedding(position_ids, known[1])

    @unobserved
    def _make(self, x: Tensor, length: int, layer_type: str) -> tuple[Tensor, Tensor]:
        frequencies = self._named(layer_type, "inv_freq").to(device=x.device, dtype=torch.float32)
        scaling = float(self._named(layer_type, "attention_scaling"))
        positions = torch.arange(length, device=x.device).float()
        angle = (positions[:, None] * frequencies).double()
        if float(angle.abs().max()) > MOST_ANGLE:
            raise UsageError(f"{self.what}: position {length} turns by more than {MOST_ANGLE:.0f} radians, where tables end.")
        cosine, sine = (rounded(table.mul_(scaling), x.dtype) for table in cos_sin(angle))
        return torch.cat([cosine, cosine], 1), torch.cat([sine, sine], 1)
