"""What the exact tier costs against the stock model: time, with and without its compiled steps, and the memory of preparing.

    python benchmarks/exact_cost.py            all cells, each (dtype, threads) in a fresh process
    python benchmarks/exact_cost.py memory     peak memory alone

The time's ratios are those of `detlab bench --tier exact`. Memory: of a process that puts a loaded model under the tier, above
what its imports take, against the prepared model: four bytes for each weight, and the embedding as it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from _harness import save
from engine_cost import peak_mib

MODEL = "smollm2-135m"
SECONDS = float(os.environ.get("BENCH_SECONDS", "4"))
#: dtype, threads, whether the steps between products are compiled.
CELLS = (
    ("float32", 1, True), ("bfloat16", 1, True), ("float32", 2, True), ("float32", 1, False), ("bfloat16", 2, True),
)  # fmt: skip


def cost(dtype: str, threads: str) -> dict[str, Any]:
    """Times the model in this process."""
    import torch

    import detlab

    torch.set_num_threads(int(threads))
    model, _ = detlab.load_model(MODEL, dtype=dtype)
    return detlab.bench(model, "exact", seconds=SECONDS).to_json()


def memory(dtype: str) -> dict[str, float]:
    """Peak memory of preparing the model, in MiB above the imports (Linux)."""
    import torch

    import detlab
    from detlab.engine.exact.machine import choose_kernel

    torch.set_num_threads(1)
    model, _ = detlab.load_model("tiny-llama", dtype=dtype)
    detlab.apply(model, "exact")  # what is compiled and asked of the machine once
    choose_kernel()
    before = peak_mib()
    model, _ = detlab.load_model(MODEL, dtype=dtype)
    embedding = model.get_input_embeddings().weight
    prepared = 4 * sum(p.numel() for p in model.parameters() if p.ndim == 2) + embedding.numel() * embedding.element_size()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: what loading took is not asked
    detlab.apply(model, "exact")
    return {"prepared_mib": prepared / 2**20, "peak_mib": peak_mib() - before}


def child(kind: str, *arguments: str, compiled: bool = True) -> Any:
    """Runs `cost` or `memory` in a fresh process."""
    command = [sys.executable, __file__, kind, *arguments]
    variables = os.environ | ({} if compiled else {"NUMBA_DISABLE_JIT": "1"})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main(what: str = "") -> None:
    """Runs all, prints it and saves `results/exact_cost.json`."""
    peaks = {dtype: child("measure-memory", dtype) for dtype in ("float32", "bfloat16")}
    for dtype, peak in peaks.items():
        print(
            f"{dtype:9} prepared model {peak['prepared_mib']:.0f} MiB; at most {peak['peak_mib']:.0f} while it is prepared: "
            f"{peak['peak_mib'] / peak['prepared_mib']:.2f}"
        )
    if what == "memory":
        return
    results = []
    for dtype, threads, compiled in CELLS:
        result = child("measure-cost", dtype, str(threads), compiled=compiled)
        result.pop("environment")
        results.append(result | {"compiled": compiled})
        cells = "; ".join(f"{c['name']} {c['ratio']:.2f} ({c['low']:.2f} to {c['high']:.2f})" for c in result["cells"])
        print(f"{dtype:9} {threads} threads, {'compiled' if compiled else 'not compiled'}: {cells}", flush=True)
        save("exact_cost", {"seconds": SECONDS, "memory": peaks, "results": results})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps({"measure-cost": cost, "measure-memory": memory}[sys.argv[1]](*sys.argv[2:])))
    else:
        main(*sys.argv[1:])
