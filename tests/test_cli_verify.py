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
