"""`verify` probes the kernels again: a wrong map refutes the certificate, although no text may show it; a right one holds."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

import detlab
from detlab.engine.kernels import KernelCheck, KernelMap, check_again, watching
from detlab.engine.ledger import Finding, ledger
from detlab.verify import Certificate

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]

# What a fresh process does before it verifies: nothing, a wrong member in the ledger's file, or a kernel that was exchanged.
PLANT = """
import json, sys
from dataclasses import asdict
from detlab.engine.classes import ClassMap
from detlab.engine.ledger import ledger

def wrong_member():
    for name in list(ledger().measured):
        known = ledger().known(name, ClassMap) if name.startswith("linear/") else None
        if known is not None and known.others:
            members = sorted({*known.members, *known.others})
            ledger().keep(name, ClassMap(known.unit, tuple(members), tuple([1.0 + c for c in members]), (), known.digest))

def other_kernel():
    from detlab.engine.linear import _Packed
    original = _Packed.__call__
    units = {m["unit"] for n, m in ledger().measured.items() if n.startswith("linear/packed")}

    def call(self, x):  # the first and the second half of a sum are added apart
        if x.shape[0] in units or self.num_in != 1536:
            return original(self, x)
        first, second = x.clone(), x.clone()
        first[:, x.shape[1] // 2 :] = 0
        second[:, : x.shape[1] // 2] = 0
        return original(self, first) + original(self, second)

    _Packed.__call__ = call

{"wrong_member": wrong_member, "other_kernel": other_kernel, "nothing": lambda: None}[sys.argv.pop(1)]()
from detlab import cli
raise SystemExit(cli.main())
"""


def verified(folder, plant="nothing", dtype="bfloat16", axes="run"):
    """Exit code and certificate of `detlab verify` in a fresh process, whose ledger lies in a folder of its own."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "tokens": PROMPT}) + "\n", encoding="utf-8")
    asked = ["verify", "--model", "tiny-llama", "--dtype", dtype, "--prompts", prompts, "--axes", axes, "--trials", "2"]
    done = subprocess.run(
        [sys.executable, "-c", PLANT, plant, *map(str, asked), "--save", str(folder / "c.json"), "--json"],
        capture_output=True, text=True, check=False, env=os.environ | {"DETLAB_CACHE": str(folder)},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, Certificate.load(folder / "c.json")


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """A cache folder, and the certificate of the process that filled it."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, *verified(folder)


def test_a_right_map_holds(right):
    """The control: what this machine measured, probed again with other data."""
    _, code, found = right
    count = found.kernel_counts
    assert code == 0 and found.holds and found.wrong_kernels == []
    assert count["kernels"] >= 4 and count["shapes"] > count["kernels"] and count["failed"] == 0
    said = f"{count['kernels']} kernels were probed again, in the {count['shapes']} shapes that ran: all hold"
    assert f"kernels: {said}" in str(found) and said in found._repr_html_()


def test_a_kernel_that_is_another_one_now_is_found(right, tmp_path):
    """The ledger's maps are believed, and each text is served in one way alone: no text can show it."""
    (tmp_path / "calibration").symlink_to(right[0] / "calibration")
    code, found = verified(tmp_path, "other_kernel")
    assert code == 1 and found.is_refuted and not found.holds
    assert found.axes["run"].mismatches == 0
    assert {check.kernel.split()[2] for check in found.wrong_kernels} == {"1536x576"}
    (wrong,) = found.wrong_kernels
    assert set(wrong.failed) <= set(wrong.shapes) and wrong.file.startswith(str(tmp_path)) and wrong.file.endswith(".json")
    count = found.kernel_counts
    assert f"and {len(wrong.failed)} of {count['shapes']} shapes of kernels do not hold" in found.headline
    assert f"wrong: {wrong.kernel}: at {wrong.failed[0]}" in str(found) and f"Delete {wrong.file} and start again" in str(found)
    page = found.save(tmp_path / "c.html").read_text()
    assert "The kernels, probed again" in page and wrong.kernel in page and f"Delete {wrong.file}" in page
    assert found.to_json()["kernels"] | {"checks": []} == count | {"checks": []}
    assert found.to_json()["kernels"]["checks"][found.kernels.index(wrong)]["failed"] == list(wrong.failed)


def test_a_wrong_member_in_the_ledgers_file_is_found_and_deleting_the_file_helps(right, tmp_path):
    if not any(known.others for known in right[2].coverage.class_maps):
        pytest.skip("on this machine all row counts of this model's kernels are of one class: no member would be wrong")
    folder = tmp_path / "calibration"
    folder.mkdir()
    for file in (right[0] / "calibration").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    code, found = verified(tmp_path, "wrong_member")
    assert code == 1 and found.is_refuted and found.wrong_kernels
    (file,) = {check.file for check in found.wrong_kernels}
    os.unlink(file)
    code, found = verified(tmp_path)
    assert code == 0 and found.holds


def test_fresh_processes_look_at_their_own_kernels():
    found = detlab.verify(detlab.load_model("tiny-llama")[0], [PROMPT], axes=["threads"], trials=2, threads=[2])
    assert found.holds or not found.is_refuted
    here, there = ([c for c in found.kernels if c.where == where] for where in ("", "threads=2"))
    assert here and len(here) == len(there)
    assert all(c.holds for c in (*here, *there)) and all(" threads=2" in c.kernel for c in there if "linear" in c.kernel)
    assert found.kernel_counts["kernels"] == len(here) + len(there)


def test_a_tier_without_measured_kernels_says_so():
    found = detlab.verify(detlab.load_model("tiny-llama")[0], [PROMPT], "exact", ["run"], trials=1)
    assert found.holds and found.kernels == []
    assert "kernels: no kernel was probed again: tier 'exact' measured none" in str(found)


def test_what_is_looked_at_ran_in_the_block():
    class Planted:
        def __init__(self, *ran):
            self.ran, self.seeds = set(ran), []

        def fresh(self):
            self.ran.clear()

        def recheck(self, seed):
            self.seeds.append(seed)
            return [Finding("planted", shape, shape != "8 rows") for shape in sorted(self.ran)]

    kernels = {"planted a": Planted("1 rows"), "planted b": Planted("2 rows")}
    ledger().kernels |= kernels
    try:
        with watching() as running:
            kernels["planted a"].ran |= {"4 rows", "8 rows"}
            (found,) = check_again({n: k for n, k in running().items() if n in kernels}, 7, "threads=3")
    finally:
        for name in kernels:
            del ledger().kernels[name]
    assert found == KernelCheck("planted a", ("4 rows", "8 rows"), ("8 rows",), str(ledger().path), "threads=3")
    assert str(found).startswith("planted a (threads=3): at 8 rows it has other bits than those of its class. Delete ")
    assert kernels["planted a"].seeds == [7] and kernels["planted b"].seeds == []
    assert kernels["planted a"].ran == {"1 rows", "4 rows", "8 rows"} and kernels["planted b"].ran == {"2 rows"}
    assert KernelCheck.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_a_map_is_read_back():
    known = KernelMap("linear", "linear: one class at 1..4 rows", (1, 2, 3, 4), (40,))
    assert KernelMap.from_json(json.loads(json.dumps(asdict(known)))) == known and str(known) == known.words
