"""Fresh processes: the same model arrives, the variables are set, and nothing is left behind, whatever happens."""

import copy
import errno
import gc
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import detlab
from detlab import Condition, process
from detlab.errors import CaptureError, DetlabError, MachineError, UsageError
from detlab.process import receive_model, send_model
from detlab.trace.keep import RowKeeper
from tests.bit_classes import bitwise_equal

FAMILIES = ("tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe", "tiny-mixtral")
PROMPTS = [[11, 12, 13, 14, 15, 16, 17], [21, 22, 23]]
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
CAPPED = Condition.parse("aten_isa=default,mkl_isa=COMPATIBLE,onednn_isa=SSE41")


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary folders are made, empty at first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_in(folder, prefix="detlab-"):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(prefix))


def variables():
    return {name: os.environ.get(name) for name in (*VARIABLES, "PYTHONPATH")}


# ----------------------------------------------------------------------------------------------- real children
def test_the_own_instruction_set_gives_the_bits_of_this_process(model, folder):
    """The twin: capped at what it has anyway, a fresh process computes what this one does."""
    own = torch.backends.cpu.get_cpu_capability().lower()
    if own not in ("default", "avx2", "avx512") or set(VARIABLES) & set(os.environ):
        pytest.skip(f"this process computes with {own}, or has its own caps: no condition asks for the same")
    condition = Condition(aten_isa=own, onednn_isa="DEFAULT", batch_size=2, padding_side="left", temperature=0.7, seed=3)
    before, seen = variables(), []
    here = detlab.run(model, PROMPTS, Condition(batch_size=2, padding_side="left", temperature=0.7, seed=3), new_tokens=3)
    there = detlab.run(model, PROMPTS, condition, new_tokens=3, save="full", progress=lambda *what: seen.append(what))
    assert variables() == before
    assert seen == [(step, 3, str(condition)) for step in (1, 2, 3)]
    assert there.condition == condition and there.is_live and there.prompt_ids == here.prompt_ids
    assert there.md5 == here.md5 and there.tokens == here.tokens and there.inputs == here.inputs
    for ours, theirs in zip(here.logits, there.logits, strict=True):
        assert bitwise_equal(ours, theirs)
    assert [op.key for op in there.trace.ops] == [op.key for op in here.trace.ops]
    for a, b in zip(here.trace.tensors, there.trace.tensors, strict=True):
        assert np.array_equal(a.digests, b.digests)
    assert len(there.trace.saved) > 100
    record = there.environment.to_json()
    assert record["variables"]["ATEN_CPU_CAPABILITY"] == own and record["variables"]["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"
    assert record["threads"]["intra_op"] == torch.get_num_threads()
    assert left_in(folder, "detlab-run-") == [] and len(left_in(folder, "detlab-model-")) == 1
    result = detlab.compare(here, there, controls=False)
    assert result.verdict == "identical" and result.rows_compared > 1000
    # Rows kept in the child come back as they would be kept here, and so does the word that memory ran out.
    ops = {op.index for op in here.trace.ops if not op.is_view}
    ours, theirs = (RowKeeper(ops, [1], budget=200_000) for _ in "ab")
    here.replay(keep=ours)
    there.replay(keep=theirs)
    assert ours.is_full and theirs.is_full and len(ours.kept) > 20 and ours.kept.keys() == theirs.kept.keys()
    for index, (keys, values) in ours.kept.items():
        assert np.array_equal(keys, theirs.kept[index][0]) and bitwise_equal(values, theirs.kept[index][1])


def ordered(tensor):
    """Floats as integers that count representable steps; +0 and -0 are the same."""
    bits = tensor.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def test_a_capped_instruction_set_is_compared_and_sized(model, folder):
    before = variables()
    a = detlab.run(model, PROMPTS[:1], new_tokens=2, save="full")
    b = detlab.run(model, PROMPTS[:1], CAPPED, new_tokens=2, save="full")
    assert variables() == before
    record = b.environment.to_json()
    assert [record["variables"][name] for name in VARIABLES] == ["default", "COMPATIBLE", "SSE41"]
    assert record["cpu"]["capability"].lower() in ("default", "no avx")  # what ATen chose in the child
    result = detlab.compare(a, b)  # replays b in another fresh process, which keeps the differing rows
    assert result.controls == {"a_repeated": True, "b_repeated": True}
    assert result.logits_equal == (a.md5 == b.md5)
    assert left_in(folder, "detlab-run-") == []
    parted = []
    for ours, theirs in result.detail.aligned.items():
        number_a, number_b = a.trace.ops[ours].outputs[0], b.trace.ops[theirs].outputs[0]
        x, y = a.trace.saved[number_a], b.trace.saved[number_b]
        if x.is_floating_point() and x.shape == y.shape and not bitwise_equal(x, y):
            parted.append((ours, x, y))
    if not parted:
        assert result.verdict == "identical" and a.md5 == b.md5
        return
    assert result.verdict == "diverged" and result.first.op_index == parted[0][0] and result.first.inputs_matched
    assert result.first.max_ulp is not None
    sized = {d.op_index: d for d in (*result.origins, *result.carriers)}
    checked = 0
    for ours, x, y in parted:
        found = sized.get(ours)
        if found is None or found.max_ulp is None or x.dtype != torch.float32:
            continue
        assert found.max_abs == float((x.double() - y.double()).abs().max())
        assert found.max_ulp == int((ordered(x) - ordered(y)).abs().max())
        checked += 1
    assert checked > 10


# ------------------------------------------------------------------------------------------ children that fail
def python_that(monkeypatch, tmp_path, *lines):
    """Has fresh processes run a shell script in place of Python."""
    script = tmp_path / "python"
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(process.sys, "executable", str(script))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["kill -9 $$"], "the fresh process with ATEN_CPU_CAPABILITY=avx2 was killed by signal 9: it said nothing"),
        (["echo first >&2", "echo 'no such device' >&2", "exit 3"],
         "the fresh process with ATEN_CPU_CAPABILITY=avx2 ended with code 3: no such device"),
    ],
)  # fmt: skip
def test_a_child_that_dies_is_named(model, folder, monkeypatch, tmp_path, lines, message):
    python_that(monkeypatch, tmp_path, *lines)
    before = variables()
    with pytest.raises(MachineError) as caught:
        detlab.run(model, PROMPTS, Condition(aten_isa="avx2"), new_tokens=1)
    assert str(caught.value) == message
    assert left_in(folder, "detlab-run-") == [] and variables() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interruption_kills_the_child(model, folder, monkeypatch, tmp_path, error):
    python_that(monkeypatch, tmp_path, f"echo $$ > {tmp_path}/pid", "echo progress 1 2", "exec sleep 300")

    def interrupt(done, total, what):
        assert (done, total, what) == (1, 2, "mkl_isa=SSE2")
        raise error

    with pytest.raises(error):
        detlab.run(model, PROMPTS, Condition(mkl_isa="SSE2"), new_tokens=1, progress=interrupt)
    number = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    assert left_in(folder, "detlab-run-") == []
    gc.collect()  # an unclosed pipe would warn here


def test_sweep_says_what_a_dead_child_means(model, folder, monkeypatch, tmp_path):
    python_that(monkeypatch, tmp_path, "exit 3")
    table = detlab.sweep(model, PROMPTS, ["onednn_isa=AVX2"], new_tokens=1)
    assert table.verdict.tolist() == ["not on this machine"]
    assert table.reason[0] == "the fresh process with ONEDNN_MAX_CPU_ISA=AVX2 ended with code 3: it said nothing"


# --------------------------------------------------------------------------------------------- the model's way
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FAMILIES), ("tiny-llama", "bfloat16"), ("tiny-gemma3", "bfloat16")]
)
def test_every_family_arrives_as_it_is(name, dtype, folder):
    sent = detlab.load_model(name, dtype=dtype)[0]
    if "mo" in name:
        sent.set_experts_implementation("eager")
    with torch.no_grad():
        next(sent.parameters())[0, :3] = torch.tensor([-0.0, float("nan"), 1.5])
    arrived = receive_model(send_model(sent))
    assert type(arrived) is type(sent) and not arrived.training and not next(arrived.parameters()).requires_grad
    ours = [*sent.named_parameters(), *sent.named_buffers()]
    theirs = [*arrived.named_parameters(), *arrived.named_buffers()]
    for (where, a), (there, b) in zip(ours, theirs, strict=True):
        assert where == there and bitwise_equal(a, b)
    assert arrived.config._attn_implementation == sent.config._attn_implementation
    assert getattr(arrived.config, "_experts_implementation", None) == getattr(sent.config, "_experts_implementation", None)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert bitwise_equal(arrived(ids).logits, sent(ids).logits)


def test_buffers_arrive_as_they_are(folder):
    """A model cast by hand has rounded buffers, which its configuration does not know."""
    cast = copy.deepcopy(detlab.load_model("tiny-llama")[0]).to(torch.bfloat16)
    arrived = receive_model(send_model(cast))
    assert arrived.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert bitwise_equal(arrived.model.rotary_emb.inv_freq, cast.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("way", ["no_grad", "data", "numpy", "buffer", "attention"])
def test_what_changed_since_is_sent_again(model, folder, way):
    sent = copy.deepcopy(model)
    first = send_model(sent)
    assert send_model(sent) == first and left_in(folder) == [first.name]  # the same model is sent once
    weight = sent.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        if way == "no_grad":
            weight[3, 4] += 1
        elif way == "data":
            weight.data[3, 4] += 1
        elif way == "numpy":
            weight.numpy()[3, 4] += 1
        elif way == "buffer":
            sent.model.rotary_emb.inv_freq[3] += 1
        else:
            sent.set_attn_implementation("eager")
    second = send_model(sent)
    assert second != first and left_in(folder) == [second.name]
    arrived = receive_model(second)
    assert bitwise_equal(arrived.model.layers[1].mlp.up_proj.weight, weight)
    assert bitwise_equal(arrived.model.rotary_emb.inv_freq, sent.model.rotary_emb.inv_freq)
    assert arrived.config._attn_implementation == sent.config._attn_implementation


def test_the_folder_goes_with_the_model(model, folder):
    sent = copy.deepcopy(model)
    send_model(sent)
    assert len(left_in(folder)) == 1
    del sent
    gc.collect()
    assert left_in(folder) == []


def test_a_model_that_arrives_changed_is_not_run(model, folder):
    sent = copy.deepcopy(model)
    file = send_model(sent) / "state.safetensors"
    receive_model(file.parent)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(MachineError) as caught:
        receive_model(file.parent)
    name = str(caught.value).removeprefix("the model arrived changed in the fresh process: ").partition(";")[0]
    assert name in {*dict(sent.named_parameters()), *dict(sent.named_buffers())}
    assert str(caught.value).endswith("; the run was not made.")


# ------------------------------------------------------------------------------------------------- what it refuses
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 256)

    def forward(self, input_ids):
        return {"logits": self.head(torch.zeros(*input_ids.shape, 8))}


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: None)
    return model


def hooked_before(model):
    model.register_forward_pre_hook(lambda m, a: None)
    return model


def patched(model):
    inner = model.lm_head
    inner.forward = lambda x, old=inner.forward: old(x)
    return model


LOST = "which would be lost. Remove them, or start Python with the variables set."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hooked, f"LlamaForCausalLM cannot be sent to a fresh process: model.layers.0.mlp carries hooks or a replaced "
                 f"forward, {LOST}"),
        (hooked_before, f"LlamaForCausalLM cannot be sent to a fresh process: the model carries hooks or a replaced forward, "
                        f"{LOST}"),
        (patched, f"LlamaForCausalLM cannot be sent to a fresh process: lm_head carries hooks or a replaced forward, {LOST}"),
        (lambda model: Own(), "Own cannot be sent to a fresh process: it is not a class of transformers, so the child could "
                              "not rebuild it. Use conditions that run in this process, or start Python with the variables "
                              "set."),
    ],
    ids=["hook", "pre-hook", "forward", "class"],
)  # fmt: skip
def test_models_that_would_not_be_the_same(model, folder, change, message):
    changed = change(copy.deepcopy(model)).eval()
    with pytest.raises(CaptureError) as caught:
        detlab.run(changed, PROMPTS, Condition(aten_isa="avx2"), new_tokens=1)
    assert str(caught.value) == message
    assert left_in(folder) == []


def test_a_function_cannot_be_sent(model, folder):
    with pytest.raises(UsageError) as caught:
        detlab.run(model, PROMPTS, Condition(aten_isa="avx2"), save=lambda op: True)
    assert str(caught.value) == (
        "save is a function, which cannot be sent to the fresh process that aten_isa=avx2 needs; "
        'use save="digest" or save="full".'
    )
    assert left_in(folder) == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")],
    ids=["OSError", "SafetensorError"],
)
def test_a_full_disk(model, folder, monkeypatch, error):
    def refuse(tensors, path):
        Path(path).write_bytes(b"a part of it")
        raise error

    sent = copy.deepcopy(model)
    monkeypatch.setattr(process, "save_file", refuse)
    with pytest.raises(DetlabError) as caught:
        detlab.run(sent, PROMPTS, Condition(aten_isa="avx2"), new_tokens=1)
    size = sum(p.numel() * p.element_size() for p in sent.parameters()) / 2**20
    assert isinstance(caught.value, MachineError) and caught.value.__cause__ is error
    assert str(caught.value) == (
        f"LlamaForCausalLM ({size:.0f} MiB) could not be written to {folder} for a fresh process: {error}. "
        "Free some space, or set TMPDIR to a larger disk."
    )
    assert left_in(folder) == []
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    receive_model(send_model(sent))  # nothing was remembered as sent
