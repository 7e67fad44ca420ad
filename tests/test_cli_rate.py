"""`detlab rate`: exit codes, one JSON document, before and after a remedy."""

import json
import re

import pytest
import torch

from detlab import cli
from tests.bit_classes import row_class_equal

PARTS = not row_class_equal(torch.float32, 576, 576, 1, 4)  # decoding one row or four gives other bits on this machine


@pytest.fixture
def call(capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "tokens": [5, 6, 7, 8, 9, 10, 11]}\n{"id": "b", "tokens": [9, 10, 11]}\n', encoding="utf-8")

    def run(*arguments):
        try:
            code = cli.main(["rate", "--model", "tiny-llama", "--prompts", str(path), *map(str, arguments)])
        except SystemExit as leaving:
            code = leaving.code
        out, err = capsys.readouterr()
        return code, out, re.sub(r"^.*: call \d+ of \d+\n", "", err, flags=re.MULTILINE)

    return run


def test_before_and_after_in_one_document(call):
    code, out, err = call("--runs", 8, "--new-tokens", 2, "--remedy", "tier-invariant", "--condition", "",
                          "--condition", "batch_size=4", "--json")  # fmt: skip
    data = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    before, after = data["before"], data["after"]
    assert after["divergent_runs"] == 0 and after["distinct"] == [1, 1] and after["remedy"] == "tier-invariant"
    assert before["outputs"] == 16 and before["conditions"] == ["default", "batch_size=4"] and before["remedy"] == ""
    assert [run["batch_size"] for run in before["runs"]] == [run["batch_size"] for run in after["runs"]]  # the same draw
    fours = sum(run["batch_size"] == 4 for run in before["runs"])
    assert 0 < fours < 8 and before["divergent_runs"] == (fours if PARTS else before["divergent_runs"])
    assert all(re.fullmatch("[0-9a-f]{32}", md5) for run in before["runs"] for md5 in run["logits_md5"] + run["tokens_md5"])
    assert before["batch_sizes"]["variation"] > 0 and set(before["utilisation"]) <= set(before["sensors"])


def test_what_parts_has_exit_code_1_and_what_does_not_0(call):
    arguments = ("--runs", 6, "--new-tokens", 2, "--condition", "")
    code, out, err = call(*arguments)
    assert (code, err) == (0, "") and "divergent runs: 0 (0.0 %; at most 50 % at 95 %)" in out
    code, out, err = call(*arguments, "--condition", "batch_size=4", "--condition", "dtype=bfloat16")
    assert (code, err) == (1, "") and "6 runs of 2 prompts under 3 conditions" in out and "utilisation: " in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--remedy", "sedes"), 2, "detlab: unknown remedy 'sedes'; choose from seeds,"),
        (("--remedy", "float64+half-storage"), 2, "detlab: the remedies 'float64' and 'half-storage' conflict"),
        (("--condition", "batchsize=4"), 2, "detlab: unknown condition key 'batchsize'."),
        (("--runs", "0"), 2, "argument --runs: give a number of at least 1, not 0"),
        (("--remedy", "power-cap"), 3, "detlab: the remedy 'power-cap' cannot be had here: advice: detlab never changes"),
    ],
)
def test_bad_usage_is_told_from_what_cannot_be_had(call, arguments, code, message):
    found, out, err = call(*arguments)
    assert (found, out) == (code, "") and message in err
