"""The child's side of a run in a fresh process: ``python -m detlab.worker FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from detlab.condition import Condition
from detlab.process import receive_model
from detlab.prompts import Prompt
from detlab.runner import execute
from detlab.trace.keep import RowKeeper


def main(folder: Path) -> None:
    """Executes the request in ``folder`` and leaves the results there."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    model = receive_model(Path(request["model"]))
    keep = RowKeeper.from_request(request["keep"]) if request["keep"] is not None else None
    prompts = [Prompt(id=str(i), tokens=tuple(tokens)) for i, tokens in enumerate(request["inputs"])]

    def report(done: int, total: int, what: str) -> None:
        print("progress", done, total, flush=True)

    made = execute(
        model, prompts, request["inputs"], Condition.from_json(request["condition"]), request["new_tokens"], None,
        save=request["save"], with_trace=request["trace"], force=request["force"], progress=report, keep=keep, here=True,
    )  # fmt: skip
    made.save(folder / "run")
    if keep is not None:
        flat: dict[str, Tensor] = {"is_full": torch.tensor(keep.is_full)}
        for op, (keys, values) in keep.kept.items():
            flat[f"{op}.keys"], flat[f"{op}.values"] = torch.from_numpy(keys.copy()), values.contiguous()
        save_file(flat, folder / "kept.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
