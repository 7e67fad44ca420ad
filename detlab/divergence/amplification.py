"""How much each layer grows or shrinks the difference that reaches it.

While a runs, b's rows are put in at the end of every layer. So each layer meets b's input under a's condition: what it returns
then differs from a's by the incoming difference alone, grown or shrunk, and from b's by what the layer adds of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from detlab.divergence.graft import refuse_variables
from detlab.divergence.graft_rows import RowsOf, targets_from
from detlab.divergence.replay import Again, replay, sides_of
from detlab.divergence.result import Comparison
from detlab.errors import UsageError
from detlab.trace.records import Trace

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class LayerGain:
    """One layer, in root mean squares over the elements of its output's rows.

    Attributes:
        layer: its number.
        incoming: size of the difference that reaches it: 0 for the first.
        outgoing: size of the difference that this makes of its output, under a's condition.
        own: size of the difference that b's condition adds in the layer itself.
    """

    layer: int
    incoming: float
    outgoing: float
    own: float

    @property
    def factor(self) -> float | None:
        """Outgoing by incoming; None where nothing comes in, or the sizes are no numbers."""
        if not self.incoming or not math.isfinite(self.incoming + self.outgoing):
            return None
        return self.outgoing / self.incoming


def amplification(comparison: Comparison, *, prompt: int | None = None, again: Sequence[Again] | None = None,
                  model: nn.Module | None = None) -> list[LayerGain]:  # fmt: skip
    """Measures what each layer does to an incoming difference, over all calls of the comparison.

    Args:
        comparison: what `compare` returned.
        prompt: the prompt whose rows are looked at; None takes the first divergence's.
        again, model: for bare traces, as for `graft`.

    Returns:
        One `LayerGain` per numbered layer, in order. Layers whose rows cannot be matched in both runs are left out.

    Raises:
        UsageError: the comparison does not hold its runs, or a condition needs a fresh process, or there is no such prompt.
    """
    a, b = sides_of(comparison, again, model)
    refuse_variables(a, b)
    if prompt is None:
        prompt = comparison.first.prompt if comparison.first is not None else 0
    if prompt not in range(len(comparison.prompt_ids)):
        raise UsageError(f"prompt={prompt!r} is not possible; give a number from 0 to {len(comparison.prompt_ids) - 1}.")
    ends = {at: op for at, op in _ends(a.trace).items() if op in comparison.detail.aligned}
    pairs = [(comparison.detail.aligned[op], op) for op in ends.values()]
    theirs, ours = (RowsOf({pair[side] for pair in pairs}, [prompt], values=True) for side in (0, 1))
    a.execute(ours)
    b.execute(theirs)
    targets = targets_from(pairs, theirs, ours)
    for target in targets.values():
        target.keeps = True
    _, spot = replay(a, targets=targets)
    sums: dict[int, list[float]] = {}
    for (call, layer), op in sorted(ends.items()):
        if (op, 0) not in spot.kept:
            continue
        elements, values = ours.found[op, 0]
        target = targets[op, 0]
        plain = values[elements.mask(target.elements.keys)].double()
        found, put = spot.kept[op, 0].double(), target.values.double()
        squares = sums.setdefault(layer, [0.0, 0.0, 0.0, 0.0])
        before = ends.get((call, layer - 1))
        if before is not None and (before, 0) in targets:
            given, own = targets[before, 0], ours.found[before, 0]
            squares[0] += float((given.values.double() - own[1][own[0].mask(given.elements.keys)].double()).square().sum())
        squares[1] += float((found - plain).square().sum())
        squares[2] += float((put - found).square().sum())
        squares[3] += plain.numel()
    return [
        LayerGain(layer, *(math.sqrt(total / max(1.0, number)) for total in (incoming, outgoing, own)))
        for layer, (incoming, outgoing, own, number) in sorted(sums.items())
    ]


def _ends(trace: Trace) -> dict[tuple[int, int], int]:
    """(call, layer) -> the last op that computed rows in this layer: its output."""
    ends: dict[tuple[int, int], int] = {}
    for op in trace.ops:
        found = _LAYER.search(op.module)
        if found is None or op.is_view or not op.outputs or op.call < 0 or trace.tensors[op.outputs[0]].status != "rows":
            continue
        ends[op.call, int(found[1])] = op.index
    return ends
