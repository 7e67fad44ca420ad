"""Many conditions against one baseline, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from detlab.condition import Condition
from detlab.divergence.compare import compare
from detlab.errors import ControlError, MachineError, UsageError
from detlab.runner import Progress, run

if TYPE_CHECKING:
    import pandas as pd


def sweep(model: nn.Module, prompts: Any, conditions: Sequence[Condition | str], *, baseline: Condition | str = "",
          new_tokens: int = 8, tokenizer: Any = None, progress: Progress | None = None) -> pd.DataFrame:  # fmt: skip
    """Compares each condition with a baseline.

    Args:
        model, prompts, tokenizer: as for `run`.
        conditions: such as ``Condition.grid(batch_size=[2, 4], attention=["sdpa", "eager"])``.
        baseline: what each is compared with; run once.
        new_tokens: tokens to decode after prefill.
        progress: called with (calls done, calls in all, what).

    Returns:
        One line per condition: condition, verdict ("identical", "diverged", "control_flow"; "control failed" or "not on this
        machine" with the reason), module, op, call, prompt_id, position of the first divergence, inputs_matched, max_ulp,
        max_abs, token_flips, cosine, rows_compared.

    Raises:
        UsageError: there are no conditions, or one cannot be.
    """
    import pandas as pd

    chosen = [Condition.parse(c) if isinstance(c, str) else c for c in conditions]
    if not chosen:
        raise UsageError('sweep needs at least one condition; got none. Try Condition.grid(batch_size=[2, 4, 8]).')
    start = Condition.parse(baseline) if isinstance(baseline, str) else baseline
    first = run(model, prompts, start, new_tokens=new_tokens, tokenizer=tokenizer, progress=progress)
    lines: list[dict[str, Any]] = []
    for condition in chosen:
        line: dict[str, Any] = {"condition": str(condition)}
        lines.append(line)
        try:
            other = run(model, prompts, condition, new_tokens=new_tokens, tokenizer=tokenizer, progress=progress)
            result = compare(first, other, progress=progress)
        except MachineError as error:
            line |= {"verdict": "not on this machine", "reason": str(error)}
            continue
        except ControlError as error:
            line |= {"verdict": "control failed", "reason": str(error)}
            continue
        line |= {"verdict": result.verdict, "token_flips": len(result.token_flips), "cosine": result.cosine}
        line["rows_compared"] = result.rows_compared
        if result.first is not None:
            names = ("module", "op", "call", "prompt_id", "position", "inputs_matched", "max_ulp", "max_abs")
            line |= {name: getattr(result.first, name) for name in names}
    columns = [
        "condition", "verdict", "module", "op", "call", "prompt_id", "position", "inputs_matched", "max_ulp", "max_abs",
        "token_flips", "cosine", "rows_compared", "reason",
    ]  # fmt: skip
    return pd.DataFrame(lines, columns=columns)
