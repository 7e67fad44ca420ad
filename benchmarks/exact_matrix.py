"""One MD5 of the logits under the exact tier: batches, padding, chunks, decoding, caches, threads, instruction sets, splits.

For each model, dtype and context one text of that many tokens is served in all the ways of `detlab.verify`'s axes, instruction
sets in fresh processes among them, and so it is with the tier off, as a control: the stock model has several MD5s. What was
run is kept after each row, so that rows can be run alone; all take hours.

    python benchmarks/exact_matrix.py [ROW ...]      such as "tiny-llama float32 300"
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import torch
from _harness import RESULTS, save

import detlab
from detlab.models import FAMILIES

NAME = "exact_matrix"
CONTEXTS = (4, 300, 2048)
AXES = ("batch", "position", "padding", "chunk", "decode", "cache", "threads", "isa", "split", "alignment", "run")
#: Of long texts, which take seconds each, and of the large model half a minute.
FEW = ("batch", "padding", "chunk", "decode", "threads", "isa", "split")


def text_of(length: int) -> list[int]:
    draw = random.Random(f"exact {length}")
    return [draw.randrange(3, 250) for _ in range(length)]


def row(name: str, dtype: str, context: int) -> dict[str, Any]:
    """Serves one text in all ways; the last of its tokens are those that the model chose."""
    model, _ = detlab.load_model(name, dtype=dtype)
    most = getattr(model.config, "max_position_embeddings", context)
    new_tokens = 2 if context < 10 else 4
    length = min(context, most - 64) - new_tokens
    is_long = context > 1000 or (name == "smollm2-135m" and context > 100)
    found = detlab.verify(
        model, [text_of(length)], tier="exact", axes=FEW if is_long else AXES, trials=2 if is_long else 6,
        new_tokens=new_tokens, threads=[2, 3],
    )  # fmt: skip
    (md5,) = found.md5.values()
    axes = {
        axis.axis: {
            "comparisons": axis.comparisons, "mismatches": axis.mismatches,
            "control_comparisons": axis.control_comparisons, "control_mismatches": axis.control_mismatches,
            "verdict": axis.verdict,
        }
        for axis in found.axes.values()
    }  # fmt: skip
    evidence = {axis.axis: axis.evidence for axis in found.axes.values()}
    return {"tokens": length + new_tokens, "spec": found.spec, "md5": md5, "holds": found.holds, "axes": axes, "seen": evidence}


def main(chosen: list[str]) -> int:
    """Runs rows, prints and keeps them; 1 where a bit differed or something was not tested."""
    torch.set_num_threads(1)
    names = (*FAMILIES, "smollm2-135m")
    known = {f"{n} {d} {c}": (n, d, c) for n in names for d in ("float32", "bfloat16") for c in CONTEXTS}
    unknown = [name for name in chosen if name not in known]
    if unknown:
        print(f"no row {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    path = RESULTS / f"{NAME}.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if chosen and path.exists() else {"rows": {}}
    rows: dict[str, Any] = stored["rows"]
    wrong = 0
    for name in chosen or known:
        made = row(*known[name])
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
        rows[name] = made | {"commit": commit.strip()}
        total, parted = (sum(axis[kind] for axis in made["axes"].values()) for kind in ("comparisons", "mismatches"))
        controls = [axis for axis, found in made["axes"].items() if found["control_mismatches"]]
        wrong += not made["holds"]
        print(
            f"{name:27} {made['tokens']:5} tokens: {parted} of {total} differ, md5 {made['md5']}; "
            f"stock parts on {', '.join(controls) or 'nothing'}",
            flush=True,
        )
        save(NAME, {"rows": rows})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
