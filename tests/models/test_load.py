"""Names and what is not one, folders, the hub, damaged checkpoints, and the tokenizer of a model."""

import copy
import gc
import logging
import random
import weakref

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import http_backoff

from detlab.errors import MachineError, ModelError, UsageError
from detlab.models import FAMILIES, load_model, model_names, tokenizer_for
from detlab.models.messages import quiet_retries
from tests.models.pins import TINY_SHA256, digest

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
        ("nope", r"no model 'nope': no such name\. Known names: .*, or a hub id \(org/name\)\.$"),
        ("./nowhere", r"no model '\./nowhere': no such folder\. Known names"),
        ("nowhere/", "no such folder"),
        ("/no/such/folder", "no such folder"),
    ],
)
def test_missing_model_fails_without_asking_the_hub(name, message, monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)
    with pytest.raises(ModelError, match=message):
        load_model(name)


def test_missing_hub_model_says_what_was_tried(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tried = r"no model 'nobody/nothing'; tried the known names, folders and the hub \(offline: .*\): "
    hint = r".*Known names: .*or give a folder with a config\.json, or a hub id"
    with pytest.raises(ModelError, match=tried + hint):
        load_model("nobody/nothing")


@pytest.mark.parametrize(("name", "guess"), [("gpt2", "tiny-gpt2"), ("me/tiny-llama", "tiny-llama"), ("a/b", None)])
def test_hub_ids_are_asked_of_the_hub(name, guess, monkeypatch):
    def refuse(source, **options):
        asked.append(source)
        raise OSError("Not there")

    asked = []
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    hint = f"Did you mean {guess}" if guess else "Known names"
    with pytest.raises(ModelError, match=rf"no model '{name}'; tried .* the hub.*: Not there\. {hint}"):
        load_model(name)
    assert asked == [name]


@pytest.mark.parametrize("progress", [True, False])
def test_retries_of_the_hub_are_one_line(progress, monkeypatch, capfd):
    def ask(source, **options):
        # The hub's own client and its own words, at a port where nobody listens.
        http_backoff("GET", "http://127.0.0.1:1/", max_retries=2, base_wait_time=0)

    warned = []
    logger = logging.getLogger("huggingface_hub.utils._http")
    monkeypatch.setattr(logger, "handle", lambda record: warned.append(record) if logger.filter(record) else None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", ask)
    with pytest.raises(ModelError, match=r"no model 'a/b'; tried .*the hub"):
        load_model("a/b", progress=progress)
    assert warned == []
    line = "detlab: No answer from the hub yet; trying again for up to half a minute ...\n"
    assert capfd.readouterr().err == (line if progress else "")
    logger.warning("Rate limited. Waiting 2s before retry [Retry 1/5].")
    with quiet_retries(progress=True):
        logger.warning("Rate limited. Waiting 2s before retry [Retry 1/5].")
    logger.warning("Retrying in 1s [Retry 1/5].")
    assert len(warned) == 3


def test_folder_without_config_and_file(tmp_path):
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(ModelError, match=r"it holds no config\.json; found: weights\.bin\."):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="is a file; give the folder that holds the model's config.json"):
        load_model(tmp_path / "weights.bin")


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
