"""The compiled steps: when they serve, when they are refused, and how threads share them."""

import subprocess
import sys

import pytest
import torch

import detlab
from detlab.engine import session
from detlab.engine.exact import compiled, functions, machine, norms
from detlab.verify.serve import Way, logits_of
from tests.bit_classes import bitwise_equal, draw

TEXT = [(index * 7919 + 11) % 250 for index in range(24)]


@pytest.fixture
def asked_anew():
    """The machine's answers are forgotten before and after."""
    answers = (machine.steps_agree, compiled.is_installed, compiled._kernels)
    for answer in answers:
        answer.cache_clear()
    yield
    for answer in answers:
        answer.cache_clear()
    machine.choose_kernel()


def test_they_serve_here():
    machine.choose_kernel()
    assert machine.steps_agree() and compiled.serves(torch.ones(1))
    assert not compiled.serves(torch.ones(1, device="meta"))


def wrong(first, last, x, out):
    """Silu, but for its rounding: one value in the last place."""
    out[first:last] = torch.nn.functional.silu(torch.from_numpy(x[first:last].copy())).numpy() * (1 + 2.0**-23)


def test_a_loop_that_is_off_is_refused(asked_anew, monkeypatch):
    monkeypatch.setattr(compiled._kernels(), "silu", wrong)
    machine.choose_kernel()
    assert not machine.steps_agree() and not compiled.serves(torch.ones(1))
    monkeypatch.undo()
    machine.steps_agree.cache_clear()
    machine.choose_kernel()
    assert compiled.serves(torch.ones(1))


def test_without_numba(asked_anew, monkeypatch):
    model = detlab.load_model("tiny-llama", dtype="float32")[0]
    with session.applied(model, "exact"):
        assert compiled.serves(torch.ones(1))
        expected = logits_of(model, TEXT, Way())
    for answer in (machine.steps_agree, compiled.is_installed, compiled._kernels):
        answer.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "detlab.engine.exact.kernels")
    monkeypatch.delattr("detlab.engine.exact.kernels")
    with session.applied(model, "exact"):
        assert not compiled.serves(torch.ones(1))
        assert bitwise_equal(logits_of(model, TEXT, Way()), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_rows(threads):
    x, weight = draw(3001, 67, seed=1), draw(1, 67, seed=2)[0].double()
    with compiled.allowed(False):
        expected = norms.rms_norm(x, weight, 1e-6), functions.evaluate("gelu_tanh", x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with compiled.allowed(True):
            found = norms.rms_norm(x, weight, 1e-6), functions.evaluate("gelu_tanh", x)
    finally:
        torch.set_num_threads(before)
    assert all(bitwise_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_control_differs():
    """What the machine's own functions give: other bits, so that the comparisons above can fail."""
    x = draw(3001, 67, seed=1)
    with compiled.allowed(True):
        assert not bitwise_equal(functions.evaluate("silu", x), torch.nn.functional.silu(x))


def test_no_rows():
    with compiled.allowed(True):
        for shape in ((0, 67), (3, 0, 67)):
            assert norms.rms_norm(torch.empty(shape), None, 1e-6).shape == shape
            assert functions.evaluate("silu", torch.empty(shape)).shape == shape


def test_numba_is_imported_for_this_tier_alone():
    code = "import sys, detlab, detlab.verify, detlab.engine.exact.install; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
