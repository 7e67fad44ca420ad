"""Finds a model by its name, in a folder or on the hub, and remembers its tokenizer."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn

from detlab.errors import MachineError, ModelError, UsageError
from detlab.models.messages import first_line, no_progress_bars, quiet_retries
from detlab.models.smollm2 import SMOLLM2, cache_folder, ensure_cached
from detlab.models.tiny import FAMILIES, build_tiny, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DTYPES", "load_model", "model_names", "tokenizer_for"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

# Hub ids from before organisations. Any other bare name is a slip: asking the hub for it would take half a minute
# where there is no network.
BARE_HUB_IDS = {"ctrl", "distilgpt2", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "openai-gpt"}

# Models loaded here, with their tokenizer. Weak: remembering a model must not keep its weights alive.
_tokenizers: WeakKeyDictionary[nn.Module, PreTrainedTokenizerBase] = WeakKeyDictionary()


def load_model(
    name: str | os.PathLike[str],
    dtype: str | torch.dtype = "float32",
    *,
    attention: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer, ready for inference on the CPU.

    Args:
        name: one of `model_names()`, a folder that holds a config.json, or a hub id (org/name).
        dtype: float32, bfloat16, float16 or float64, as a string or a torch.dtype. Weights are rounded to it
            once; buffers keep the dtype the architecture gives them. In float64, mixture-of-experts layers
            run expert by expert, since the grouped kernel does not know that dtype.
        attention: attention implementation, such as "sdpa" or "eager"; None takes the architecture's default.
        trust_remote_code: run Python code that comes with the checkpoint. Off unless you ask.
        progress: say on stderr what takes more than two seconds.

    Returns:
        the model in evaluation mode, without gradients, and its tokenizer. The global random state is left as
        it was.

    Raises:
        UsageError: the dtype or the attention implementation is unknown.
        ModelError: the model is missing, damaged, lacks weights or lacks a tokenizer.
        MachineError: this machine lacks what the model or the attention implementation needs.
    """
    torch_dtype = _as_dtype(dtype)
    _check_attention(attention)
    asked = os.fspath(name)
    # Building a model draws initial weights; the caller's random stream must not move.
    with torch.random.fork_rng(devices=[]):
        if asked in FAMILIES:
            model, tokenizer = build_tiny(asked, torch_dtype, attention), tiny_tokenizer()
        elif asked == SMOLLM2:
            folder = str(ensure_cached(progress))
            model, tokenizer = _from_pretrained(folder, torch_dtype, attention, False, local_files_only=True)
        else:
            source = _resolve(asked)
            with quiet_retries(progress):
                model, tokenizer = _from_pretrained(source, torch_dtype, attention, trust_remote_code)
    if asked in model_names():
        model.config._name_or_path = asked  # not the cache's path: records of a run are shared
    if torch_dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    _tokenizers[model] = tokenizer
    return model, tokenizer


def model_names() -> list[str]:
    """Lists the names `load_model` knows without a path or a hub.

    >>> "tiny-llama" in model_names()
    True
    """
    return [SMOLLM2, *FAMILIES]


def tokenizer_for(model: nn.Module) -> PreTrainedTokenizerBase:
    """Finds the tokenizer of a model: remembered from `load_model`, or lying where the model came from.

    Only local files are read, and nothing is converted or downloaded.

    Raises:
        ModelError: none is found; pass `tokenizer=` instead.
    """
    if model in _tokenizers:
        return _tokenizers[model]
    source = str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
    if source in FAMILIES:
        return tiny_tokenizer()
    try:
        if not source:
            raise ModelError("its config names no source")
        folder = str(cache_folder()) if source == SMOLLM2 else source
        return _auto_tokenizer(folder, local_files_only=True)
    except Exception as error:  # whatever a missing or foreign tokenizer makes transformers raise
        raise ModelError(
            f"no tokenizer is known for this {type(model).__name__} (source {source!r}): "
            f"{first_line(error)} Pass tokenizer=, or give the prompts as token ids."
        ) from error


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise UsageError(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}.")


def _check_attention(attention: str | None) -> None:
    if attention is None:
        return
    known = ["eager", *transformers.AttentionInterface().valid_keys()]  # type: ignore[no-untyped-call]
    if attention not in known and "/" not in attention:  # a "/" marks a kernel from the hub
        raise UsageError(f"unknown attention {attention!r}; choose from {', '.join(known)}.")


# --- checkpoints: folders and the hub ---------------------------------------------------------------


def _resolve(asked: str) -> str:
    """Turns what was asked into what transformers understands; refuses what it would answer vaguely."""
    path = Path(asked).expanduser()
    if asked and path.is_dir():
        if not (path / "config.json").is_file():
            found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise ModelError(f"no model in the folder {asked!r}: it holds no config.json; found: {found}.")
        return str(path)
    if path.is_file():
        raise ModelError(f"{asked!r} is a file; give the folder that holds the model's config.json.")
    if asked in BARE_HUB_IDS or re.fullmatch(r"\w[\w.-]*/[\w.-]+", asked):
        return asked
    kind = "folder" if re.search(r"^[.~]|[/\\]", asked) else "name"
    raise ModelError(f"no model {asked!r}: no such {kind}. {_hint(asked)}")


def _hint(asked: str) -> str:
    near = difflib.get_close_matches(asked.lower(), model_names(), n=3, cutoff=0.5)
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    known = ", ".join(model_names())
    return f"{guess}Known names: {known}; or give a folder with a config.json, or a hub id (org/name)."


def _from_pretrained(
    source: str, dtype: torch.dtype, attention: str | None, trust_remote_code: bool, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options["trust_remote_code"] = trust_remote_code
    offline = " (offline: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    tried = "the folder" if Path(source).is_dir() else f"the known names, folders and the hub{offline}"
    with no_progress_bars():
        try:
            config = transformers.AutoConfig.from_pretrained(source, **options)
        except Exception as error:  # transformers, the hub's client and json each raise their own
            raise ModelError(
                f"no model {source!r}; tried {tried}: {first_line(error)} {_hint(source)}"
            ) from error
        try:  # before the weights: it is quick, and its absence should not cost a minute
            tokenizer = _auto_tokenizer(source, **options)
        except Exception as error:
            raise ModelError(
                f"{source!r} has no tokenizer that can be read: {first_line(error)} Save one beside the "
                "model (tokenizer.save_pretrained), or load the model yourself and pass token ids as prompts."
            ) from error
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                **options,
            )
        except ImportError as error:
            raise MachineError(f"{source!r} cannot be loaded here: {first_line(error)}") from error
        except Exception as error:
            raise ModelError(f"{source!r} cannot be loaded: {first_line(error)}") from error
    model, report = loaded
    # transformers only warns here and draws the missing weights at random: two loads would be two models.
    missing = {*report.get("missing_keys", ()), *(str(key[0]) for key in report.get("mismatched_keys", ()))}
    if missing:
        shown = ", ".join(sorted(missing)[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"{source!r} lacks weights of {type(model).__name__} ({shown}); they would be drawn at random on "
            "every load. Is the checkpoint complete, and of a causal language model?"
        )
    return model, tokenizer


def _auto_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source, **options)
    return tokenizer
