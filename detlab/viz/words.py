"""What figures, panel and report say in common: verdicts in words, short names of ops, and one cell's story.

Everything that comes from prompts, models or files passes through `escape` before it becomes HTML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from detlab.divergence.result import Comparison, Divergence
from detlab.divergence.rows import CARRIER, IDENTICAL, ORIGIN, OpComparison
from detlab.trace.records import split_keys

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_NAN_ULP = 1 << 62  # what the ULP distance says where one side is NaN

STATE_WORDS = {
    0: "not computed in both runs",
    IDENTICAL: "bit-identical",
    CARRIER: "differs; an input already differed (carrier)",
    ORIGIN: "differs although its inputs matched (origin)",
}


@dataclass(frozen=True)
class Verdict:
    """A verdict for people: a sign, a headline, one sentence, and a CSS class; never colour alone."""

    sign: str
    headline: str
    sentence: str
    css: str


_VERDICTS = {
    "identical": Verdict("=", "Identical", "All rows that were compared are bitwise equal in both runs.", "identical"),
    "diverged": Verdict("≠", "Diverged", "At least one row that both runs computed has other bits.", "diverged"),
    "control_flow": Verdict(
        "⑂",
        "Control flow",
        "The runs took different code paths before their bits could be compared.",
        "control-flow",
    ),
}


def verdict_words(verdict: str) -> Verdict:
    """The verdict in words; one that has none is shown as it stands."""
    return _VERDICTS.get(verdict, Verdict("?", verdict, "", "other"))


def escape(text: object) -> str:
    """Makes text harmless in HTML, in attributes too."""
    return html.escape(str(text), quote=True)


def plotly_text(text: object, most: int = 80) -> str:
    """Makes text harmless in a figure, where plotly reads some tags and `%{...}`, and keeps it short."""
    plain = str(text)
    short = plain if len(plain) <= most else plain[: most - 1] + "…"
    return html.escape(short, quote=False).replace("%{", "%&#123;")


def style(name: str) -> str:
    """The text of a style sheet that stands beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def layer_of(module: str) -> int | None:
    """The first number among a module's dotted names: the layer; None outside the layers."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def short_module(module: str) -> str:
    """`model.layers.3.self_attn.q_proj` as `3/self_attn.q_proj`; other modules keep their names.

    >>> short_module("model.layers.3.self_attn.q_proj"), short_module("lm_head"), short_module("")
    ('3/self_attn.q_proj', 'lm_head', '(model)')
    """
    found = _LAYER.search(module)
    if found is None:
        return module or "(model)"
    return f"{found[1]}/{module[found.end() :] or '(layer)'}"


def op_labels(modules: Sequence[str], ops: Sequence[str]) -> list[str]:
    """Short, distinct names of ops, in the order given."""
    return distinct([f"{short_module(module)} · {op}" for module, op in zip(modules, ops, strict=True)])


def distinct(labels: Sequence[str]) -> list[str]:
    """Numbers the second and later uses of a label: an axis of categories would draw them as one line.

    >>> distinct(["mm", "add", "mm"])
    ['mm', 'add', 'mm #2']
    """
    seen: dict[str, int] = {}
    result = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    return result


def number(value: float | None) -> str:
    """A size in three digits; what is not finite is named."""
    if value is None or value != value:
        return "not measured"
    return "infinite or NaN on one side" if value == float("inf") else f"{value:.3g}"


def ulps(count: int | None) -> str:
    """An ULP distance with its unit."""
    if count is None:
        return "not measured"
    return "NaN on one side" if count >= _NAN_ULP else f"{count:,} ULP"


def plural(count: int, noun: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ordinal(count: int) -> str:
    """Counts from 0: `1st`, `2nd`, `3rd`, `4th`, and `11th`."""
    at = count + 1
    tail = "th" if at % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(at % 10, "th")
    return f"{at}{tail}"


def first_in_words(comparison: Comparison) -> str:
    """Where the runs part, as plain text: one or two sentences."""
    first = comparison.first
    if first is None and not comparison.rows_compared:
        return "The runs have no row in common that could be compared."
    if first is None:
        return f"All {comparison.rows_compared:,} rows compared are bitwise equal: nothing to point at."
    if first.inputs_matched:
        why = (
            "Every row of the inputs it saw is bitwise equal in both runs, and its output is not: this op "
            "itself computed other bits."
        )
    elif comparison.verdict == "control_flow":
        why = "Its input was made by another op in each run: they took different code paths before this point."
    else:
        why = "An input already differed, and what made it could not be compared itself."
    return f"{first}. {why}"


def controls_in_words(comparison: Comparison) -> str:
    """Which controls held, as plain text."""
    held = {True: "held", False: "FAILED", None: "not run"}
    return ", ".join(f"{name.replace('_', ' ')} {held[value]}" for name, value in comparison.controls.items()) + "."


@dataclass(frozen=True)
class Cell:
    """One op at one position of one prompt: what the heatmap's cell stands for.

    Attributes:
        step: 0 for prefill, then one per decoded token; -1 where the op was not computed in both runs.
        state: 0 not computed in both, 1 identical, 2 carrier, 3 origin.
        max_abs, max_ulp: over this row; None where not measured.
        op_index: the op's number in the trace of a; -1 where the op was not computed in both runs.
        entry: the op's entry in the comparison (its inputs, share and row count); None where nothing differs.
    """

    module: str
    op: str
    occurrence: int
    prompt_id: str
    position: int
    step: int = -1
    state: int = 0
    max_abs: float | None = None
    max_ulp: int | None = None
    entry: Divergence | None = None
    op_index: int = -1


@dataclass
class Cells:
    """Looks up cells of one prompt; ``lines`` are the rows of `Comparison.grid`, in its order.

    Attributes:
        lines: (module, op, occurrence) per row of the grid.
    """

    comparison: Comparison
    prompt: int
    lines: list[tuple[str, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._found: dict[tuple[str, str, int], list[OpComparison]] = {}
        self._entries = {d.op_index: d for d in [*self.comparison.origins, *self.comparison.carriers]}
        for found in self.comparison.detail.ops:
            prompts, positions = split_keys(found.keys)
            if ((prompts == self.prompt) & (positions >= 0)).any():
                self._found.setdefault(self.comparison.trace.ops[found.a].key, []).append(found)
        self.lines = list(self._found)

    def cell(self, line: int, position: int) -> Cell:
        """The cell of a row of the grid at a token position; as in the grid, the worst call counts."""
        module, op, occurrence = self.lines[line]
        ids = self.comparison.prompt_ids
        prompt_id = ids[self.prompt] if self.prompt < len(ids) else str(self.prompt)
        best: tuple[int, OpComparison, int] | None = None
        for found in self._found[module, op, occurrence]:
            prompts, positions = split_keys(found.keys)
            at = ((prompts == self.prompt) & (positions == position)).nonzero()[0]
            if len(at) and (best is None or int(found.state[at[0]]) >= best[0]):
                best = int(found.state[at[0]]), found, int(found.keys[at[0]])
        if best is None:
            return Cell(module, op, occurrence, prompt_id, position)
        state, found, key = best
        max_abs: float | None = None
        max_ulp: int | None = None
        measured = self.comparison.sizes.get(found.a)
        if state > IDENTICAL and measured is not None:
            at = (measured[0] == key).nonzero()[0]
            if len(at):
                max_abs, max_ulp = float(measured[1][at[0]]), int(measured[2][at[0]])
        trace = self.comparison.trace
        step = trace.calls[trace.ops[found.a].call].step
        return Cell(
            module,
            op,
            occurrence,
            prompt_id,
            position,
            step,
            state,
            max_abs,
            max_ulp,
            self._entries.get(found.a),
            found.a,
        )


def cell_rows(cell: Cell) -> list[tuple[str, str]]:
    """A cell as (name, value) pairs of plain text."""
    rows = [
        ("module", cell.module or "(model)"),
        ("op", f"{cell.op} (the {ordinal(cell.occurrence)} of this name in the module)"),
        ("where", f"prompt {cell.prompt_id}, position {cell.position}" + _phase(cell.step)),
        ("kind", STATE_WORDS.get(cell.state, "unknown")),
    ]
    if cell.state <= IDENTICAL:
        return rows
    rows += [
        ("inputs", _inputs(cell)),
        ("largest difference here", f"{number(cell.max_abs)} ({ulps(cell.max_ulp)})"),
    ]
    if cell.max_abs == 0:
        rows.append(("note", "the numbers are equal and their bits are not: +0 against −0"))
    if cell.entry is not None:
        entry = cell.entry
        rows.append(("rows of this op that differ", f"{entry.num_rows:,} in this call, over all prompts"))
        if entry.max_abs is not None:
            rows.append(("largest in this call", f"{number(entry.max_abs)} ({ulps(entry.max_ulp)})"))
        if entry.share is not None:
            rows.append(("share of elements that differ", f"{entry.share:.1%} of a differing row"))
    return rows


def _phase(step: int) -> str:
    return "" if step < 0 else ", prefill" if step == 0 else f", decode step {step}"


def _inputs(cell: Cell) -> str:
    entry = cell.entry
    named = entry.inputs if entry is not None else {}
    unknown = [name for name, state in named.items() if state == "unknown"]
    tail = f"; could not be compared: {', '.join(unknown)}" if unknown else ""
    if cell.state == ORIGIN:
        matched = [name for name, state in named.items() if state == "matched"]
        return f"all matched{': ' + ', '.join(matched) if matched else ''}{tail}"
    if entry is None or entry.kind != "carrier":
        return "an input already differed at this position (elsewhere in this op they matched)"
    differs = [name for name, state in named.items() if state == "differs"] or ["an input"]
    source = f", made by {entry.source}" if entry.source else ""
    where = "" if entry.position == cell.position else f" (seen at position {entry.position}, where this op first differs)"
    return f"{', '.join(differs)} already differed{source}{where}{tail}"
