"""What an explanation holds, and how it is shown."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from detlab.divergence.explain_factors import Factor
from detlab.divergence.kernels import Kernel
from detlab.divergence.result import Divergence
from detlab.divergence.trees import AccumulationTree

if TYPE_CHECKING:
    import pandas as pd

KERNEL, PARTITION, BODY_AND_TAIL, ARRIVAL = "another kernel", "another partition", "vector body or scalar tail", "arrival order"
INSTRUCTION_SET, ROUNDING, NOTHING = "another instruction set", "other rounding", "nothing found"
NO_ORIGIN, NOT_REPRODUCED = "no origin", "not reproduced"


@dataclass(frozen=True)
class Mechanism:
    """How the difference arises: one of the kinds above, and a sentence."""

    kind: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass
class Explanation:
    """Why one op gave other bits.

    Attributes:
        divergence: the op; None where the runs are identical.
        mechanism: the answer.
        factors: the discriminator table.
        kernels: what ran on each side: ATen ops by torch's profiler, library calls by the libraries' own logs.
        trees: accumulation trees of one element that differs, of a and of b; None where the op is no sum.
        reproduced: whether the op, executed alone on the captured inputs, gave the bits of a and of b.
        is_faithful: whether the repetition that captured the inputs gave the digests of the runs.
        differs_alone: whether the op's bits differ between the sides when it is executed alone.
        num_rows: rows looked at.
        errors: largest errors of a and of b against the op in float64 on a's inputs; None where there is none.
        tail: whether each element that differs comes from the vector body on one side and the scalar tail on the other.
        stages: of attention, the parts that differ by themselves: "scores", "softmax", "values".
        seconds: how long it took.
        notes: what could not be looked at.
    """

    divergence: Divergence | None
    mechanism: Mechanism
    factors: list[Factor] = field(default_factory=list)
    kernels: tuple[list[Kernel], ...] = ([], [])
    trees: list[AccumulationTree | None] = field(default_factory=lambda: [None, None])
    reproduced: tuple[bool, ...] = (False, False)
    is_faithful: tuple[bool, ...] = (False, False)
    differs_alone: bool = False
    num_rows: int = 0
    errors: tuple[float, float] | None = None
    tail: bool = False
    stages: tuple[str, ...] = ()
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def trees_differ(self) -> bool | None:
        """Whether the sides add in different orders; None where a tree is not known."""
        a, b = self.trees
        return None if a is None or b is None else a != b

    @property
    def nearer(self) -> str:
        """The side nearer to float64: "a", "b" or "neither"; "" where there is no judge."""
        if self.errors is None:
            return ""
        a, b = self.errors
        return "neither" if a == b else "a" if a < b else "b"

    def factor(self, name: str) -> Factor | None:
        """A line of the table by the beginning of its name."""
        return next((factor for factor in self.factors if factor.name.startswith(name)), None)

    def lines(self) -> list[str]:
        """The explanation in plain lines, the mechanism first."""
        lines = [self.mechanism.sentence]
        if not self.factors:
            return lines + [f"note: {note}" for note in self.notes]
        held = ["yes" if held else "NO" for held in self.reproduced]
        lines.append(f"executed alone on the captured inputs: a's bits {held[0]}, b's bits {held[1]} ({self.num_rows} rows)")
        for factor in self.factors:
            lines.append(f"{factor.name}: {factor_words(factor)}")
        for side, kernels in zip("ab", self.kernels, strict=True):
            lines.append(f"kernels of {side}: {kernel_words(kernels)}")
        lines.append(self.tree_words())
        if self.errors is not None:
            lines.append(f"largest error against float64: {self.errors[0]:.3g} in a, {self.errors[1]:.3g} in b")
        return lines + [f"note: {note}" for note in self.notes]

    def tree_words(self) -> str:
        """Whether the accumulation trees differ, in words."""
        a, b = self.trees
        if a is None or b is None:
            return "accumulation trees: not known"
        if a == b:
            return f"accumulation trees: the same, {a.describe()}"
        return f"accumulation trees: they differ. a: {a.describe()} b: {b.describe()}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "divergence": self.divergence.to_json() if self.divergence else None,
            "mechanism": self.mechanism.kind,
            "sentence": self.mechanism.sentence,
            "factors": [factor.to_json() for factor in self.factors],
            "kernels": {side: [str(k) for k in kernels] for side, kernels in zip("ab", self.kernels, strict=True)},
            "trees": {side: None if tree is None else tree.to_json() for side, tree in zip("ab", self.trees, strict=True)},
            "trees_differ": self.trees_differ,
            "reproduced": list(self.reproduced),
            "errors": self.errors,
            "notes": self.notes,
        }

    def to_pandas(self) -> pd.DataFrame:
        """The discriminator table: one line per factor."""
        import pandas as pd

        columns = ["factor", "tried", "classes", "moves", "a", "b", "gives_b"]
        lines = [
            (f.name, f.tried, " | ".join(", ".join(group) for group in f.classes), f.moves, f.ours, f.theirs, f.leads_to_b)
            for f in self.factors
        ]
        return pd.DataFrame(lines, columns=columns)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        first, *rest = self.lines()
        items = "".join(f"<li>{html.escape(line)}</li>" for line in rest)
        return f"<p><strong>{html.escape(first)}</strong></p><ul>{items}</ul>"


def factor_words(factor: Factor, most: int = 8) -> str:
    """A line of the table in words: what was tried, and which values share their bits."""
    if not factor.moves:
        return f"no ({factor.tried} values, one result)"
    groups = ["{" + ", ".join(group[:most]) + (" ..." if len(group) > most else "") + "}" for group in factor.classes[:6]]
    more = f" and {len(factor.classes) - 6} more" if len(factor.classes) > 6 else ""
    tail = "; b's value gives b's bits" if factor.leads_to_b else ""
    return f"MOVES the bits: {' '.join(groups)}{more}{tail}"


def kernel_words(kernels: list[Kernel], most: int = 6) -> str:
    """Kernels in one line."""
    shown = ", ".join(map(str, kernels[:most])) or "not known"
    return shown + (f" and {len(kernels) - most} more" if len(kernels) > most else "")
