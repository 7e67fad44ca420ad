"""The fast functions against the definition in Python's whole numbers, bit by bit, on plain and on hostile values."""

import math

import pytest
import torch

from detlab.engine.exact import functions, linear, norms, reference, rotary
from detlab.engine.exact.attention import _sealed, attend, encoded, numbers, query_bits
from detlab.engine.exact.constants import KEY_BITS, MOST_TOKENS, UNIT
from detlab.engine.exact.digits import rows_of, signed
from detlab.engine.exact.experts import _sum_in_order, chosen, combined
from tests.bit_classes import bitwise_equal, draw

pytestmark = pytest.mark.usefixtures("steps")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = torch.finfo(torch.float32).max


def hostile(rows, size, dtype, seed=0):
    """Rows of every kind: plain, outliers, tiny, subnormal, zero, signed zeros, the largest, one value among zeros."""
    x = draw(rows, size, seed=seed)
    top = torch.finfo(dtype).max
    x[1 % rows, :: max(1, size // 3)] *= 1000.0
    x[2 % rows] *= 2.0**-110
    x[3 % rows] *= 2.0**-130
    x[4 % rows] = 0.0
    x[5 % rows] = -0.0
    x[6 % rows] = (x[6 % rows] * 2).clamp(-1, 1) * top
    x[7 % rows, 1:] = 0.0
    x[8 % rows] = torch.where(x[8 % rows] > 0, top, -top)
    x[9 % rows] = x[9 % rows].sign() * (1 - 2.0**-24) * 0.5
    return x.to(dtype)


def same(actual, expected):
    """Bitwise, but that a NaN is a NaN whatever its payload."""
    expected = torch.tensor(expected, dtype=torch.float64).to(actual.dtype).view(actual.shape)
    both = actual.isnan() & expected.isnan()
    return bitwise_equal(actual.masked_fill(both, 0), expected.masked_fill(both, 0))


def rows(tensor):
    return tensor.double().tolist()


def test_digits():
    x = torch.cat([hostile(10, 9, torch.float32), torch.tensor([[1.0, -1.0, 0.5, *([1 - 2.0**-24, -(2.0**-27)] * 3)]])])
    cut = signed(rows_of(x).digits)
    for m, row in enumerate(rows(x)):
        numbers, _ = reference.quantised(row, 27)
        assert [reference.digits(q) for q in numbers] == cut[:, m].t().tolist()
        assert all(sum(d * 128 ** (3 - i) for i, d in enumerate(reference.digits(q))) == q for q in numbers)
    assert int(cut.abs().max()) <= 64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", linear.KERNELS)
def test_linear(kernel, dtype):
    if dtype == torch.float16 and kernel != "int8":
        return
    for size, outputs, seed in ((1, 1, 0), (7, 5, 1), (64, 10, 2), (131, 3, 3)):
        x, w = hostile(10, size, dtype, seed), hostile(outputs, size, dtype, seed + 9)
        x[3, size // 2] = float("nan")
        x[6, 0] = float("-inf")
        bias = draw(outputs, seed=4).to(dtype) if size != 64 else None
        layer = linear.ExactLinear([linear.prepare(w)], [bias], kernel)
        given = rows(w), None if bias is None else rows(bias)
        expected = [reference.linear(row, *given, reference.cast_to(dtype)) for row in rows(x)]
        assert same(layer(x), expected)
        assert bitwise_equal(layer(x[5:6]), layer(x)[5:6])


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_functions(name):
    special = [0.0, -0.0, 1e-40, -1e-40, 1e-3, 0.1249, 0.125, -0.125, 0.5, -1.0, 5.0, -5.0, 20.0, -20.0, 88.0, -88.0, 700.0,
               -700.0, 1e30, -1e30, LARGEST, -LARGEST, float("nan"), float("inf"), float("-inf")]  # fmt: skip
    values = torch.cat([torch.tensor(special), draw(200, seed=1) * 12, draw(60, seed=2) / 50])
    for dtype in DTYPES[:2]:
        x = values.to(dtype)
        actual = functions.evaluate(name, x)
        assert same(actual, [reference.function(name, v, reference.cast_to(dtype)) for v in rows(x)])


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_functions_are_accurate(name):
    x = torch.cat([draw(20000, seed=3) * 9, draw(1000, seed=4) / 100, draw(1000, seed=5) * 30]).double()
    known = {
        "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
        "relu": torch.relu, "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "quick_gelu": lambda v: v * torch.sigmoid(1.702 * v),
    }[name](x)  # fmt: skip
    error = (functions.FUNCTIONS[name](x) - known).abs()
    # torch's own gelu cancels in its tail; what is left is held against its absolute error.
    assert bool((error <= 2.0**-32 * known.abs() + 1e-15 * x.abs()).all())


def test_exp_is_accurate():
    x = draw(20000, seed=3).double() * 80
    assert float((functions.exp(x) / x.exp() - 1).abs().max()) < 2.0**-36.5


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_norms(dtype):
    for size, seed in ((1, 0), (5, 1), (64, 2), (200, 3)):
        x, weight, bias = hostile(12, size, dtype, seed), draw(size, seed=5).to(dtype), draw(size, seed=6).to(dtype)
        x[10] = x[10] / 100 + 7.0
        x[11, size // 2] = float("inf")
        given = [rows(t) for t in (weight, bias)]
        cast = reference.cast_to(dtype)
        actual = norms.rms_norm(x, weight.double(), 1e-6)
        assert same(actual, [reference.rms_norm(row, given[0], 1e-6, cast) for row in rows(x)])
        actual = norms.layer_norm(x, weight.double(), bias.double(), 1e-5)
        assert same(actual, [reference.layer_norm(row, *given, 1e-5, cast) for row in rows(x)])


def test_norms_are_accurate():
    x, weight, bias = draw(300, 576, seed=1), draw(576, seed=2), draw(576, seed=3)
    x[:, 7] *= 1000
    x[100:200] += 3
    for name in ("rms_norm", "layer_norm"):
        more = () if name == "rms_norm" else (bias.double(),)
        exact = getattr(norms, name)(x, weight.double(), *more, 1e-6)
        function = getattr(torch.nn.functional, name)
        truth = function(x.double(), (576,), weight.double(), *more, 1e-6)
        assert float(((exact - truth).abs() / (truth.abs() + 1e-3)).max()) < 2.0**-22


@pytest.mark.parametrize("size", [1, 5, 64, 256])
def test_attention(size):
    bits = query_bits(size)
    assert bits + KEY_BITS + math.ceil(math.log2(size)) <= 53
    for tokens, seed in ((1, 1), (3, 2), (17, 3), (30, 4)):
        for factor in (1.0, 300.0):
            q, k, v = draw(4, size, seed=seed) * factor, hostile(tokens, size, torch.float32, seed), draw(tokens, size, seed=9)
            k = k.clamp(-100, 100)
            v[0] *= 1000
            v[-1] *= 2.0**-80
            scaling = size**-0.5
            keys, values = _sealed(encoded(k), encoded(v))
            out = attend(numbers(q[None, None], bits), keys[None, None], values[None, None], None, scaling * UNIT)
            cast = reference.cast_to(torch.float32)
            assert same(out[0, 0].float(), [reference.attention(row, rows(k), rows(v), scaling, cast) for row in rows(q)])


def test_attention_in_any_order_and_with_what_is_not_seen():
    q, k, v = draw(1, 3, 5, 64, seed=1) * 8, draw(1, 3, 700, 64, seed=2), draw(1, 3, 700, 64, seed=3)
    query, keys, values = numbers(q, query_bits(64)), encoded(k), encoded(v)
    expected = attend(query, keys, values, None, 200.0)
    order = torch.randperm(700, generator=torch.Generator().manual_seed(1))
    assert bitwise_equal(attend(query, keys[:, :, order], values[:, :, order], None, 200.0), expected)
    bad = torch.full_like(k[:, :, :50], float("nan"))
    bad_keys, bad_values = _sealed(encoded(bad), encoded(bad))
    keys, values = torch.cat([bad_keys, keys], 2), torch.cat([bad_values, values], 2)
    hidden = torch.zeros(1, 1, 5, 750, dtype=torch.bool)
    hidden[..., :50] = True
    assert bitwise_equal(attend(query, keys, values, hidden, 200.0), expected)
    hidden[0, 0, 2, 3] = False  # one query sees one of the bad
    out = attend(query, keys, values, hidden, 200.0)
    assert bool(out[:, :, 2].isnan().all()) and bitwise_equal(out[:, :, [0, 1, 3, 4]], expected[:, :, [0, 1, 3, 4]])


def test_attention_of_the_most_tokens():
    """The longest context: sums of more terms than float64 adds exactly go on in whole numbers of 64 bits."""
    tokens = MOST_TOKENS
    q, k, v = draw(1, 1, 1, 2, seed=1), draw(1, 1, tokens, 2, seed=2) / 64, draw(1, 1, tokens, 2, seed=3)
    k[0, 0, tokens // 2 :] = 0.0  # half of them of one weight, and so most of them near the largest there is
    out = attend(numbers(q, query_bits(2)), encoded(k), encoded(v), None, 512.0)
    cast = reference.cast_to(torch.float32)
    expected = reference.attention(rows(q)[0][0][0], rows(k)[0][0], rows(v)[0][0], 512.0 / UNIT, cast)
    assert same(out[0, 0, 0].float(), expected)


def test_rotary():
    special = torch.tensor([0.0, 1e-30, 2.0**20], dtype=torch.float64)
    angles = torch.cat([torch.arange(200).double(), draw(500, seed=1).double().abs() * 131072, special])
    cosine, sine = rotary.cos_sin(angles)
    expected = [reference.cos_sin(a) for a in angles.tolist()]
    assert bitwise_equal(cosine, torch.tensor([c for c, _ in expected], dtype=torch.float64))
    assert bitwise_equal(sine, torch.tensor([s for _, s in expected], dtype=torch.float64))
    assert max(abs(c - math.cos(a)) + abs(s - math.sin(a)) for (c, s), a in zip(expected, angles.tolist(), strict=True)) < 1e-15


def test_softmax_and_routing():
    logits = torch.cat([draw(6, 16, seed=1) * 9, torch.zeros(1, 16), torch.full((1, 16), -LARGEST)])
    logits[2, 3], logits[3, 4], logits[4, 5:9] = float("nan"), float("-inf"), 3.0
    single = reference.cast_to(torch.float32)
    probabilities = functions.softmax(logits)
    assert same(probabilities, [reference.softmax(row, single) for row in rows(logits)])
    for row, p in zip(rows(logits), probabilities, strict=True):
        if not bool(p.isnan().any()):
            values, index = chosen(p, 4)
            weights = values / _sum_in_order(values)
            found, expected = reference.routing(row, 4, single)
            assert index.tolist() == found and same(weights, expected)
    results, weights = draw(5, 4, 32, seed=2).bfloat16(), draw(5, 4, seed=3).bfloat16()
    cast = reference.cast_to(torch.bfloat16)
    expected = [reference.experts(rows(r), rows(w), cast) for r, w in zip(results, weights, strict=True)]
    assert same(combined(results, weights), expected)
