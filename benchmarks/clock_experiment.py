"""Do boost clocks change results? SmolLM2's bits against clock and time over many runs whose timing is moved for real.

Then the mechanisms by which timing does reach the bits, each as it is and fixed: sums in the order of arrival, a kernel chosen
by timing; where there is a GPU also atomic additions and cuDNN's benchmark mode, and the model runs there. Takes some minutes.

    python benchmarks/clock_experiment.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from _harness import save

import detlab

PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "assistant.jsonl"
RUNS = {"model": 120, "cpu": 200, "cuda": 100}


def record(result: detlab.ClockExperiment) -> dict[str, Any]:
    """The result without the machine, which the harness records; a run is one line."""
    made = result.to_json()
    made.pop("environment")
    made["runs"] = [
        f"{run.timing} {run.digest[:8]} {run.seconds:.5f} s {run.speed:.0f} MiB/s {run.cpu_mhz or run.gpu_mhz or 0:.0f} MHz"
        for run in result.runs
    ]
    return made


def null() -> detlab.ClockExperiment:
    """SmolLM2 in bfloat16, two prompts and four decoded tokens; all of its threads, whose number stays as it is."""
    model, _ = detlab.load_model("smollm2-135m", dtype="bfloat16")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = detlab.load_prompts(PROMPTS)[:2]

    def work() -> list[torch.Tensor]:
        return detlab.run(model, prompts, detlab.Condition(), new_tokens=4, trace=False).logits

    return detlab.clock_experiment(work, RUNS["model"], model=model)


def main() -> None:
    """Measures, prints and saves."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    experiments: dict[str, Any] = {}
    result = null()
    name = f"SmolLM2, bfloat16, {torch.get_num_threads()} threads"
    print(f"--- {name}\n{result}\n", flush=True)
    experiments[name] = record(result)
    torch.set_num_threads(1)  # the mechanisms start threads of their own
    not_run = {}
    for mechanism in detlab.mechanisms():
        if why := mechanism.reason():
            not_run[mechanism.name] = why
            print(f"--- {mechanism.name}: not run: {why}", flush=True)
            continue
        for how, work in (("as it is", mechanism.work), ("fixed", mechanism.fixed)):
            result = detlab.clock_experiment(work, RUNS[mechanism.where])
            print(f"--- {mechanism.name}, {how}\n{result}\n", flush=True)
            experiments[f"{mechanism.name}, {how}"] = record(result)
    save("clock_experiment", {"experiments": experiments, "not_run": not_run})


if __name__ == "__main__":
    main()
