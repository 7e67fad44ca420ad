"""A tiny model, and a checkpoint of it with its tokenizer, as users have them."""

import pytest

from detlab.models import load_model


@pytest.fixture(scope="module")
def llama():
    return load_model("tiny-llama")


@pytest.fixture
def saved(llama, tmp_path):
    folder = tmp_path / "checkpoint"
    for part in llama:
        part.save_pretrained(folder)
    return folder
