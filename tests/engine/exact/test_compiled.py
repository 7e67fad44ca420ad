"""The compiled steps: when they serve, when they are refused, and how threads share them."""

import subprocess
import sys

import pytest
import torch

import detlab
from detlab.engine import session
from detlab.engine.exact import attention, compiled, functions, linear, machine, norms
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
    with pytest.warns(UserWarning, match="not compiled: what Numba compiled gives other bits on this machine"):
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
    with pytest.warns(UserWarning, match="not compiled: Numba is not installed"), session.applied(model, "exact"):
        assert not compiled.serves(torch.ones(1))
        assert bitwise_equal(logits_of(model, TEXT, Way()), expected)


def test_a_cache_that_cannot_be_read_costs_time_alone(asked_anew, monkeypatch):
    def damaged(*arguments):
        raise EOFError("Ran out of input")

    monkeypatch.setattr(compiled._kernels(), "encode", damaged)
    with pytest.warns(UserWarning, match="not compiled: EOFError: Ran out of input.*delete them.*The bits are the same"):
        machine.choose_kernel()
    assert not compiled.serves(torch.ones(1))


def test_torchs_defaults_are_not_asked():
    model = detlab.load_model("tiny-llama", dtype="bfloat16")[0]
    with session.applied(model, "exact"):
        expected = logits_of(model, TEXT, Way())
    torch.set_default_dtype(torch.bfloat16)
    try:
        with session.applied(model, "exact"):
            found = logits_of(model, TEXT, Way())
    finally:
        torch.set_default_dtype(torch.float32)
    assert bitwise_equal(found, expected)


def test_rows_of_another_size_are_refused_as_torch_refuses_them():
    with compiled.allowed(True), pytest.raises(RuntimeError, match="must match"):
        norms.rms_norm(torch.ones(2, 1000), torch.ones(64, dtype=torch.float64), 1e-6)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kernel", [kernel for kernel in linear.KERNELS if machine.is_exact(kernel)])
def test_columns_first_in_memory(kernel, is_compiled):
    x = draw(3, 5, seed=3)
    x[1, 2] = float("nan")
    layer = linear.ExactLinear([linear.prepare(draw(2, 5, seed=4))], [None], kernel)
    with compiled.allowed(is_compiled):
        expected, found = layer(x), layer(x.t().contiguous().t())
        numbers = [attention.encoded(y) for y in (x, x.t().contiguous().t())]
    assert expected[1].isnan().all() and bitwise_equal(found, expected)
    assert bool(numbers[1][1, -1].isnan()) and bitwise_equal(numbers[0][0], numbers[1][0])


def test_the_last_thread_of_a_process_is_served():
    """Where a pool takes no more work, as while Python ends, the thread that asks does it all."""
    code = (
        "import threading, time, torch; torch.set_num_threads(2)\n"
        "from detlab.engine.exact import compiled, norms; compiled.use(True)\n"
        "def late():\n    time.sleep(0.5); print(norms.rms_norm(torch.ones(3000, 67), None, 1e-6).shape)\n"
        "norms.rms_norm(torch.ones(3000, 67), None, 1e-6); threading.Thread(target=late).start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch.Size([3000, 67])" and not done.stderr


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
