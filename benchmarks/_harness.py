"""What the benchmarks share: interleaved timing, and results with the commit, the CPU and the date."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from detlab.environment import environment

RESULTS = Path(__file__).parent / "results"


def interleaved(methods: dict[str, Callable[[], Any]], baseline: str, rounds: int) -> dict[str, dict[str, float]]:
    """Times methods in turn, round by round, in CPU seconds of this process.

    Args:
        methods: what to time, by name; each is run once before timing.
        baseline: the method that ratios are taken against, within each round.
        rounds: how often.

    Returns:
        Per method: median milliseconds, median ratio, and the ratio's quartiles.
    """
    for run in methods.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.process_time()
            methods[name]()
            seconds[name].append(time.process_time() - started)
    rows = {}
    for name in names:
        ratios = sorted(s / b for s, b in zip(seconds[name], seconds[baseline], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows[name] = {"ms": 1e3 * statistics.median(seconds[name]), "ratio": middle, "low": low, "high": high}
    return rows


def save(name: str, content: dict[str, Any]) -> None:
    """Keeps a benchmark's results as ``results/NAME.json``."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine = environment()
    record = {
        "benchmark": name,
        "commit": commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": machine.to_json()["cpu"],
        "fingerprint": machine.fingerprint(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record | content, indent=1, default=str) + "\n", encoding="utf-8")
