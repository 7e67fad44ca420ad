"""Saved traces: they come back whole, damage is named, and nothing that is not ours is touched."""

import dataclasses
import errno
import gc
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import detlab
from detlab.errors import TraceCorrupt, TraceError, TraceSchema
from detlab.trace import store
from detlab.trace.records import Call, ModuleRecord, OpRecord, TensorRecord, Trace
from tests.bit_classes import bitwise_equal

PROMPTS = [[5, 6, 7, 8, 9], [50, 51, 52]]


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.fixture(scope="module")
def finished(model):
    """A run with a cache that grows (parts), padding, and some full tensors."""
    condition = detlab.Condition(batch_size=2, padding_side="left", padding=1)
    return detlab.run(model, PROMPTS, condition, new_tokens=3, save=lambda op: op.module == "lm_head")


@pytest.fixture
def saved(finished, tmp_path):
    return finished.save(tmp_path / "run")


def assert_same(a, b, where="trace"):
    """Equality of records, field by field; arrays and tensors by their bits."""
    assert type(a) is type(b), where
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b), where
    elif isinstance(a, torch.Tensor):
        assert bitwise_equal(a, b), where
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            if not field.name.startswith("_"):
                assert_same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, Mapping):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    else:
        assert a == b, where


def test_a_run_comes_back_whole(finished, saved):
    loaded = detlab.load_trace(saved)
    assert isinstance(loaded, detlab.Run) and not loaded.is_live and loaded.md5 == finished.md5
    assert any(t.parts for t in finished.trace.tensors) and finished.trace.saved
    for field in dataclasses.fields(finished):
        if field.name not in ("_source", "seconds"):
            assert_same(getattr(finished, field.name), getattr(loaded, field.name), field.name)
    assert loaded.seconds == finished.seconds
    for number in range(len(finished.trace.tensors)):
        assert_same(finished.trace.rows(number), loaded.trace.rows(number), f"rows {number}")
    comparison = detlab.compare(finished, loaded)
    assert comparison.verdict == "identical" and comparison.rows_compared > 1000


def test_a_bare_trace_comes_back_whole(model, tmp_path):
    with torch.no_grad(), detlab.capture(model, path=tmp_path / "one") as trace:
        model(torch.tensor([[5, 6, 7]]))
    loaded = detlab.load_trace(tmp_path / "one")
    assert isinstance(loaded, detlab.Trace)
    assert_same(trace, loaded)
    assert trace.save(tmp_path / "two") == tmp_path / "two"
    assert_same(detlab.load_trace(tmp_path / "two"), loaded)


def test_odd_records_come_back_whole(tmp_path):
    trace = Trace(model={"class": "Größe <b>", "dtype": "bfloat16", "parameters": 0}, notes=["note with \u2028 and 'quotes'"])
    positions = np.array([[0, -1, 1]])
    trace.calls.append(Call(0, 7, np.array([-1]), positions, range(1, 3), np.array([[-1, 5]])))
    digests = np.array([-(2**63), 2**63 - 1, 0])
    trace.tensors = [
        TensorRecord(0, "input", "input_ids", -1, -1, (), "int64", "whole", None, None, 1, digests[:1]),
        TensorRecord(1, "op", "", 0, 0, (2, 0, 3), "float32", "rows", range(0, 2), (4, 1, 4), 3, digests),
        TensorRecord(2, "constant", "x (changed in place)", 0, -1, (1,), "complex64", "unlaid"),
        TensorRecord(3, "op", "", 0, 1, (2, 3), "float32", "rows", None, range(9, 3, -2), 3, parts=(1, 1)),
        TensorRecord(4, "buffer", "", 0, -1, (1,), "bool", "whole", (), (), 0),
        TensorRecord(5, "op", "", 0, 1, (2, 3), "float32", "rows", width=3, digests=digests[:2], pairs=(2**25, 3)),
        TensorRecord(6, "op", "", 0, 1, (0, 2**33), "float32", "rows", width=2**33, pairs=()),
    ]
    trace.ops = [
        OpRecord(0, 0, "", "mkldnn._linear_pointwise", 3, (("x", 0, "whole"), ("y[1]", 2, "context")), (1,), False, True),
        OpRecord(1, 0, "a.b", "cat", 0, (), (), True, False),
    ]
    trace.modules = [ModuleRecord(0, "a.b", "Linear", 0, 2, -1)]
    odd = {1: torch.tensor([float("nan"), -0.0]).bfloat16(), 3: torch.zeros(0, 3), 4: torch.tensor(True)}
    for number, tensor in odd.items():
        trace.saved.add(number, tensor)
    trace.save(tmp_path / "odd")
    loaded = detlab.load_trace(tmp_path / "odd")
    assert_same(trace, loaded)
    empty = Trace()
    empty.save(tmp_path / "empty")
    assert_same(detlab.load_trace(tmp_path / "empty"), empty)


# ------------------------------------------------------------------------------------------------------ damage
def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def write_manifest(folder, manifest):
    """Writes a manifest with a right checksum, as one who means harm could."""
    manifest.pop("checksum", None)
    manifest["checksum"] = store._checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, ensure_ascii=False))


@pytest.mark.parametrize("name", ["logits.safetensors", "trace.safetensors", "tensors-00000.safetensors"])
def test_one_changed_byte_anywhere_is_seen(saved, name):
    data = (saved / name).read_bytes()
    message = rf"{name} is truncated or was changed \(checksum differs\); save the trace again\.$"
    for place in {0, 9, len(data) // 2, len(data) - 1}:
        changed = bytearray(data)
        changed[place] ^= 1
        (saved / name).write_bytes(changed)
        with pytest.raises(TraceCorrupt, match=message):
            detlab.load_trace(saved)
    (saved / name).write_bytes(data)
    detlab.load_trace(saved)


def test_truncated_and_missing_files(saved):
    file = saved / "trace.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(TraceCorrupt, match=r"trace\.safetensors is truncated or was changed"):
        detlab.load_trace(saved)
    file.unlink()
    with pytest.raises(TraceCorrupt, match=rf"^{saved}: trace\.safetensors is missing; the trace is damaged: save it again\.$"):
        detlab.load_trace(saved)


def test_a_changed_manifest(saved):
    text = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(text.replace('"batch_size": 2', '"batch_size": 3'))
    with pytest.raises(TraceCorrupt, match=r"manifest\.json was changed after it was written \(checksum differs\)"):
        detlab.load_trace(saved)
    for damaged in (text[:-20], "", "\x00", "[1, 2"):
        (saved / "manifest.json").write_text(damaged)
        with pytest.raises(TraceCorrupt, match=r"manifest\.json cannot be read \(.*\); the trace is damaged: save it again\.$"):
            detlab.load_trace(saved)
    message = r"manifest\.json is not a detlab manifest; give the folder that Run\.save wrote\.$"
    for other in ("[]", "{}", '{"format": "onnx"}', "3"):
        (saved / "manifest.json").write_text(other)
        with pytest.raises(TraceCorrupt, match=message):
            detlab.load_trace(saved)


@pytest.mark.parametrize("schema", [0, store.SCHEMA + 1, "1", None])
def test_another_schema(saved, schema):
    manifest = manifest_of(saved) | {"schema": schema}
    write_manifest(saved, manifest)
    with pytest.raises(TraceSchema) as caught:
        detlab.load_trace(saved)
    assert str(caught.value) == (
        f"{saved} has schema {schema!r}; this version of detlab reads schema {store.SCHEMA}. "
        "Run the condition again, or read it with the version that wrote it."
    )


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_file_names_cannot_leave_the_folder(saved, name):
    secret = saved.parent / "secret.safetensors"
    secret.write_bytes((saved / "trace.safetensors").read_bytes())
    manifest = manifest_of(saved)
    manifest["files"][name] = store._sha256(secret)
    write_manifest(saved, manifest)
    with pytest.raises(TraceCorrupt, match="lies outside the folder|is missing"):
        detlab.load_trace(saved)


def test_parts_that_do_not_fit_together(saved):
    manifest = manifest_of(saved)
    manifest["content"]["trace"]["names"] = manifest["content"]["trace"]["names"][:3]
    write_manifest(saved, manifest)
    with pytest.raises(TraceCorrupt, match=r"the trace's parts do not fit together \(IndexError.*\); save it again\.$"):
        detlab.load_trace(saved)


@pytest.mark.parametrize("name", ["ops.call", "ops.inputs.tensor", "ops.inputs.num", "tensors.layout", "digests", "shapes"])
@pytest.mark.parametrize("length", [0, -1])
def test_columns_of_other_lengths_do_not_fit_together(finished, name, length):
    content, columns, shards = store.pack_trace(finished.trace)
    columns[name] = columns[name][:length]
    with pytest.raises(TraceCorrupt, match=r"the trace's parts do not fit together \(.*\); save it again\.$"):
        store.unpack_trace(content, columns, shards)
    del columns[name]
    message = rf"the trace's parts do not fit together \(KeyError\('{name}'\)\); save it again\.$"
    with pytest.raises(TraceCorrupt, match=message):
        store.unpack_trace(content, columns, shards)


def test_the_garbage_collector_is_as_before(saved):
    assert gc.isenabled()
    detlab.load_trace(saved)
    assert gc.isenabled()
    gc.disable()
    try:
        detlab.load_trace(saved)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["nowhere", ".", "file"])
def test_what_is_no_saved_trace(tmp_path, path):
    (tmp_path / "file").write_text("x")
    what = "has no manifest.json" if path == "." else "does not exist"
    with pytest.raises(TraceError, match=f"is not a saved trace: it {what}. Give the folder that Run.save wrote.$"):
        detlab.load_trace(tmp_path / path)


def test_nothing_is_unpickled(saved, monkeypatch):
    monkeypatch.setattr("pickle.Unpickler", None)
    monkeypatch.setattr("pickle.loads", None)
    monkeypatch.setattr(torch, "load", None)
    assert isinstance(detlab.load_trace(saved), detlab.Run)
    assert sorted(p.name for p in saved.iterdir()) == [
        "logits.safetensors", "manifest.json", "tensors-00000.safetensors", "trace.safetensors",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------ whole or not at all
def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


FAULTS = [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), MemoryError()]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_save_that_is_cut_short_leaves_nothing(finished, tmp_path, monkeypatch, fault, after):
    written = []

    def failing(real):  # both writers take what is written and where to
        def write(what, path):
            if len(written) == after:
                Path(path).write_bytes(b"half")
                raise fault
            written.append(path)
            real(what, path)

        return write

    monkeypatch.setattr(store, "save_file", failing(store.save_file))
    monkeypatch.setattr(store.shutil, "copyfile", failing(store.shutil.copyfile))
    expected = TraceError if isinstance(fault, OSError) else type(fault)
    with pytest.raises(expected) as caught:
        finished.save(tmp_path / "deep" / "run")
    if isinstance(fault, OSError):
        assert str(caught.value) == f"cannot write {tmp_path / 'deep' / 'run'}: {fault}. Nothing was written."
    assert [p for p in tmp_path.rglob("*") if p.name != "deep"] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at", [0, 1])
def test_an_overwrite_that_is_cut_short_keeps_what_was_there(finished, saved, monkeypatch, fault, at):
    before = contents(saved.parent)
    real, calls = os.rename, []

    def rename(a, b):
        calls.append((a, b))
        if len(calls) == at + 1:
            raise fault
        real(a, b)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(TraceError if isinstance(fault, OSError) else type(fault)):
        finished.save(saved)
    assert len(calls) > at and contents(saved.parent) == before
    assert sorted(p.name for p in saved.parent.iterdir()) == ["run"]


def test_an_own_folder_is_replaced(finished, saved, model):
    other = detlab.run(model, [[9, 9]], new_tokens=0)
    other.save(saved)
    assert detlab.load_trace(saved).inputs == [[9, 9]]
    assert sorted(p.name for p in saved.parent.iterdir()) == ["run"]
    assert sorted(p.name for p in saved.iterdir()) == ["logits.safetensors", "manifest.json", "trace.safetensors"]


@pytest.mark.parametrize("kind", ["folder", "file", "foreign manifest", "broken manifest", "link"])
def test_what_is_not_ours_is_not_touched(finished, tmp_path, kind):
    path = tmp_path / "taken"
    if kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
        if kind == "foreign manifest":  # as browser extensions and many tools have
            (path / "manifest.json").write_text('{"name": "extension", "files": {}}')
        if kind == "broken manifest":
            (path / "manifest.json").write_text("{")
        if kind == "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    with pytest.raises(TraceError) as caught:
        finished.save(path)
    assert str(caught.value) == f"{path} exists and is not a folder that detlab saved; choose another path or move it away."
    assert contents(tmp_path) == before and len(list(tmp_path.iterdir())) == (2 if kind == "link" else 1)


def test_an_empty_folder_is_taken(finished, tmp_path):
    (tmp_path / "empty").mkdir()
    finished.save(tmp_path / "empty")
    assert detlab.load_trace(tmp_path / "empty").md5 == finished.md5


def test_a_place_that_cannot_be_written(finished, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceError, match=rf"^cannot write {tmp_path}/file/run: .*\. Nothing was written\.$"):
        finished.save(tmp_path / "file" / "run")


def test_others_may_read_what_was_saved(saved):
    beside = saved.parent / "beside"
    beside.mkdir()
    assert stat.S_IMODE(saved.stat().st_mode) == stat.S_IMODE(beside.stat().st_mode)
