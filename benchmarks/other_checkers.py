"""Another checker beside `detlab.verify`, on one model whose answers are bit-identical in any batch: who raises a false alarm?

detllm 0.1.1 (`pip install --no-deps detllm==0.1.1`) compares the rows of a batch with their padding. The model here runs under
the invariant tier in both checks, and a plain loop says what is true: each prompt's new tokens, alone and in the padded batch.

python benchmarks/other_checkers.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from _harness import save

import detlab

PROMPTS = ["Hi!", "Name three rivers.", "Why is the sky blue in the daytime and black at night?", "2 + 2 ="]


def truth(model: Any, tokenizer: Any) -> bool:
    """Whether each prompt's new tokens are the same alone and in one left-padded batch."""
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    together = model.generate(**batch, max_new_tokens=12, do_sample=False)[:, batch["input_ids"].shape[1] :]
    alone = []
    for prompt in PROMPTS:
        one = tokenizer([prompt], return_tensors="pt")
        alone.append(model.generate(**one, max_new_tokens=12, do_sample=False)[0, one["input_ids"].shape[1] :])
    # Alone, a text ends at its end token; in the batch, padding follows it.
    return all(torch.equal(a, b[: len(a)]) for a, b in zip(alone, together, strict=True))


def main() -> None:
    """Runs both checkers and saves what they said."""
    try:
        from detllm.api import check
        from detllm.backends.hf import HFBackend
    except ImportError:
        raise SystemExit("detllm is not installed: pip install --no-deps detllm==0.1.1") from None
    torch.set_num_threads(1)
    rows = {}
    for name in ("tiny-llama", "smollm2-135m"):
        model, tokenizer = detlab.load_model(name)
        tokenizer.padding_side = "left"
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            backend = HFBackend(folder)
            backend.tokenizer.padding_side = "left"
            detlab.apply(backend.model)
            is_same = truth(backend.model, backend.tokenizer)
            report = check(
                backend="hf", model=folder, prompts=PROMPTS, runs=2, vary_batch=[4], batch_size=1, max_new_tokens=12,
                backend_adapter=backend, out_dir=str(Path(folder) / "out"),
            )  # fmt: skip
            detlab.restore(backend.model)
        certificate = detlab.verify(model, PROMPTS, axes=["batch", "padding"])
        rows[name] = {
            "tokens_are_the_same": is_same,
            "detllm": {"status": report.status, "category": report.category},
            "detlab": {axis: row["mismatches"] for axis, row in certificate.to_json()["axes"].items()},
        }
        print(f"{name}: new tokens the same alone and in the batch: {is_same}")
        print(f"  detllm 0.1.1: {report.status}, {report.category}")
        print(f"  detlab: {'holds' if certificate.holds else 'does not hold'}, mismatches {rows[name]['detlab']}")
    save("other_checkers", {"prompts": PROMPTS, "rows": rows})


if __name__ == "__main__":
    main()
