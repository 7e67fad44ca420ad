"""The child's side of remedies that need a fresh process: ``python -m detlab.remedies.worker FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from detlab.condition import Condition
from detlab.process import receive_model
from detlab.remedies.registry import REMEDIES
from detlab.remedies.remedy import Plan
from detlab.remedies.serve import serve_here


def main(folder: Path) -> None:
    """Serves the request in ``folder`` and leaves logits, tokens, seconds and traces there."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    model = receive_model(Path(request["model"]))
    plan = Plan(tuple(REMEDIES[name] for name in request["plan"]))
    conditions = [Condition.from_json(record) for record in request["conditions"]]
    made = serve_here(model, request["inputs"], conditions, request["new_tokens"], plan, request["trace"])
    logits = {
        f"{number}.{prompt}": rows.contiguous().clone()
        for number, one in enumerate(made)
        for prompt, rows in enumerate(one.logits)
    }
    save_file(logits, folder / "logits.safetensors")
    records = [{"tokens": one.tokens, "steps": one.steps, "is_traced": one.traced is not None} for one in made]
    (folder / "served.json").write_text(json.dumps(records), encoding="utf-8")
    for number, one in enumerate(made):
        if one.traced is not None:
            one.traced.save(folder / f"run-{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
