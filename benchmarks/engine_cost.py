"""What the invariant tier costs against the stock model: SmolLM2 in both dtypes and thread counts, MoE, a sliding window.

python benchmarks/engine_cost.py            all cells, each (model, dtype, threads) in a fresh process
python benchmarks/engine_cost.py memory     peak memory alone
python benchmarks/engine_cost.py cost       time alone
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _harness import save

CELLS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"batch_sizes": (1, 8, 32), "contexts": (100, 600), "prefills": (64, 512, 2048), "parts": True},
    "tiny-qwen3-moe": {"batch_sizes": (1, 8, 32), "contexts": (100,), "prefills": (64, 512), "padded": True},
    "tiny-gemma3": {"batch_sizes": (1, 8, 32), "contexts": (100,), "prefills": (64, 512), "padded": True},
}
SECONDS = float(os.environ.get("BENCH_SECONDS", "4"))


def peak_mib() -> float:
    """Peak resident memory of this process, in MiB (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def cost(model: str, dtype: str, threads: str) -> dict[str, Any]:
    """Times one model in this process."""
    import torch

    import detlab

    torch.set_num_threads(int(threads))
    loaded, _ = detlab.load_model(model, dtype=dtype)
    return detlab.bench(loaded, seconds=SECONDS, **CELLS[model]).to_json()


def memory(model: str, dtype: str, tier: str) -> dict[str, Any]:
    """Peak memory of loading a model, a prefill of 512 tokens and 8 decode steps, above what the imports take."""
    import torch

    import detlab
    from detlab.bench import _decode, _prefill
    from detlab.coverage import coverage  # noqa: F401 - imported before the baseline, as the tier needs it

    torch.set_num_threads(1)
    before = peak_mib()
    loaded, _ = detlab.load_model(model, dtype=dtype)
    started = time.perf_counter()
    with torch.no_grad():
        if tier != "stock":
            detlab.apply(loaded, tier)
        entered = time.perf_counter() - started
        _prefill(loaded, 512)()
        step = _decode(loaded, 1, 100)
        for _ in range(8):
            step()
    return {"mib": peak_mib() - before, "entered": entered}


def child(kind: str, *arguments: str) -> dict[str, Any]:
    """Runs `cost` or `memory` in a fresh process."""
    done = subprocess.run([sys.executable, __file__, kind, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main(what: str = "") -> None:
    """Runs all and saves `results/engine_cost.json` and `results/engine_memory.json`."""
    if what != "cost":
        rows = {}
        for model in ("smollm2-135m", "tiny-llama"):
            for dtype in ("float32", "bfloat16"):
                stock, tier = (child("measure-memory", model, dtype, tier) for tier in ("stock", "invariant"))
                row = {"stock_mib": stock["mib"], "tier_mib": tier["mib"], "ratio": tier["mib"] / stock["mib"]}
                rows[f"{model}, {dtype}"] = row
                print(
                    f"{model:14} {dtype:9} peak above imports: {stock['mib']:.0f} -> {tier['mib']:.0f} MiB, {row['ratio']:.2f}"
                )
        save("engine_memory", {"rows": rows})
    if what == "memory":
        return
    results = []
    for model, threads in (("smollm2-135m", "1"), ("smollm2-135m", "2"), ("tiny-qwen3-moe", "1"), ("tiny-gemma3", "1")):
        for dtype in ("float32", "bfloat16"):
            result = child("measure-cost", model, dtype, threads)
            result.pop("environment")
            results.append(result | {"name": model})
            ratios = sorted(cell["ratio"] for cell in result["cells"])
            slow = [f"{c['name']} {c['ratio']:.2f}" for c in result["cells"] if c["ratio"] > 1]
            head = f"{model:14} {dtype:9} {threads} threads: median {result['median_ratio']:.2f}"
            print(f"{head}, {ratios[0]:.2f} to {ratios[-1]:.2f}; above 1: {', '.join(slow) or 'none'}", flush=True)
            save("engine_cost", {"seconds": SECONDS, "results": results})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps({"measure-cost": cost, "measure-memory": memory}[sys.argv[1]](*sys.argv[2:])))
    else:
        main(*sys.argv[1:])
