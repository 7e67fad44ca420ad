"""`detlab verify` and `detlab coverage`: exit codes, one JSON document, files."""

import json
import re

import pytest

from detlab import cli
from detlab.verify import Certificate


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "tokens": [5, 6, 7, 8]}\n{"id": "b", "tokens": [9, 10, 11]}\n', encoding="utf-8")
    return str(path)


@pytest.fixture
def call(capsys):
    def run(*arguments):
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as leaving:
            code = leaving.code
        out, err = capsys.readouterr()
        return code, out, re.sub(r"^.*: call \d+ of \d+\n", "", err, flags=re.MULTILINE)

    return run


def test_it_holds(call, prompts, tmp_path):
    code, out, err = call("verify", "--model", "tiny-llama", "--prompts", prompts, "--axes", "batch, run", "--trials", "2",
                          "--save", tmp_path / "c.json")  # fmt: skip
    assert (code, err) == (0, "") and "tier 'invariant' holds: 0 of" in out
    assert list(Certificate.load(tmp_path / "c.json").axes) == ["batch", "run"]


def test_json_is_one_document(call, prompts):
    code, out, err = call("verify", "--model", "tiny-llama", "--prompts", prompts, "--axes", "run", "--trials", "2", "--json")
    data = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert data["axes"]["run"]["comparisons"] == 2 and data["axes"]["run"]["bound95"] == 1.0 and set(data["md5"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--axes", "batches"], "detlab: verify knows no axis 'batches'; choose from batch,"),
        (["--axes", ","], "detlab: verify needs at least one axis;"),
        (["--tier", "exakt", "--axes", "run"], "detlab: tier='exakt' is not known;"),
        (["--trials", "0"], "give a number of at least 1, not 0"),
    ],
)
def test_bad_usage_has_exit_code_2(call, prompts, more, message):
    code, out, err = call("verify", "--model", "tiny-llama", "--prompts", prompts, *more)
    assert (code, out) == (2, "") and message in err


def test_a_certificate_is_run_again(call, prompts, tmp_path):
    path = tmp_path / "c.json"
    code, _, err = call("verify", "--model", "tiny-llama", "--tier", "exact", "--prompts", prompts, "--axes", "run,split",
                        "--trials", "2", "--save", path)  # fmt: skip
    assert (code, err) == (0, "")
    code, out, err = call("verify", "--certificate", path, "--axes", "run", "--save", tmp_path / "mine.json")
    assert (code, err) == (0, "") and out.startswith("certificate confirmed: 2 of 2 MD5s") and "(spec tri4) holds" in out
    assert Certificate.load(tmp_path / "mine.json").md5 == Certificate.load(path).md5
    forged = Certificate.load(path)
    forged.md5["b"] = "0" * 32
    forged.save(path)
    code, out, err = call("verify", "--certificate", path, "--axes", "run", "--json")
    assert (code, err) == (1, "") and json.loads(out)["differing"] == ["b"]
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"tier": "invariant"}))
    for content, message in ((None, "was changed since it was written"), ("{", "is not JSON"), ("[]", "holds no certificate")):
        if content is not None:
            path.write_text(content)
        code, out, err = call("verify", "--certificate", path)
        assert (code, out) == (2, "") and message in err
    code, out, err = call("verify", "--certificate", tmp_path / "none.json")
    assert code == 2 and "cannot be read: No such file or directory" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "detlab: verify needs a model: --model smollm2-135m, or --certificate FILE, which names one."),
        (["--certificate", "c.json", "--tier", "exact"], "detlab: --tier is the certificate's; beside --certificate give"),
        (["--certificate", "c.json", "--new-tokens", "2"], "detlab: --new-tokens is the certificate's;"),
    ],
)
def test_a_model_or_a_certificate(call, more, message):
    code, out, err = call("verify", *more)
    assert (code, out) == (2, "") and message in err


def test_a_machine_that_is_not_exact_has_exit_code_3(call, prompts, monkeypatch):
    from detlab.engine.exact import machine

    monkeypatch.setattr(machine, "is_exact", lambda *_: False)
    machine._choice.cache_clear()
    try:
        code, out, err = call("verify", "--model", "tiny-llama", "--tier", "exact", "--prompts", prompts, "--axes", "run")
    finally:
        machine._choice.cache_clear()
    assert (code, out) == (3, "") and "product is not exact on this machine" in err


def test_coverage(call):
    code, out, err = call("coverage", "--model", "tiny-llama", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "") and data["counts"]["uncovered"] == 0 and data["counts"]["covered"] > 0
    code, out, err = call("coverage", "--model", "tiny-llama")
    assert (code, err) == (0, "") and "under tier invariant" in out


def test_what_does_not_hold_has_exit_code_1(call, prompts, monkeypatch):
    from detlab.engine.cache import CanonicalLayer

    original = CanonicalLayer.update

    def update(self, keys, values, *more, **others):
        return original(self, keys * (1 + 2**-20) if keys.shape[0] > 1 else keys, values, *more, **others)

    monkeypatch.setattr(CanonicalLayer, "update", update)
    code, out, _ = call("verify", "--model", "tiny-llama", "--prompts", prompts, "--axes", "batch", "--trials", "4")
    assert code == 1 and "does not hold" in out
