"""`bench`: what first calls spend on probing shapes that were not known is told apart from what calls cost."""

import json
import os
import subprocess
import sys

import pytest

import detlab
from detlab.bench import Cell


def benched(folder):
    asked = "bench --model tiny-llama --batch-sizes 1 --contexts 8 --prefills 70 --seconds 0.1 --json".split()
    done = subprocess.run(
        [sys.executable, "-m", "detlab", *asked],
        capture_output=True, text=True, check=True, env=os.environ | {"DETLAB_CACHE": str(folder)},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_probing_is_paid_once(tmp_path):
    first, again = benched(tmp_path), benched(tmp_path)
    assert first["probing_seconds"] == pytest.approx(sum(cell["probing_seconds"] for cell in first["cells"]))
    assert next(cell["probing_seconds"] for cell in first["cells"] if cell["name"] == "prefill, 70 tokens") > 0
    assert again["probing_seconds"] < 0.2 * first["probing_seconds"]  # buffers of elementwise functions are not kept


def test_it_is_shown():
    cells = [Cell("prefill, 64 tokens", 1.0, 2.0, 2.0, 1.9, 2.1, 5, 0.75), Cell("decode", 1.0, 1.0, 1.0, 1.0, 1.0, 5)]
    found = detlab.Bench("M", "float32", "invariant", 1, cells, enter_seconds=1.5)
    assert found.probing_seconds == 0.75 and found.to_json()["cells"][0]["probing_seconds"] == 0.75
    lines = str(found).splitlines()
    assert lines[1].endswith("first call probed") and lines[2].endswith("1.90 to 2.10  0.8 s") and lines[3].endswith("0.0 s")
    assert lines[-1] == "median ratio 1.50; entering 1.5 s, again 0.0 s; probing new shapes in first calls 0.8 s"
    page = found._repr_html_()
    assert "seconds of probing in the first call" in page and "<td>0.8</td>" in page and lines[-1] in page
