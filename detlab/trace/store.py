"""Keeps traces in folders: one JSON manifest and safetensors files, checksummed, written whole or not at all.

Nothing is unpickled; a manifest's file names cannot leave its folder. How a trace becomes columns is in `columns`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from detlab.errors import TraceCorrupt, TraceError, TraceSchema
from detlab.trace.columns import pack_trace as pack_trace
from detlab.trace.columns import unpack_trace as unpack_trace
from detlab.trace.records import Trace

SCHEMA = 2
_MANIFEST = "manifest.json"
_SHARD = "tensors-"


# ------------------------------------------------------------------------------------------------------------ folders
def write_folder(path: str | Path, content: dict[str, Any], files: dict[str, dict[str, Tensor]],
                 shards: Sequence[Path] = ()) -> Path:  # fmt: skip
    """Writes a folder of one JSON document and some safetensors files, whole or not at all.

    Args:
        path: the folder; one that detlab wrote is replaced, anything else is refused.
        content: the JSON document.
        files: tensors by file stem.
        shards: safetensors files of full tensors, which are copied.

    Raises:
        TraceError: something else is at ``path``, or the disk refuses.
    """
    target = Path(path)
    if target.exists() and not _may_replace(target):
        raise TraceError(f"{target} exists and is not a folder that detlab saved; choose another path or move it away.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = _beside(target)
    except OSError as error:
        raise TraceError(f"cannot write {target}: {error.strerror}. Nothing was written.") from error
    try:
        sums = {}
        for stem, tensors in files.items():
            name = f"{stem}.safetensors"
            save_file({k: v.contiguous() for k, v in tensors.items()}, fresh / name)
            sums[name] = _sha256(fresh / name)
        for number, shard in enumerate(shards):
            name = f"{_SHARD}{number:05}.safetensors"
            shutil.copyfile(shard, fresh / name)
            sums[name] = _sha256(fresh / name)
        manifest = {"format": "detlab", "schema": SCHEMA, "files": sums, "content": content}
        manifest["checksum"] = _checksum(manifest)
        (fresh / _MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False), encoding="utf-8")
        if target.exists():
            old = _beside(target)
            try:
                os.rename(target, old / "old")
                os.rename(fresh, target)
            finally:
                if not target.exists():  # what was there stays, whatever stopped us
                    os.rename(old / "old", target)
                shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(fresh, target)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"cannot write {target}: {error}. Nothing was written.") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _may_replace(target: Path) -> bool:
    """Whether a path holds what detlab saved, or an empty folder."""
    if not target.is_dir() or target.is_symlink():
        return False
    if not any(target.iterdir()):
        return True
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == "detlab"


def _beside(target: Path) -> Path:
    """A new hidden folder beside a path, with the permissions that folders get here (`tempfile` would make it private)."""
    folder = target.parent / f".{target.name}.{secrets.token_hex(6)}"
    folder.mkdir()
    return folder


def read_folder(path: str | Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], list[Path]]:
    """Reads what `write_folder` wrote: the document, the files, and where the shards of full tensors are.

    Raises:
        TraceError: there is no such folder.
        TraceSchema: another version of detlab wrote it in another format.
        TraceCorrupt: it is damaged: unreadable, truncated, or changed since it was written.
    """
    folder = Path(path)
    if not (folder / _MANIFEST).is_file():
        what = "has no manifest.json" if folder.is_dir() else "does not exist"
        raise TraceError(f"{folder} is not a saved trace: it {what}. Give the folder that Run.save wrote.")
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TraceCorrupt(f"{folder}/{_MANIFEST} cannot be read ({error}); the trace is damaged: save it again.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != "detlab":
        raise TraceCorrupt(f"{folder}/{_MANIFEST} is not a detlab manifest; give the folder that Run.save wrote.")
    if manifest.get("schema") != SCHEMA:
        raise TraceSchema(
            f"{folder} has schema {manifest.get('schema')!r}; this version of detlab reads schema {SCHEMA}. "
            "Run the condition again, or read it with the version that wrote it."
        )
    claimed = manifest.pop("checksum", None)
    if claimed != _checksum(manifest):
        raise TraceCorrupt(f"{folder}/{_MANIFEST} was changed after it was written (checksum differs); save the trace again.")
    files: dict[str, dict[str, Tensor]] = {}
    shards: list[Path] = []
    for name, sha256 in manifest["files"].items():
        if Path(name).name != name:
            raise TraceCorrupt(f"{folder}: the manifest names {name!r}, which lies outside the folder.")
        file = folder / name
        if not file.is_file():
            raise TraceCorrupt(f"{folder}: {name} is missing; the trace is damaged: save it again.")
        if _sha256(file) != sha256:
            raise TraceCorrupt(f"{folder}: {name} is truncated or was changed (checksum differs); save the trace again.")
        if name.startswith(_SHARD):
            shards.append(file)
        else:
            files[name.removesuffix(".safetensors")] = load_file(file)
    return manifest["content"], files, shards


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Saves a bare trace (one that `capture` made); `Run.save` saves a whole run."""
    content, columns, shards = pack_trace(trace)
    return write_folder(path, {"trace": content}, {"trace": columns}, shards)
