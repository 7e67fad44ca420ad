"""The child of the axes that need one, ``python -m detlab.verify.worker FOLDER``: serves texts under another setting."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from detlab.engine import session as engine
from detlab.engine.kernels import check_again, watching
from detlab.process import receive_model
from detlab.verify.apart import kernels_digest, moved
from detlab.verify.serve import Way, logits_of, watched

__all__ = ["main"]


def _served(model: nn.Module, jobs: list[dict[str, Any]], pool: list[list[int]], name: str, out: dict[str, Tensor]) -> None:
    for number, job in enumerate(jobs):
        out[f"{name}.{number}"] = logits_of(model, job["text"], Way.from_json(job["way"]), pool, job["keep"]).contiguous()
        print("progress", len(out), 0, flush=True)


def main(folder: Path) -> None:
    """Executes the request in ``folder``: jobs under the tier, and jobs with it off."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    model = receive_model(Path(request["model"]))
    counts = moved(model, request["offset"]) if request["offset"] >= 0 else {}
    out: dict[str, Tensor] = {}
    with watching() as running:
        with engine.applied(model, request["tier"]), watched(model) as watch:
            _served(model, request["jobs"], request["pool"], "tier", out)
        checks = [asdict(check) for check in check_again(running(), request["probe_seed"])]
    evidence = watch.to_json() | counts | {"threads": torch.get_num_threads()}
    _served(model, request["control"], request["pool"], "stock", out)
    save_file(out, folder / "logits.safetensors")
    (folder / "evidence.json").write_text(json.dumps({"counts": evidence, "kernels": kernels_digest(), "checks": checks}),
                                          encoding="utf-8")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
