"""How long a comparison takes, and how large a trace is on disk: SmolLM2 in bfloat16, 8 prompts x 64 new tokens.

python benchmarks/compare_traces.py [PROMPTS [TOKENS]]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from _harness import save

import detlab

PROMPTS = Path(__file__).parent.parent / "data" / "prompts" / "assistant.jsonl"


def main(num_prompts: int, new_tokens: int) -> None:
    """Captures two runs, compares them, saves one."""
    torch.set_num_threads(1)
    model, _ = detlab.load_model("smollm2-135m", dtype="bfloat16")
    prompts = detlab.load_prompts(PROMPTS)[:num_prompts]
    whole = detlab.Condition(batch_size=num_prompts, padding_side="left")
    halves = detlab.Condition(batch_size=max(1, num_prompts // 2), padding_side="left")
    a = detlab.run(model, prompts, whole, new_tokens=new_tokens)
    b = detlab.run(model, prompts, halves, new_tokens=new_tokens, force=a.tokens)
    started = time.process_time()
    result = detlab.compare(a, b, controls=False, measure=False)
    seconds = time.process_time() - started
    with tempfile.TemporaryDirectory() as folder:
        a.save(Path(folder) / "run")
        sizes = {file.name: file.stat().st_size for file in (Path(folder) / "run").iterdir()}
        started = time.process_time()
        detlab.load_trace(Path(folder) / "run")
        loading = time.process_time() - started
    assert a.trace is not None
    row = {
        "ops": len(a.trace.ops), "digests": a.trace.num_digests, "rows_compared": result.rows_compared,
        "verdict": result.verdict, "compare_s": seconds, "load_s": loading,
        "trace_mb": sizes["trace.safetensors"] / 1e6, "files": sizes,
    }  # fmt: skip
    print(f"{num_prompts} prompts x {new_tokens} tokens: {row['ops']:,} ops, {row['digests']:,} row digests in a")
    print(f"compared {row['rows_compared']:,} rows in {seconds:.1f} s of CPU time: {result.verdict}")
    whole_mb = sum(sizes.values()) / 1e6
    print(f"trace on disk {row['trace_mb']:.1f} MB (the run with its logits {whole_mb:.1f} MB), loaded in {loading:.1f} s")
    save("compare_traces", row)


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["8", "64"][len(sys.argv) - 1 :])))
