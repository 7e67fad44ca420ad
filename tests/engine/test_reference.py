"""The engine's parts against their slow twins, bitwise: what the fast path computes is what the reference says."""

import pytest
import torch
import torch.nn.functional as F

from detlab.engine.attention import attention_rule, canonical_attention, reference_attention
from detlab.engine.elementwise import canonical_elementwise, reference_elementwise
from detlab.engine.linear import CanonicalLinear, reference_linear
from detlab.engine.probes import draw
from detlab.engine.step import Step
from tests.bit_classes import bitwise_equal

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [*range(1, 14), 15, 16, 17, 31, 32, 33, 63, 64, 65, 128]


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), [(576, 192), (300, 77)])
def test_linear(dtype, k, n, threads):
    bias = draw(n, dtype=dtype, seed=2) if n == 77 else None
    layer = CanonicalLinear(draw(n, k, dtype=dtype, seed=1) / 16, bias)
    x = draw(128, k, dtype=dtype, seed=3)
    expected = reference_linear(layer, x)
    for rows in ROWS:
        for first in {0, 128 - rows}:
            assert bitwise_equal(layer(x[first : first + rows]), expected[first : first + rows]), (rows, first)
    assert bitwise_equal(layer(x.view(2, 64, k)), expected.view(2, 64, n))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_an_ordinary_product_in_other_bits(dtype):
    weight, x = draw(40, 64, dtype=dtype, seed=1), draw(9, 64, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().t()
    error = (CanonicalLinear(weight, None)(x).double() - exact).abs().max()
    assert error <= 65 * torch.finfo(torch.float32).eps * 64 + torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_vector_at_every_row_among_strange_neighbours(dtype):
    layer = CanonicalLinear(draw(77, 300, dtype=dtype, seed=1), None)
    vector = draw(300, dtype=dtype, seed=2)
    expected = layer(vector[None])[0]
    for rows in (2, 3, 5, 13, 33):
        block = draw(rows, 300, dtype=dtype, seed=3)
        block[::2] = float("nan")
        block[1::4] = float("inf")
        for at in range(rows):
            mixed = block.clone()
            mixed[at] = vector
            assert bitwise_equal(layer(mixed)[at], expected), (rows, at)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 2, 64), (1, 1, 40)])
def test_attention(dtype, heads, groups, size, threads):
    rule = attention_rule(dtype, size)
    for tokens in (1, 7, 40, 70):
        q, k, v = (draw(2, h, tokens, size, dtype=dtype, seed=s) for s, h in ((1, heads), (2, groups), (3, groups)))
        step = Step(2, tokens, 0, None, None, dtype, torch.device("cpu"))
        got = canonical_attention(torch.nn.Identity(), q, k, v, step)[0]
        for at in {0, tokens // 2, tokens - 1}:
            for row in range(2):
                expected = reference_attention(q[row, :, at], k[row, :, : at + 1], v[row, :, : at + 1], rule)
                assert bitwise_equal(got[row, at], expected), (tokens, at, row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, torch.tanh, F.gelu, lambda x: F.gelu(x, approximate="tanh")])
def test_elementwise(dtype, function, threads):
    canonical = canonical_elementwise(function)
    x = draw(5, 37, dtype=dtype, seed=1) * 8
    expected = reference_elementwise(function, x)
    assert bitwise_equal(canonical(x), expected)
    assert bitwise_equal(canonical(x[1:3]), expected[1:3])
    assert bitwise_equal(canonical(x.t()).t().contiguous(), expected)  # strides do not matter
    wide = x.repeat(4000, 1)  # enough that a stock kernel would cut it among threads
    assert bitwise_equal(canonical(wide)[-5:], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_of_an_odd_number_of_half_vectors(dtype):
    """A stock 16-bit gelu computes 32 elements that are left over in another way than 64: few, near -5, are seen to differ."""
    canonical = canonical_elementwise(lambda x: F.gelu(x, approximate="tanh"))
    x = draw(96 * 400, dtype=dtype, seed=1) * 8
    expected = canonical(x)
    parts = torch.cat([canonical(part) for part in x.split(96)])
    assert bitwise_equal(parts, expected)
