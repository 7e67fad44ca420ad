"""An elementwise function that computes some places of a buffer otherwise is found before its result is used."""

import pytest
import torch
import torch.nn.functional as F

from detlab.engine.elementwise import canonical_elementwise, reference_elementwise
from detlab.engine.ledger import ledger
from detlab.engine.places import VECTOR, Places, places_of, telling
from detlab.engine.probes import draw
from detlab.errors import MachineError
from tests.bit_classes import bitwise_equal


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def planted_gelu(places):
    """gelu that takes a stock kernel's other formula, that of what is left over, at some places of a buffer."""

    def function(x):
        flat = x.reshape(-1)
        made, at = tanh_gelu(flat), places(flat.numel())
        made[at] = tanh_gelu(torch.stack([flat, flat], 1)[:, 0])[at]  # of every other element: not in vectors
        return made.view(x.shape)

    return function


def test_both_formulas_of_stock_kernels_are_found():
    """Where a stock kernel computes short buffers otherwise, some of the arguments that are tried show it."""
    for dtype, scale in ((torch.float32, 4), (torch.bfloat16, 8), (torch.float16, 8)):
        for function in (F.silu, torch.sigmoid, tanh_gelu, F.gelu, torch.tanh, torch.exp):
            x = scale * draw(7 * 4096, dtype=dtype, seed=1)
            x = x[x.isfinite()]
            parted = not bitwise_equal(function(x), torch.cat([function(part) for part in x.split(7)]))
            assert len(telling(function, dtype)) or not parted, (dtype, function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [F.silu, tanh_gelu, torch.exp])
def test_a_stock_function_holds_at_all_lengths(dtype, function):
    places = Places(function, "f", dtype)
    for length in (64, 128, 192, 1536, 64 * 37, 2**15 + 64, 3 * 2**15):
        assert places.plan(length) == (length,)
    assert all(finding.holds for finding in places.recheck())
    assert places.ran == {64, 128, 192, 1536, 64 * 37, 2**15 + 64, 3 * 2**15}
    places.fresh()
    assert not places.ran and places.plan(128) == (128,) and places.ran == {128}


@pytest.mark.parametrize(
    ("planted", "length", "plan"),
    [
        (lambda n: slice(n - 64, n) if n > 1024 else slice(0, 0), 1536, (1024, 512)),  # the last 64 elements
        (lambda n: slice(2**15, None), 2**15 + 128, (2**15, 128)),  # a second grain
        (lambda n: slice(0, n) if n == 192 else slice(0, 0), 192, (128, 64)),  # one length
        (lambda n: slice(500, 501), 640, None),  # one place
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_places_with_another_formula_are_avoided(dtype, planted, length, plan):
    function = planted_gelu(planted)
    if not len(telling(tanh_gelu, dtype)):
        pytest.skip("this machine computes gelu by one formula")
    places = Places(function, "f", dtype)
    assert sum(places.plan(length)) == length and length not in places.plan(length)
    assert plan is None or places.plan(length) == plan
    x = 8 * draw(min(length - 3, 2000), dtype=dtype, seed=5).repeat(length)[: length - 3]
    canonical = canonical_elementwise(function)
    assert bitwise_equal(canonical(x)[:2000], reference_elementwise(tanh_gelu, x[:2000]))
    assert bitwise_equal(canonical(x.view(1, -1)), canonical(x).view(1, -1))


def test_a_function_without_any_length_is_refused():
    with pytest.raises(MachineError, match="depend on its place, even in a buffer of 64"):
        Places(planted_gelu(lambda n: slice(3, 4)), "f", torch.float32)


def test_a_second_look_finds_a_wrong_length():
    places = Places(planted_gelu(lambda n: slice(128, None)), "f", torch.float32)
    places._holds[256] = True  # as if an earlier version had believed it
    assert places.plan(256) == (256,)
    assert [(finding.shape, finding.holds) for finding in places.recheck()] == [("256 elements", False)]


def test_layers_that_compute_the_same_share_what_is_known():
    a, b, c = (torch.nn.GELU(approximate=kind) for kind in ("tanh", "tanh", "none"))
    assert places_of(a.forward, torch.float32) is places_of(b.forward, torch.float32)
    assert places_of(a.forward, torch.float32) is not places_of(c.forward, torch.float32)
    assert places_of(a.forward, torch.float32) is not places_of(a.forward, torch.bfloat16)
    assert ledger().kernels["elementwise GELU(approximate='tanh') float32 threads=1"] is places_of(a.forward, torch.float32)
    assert places_of(lambda x: x, torch.float32) is not places_of(lambda x: x, torch.float32)


def test_empty_and_in_place():
    canonical = canonical_elementwise(torch.nn.ReLU(inplace=True).forward)
    assert canonical(torch.zeros(0, 4)).shape == (0, 4)
    x = draw(3, 64, dtype=torch.float32)
    assert bitwise_equal(canonical(x.clone()), x.clamp_min(0) + 0.0)
    assert canonical(x.repeat(1, 2)[:, ::2]).shape == (3, 64)


def test_vectors():
    assert VECTOR % 64 == 0


# ------------------------------------------------------------------------------------------------------ greedy choice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [17, 1000, 49152, 50257])
def test_argmax_takes_the_lowest_of_equals(dtype, vocab):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 5, 8):
                logits = draw(rows, vocab, dtype=dtype, seed=rows)
                generator = torch.Generator().manual_seed(vocab + rows)
                ties = torch.stack([torch.randperm(vocab, generator=generator)[:5] for _ in range(rows)])
                logits.scatter_(1, ties, 2.0)
                assert torch.equal(logits.argmax(-1), ties.amin(1)), (threads, rows)
                assert torch.equal(torch.zeros(rows, vocab, dtype=dtype).argmax(-1), torch.zeros(rows, dtype=torch.long))
                last = torch.zeros(rows, vocab, dtype=dtype)
                last[:, -2:] = 1
                assert bool((last.argmax(-1) == vocab - 2).all())
                wide = torch.stack([logits, logits], 2)[..., 0]  # every other element of a buffer
                assert torch.equal(wide.argmax(-1), ties.amin(1))
    finally:
        torch.set_num_threads(before)
