"""The command: exit codes, one JSON document and nothing else on stdout, errors that name the fix."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import detlab
from detlab import cli
from tests.bit_classes import row_class_equal

ROOT = Path(__file__).resolve().parent.parent
DECODE_DIFFERS = not row_class_equal(torch.float32, 576, 576, 1, 4)
PROMPTS = [{"id": "first", "tokens": [5, 6, 7, 8]}, {"id": "zwei & <b>", "tokens": [9, 10, 11]}, {"tokens": [4, 4]}]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(p, ensure_ascii=False) for p in PROMPTS), encoding="utf-8")
    return str(path)


@pytest.fixture
def call(capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as leaving:  # argparse leaves by itself
            code = leaving.code
        out, err = capsys.readouterr()
        # On a slow machine progress is reported beside the result.
        return code, out, re.sub(r"^.*: call \d+ of \d+\n", "", err, flags=re.MULTILINE)

    return run


def investigate(call, prompts, *more, b="batch_size=4"):
    return call("investigate", "--model", "tiny-llama", "--prompts", prompts, "--b", b, "--new-tokens", "3", *more)


# ----------------------------------------------------------------------------------------------------- investigate
def test_identical_conditions_hold(call, prompts):
    code, out, err = investigate(call, prompts, "--a", "batch_size=2", b="batch_size=2,mates=random")
    assert (code, err) == (0, "")
    assert "verdict: identical" in out and "controls: a_repeated held, b_repeated held" in out
    assert "reproduce: detlab.investigate(model, prompts, a='batch_size=2', b='batch_size=2,mates=random', new_tokens=3)" in out


def test_what_does_not_hold_has_exit_code_1_and_is_named(call, prompts):
    code, out, err = investigate(call, prompts)
    assert err == "" and code == (1 if "verdict: identical" not in out else 0) >= int(DECODE_DIFFERS)
    if code:
        assert "verdict: diverged" in out and "first: model.layers.0.self_attn.q_proj · mm at prompt first, position" in out
        assert "inputs matched; up to " in out


@pytest.mark.parametrize("more", [(), ("--limit", "1"), ("--dtype", "bfloat16", "--limit", "2")])
def test_json_is_one_document_and_nothing_else(call, prompts, more):
    code, out, err = investigate(call, prompts, "--json", *more)
    assert err == "" and out.count("\n") == 1
    data = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    keys = {"verdict", "first", "origins", "token_flips", "rows_compared", "controls", "environment", "md5", "call"}
    assert keys <= set(data)
    assert code == (0 if data["verdict"] == "identical" else 1)
    assert data["a"] == "default" and data["b"] == "batch_size=4"
    assert data["controls"] == {"a_repeated": True, "b_repeated": True}
    assert len(data["md5"]["a"]) == (int(more[-1]) if more else 3)
    if not more and DECODE_DIFFERS:
        assert data["first"]["module"] == "model.layers.0.self_attn.q_proj" and data["first"]["inputs_matched"] is True
        assert data["first"]["max_ulp"] >= 1
        assert {d["prompt_id"] for d in data["origins"]} <= {"first", "zwei & <b>", "prompts:3"}


def test_own_prompts_are_used_where_none_are_given(call):
    code, out, err = call("investigate", "--model", "tiny-llama", "--b", "batch_size=2,mates=repeat", "--limit", "1",
                          "--new-tokens", "0", "--json")  # fmt: skip
    assert err == "" and code in (0, 1)
    (own,) = detlab.load_prompts(ROOT / "data" / "prompts" / "assistant.jsonl")[:1]
    assert own.id in json.loads(out)["call"]


def test_report_and_saved_runs(call, prompts, tmp_path):
    code, out, err = investigate(call, prompts, "--report", tmp_path / "report.html", "--save", tmp_path / "runs")
    assert err == "" and code in (0, 1)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "zwei & <b>" not in page  # prompts' names are escaped
    again, text, err = call("compare", tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    assert again == code and err == ""
    assert [line for line in text.splitlines() if line.startswith("verdict")] == [
        line for line in out.splitlines() if line.startswith("verdict")
    ]
    assert "the model is not at hand" in text
    again, text, err = call("compare", tmp_path / "runs" / "a", tmp_path / "runs" / "a", "--json")
    assert (again, err, json.loads(text)["verdict"]) == (0, "", "identical")


# ------------------------------------------------------------------------------------------------------- bad usage
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--b", "batchsize=4"], "detlab: unknown condition key 'batchsize'. Did you mean batch_size? Known keys: batch_size,"),
        (["--b", "batch_size=0"], "detlab: batch_size=0 is not possible; give a whole number of at least 1."),
        (["--b", "batch_size=2", "--a", "row=1"], "detlab: row=1 lies outside a batch of batch_size=1;"),
        (["--b", "", "--prompts", "nowhere.jsonl"], "detlab: nowhere.jsonl does not exist."),
        (["--b", "", "--prompts", "x.csv"], "detlab: load_prompts reads .jsonl and .txt files; got 'x.csv'."),
        (["--b", "", "--dtype", "fp32"], "detlab: unknown dtype 'fp32'; choose from float32,"),
    ],
)
def test_bad_usage_has_exit_code_2_and_names_the_fix(call, prompts, arguments, message):
    if "--prompts" not in arguments:
        arguments = [*arguments, "--prompts", prompts]
    code, out, err = call("investigate", "--model", "tiny-llama", *arguments)
    assert (code, out) == (2, "") and err.startswith(message) and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["investigate", "--b", ""], "the following arguments are required: --model"),
        (["investigate", "--model", "tiny-llama"], "the following arguments are required: --b"),
        (["investigate", "--model", "m", "--b", "", "--limit", "0"], "argument --limit: give a number of at least 1, not 0"),
        (["investigate", "--model", "m", "--b", "", "--new-tokens", "-1"], "--new-tokens: give a number of at least 0, not -1"),
        (["investigate", "--model", "m", "--b", "", "--limit", "many"], "argument --limit: "),
        (["compare", "a"], "the following arguments are required: B"),
        (["solve"], "invalid choice: 'solve'"),
    ],
)
def test_arguments_that_argparse_refuses(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and message in err and "usage: detlab" in err


# ------------------------------------------------------------------------------------------------- could not be tested
def test_a_missing_model_could_not_be_tested(call, prompts):
    code, out, err = call("investigate", "--model", "tiny-lama", "--b", "", "--prompts", prompts)
    assert (code, out) == (3, "") and err.startswith("detlab: no model 'tiny-lama'") and "Did you mean tiny-llama" in err


def test_traces_that_are_not_there(call, tmp_path):
    code, out, err = call("compare", tmp_path / "a", tmp_path / "b")
    assert (code, out) == (3, "")
    assert err == f"detlab: {tmp_path}/a is not a saved trace: it does not exist. Give the folder that Run.save wrote.\n"


def test_a_failed_control_could_not_be_tested(call, prompts, monkeypatch):
    def fail(*arguments, **options):
        raise detlab.errors.ControlError("the control failed: a (default) gave other bits")

    monkeypatch.setattr(importlib.import_module("detlab.investigate"), "investigate", fail)
    code, out, err = investigate(call, prompts)
    assert (code, out, err) == (3, "", "detlab: the control failed: a (default) gave other bits\n")


@pytest.mark.parametrize("where", ["--save", "--report"])
def test_a_file_that_cannot_be_written_does_not_cost_the_result(call, prompts, tmp_path, where):
    (tmp_path / "taken").write_text("mine")
    path = tmp_path / "taken" if where == "--save" else tmp_path / "no folder" / "report.html"
    code, out, err = investigate(call, prompts, where, path)
    assert code in (2, 3) and "verdict: " in out and err.startswith("detlab: ") and str(path) in err
    assert (tmp_path / "taken").read_text() == "mine"


def test_an_unexpected_error_is_not_taken_for_a_difference(call, prompts, monkeypatch):
    monkeypatch.setattr("detlab.models.load_model", lambda *a, **k: 1 / 0)
    code, out, err = investigate(call, prompts)
    assert (code, out) == (3, "") and "ZeroDivisionError" in err and "could not be tested" in err


def test_an_interruption_saves_nothing(call, prompts, tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("detlab.investigate"), "investigate", interrupt)
    code, out, err = investigate(call, prompts, "--save", tmp_path / "runs", "--report", tmp_path / "r.html")
    assert (code, out, err) == (130, "", "\ndetlab: interrupted; nothing was saved.\n")
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


# --------------------------------------------------------------------------------------------------------- the rest
@pytest.mark.parametrize("command", [[], ["investigate"], ["compare"], ["environment"], ["demo"], ["lab"]])
def test_help(call, command):
    code, out, err = call(*command, "--help")
    assert (code, err) == (0, "") and out.startswith("usage: detlab")
    if not command:
        assert "Exit code: 0 it holds, 1 it does not, 2 bad usage, 3 could not be tested." in out
        assert all(name in out for name in ("investigate", "compare", "environment", "demo", "lab"))


def test_environment(call):
    code, out, err = call("environment", "--json")
    assert (code, err) == (0, "") and json.loads(out).keys() == detlab.environment().to_json().keys()
    code, out, err = call("environment")
    assert (code, err) == (0, "") and torch.__version__.split("+")[0] in out


def test_the_command_in_its_own_process():
    command = [sys.executable, "-W", "error", "-m", "detlab", "environment", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)
    closed = f"{sys.executable} -m detlab environment | true"  # a reader that goes away is no failure
    done = subprocess.run(["bash", "-o", "pipefail", "-c", closed], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_lab_opens_the_start_notebook_on_this_machine_only(call, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    call("lab", "--", "--no-browser")
    (command,) = started
    assert command[1:3] == ["-m", "jupyterlab"] and command[3].endswith("00-start-here.ipynb")
    assert "--ServerApp.ip=127.0.0.1" in command and command[-1] == "--no-browser"


def test_what_needs_a_checkout_says_so(call, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_ROOT", tmp_path)
    code, out, err = call("lab")
    assert (code, out) == (2, "")
    assert err == "detlab: the notebooks are not beside the package; run `detlab lab` from a checkout of detlab.\n"
    code, out, err = call("investigate", "--model", "tiny-llama", "--b", "")
    assert (code, out) == (2, "")
    assert err == "detlab: detlab's own prompts are not beside the package (this is no checkout); give --prompts FILE.\n"


def test_demo_writes_a_report(call, tmp_path):
    code, out, err = call("demo", "--model", "tiny-llama", "--report", tmp_path / "report.html")
    assert (code, err) == (0, "") and f"report: {tmp_path / 'report.html'}" in out
    assert out.startswith("tiny-llama in bfloat16 answers 6 prompts: each alone, then all in one left-padded batch.\n")
    assert "verdict: " in out and (tmp_path / "report.html").is_file()
