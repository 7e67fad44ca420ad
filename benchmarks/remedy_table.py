"""What fixes it: every remedy tried on SmolLM2 in bfloat16, for the two differences that users meet first.

Batch 1 against a left-padded batch of 6, and decoding with a cache against computing the whole text anew (prefill) at each
step. Every row is a measurement of this machine; what cannot be tried says why. Takes about ten minutes of CPU time.

    python benchmarks/remedy_table.py [batch | prefill]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, save

import detlab
from detlab.remedies import REMEDIES, Remedy

NAME = "remedy_table"
PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "assistant.jsonl"
PAIRS = {"batch": ("", "batch_size=6,padding_side=left"), "prefill": ("", "cache=none")}
NUM_PROMPTS, NEW_TOKENS = {"batch": 6, "prefill": 4}, 2
TRIALS = 1


def remedies() -> list[str | Remedy]:
    """The registry, and launch blocking once more as a variable that is set where no CUDA reads it."""
    on_cpu = replace(REMEDIES["launch-blocking"], name="launch-blocking (set without CUDA)", where=("cpu", "cuda"))
    return [*REMEDIES, *([] if torch.cuda.is_available() else [on_cpu])]


def main(names: list[str]) -> None:
    """Measures, prints and saves; a pair that is not asked for keeps what was measured of it before."""
    torch.set_num_threads(1)
    model, _ = detlab.load_model("smollm2-135m", dtype="bfloat16")
    prompts = detlab.load_prompts(PROMPTS)
    path = RESULTS / f"{NAME}.json"
    for name in names or list(PAIRS):
        a, b = PAIRS[name]
        made = detlab.try_remedies(
            model, prompts[: NUM_PROMPTS[name]], a, b, remedies(), NEW_TOKENS, TRIALS,
            progress=lambda done, total, what: print(f"{done} of {total}: {what}", file=sys.stderr, flush=True),
        )  # fmt: skip
        print(made, flush=True)
        record = made.to_json()
        record.pop("environment")  # the harness records the machine
        # Read now: the other pair may have been measured meanwhile, by another process.
        pairs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["pairs"] if path.exists() else {}
        pairs[name] = record
        save(NAME, {"model": "smollm2-135m, bfloat16, 1 thread", "prompts": NUM_PROMPTS, "pairs": pairs})


if __name__ == "__main__":
    main(sys.argv[1:])
