"""What holds of any numbers: order, split and company change no bit, and the fast functions are the definition.

Hypothesis draws the numbers; derandomised, so that a run is like the one before.
"""

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detlab.engine.exact import functions, linear, norms, reference
from detlab.engine.exact.attention import _sealed, attend, encoded, numbers, query_bits
from detlab.engine.exact.constants import UNIT
from detlab.engine.exact.machine import is_exact
from detlab.engine.exact.split import SplitLinear
from tests.bit_classes import bitwise_equal
from tests.engine.exact.test_reference import rows, same

pytestmark = pytest.mark.usefixtures("steps")

few = settings(max_examples=20, derandomize=True, deadline=None, database=None)
KERNELS = [kernel for kernel in linear.KERNELS if is_exact(kernel)]
LARGEST = 3.4028234663852886e38

plain = st.floats(-4, 4, width=32)
adversarial = st.one_of(
    plain, st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, LARGEST, -LARGEST, 1000.0, 1 - 2.0**-24, -(2.0**-27), 63.5, 0.5]),
)  # fmt: skip
odd = st.one_of(adversarial, st.sampled_from([float("nan"), float("inf"), float("-inf")]))


def alike(actual, expected):
    """Bitwise, but that a NaN is a NaN: which one it is, is the processor's choice until a linear layer writes its own."""
    return same(actual, expected.double().tolist())


@st.composite
def matrix(draw, height, width, elements=adversarial):
    values = draw(st.lists(elements, min_size=height * width, max_size=height * width))
    return torch.tensor(values, dtype=torch.float32).view(height, width)


@st.composite
def products(draw, most=12, elements=adversarial):
    """Rows x and a weight, of one number of terms."""
    terms = draw(st.integers(1, most))
    return draw(matrix(draw(st.integers(1, 3)), terms, elements)), draw(matrix(draw(st.integers(1, 3)), terms))


@st.composite
def dealt(draw, size):
    """Columns dealt out to ranks, in any way and order."""
    order = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
    return [torch.tensor(order[a:b], dtype=torch.int64) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


@few
@given(st.data(), products(elements=odd), st.sampled_from(KERNELS))
def test_any_split_and_any_order_of_a_product(data, factors, kernel):
    x, weight = factors
    whole = linear.ExactLinear([linear.prepare(weight)], [None], KERNELS[0])(x)
    ranks = data.draw(dealt(x.shape[1]))
    assert bitwise_equal(SplitLinear(linear.prepare(weight), None, ranks, kernel)(x), whole)
    order = torch.tensor(data.draw(st.permutations(range(x.shape[1]))))
    again = linear.ExactLinear([linear.prepare(weight[:, order])], [None], kernel)
    assert bitwise_equal(again(x[:, order]), whole)
    row = data.draw(st.integers(0, len(x) - 1))
    assert bitwise_equal(again(x[row : row + 1, order]), whole[row : row + 1])


@few
@given(products(elements=odd), st.booleans(), st.sampled_from(KERNELS))
def test_a_product_is_the_definition(factors, has_bias, kernel):
    x, weight = factors
    bias = weight[:, 0].clamp(-8, 8) if has_bias else None
    found = linear.ExactLinear([linear.prepare(weight)], [bias], kernel)(x)
    cast = reference.cast_to(torch.float32)
    assert same(found, [reference.linear(row, rows(weight), None if bias is None else rows(bias), cast) for row in rows(x)])


@few
@given(st.data(), st.integers(1, 9).flatmap(lambda size: matrix(2, size, odd)))
def test_norms_in_any_order_are_the_definition(data, x):
    order = torch.tensor(data.draw(st.permutations(range(x.shape[1]))))
    weight = torch.linspace(-1, 2, x.shape[1])
    cast, w = reference.cast_to(torch.float32), rows(weight)
    found = norms.rms_norm(x, weight.double(), 1e-6)
    assert same(found, [reference.rms_norm(row, w, 1e-6, cast) for row in rows(x)])
    assert alike(norms.rms_norm(x[:, order], weight[order].double(), 1e-6), found[:, order])
    found = norms.layer_norm(x, weight.double(), weight.double(), 1e-5)
    assert same(found, [reference.layer_norm(row, w, w, 1e-5, cast) for row in rows(x)])
    there = norms.layer_norm(x[:, order], weight[order].double(), weight[order].double(), 1e-5)
    assert alike(there, found[:, order])


@few
@given(st.data(), st.integers(1, 9).flatmap(lambda size: matrix(2, size, odd)))
def test_softmax_in_any_order_is_the_definition(data, x):
    order = torch.tensor(data.draw(st.permutations(range(x.shape[1]))))
    x = torch.where(x == float("-inf"), -LARGEST, x)  # a row of nothing else has no softmax
    found = functions.softmax(x)
    assert same(found, [reference.softmax(row, reference.cast_to(torch.float32)) for row in rows(x)])
    assert alike(functions.softmax(x[:, order]), found[:, order])


@few
@given(st.data(), st.tuples(st.integers(1, 7), st.integers(1, 4)))
def test_attention_in_any_order_is_the_definition(data, sizes):
    tokens, size = sizes
    bounded = st.one_of(plain, st.sampled_from([0.0, -0.0, 1e-40, 1000.0, -1000.0, 2.0**-90]))
    q, k, v = data.draw(matrix(1, size, bounded)), data.draw(matrix(tokens, size, bounded)), data.draw(matrix(tokens, size))
    query = numbers(q[None, None], query_bits(size))
    keys, values = (t[None, None] for t in _sealed(encoded(k), encoded(v)))
    found = attend(query, keys, values, None, UNIT)
    cast = reference.cast_to(torch.float32)
    assert same(found[0, 0].float(), [reference.attention(row, rows(k), rows(v), 1.0, cast) for row in rows(q)])
    order = torch.tensor(data.draw(st.permutations(range(tokens))))
    assert bitwise_equal(attend(query, keys[:, :, order], values[:, :, order], None, UNIT), found)


def test_floating_point_is_not_so():
    """The control: the same sums in float32 follow their order."""
    x, weight = torch.linspace(-3, 4, 300)[None].exp(), torch.linspace(1, 9, 300)[None].sin()
    sums = {float(reduce(torch.add, (x * weight)[0, order])) for order in (torch.arange(300), torch.arange(299, -1, -1))}
    assert len(sums) == 2
