"""What the exact tier computes, slowly, in Python's whole numbers, fractions and floats: the definition of spec `tri4`.

Every function takes lists of Python floats (each a value of the model's dtype) and returns lists of them. A sum here is one of
whole numbers, so its order is of no matter; +, -, *, / and sqrt of floats are IEEE 754's, rounded once each, and where more
than one takes part the docstring gives them in order. ``cast`` rounds to the model's dtype: to float32, nearest, ties to even,
and from there to bfloat16 or float16 where that is the dtype.

A row with a NaN or an infinity in it is `NAN` all over; other rows do not notice. A zero that comes from a sum is +0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from detlab.engine.exact import constants
from detlab.engine.exact import functions as fast_functions
from detlab.engine.exact import rotary as fast_rotary
from detlab.engine.exact.constants import DIGITS, GRID, KEY_BITS, LEAST, MAGIC, NORM_GRID, ROW_BITS, STEPS, SUM_BITS, UNIT

__all__ = ["attention", "cos_sin", "experts", "exponent", "function", "layer_norm", "linear", "rms_norm", "routing", "softmax"]

NAN = float("nan")
Row = Sequence[float]
Cast = Callable[[float], float]


def cast_to(dtype: torch.dtype) -> Cast:
    """Rounds a float as `detlab.engine.exact.linear.rounded` does."""
    return lambda y: float(torch.tensor(y, dtype=torch.float64).float().to(dtype))


# ------------------------------------------------------------------------------------------------------------- scaling
def is_finite(row: Row) -> bool:
    """Whether no value is NaN or infinite."""
    return all(math.isfinite(x) for x in row)


def exponent(row: Row, least: int = LEAST) -> int:
    """E, the smallest whole number with |x| < 2**E for all x, but at least -98."""
    return max(least, math.frexp(max(abs(x) for x in row))[1]) if any(row) else least


def quantised(row: Row, bits: int) -> tuple[list[int], int]:
    """Whole numbers round(x * 2**(bits - E)), ties to even, and E."""
    e = exponent(row)
    return [round(Fraction(x) * Fraction(2) ** (bits - e)) for x in row], e


def digits(q: int) -> list[int]:
    """Four digits of a whole number of at most 2**27 in magnitude, the most significant first: sum of d_i * 128**(3 - i).

    The last three are within -64..63, the first within -64..64.
    """
    found = []
    for _ in range(DIGITS - 1):
        low = (q + 64) % 128 - 64
        found.append(low)
        q = (q - low) // 128
    return [q, *found[::-1]]


# -------------------------------------------------------------------------------------------------------------- linear
def linear(x: Row, weight: Sequence[Row], bias: Row | None, cast: Cast) -> list[float]:
    """One row of a linear layer.

    x and each row of the weight: 27 bits of the row's own E, four digits. T = sum over k and over i + j <= 3 of
    x_i[k] * w_j[k] * 128**(3 - i - j), a whole number below 2**50 for up to 2**16 terms.
    y = T * 2**(E_x + E_w - 33), exact in float64; + bias, one rounding to float64; cast.
    """
    if not is_finite(x):
        return [NAN] * len(weight)
    numbers, e_x = quantised(x, ROW_BITS)
    cut = [digits(q) for q in numbers]
    out = []
    for n, row in enumerate(weight):
        w_numbers, e_w = quantised(row, ROW_BITS)
        w_cut = [digits(q) for q in w_numbers]
        total = sum(
            a[i] * w[j] * 128 ** (3 - i - j) for a, w in zip(cut, w_cut, strict=True) for i in range(4) for j in range(4 - i)
        )
        y = float(Fraction(total) * Fraction(2) ** (e_x + e_w - 33))
        out.append(cast(y if bias is None else y + bias[n]))
    return out


# ----------------------------------------------------------------------------------------------------------- functions
def exp2(t: float, shift: int = 0) -> float:
    """2**(t / 1024 + shift), with n = round(t), ties to even, f = t - n, n = 1024 k + j, c1 = ln 2 / 1024, c2 = c1**2 / 2.

    ((f * c2 + c1) * f + 1) * (2**(j / 1024), rounded to float64, times 2**(k + shift)).
    """
    n = (t + MAGIC) - MAGIC
    f = t - n
    k, j = divmod(int(n), STEPS)
    _, c1, c2 = constants.EXP2_TERMS
    return ((f * c2 + c1) * f + 1.0) * (constants.powers()[j] * 2.0 ** (k + shift))


def exp(x: float, factor: float = 1.0) -> float:
    """e**(x * factor) = 2**(t / 1024), t = x * (factor * 1024 log2 e), the product rounded once, kept within +-1024000."""
    if math.isnan(x):
        return NAN
    return exp2(min(1024000.0, max(-1024000.0, x * (factor * UNIT))))


def _tanh(x: float) -> float:
    if math.isnan(x):
        return NAN
    if abs(x) < 0.125:  # x * (1 + x**2 * (...)), Taylor's series to x**12
        square = x * x
        p = square * fast_functions.TANH_TERMS[-1]
        for term in fast_functions.TANH_TERMS[-2:0:-1]:
            p = (p + term) * square
        return (p + 1.0) * x
    e = exp(abs(x), -2.0)
    return math.copysign((1.0 - e) / (e + 1.0), x)


def _gelu(x: float) -> float:
    """Returns x * P, P = 1 - tail for x > 0 and tail otherwise; tail = (exp(series - z * z) * t) * 0.5.

    z = |x| * sqrt(1/2), t = 2 / (z + 2), series: Clenshaw's sum of the Chebyshev terms at 2 t - 1.
    """
    if math.isnan(x):
        return NAN
    z = abs(x) * fast_functions._SQRT_HALF
    t = 2.0 / (z + 2.0)
    y = t * 2.0 - 1.0
    b1 = b2 = 0.0
    for term in fast_functions.ERFC_TERMS[:0:-1]:
        b1, b2 = ((y + y) * b1 - b2) + term, b1
    series = (y * b1 - b2) + fast_functions.ERFC_TERMS[0]
    tail = exp(series - z * z) * t * 0.5
    return x * (1.0 - tail if x > 0 else tail)


def _gelu_tanh(x: float) -> float:
    """Returns x / (1 + exp(((x * x * 0.044715 + 1) * x) * -2 sqrt(2 / pi)))."""
    return x / (exp(((x * x) * 0.044715 + 1.0) * x, constants.GELU_UNIT / UNIT) + 1.0)


_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (exp(x, -1.0) + 1.0),
    "sigmoid": lambda x: 1.0 / (exp(x, -1.0) + 1.0),
    "quick_gelu": lambda x: x / (exp(x, -1.702) + 1.0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: NAN if math.isnan(x) else max(x, 0.0),
    "tanh": _tanh,
}


def function(name: str, x: float, cast: Cast) -> float:
    """An activation by its name in `functions.FUNCTIONS`, one rounding to float64 an operation, then cast."""
    return cast(_FUNCTIONS[name](x))


def softmax(row: Row, cast: Cast) -> list[float]:
    """With p = round(exp(x - max) * 2**40), ties to even, with the power of two kept above -64: p / sum p; cast."""
    top = max(row)
    if any(math.isnan(x) for x in row) or top == math.inf:
        return [NAN] * len(row)
    p = [round(exp2(max(-65536.0, (x - top) * UNIT), 40)) for x in row]
    return [cast(float(value) / float(sum(p))) for value in p]


def cos_sin(angle: float) -> tuple[float, float]:
    """With k = round(angle * 2 / pi): r = ((angle - k a) - k b) - k c; Taylor's series; the quarter that k names."""
    k = (angle * fast_rotary.TWO_OVER_PI + MAGIC) - MAGIC
    r = angle
    for part in fast_rotary.HALF_PI:
        r = r - k * part
    square = r * r

    def series(terms: Sequence[float]) -> float:
        total = terms[-1]
        for term in terms[-2::-1]:
            total = total * square + term
        return total

    c, s = series(fast_rotary.COS_TERMS), series(fast_rotary.SIN_TERMS) * r
    return ((c, s), (-s, c), (-c, -s), (s, -c))[int(k) & 3]


# --------------------------------------------------------------------------------------------------------------- norms
def _mean_square(row: Row) -> float:
    """S = sum of round(x**2 * 2**(36 - 2 E)); x * 2**(18 - E) squared with one rounding, then to a whole number.

    S * 2**(2 E - 36), exact, times the float64 nearest to 1 / K.
    """
    e = exponent(row)
    scaled = [x * 2.0 ** (NORM_GRID // 2 - e) for x in row]
    total = sum(round(z * z) for z in scaled)
    return float(total) * 2.0 ** (2 * e - NORM_GRID) * (1.0 / len(row))


def rms_norm(x: Row, weight: Row, eps: float, cast: Cast) -> list[float]:
    """Returns x * r * w with r = 1 / sqrt(mean square + eps), from left to right; cast. Gemma's w is 1 + weight."""
    if not is_finite(x):
        return [NAN] * len(x)
    r = 1.0 / math.sqrt(_mean_square(x) + eps)
    return [cast(value * r * w) for value, w in zip(x, weight, strict=True)]


def layer_norm(x: Row, weight: Row, bias: Row, eps: float, cast: Cast) -> list[float]:
    """Takes off the mean, sum of round(x * 2**(36 - E)) scaled back and times 1 / K; then as `rms_norm`, + bias; cast."""
    if not is_finite(x):
        return [NAN] * len(x)
    e = exponent(x)
    total = sum(round(Fraction(value) * Fraction(2) ** (NORM_GRID - e)) for value in x)
    mean = float(total) * 2.0 ** (e - NORM_GRID) * (1.0 / len(x))
    left = [value - mean for value in x]
    r = 1.0 / math.sqrt(_mean_square(left) + eps)
    return [cast(value * r * w + b) for value, w, b in zip(left, weight, bias, strict=True)]


# ----------------------------------------------------------------------------------------------------------- attention
def attention(query: Row, keys: Sequence[Row], values: Sequence[Row], scaling: float, cast: Cast) -> list[float]:
    """One query head over the tokens it sees, in any order. Steps as in the head of `detlab.engine.exact.attention`.

    Queries have b = 31 - bits of (size - 1) bits, keys and values 22. The score is (sum q k) * 2**(E_q - b + E_k - 22), exact,
    * (scaling * (1024 * log2 e)), both products rounded once; score - max, once, kept above -65536.
    """
    size = len(query)
    if not all(is_finite(row) for row in (query, *keys, *values)):
        return [NAN] * size
    b_q, b_k = (53 - KEY_BITS - (size - 1).bit_length()), KEY_BITS
    factor = scaling * UNIT
    q, e_q = quantised(query, b_q)
    scores = []
    for row in keys:
        k, e_k = quantised(row, b_k)
        total = sum(a * b for a, b in zip(q, k, strict=True))
        scores.append(float(Fraction(total) * Fraction(2) ** (e_q - b_q + e_k - b_k)) * factor)
    top = max(scores)
    p = [round(exp2(max(-65536.0, score - top), GRID)) for score in scores]
    v = [quantised(row, KEY_BITS) for row in values]
    g = [Fraction(a) * Fraction(2) ** (e - KEY_BITS) for a, (_, e) in zip(p, v, strict=True)]
    e = max(-200, math.frexp(float(max(g)))[1])
    h = [round(a * Fraction(2) ** (GRID - e)) for a in g]
    f = math.frexp(float(sum(h)))[1]
    w = [round(Fraction(a) * Fraction(2) ** (SUM_BITS - f)) for a in h]
    out = []
    for d in range(size):
        total = sum(a * row[d] for a, (row, _) in zip(w, v, strict=True))
        value = float(Fraction(total) * Fraction(2) ** (f + e - SUM_BITS - GRID))
        out.append(cast(value / float(sum(p))))
    return out


# ------------------------------------------------------------------------------------------------------------- experts
def routing(logits: Row, count: int, cast: Cast) -> tuple[list[int], list[float]]:
    """The chosen experts and their weights: softmax, the largest (of equals the first), each over their sum in that order.

    The probabilities are float32; their sum is of float64 additions, cast; the quotient is float32's.
    """
    single = cast_to(torch.float32)
    p = softmax(logits, single)
    order = sorted(range(len(p)), key=lambda i: -p[i])[:count]
    total = p[order[0]]
    for index in order[1:]:
        total = total + p[index]
    return order, [cast(single(p[i] / single(total))) for i in order]


def experts(results: Sequence[Row], weights: Row, cast: Cast) -> list[float]:
    """The sum of results[c] * weights[c], the first chosen first: exact products, float64 additions, cast."""
    out = []
    for values in zip(*results, strict=True):
        total = values[0] * weights[0]
        for value, weight in zip(values[1:], weights[1:], strict=True):
            total = total + value * weight
        out.append(cast(total))
    return out
