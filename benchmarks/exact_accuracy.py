"""How far the exact tier's logits are from float64's, beside stock's: SmolLM2 on twenty of detlab's own prompts.

The goal is a largest error within twice that of stock float32, and the judge's next token at least as often. Cosine
similarities are between the logits of a position, the smallest of all positions.

    python benchmarks/exact_accuracy.py [DTYPE ...]      float32 (the goal's) and bfloat16 where none is named
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, save
from torch import Tensor

import detlab
from detlab.prompts import encode

NAME, MODEL = "exact_accuracy", "smollm2-135m"
PROMPTS = Path(__file__).parents[1] / "data" / "prompts"
COUNTS = {"assistant": 14, "code": 3, "scoring": 3}


def against(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Errors of logits [tokens, vocab], float64, against the judge's."""
    error = (found - truth).abs()
    return {
        "max": float(error.max()),
        "rms": float(error.pow(2).mean().sqrt()),
        "cosine": float(torch.cosine_similarity(found, truth, dim=-1).min()),
        "argmax": float((found.argmax(-1) == truth.argmax(-1)).sum()),
    }


@torch.no_grad()
def measure(dtype: str) -> dict[str, Any]:
    model, tokenizer = detlab.load_model(MODEL, dtype=dtype)
    judge = copy.deepcopy(model).double()
    prompts = [p for name, count in COUNTS.items() for p in detlab.load_prompts(PROMPTS / f"{name}.jsonl")[:count]]
    inputs = [tokens[:300] for tokens in encode(prompts, tokenizer)]
    rows: dict[str, list[dict[str, float]]] = {"stock": [], "exact": []}
    smallest = 1.0
    truths = [judge(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in inputs]
    stocks = [model(torch.tensor([tokens]), use_cache=False).logits[0].double() for tokens in inputs]
    with detlab.deterministic(model, tier="exact"):
        for tokens, truth, stock in zip(inputs, truths, stocks, strict=True):
            exact = model(torch.tensor([tokens]), use_cache=False).logits[0].double()
            rows["stock"].append(against(stock, truth))
            rows["exact"].append(against(exact, truth))
            smallest = min(smallest, float(torch.cosine_similarity(exact, stock, dim=-1).min()))
    positions = sum(map(len, inputs))
    made: dict[str, Any] = {"prompts": len(inputs), "positions": positions, "cosine_exact_stock": smallest}
    for name, found in rows.items():
        made[name] = {
            "max_error": max(row["max"] for row in found),
            "largest_rms": max(row["rms"] for row in found),
            "smallest_cosine": min(row["cosine"] for row in found),
            "argmax_as_float64": sum(row["argmax"] for row in found) / positions,
        }
    made["max_error_ratio"] = made["exact"]["max_error"] / made["stock"]["max_error"]
    return made


def main(dtypes: list[str]) -> None:
    """Measures, prints and saves."""
    torch.set_num_threads(1)
    path = RESULTS / f"{NAME}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if dtypes and path.exists() else {}
    for dtype in dtypes or ("float32", "bfloat16"):
        made = rows[f"{MODEL}, {dtype}"] = measure(dtype)
        stock, exact = made["stock"], made["exact"]
        print(
            f"{MODEL} {dtype}: {made['prompts']} prompts, {made['positions']} positions: max error {stock['max_error']:.3g} "
            f"stock, {exact['max_error']:.3g} exact (ratio {made['max_error_ratio']:.2f}); argmax as float64 "
            f"{stock['argmax_as_float64']:.5f}, {exact['argmax_as_float64']:.5f}; smallest cosine with float64 "
            f"{stock['smallest_cosine']:.12f}, {exact['smallest_cosine']:.12f}",
            flush=True,
        )
        save(NAME, {"rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
