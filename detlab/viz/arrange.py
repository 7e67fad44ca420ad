"""Decides which ops share a line of a heatmap and which token positions share a column."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from detlab.divergence.result import Grid
from detlab.divergence.rows import IDENTICAL, ORIGIN
from detlab.trace.records import Array
from detlab.viz.words import distinct, layer_of, op_labels, short_module

MAX_CELLS, MAX_COLUMNS = 90_000, 600


@dataclass
class Arrangement:
    """A grid as it is drawn: ops that share a line, positions that share a column.

    Attributes:
        labels: one per line, distinct, plain text.
        members: per line, the rows of the grid that it stands for.
        positions: per column, its first token position.
        width: token positions per column.
        state: uint8 [lines, columns], the worst of the cell's members.
        max_abs: float64 [lines, columns], the largest of its differing members; NaN where none was measured.
        notes: what was drawn together, in words.
    """

    labels: list[str]
    members: list[list[int]]
    positions: list[int]
    width: int
    state: Array
    max_abs: Array
    notes: list[str]

    def member(self, grid: Grid, line: int, column: int) -> tuple[int, int]:
        """The (row of the grid, token position) that a cell is named after: the first of its worst."""
        columns = slice(column * self.width, (column + 1) * self.width)
        state = grid.state[self.members[line], columns]
        best = state.argmax()
        row, at = divmod(int(best), state.shape[1])
        return self.members[line][row], grid.positions[columns][at]


def arrange(grid: Grid, most: int = 400) -> Arrangement:
    """Decides which ops share a line and which positions share a column.

    Up to ``most`` ops have a line each. Beyond, the ops of one module, or of one layer, share a line, while
    ops with an origin keep their own as long as that fits.
    """
    names = op_labels(grid.modules, grid.ops)
    origin = (grid.state == ORIGIN).any(1).tolist() if names else []
    modules, layers = [short_module(m) for m in grid.modules], [layer_name(m) for m in grid.modules]

    def keys(shared: list[str], is_split: bool) -> list[Hashable]:
        return [i if is_split and origin[i] else name for i, name in enumerate(shared)]

    levels: list[tuple[list[Hashable], str]] = [
        (list(range(len(names))), ""),
        (keys(modules, True), "a line is a module; ops with an origin have their own"),
        (keys(layers, True), "a line is a layer; ops with an origin have their own"),
        (keys(modules, False), "a line is a module"),
        (keys(layers, False), "a line is a layer"),
    ]
    chosen, note = next((level for level in levels if len(set(level[0])) <= most), levels[-1])
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(chosen):
        groups.setdefault(key, []).append(i)
    members = list(groups.values())
    labels = [
        names[rows[0]] if len(rows) == 1 else f"{f'layer {key}' if str(key).isdigit() else key} · {len(rows)} ops"
        for key, rows in groups.items()
    ]
    limit = max(1, min(MAX_COLUMNS, MAX_CELLS // max(1, len(members))))
    width = -(-len(grid.positions) // limit) or 1
    state, max_abs = _reduced(grid, members, width)
    notes = [note] if note else []
    if width > 1:
        notes.append(f"a column is {width} tokens")
    if notes:
        notes.append("each cell shows its worst")
    return Arrangement(distinct(labels), members, grid.positions[::width], width, state, max_abs, notes)


def focus(grid: Grid, layer: str = "") -> tuple[Grid, list[int]]:
    """The ops of one layer, and which rows of the grid they are; all of them where no layer is named.

    Args:
        grid: ops x positions.
        layer: a name that `layer_name` gives.
    """
    rows = [row for row, module in enumerate(grid.modules) if not layer or layer_name(module) == layer]
    names = [grid.modules[row] for row in rows], [grid.ops[row] for row in rows]
    return Grid(grid.prompt, *names, grid.positions, grid.state[rows], grid.max_abs[rows]), rows


def layer_name(module: str) -> str:
    """The layer's number, or the name of a module outside the layers, without "model."."""
    layer = layer_of(module)
    return (module.removeprefix("model.") or "(model)") if layer is None else str(layer)


def _reduced(grid: Grid, members: list[list[int]], width: int) -> tuple[Array, Array]:
    """The worst state and the largest size of each drawn cell."""
    state, size = grid.state, np.where(grid.state > IDENTICAL, grid.max_abs, np.nan)
    if not members or not len(grid.positions):
        return np.zeros((len(members), 0), np.uint8), np.zeros((len(members), 0))
    order = [row for rows in members for row in rows]
    starts = np.cumsum([0, *(len(rows) for rows in members[:-1])])
    columns = np.arange(0, len(grid.positions), width)
    state = np.maximum.reduceat(np.maximum.reduceat(state[order], starts, 0), columns, 1)
    size = np.fmax.reduceat(np.fmax.reduceat(size[order], starts, 0), columns, 1)
    return state, size
