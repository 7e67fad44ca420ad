"""Keeps traces in folders: one JSON manifest and safetensors files, checksummed, written whole or not at all.

Nothing is unpickled; a manifest's file names cannot leave its folder. A trace is stored by columns, so that a long one is
small and loads fast: one row digest costs 8 bytes, one op about 30.
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

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from detlab.errors import TraceCorrupt, TraceError, TraceSchema
from detlab.trace.layout import Index
from detlab.trace.records import Call, ModuleRecord, OpRecord, TensorRecord, Trace
from detlab.trace.tensors import TensorStore

SCHEMA = 1
_MANIFEST = "manifest.json"
_SHARD = "tensors-"
_KINDS = ("op", "parameter", "buffer", "input", "cache", "constant")
_STATUS = ("rows", "whole", "unlaid")
_RELATIONS = ("row", "context", "whole", "place")


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


# ------------------------------------------------------------------------------------------------------------- traces
def _numbers(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64).reshape(-1))


def _ragged(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Joins rows of different lengths: (all values, where each row ends)."""
    flat = [v for row in rows for v in row]
    return _numbers(flat), _numbers(np.cumsum([len(row) for row in rows]) if rows else [])


class _Names:
    """Numbers strings in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def _pack_index(index: Index | None) -> list[int]:
    """An index as numbers: [] none, [0, start, stop, step] a range, [1, i, j, ...] a list."""
    if index is None:
        return []
    if isinstance(index, range):
        return [0, index.start, index.stop, index.step]
    return [1, *index]


def _unpack_index(values: list[int]) -> Index | None:
    if not values:
        return None
    return range(values[1], values[2], values[3]) if values[0] == 0 else tuple(values[1:])


def pack_trace(trace: Trace) -> tuple[dict[str, Any], dict[str, Tensor], list[Path]]:
    """Turns a trace into a JSON part, columns, and the shards of the full tensors that were kept."""
    names = _Names()
    columns: dict[str, Tensor] = {}

    def ragged(name: str, rows: list[Any]) -> None:
        columns[name], columns[f"{name}.ends"] = _ragged(rows)

    ops, tensors = trace.ops, trace.tensors
    columns["ops"] = _numbers(
        [[o.call, names(o.module), names(o.op), o.occurrence, o.is_view + 2 * o.is_factory] for o in ops]
    )
    ragged("ops.inputs", [[v for n, t, r in o.inputs for v in (names(n), t, _RELATIONS.index(r))] for o in ops])
    ragged("ops.outputs", [o.outputs for o in ops])
    columns["tensors"] = _numbers(
        [
            [_KINDS.index(t.kind), names(t.name), t.call, t.op, names(t.dtype), _STATUS.index(t.status), t.width]
            for t in tensors
        ]
    )
    ragged("tensors.shape", [t.shape for t in tensors])
    ragged("tensors.batch", [_pack_index(t.batch) for t in tensors])
    ragged("tensors.slots", [_pack_index(t.slots) for t in tensors])
    ragged("tensors.parts", [t.parts for t in tensors])
    ragged("tensors.pairs", [t.pairs or () for t in tensors])
    ragged("tensors.digests", [])
    columns["tensors.digests"] = _numbers(np.concatenate([t.digests for t in tensors]) if tensors else [])
    columns["tensors.digests.ends"] = _numbers(np.cumsum([len(t.digests) for t in tensors]) if tensors else [])
    columns["modules"] = _numbers(
        [[m.call, names(m.module), names(m.class_name), m.first_op, m.end_op, m.output] for m in trace.modules]
    )
    ragged("modules.inputs", [[v for n, t in m.inputs for v in (names(n), t)] for m in trace.modules])
    for call in trace.calls:
        columns[f"call.{call.index}.prompts"] = _numbers(call.prompts)
        columns[f"call.{call.index}.positions"] = torch.from_numpy(np.ascontiguousarray(call.positions))
        columns[f"call.{call.index}.tokens"] = torch.from_numpy(np.ascontiguousarray(call.tokens))
    content = {
        "model": trace.model,
        "notes": trace.notes,
        "names": list(names.numbers),
        "calls": [{"step": c.step, "query": [c.query.start, c.query.stop]} for c in trace.calls],
    }
    return content, columns, trace.saved.shards()


def unpack_trace(content: dict[str, Any], columns: dict[str, Tensor], shards: Sequence[Path]) -> Trace:
    """Rebuilds the trace that `pack_trace` took apart.

    Raises:
        TraceCorrupt: the parts do not fit together.
    """
    try:
        return _unpack(content, columns, shards)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise TraceCorrupt(f"the trace's parts do not fit together ({error!r}); save it again.") from error


def _unpack(content: dict[str, Any], columns: dict[str, Tensor], shards: Sequence[Path]) -> Trace:
    names: list[str] = content["names"]

    def table(name: str, width: int) -> list[list[int]]:
        rows: list[list[int]] = columns[name].reshape(-1, width).tolist()
        return rows

    def ragged(name: str) -> list[list[int]]:
        flat, ends = columns[name].tolist(), columns[f"{name}.ends"].tolist()
        starts = [0, *ends[:-1]]
        return [flat[a:b] for a, b in zip(starts, ends, strict=True)] if ends else []

    trace = Trace(model=content["model"], notes=list(content["notes"]))
    for index, meta in enumerate(content["calls"]):
        trace.calls.append(
            Call(
                index,
                meta["step"],
                columns[f"call.{index}.prompts"].numpy(),
                columns[f"call.{index}.positions"].numpy(),
                range(*meta["query"]),
                columns[f"call.{index}.tokens"].numpy(),
            )
        )
    inputs, outputs = ragged("ops.inputs"), ragged("ops.outputs")
    for index, (call, module, op, occurrence, flags) in enumerate(table("ops", 5)):
        triples = inputs[index]
        named = tuple(
            (names[triples[i]], triples[i + 1], _RELATIONS[triples[i + 2]]) for i in range(0, len(triples), 3)
        )
        out = tuple(outputs[index])
        record = OpRecord(index, call, names[module], names[op], occurrence, named, out, bool(flags & 1), bool(flags & 2))
        trace.ops.append(record)
    shapes, batches, slots, parts, pairs = (ragged(f"tensors.{n}") for n in ("shape", "batch", "slots", "parts", "pairs"))
    digests = columns["tensors.digests"].numpy()
    ends = columns["tensors.digests.ends"].tolist()
    start = 0
    for number, (kind, name, call, op, dtype, status, width) in enumerate(table("tensors", 7)):
        trace.tensors.append(
            TensorRecord(
                number, _KINDS[kind], names[name], call, op, tuple(shapes[number]), names[dtype], _STATUS[status],
                _unpack_index(batches[number]), _unpack_index(slots[number]), width,
                digests[start : ends[number]], tuple(parts[number]), tuple(pairs[number]) or None,
            )  # fmt: skip
        )
        start = ends[number]
    taken = ragged("modules.inputs")
    for index, (call, module, class_name, first, end, output) in enumerate(table("modules", 6)):
        given = tuple((names[taken[index][i]], taken[index][i + 1]) for i in range(0, len(taken[index]), 2))
        trace.modules.append(ModuleRecord(call, names[module], names[class_name], first, end, output, given))
    trace.saved = TensorStore(shards)
    return trace


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Saves a bare trace (one that `capture` made); `Run.save` saves a whole run."""
    content, columns, shards = pack_trace(trace)
    return write_folder(path, {"trace": content}, {"trace": columns}, shards)
