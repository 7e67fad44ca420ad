"""One MD5 over instruction sets, threads, batches, padding, chunks, decoding, and the parts of a sum; stock has several."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import detlab
from detlab.engine.exact import constants, linear, machine
from detlab.errors import MachineError, UsageError

ROOT = Path(__file__).resolve().parents[3]
MODELS = ("tiny-llama:float32", "tiny-qwen3-moe:float32", "tiny-gemma3:bfloat16")
SETTINGS = {
    "default": {},
    "ATen AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "all": {
        "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2", "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
    },
    "least": {
        "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "NUMBA_CPU_NAME": "generic",
    },
    "not compiled": {"NUMBA_DISABLE_JIT": "1"},
}


@lru_cache(maxsize=1)
def all_served():
    """What the processes found, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SETTINGS, pool.map(served_alone, SETTINGS), strict=True))


def served(setting):
    return all_served()[setting]


def served_alone(setting):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | SETTINGS[setting]
    child = Path(__file__).with_name("isa_child.py")
    result = subprocess.run(
        [sys.executable, str(child), *MODELS], env=environment, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_md5(setting):
    found, default = served(setting), served("default")
    assert found["compiled"] == (setting != "not compiled")
    assert found["functions"] == default["functions"]
    assert found["parts"] == default["parts"] and len(found["parts"]) == 1
    for name in MODELS:
        assert len(found["exact"][name]) == 1, f"{name} parts within one process"
    assert found["exact"] == default["exact"]


def test_stock_has_several():
    """The control: on a machine where the instruction sets can be chosen, stock logits follow them."""
    if served("default")["isa"] == served("least")["isa"]:
        pytest.skip("this machine has one instruction set, so that nothing can be chosen")
    for name in MODELS[:2]:
        assert len({served(setting)["stock"][name] for setting in SETTINGS}) > 1


def test_a_condition_names_the_tier():
    model = detlab.load_model("tiny-llama", dtype="float32")[0]
    prompts = [[(index * 31 + 7) % 250 for index in range(19)], [(index * 17 + 5) % 250 for index in range(11)]]
    plain = detlab.run(model, prompts, detlab.Condition(tier="exact"), new_tokens=2, trace=False)
    other = detlab.run(
        model, prompts,
        detlab.Condition(tier="exact", batch_size=2, padding_side="left", threads=2, aten_isa="avx2", mkl_isa="COMPATIBLE"),
        new_tokens=2, trace=False,
    )  # fmt: skip
    assert plain.md5 == other.md5


# ------------------------------------------------------------------------------------------------------- the self-test
def test_the_kernels_here_are_exact():
    exact = [kernel for kernel in linear.KERNELS if machine.is_exact(kernel)]
    assert "float64" in exact and machine.choose_kernel() in exact
    if "avx512_vnni" in detlab.environment().to_json()["cpu"]["isa"] and "ONEDNN_MAX_CPU_ISA" not in os.environ:
        assert exact == list(linear.KERNELS)  # what that instruction is for


@pytest.mark.parametrize("kernel", linear.KERNELS)
def test_the_longest_sum_of_the_largest_digits(kernel):
    """65,536 terms, all digits at their limits: what the bit budget is made for."""
    if not machine.is_exact(kernel):
        pytest.skip(f"the {kernel} product is not exact here, and refused")
    x, weight = machine._extremes(3, constants.MOST_TERMS, 1), machine._extremes(3, constants.MOST_TERMS, 2)
    found = machine._products(x, weight, kernel)
    assert torch.equal(found, machine._expected(x, weight).double()) and float(found.abs().max()) < 2.0**50


def saturating(digits, weight):
    """An int8 product of a CPU without VNNI, of digits that are not kept within 64: pairs are added in 16 bits."""
    shifted = digits.int() + 128
    rows = shifted.shape[0]
    pairs = torch.zeros(rows, weight.shape[0], dtype=torch.int32)
    wide = weight.int() * 2  # what full-range digits would be
    for k in range(0, digits.shape[1] - 1, 2):
        pair = shifted[:, k : k + 2].float() @ wide[:, k : k + 2].t().float()
        pairs += pair.clamp(-32768, 32767).int()
    if digits.shape[1] % 2:
        pairs += (shifted[:, -1:].float() @ wide[:, -1:].t().float()).int()
    return (pairs - 128 * wide.sum(1)) // 2


def test_a_product_that_saturates_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: saturating(a, b.t()))
    assert not machine.is_exact("int8")
    machine._choice.cache_clear()
    try:
        with pytest.raises(MachineError, match=r"the int8 product is not exact on this machine: sums of digits of \+-64"):
            machine.choose_kernel(only="int8")
        assert machine.choose_kernel() != "int8"
    finally:
        machine._choice.cache_clear()


def off_at(place):
    """The int8 product, off by one where place(result) says."""
    exact = torch._int_mm

    def product(a, b):
        result = exact(a, b)
        where = torch.zeros(result.shape, dtype=torch.bool)
        place(where, a.shape[1])
        return result + where.int()

    return product


def rows_of(count):
    def place(where, terms):
        if len(where) == 4 * count:
            where[:] = True

    return place


def last_row_of(count):
    def place(where, terms):
        if len(where) == 4 * count:
            where[-1] = True

    return place


def last_column(where, terms):
    where[:, -1] = where.shape[1] % 16 != 0


def beyond_row_32(where, terms):
    where[32:] = True


def one_element(where, terms):
    if where.shape[0] >= 100:
        where[-1, -1] = True


def last_block(where, terms):
    where[:] = terms % 64 != 0


@pytest.mark.parametrize(
    "place", [rows_of(1), rows_of(33), last_row_of(33), last_row_of(128), last_column, beyond_row_32, one_element, last_block]
)
def test_a_product_that_is_off_by_one_somewhere_is_refused(monkeypatch, place):
    monkeypatch.setattr(torch, "_int_mm", off_at(place))
    assert not machine.is_exact("int8")


def test_a_product_that_is_off_nowhere_is_exact(monkeypatch):
    expected = machine.is_exact("int8")
    monkeypatch.setattr(torch, "_int_mm", off_at(lambda where, terms: None))
    assert machine.is_exact("int8") == expected


def test_digits_of_64_do_not_saturate():
    """Pairs of 16-bit products stay within range for digits of 64, shifted by 64 or by 128."""
    assert 2 * 128 * 64 < 2**15 and 2 * (64 + 128) * 64 < 2**15


def test_flushed_subnormals_are_refused():
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormal numbers")
    try:
        with pytest.raises(MachineError, match="subnormal numbers are flushed"):
            machine.check_arithmetic()
    finally:
        torch.set_flush_denormal(False)
    machine.check_arithmetic()


def test_an_unknown_kernel():
    with pytest.raises(UsageError, match="kernel='int4' is not known; choose from packed, int8, float64"):
        machine.choose_kernel(only="int4")


# ------------------------------------------------------------------------------------------------------------- the page
def test_what_the_page_shows_is_so(capsys):
    page = (ROOT / "docs" / "exact-tier.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "exact-tier.md", "exec"), {})
    assert capsys.readouterr().out == "2 1\n" and "# 2 1: " in code
    for number in (constants.MOST_TOKENS, constants.MOST_TERMS):
        assert f"{number:,}" in page
