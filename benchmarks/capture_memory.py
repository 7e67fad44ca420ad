"""How much a trace raises peak memory: SmolLM2 in float32, a prefill of 512 tokens, each way in a fresh process.

python benchmarks/capture_memory.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from _harness import save


def forget_peak() -> None:
    """Has the kernel count this process's peak from here (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Peak resident memory since `forget_peak`, in MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def child(mode: str, layers: int) -> None:
    """Prefills once bare, then once as ``mode`` says, and prints both peaks."""
    import torch

    import detlab

    torch.set_num_threads(1)
    model, _ = detlab.load_model("smollm2-135m")
    model.model.layers = model.model.layers[:layers]
    ids = torch.randint(5, 40_000, (1, 512), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(3):  # the allocator settles
            model(input_ids=ids, use_cache=False)
        forget_peak()
        model(input_ids=ids, use_cache=False)
        before = peak_mib()
        forget_peak()
        if mode != "raw":
            with detlab.capture(model, save=mode) as trace:
                model(input_ids=ids, use_cache=False)
            assert mode == "digest" or len(trace.saved)
        else:
            model(input_ids=ids, use_cache=False)
        print(json.dumps({"before": before, "after": peak_mib()}))


def main() -> None:
    """Runs every mode and prints how much it adds."""
    rows = {}
    for mode, layers in (("raw", 30), ("digest", 30), ("full", 15), ("full", 30)):
        command = [sys.executable, __file__, mode, str(layers)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
        peaks = json.loads(done.stdout.splitlines()[-1])
        rows[f"{mode}, {layers} layers"] = {"added_mib": peaks["after"] - peaks["before"], **peaks}
        print(f"{mode:7} {layers} layers: {peaks['after'] - peaks['before']:7.1f} MiB above {peaks['before']:.0f} MiB")
    save("capture_memory", {"rows": rows})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        child(sys.argv[1], int(sys.argv[2]))
    else:
        main()
