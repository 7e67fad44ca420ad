"""A scoring service: SmolLM2 scores a fixed set of prompts under shifting conditions, stock and under the invariant tier.

Essays from 1 to 9, applications, tickets and a step of a solution by the likelier answer: how far the scores spread, and which
decisions flip, at the middle of the scale and where the better half passes (the threshold is then a score that was given).

    python benchmarks/scoring.py
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from _harness import save

import detlab

PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "scoring.jsonl"
CONDITIONS = [
    "", "batch_size=4", "batch_size=4,padding_side=left", "batch_size=4,padding_side=left,padding=64", "prefill_chunk=8",
]  # fmt: skip
CHOICES = {
    "essay": {str(n): n for n in range(1, 10)},
    "loan": {"Approve": 1, "Reject": 0},
    "ticket": {"Low": 0, "Medium": 0.5, "High": 1},
    "math": {"Yes": 1, "No": 0},
}


def main() -> None:
    """Measures, prints and saves."""
    torch.set_num_threads(1)
    prompts = detlab.load_prompts(PROMPTS)
    rows: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        model, _ = detlab.load_model("smollm2-135m", dtype=dtype)
        for kind, choices in CHOICES.items():
            chosen = [p for p in prompts if p.id.startswith(kind)]
            for remedy in (None, "tier-invariant"):
                made = detlab.score(model, chosen, choices, CONDITIONS, remedy=remedy)
                half = statistics.median_high(row[0] for row in made.scores)
                rank = [n for n, row in zip(made.prompt_ids, made.scores, strict=True) if len({s >= half for s in row}) > 1]
                name = f"{dtype}, {kind}, {remedy or 'stock'}"
                print(f"--- {name}\n{made}\nwhere the better half passes, flips: {len(rank)}\n", flush=True)
                record = made.to_json()
                record.pop("environment")
                rows[name] = record | {"flips_where_the_better_half_passes": rank}
    save("scoring", {"model": "smollm2-135m, 1 thread", "rows": rows})


if __name__ == "__main__":
    main()
