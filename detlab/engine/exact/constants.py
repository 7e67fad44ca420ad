"""The numbers of spec `tri4`: how many bits each sum is given. Other numbers would be another spec, with other bits.

Who changes one must change `kernels` too, if only its date: Numba keeps what it compiled until that file changes.
"""

from __future__ import annotations

import decimal
import math
from fractions import Fraction
from functools import lru_cache

__all__ = [
    "DIGITS", "DIGIT_OFFSET", "EXP2_TERMS", "FAR", "GELU_CUBE", "GELU_UNIT", "GRID", "KEY_BITS", "LEAST", "LEAST_FIELD",
    "MAGIC", "MOST_TERMS", "MOST_TOKENS", "NORM_GRID", "NOT_FINITE", "ROW_BITS", "STEPS", "SUM_BITS", "UNIT", "powers",
]  # fmt: skip

# ------------------------------------------------------------------------------------------------------ rows in digits
DIGITS = 4
ROW_BITS = 27  # of a row's largest element: 6 in the first digit, 7 in each of the others
#: Makes every digit of a whole number plus this one of 0..128, to be cut out by shifts.
DIGIT_OFFSET = 64 * (1 + 128 + 128**2 + 128**3)
LEAST = -98  # the smallest exponent E: 2**(27 - E) must be a float32
LEAST_FIELD = LEAST + 126  # the exponent field of a float32 with that E
NOT_FINITE = 255  # that of a NaN or an infinity
MOST_TERMS = 1 << 16  # of one sum: four products of 64 * 64 for each stay within int32

# ---------------------------------------------------------------------------------------------------- powers of two
#: Added to a float64 below 2**51 it leaves the nearest whole number, ties to even, in the last bits.
MAGIC = 1.5 * 2.0**52
#: Parts of an octave: 2**(1 / 1024) is the step of the table.
STEPS = 1024
#: Steps in one unit of the natural logarithm: 1024 * log2 e.
UNIT = 1024.0 * float.fromhex("0x1.71547652b82fep+0")
FAR = 1000.0 * STEPS  # what lies outside is as good as 0 or infinity
_LN2 = Fraction(float.fromhex("0x1.62e42fefa39efp-1"))
#: 2**(f / 1024) as a polynomial in f: (ln 2 / 1024)**n / n!; what is left out is below 2**-37 for |f| <= 1/2.
EXP2_TERMS = tuple(float((_LN2 / STEPS) ** n / math.factorial(n)) for n in range(3))


@lru_cache(maxsize=1)
def powers() -> tuple[float, ...]:
    """2**(j / 1024) for j = 0..1023, rounded to float64 from 40 digits."""
    with decimal.localcontext(prec=40):
        return tuple(float(decimal.Decimal(2) ** (decimal.Decimal(j) / STEPS)) for j in range(STEPS))


# --------------------------------------------------------------------------------------------- activations and norms
#: gelu's tanh form: 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x**3). In steps, the factor
#: of -2 u.
GELU_UNIT = -2.0 * float.fromhex("0x1.9884533d43651p-1") * UNIT
GELU_CUBE = 0.044715
NORM_GRID = 36  # bits of a square, of the row's largest

# ----------------------------------------------------------------------------------------------------------- attention
MOST_TOKENS = 1 << 17
KEY_BITS = 22  # of keys and values
SUM_BITS = 30
GRID = 40  # bits of a softmax weight
