"""How far logits are from float64's, stock and under the invariant tier: SmolLM2 on detlab's own prompts, and tiny families.

python benchmarks/engine_accuracy.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from _harness import save

import detlab
from detlab.prompts import encode

PROMPTS = Path(__file__).parents[1] / "data" / "prompts"


def errors(model: Any, judge: Any, inputs: list[list[int]]) -> list[dict[str, float]]:
    """Largest error of each prompt's logits, at all positions, against the judge's; stock and tier."""
    rows = []
    with torch.no_grad():
        for tokens in inputs:
            ids = torch.tensor([tokens])
            truth = judge(ids, use_cache=False).logits
            stock = model(ids, use_cache=False).logits.double()
            with detlab.deterministic(model):
                tier = model(ids, use_cache=False).logits.double()
            row = {"stock": float((stock - truth).abs().max()), "tier": float((tier - truth).abs().max())}
            row |= {
                "stock_rms": float((stock - truth).pow(2).mean().sqrt()),
                "tier_rms": float((tier - truth).pow(2).mean().sqrt()),
            }
            agree = (
                (truth.argmax(-1) == stock.argmax(-1)).double().mean(),
                (truth.argmax(-1) == tier.argmax(-1)).double().mean(),
            )
            rows.append(row | {"stock_argmax": float(agree[0]), "tier_argmax": float(agree[1])})
    return rows


def main() -> None:
    """Measures, prints and saves."""
    torch.set_num_threads(1)
    results = {}
    for name in ("smollm2-135m", "tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe", "tiny-mixtral"):
        for dtype in ("float32", "bfloat16"):
            model, tokenizer = detlab.load_model(name, dtype=dtype)
            judge = copy.deepcopy(model).double()
            if hasattr(judge, "set_experts_implementation") and judge._can_set_experts_implementation():
                judge.set_experts_implementation("eager")  # the grouped product knows no float64
            prompts = [p for file in ("assistant", "code") for p in detlab.load_prompts(PROMPTS / f"{file}.jsonl")][:20]
            inputs = [tokens[:300] for tokens in encode(prompts, tokenizer)]
            rows = errors(model, judge, inputs)
            worst = {key: max(row[key] for row in rows) for key in ("stock", "tier", "stock_rms", "tier_rms")}
            agreement = {key: sum(row[key] for row in rows) / len(rows) for key in ("stock_argmax", "tier_argmax")}
            results[f"{name}, {dtype}"] = worst | agreement | {"prompts": len(rows)}
            print(
                f"{name:15} {dtype:9} {len(rows)} prompts: max error {worst['stock']:.3g} stock, {worst['tier']:.3g} tier; "
                f"rms {worst['stock_rms']:.3g}, {worst['tier_rms']:.3g}; "
                f"argmax as float64 {agreement['stock_argmax']:.4f}, {agreement['tier_argmax']:.4f}"
            )
    save("engine_accuracy", {"rows": results})


if __name__ == "__main__":
    main()
