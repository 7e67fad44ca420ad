"""The heatmap in a panel, the lists beside it, and the facts of the chosen cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import ipywidgets
import numpy as np
import plotly.graph_objects as go

from detlab.divergence.result import Comparison, Grid
from detlab.trace.records import Array
from detlab.viz.arrange import Arrangement, arrange, focus, layer_name
from detlab.viz.controls import Filling, dropdown, html
from detlab.viz.figures import CONFIG, draw
from detlab.viz.words import STATE_WORDS, Cell, Cells, cell_rows, escape, op_labels

HEIGHT = 560  # of the heatmap, as in explorer.css, so that verdict and detail stay near


class View(Filling):
    """Leads from the whole heatmap to a layer, and from there to one op at one token.

    Attributes:
        box: all of it, for a panel that shows it as it is; or a panel takes its parts:
        prompt, layer, place: lists above the heatmap, and the heatmap.
        pick: the lists below, op and position.
        detail: the facts of the chosen cell, as a table.
        chosen: that cell; None before there is one.
        prompt_number: the prompt that is drawn.
        on_choice: called when another cell has been chosen.
    """

    def __init__(self, height: int = HEIGHT) -> None:
        self._height = height
        self._comparison: Comparison | None = None
        self._whole: Grid | None = None
        self._grid: Grid | None = None
        self._rows: list[int] = []
        self._plan: Arrangement | None = None
        self._cells: Cells | None = None
        self._figure = go.FigureWidget()
        self._figure._config = dict(CONFIG)
        self.chosen: Cell | None = None
        self.prompt_number = 0
        self.on_choice: Callable[[], None] | None = None
        self.prompt = dropdown("prompt", [], None, "detlab-prompt")
        self.layer = dropdown("layer", [], None, "detlab-layer")
        self.op = dropdown("op", [], None, "detlab-op", width="520px")
        self.position = dropdown("position", [], None, "detlab-position")
        self.detail = html("detlab-detail")
        self.place = ipywidgets.VBox([self._figure])
        self.place.add_class("detlab-heatmap")
        self.prompt.observe(self._prompt_chosen, "value")
        self.layer.observe(self._layer_chosen, "value")
        self.op.observe(self._cell_chosen, "value")
        self.position.observe(self._cell_chosen, "value")
        above = ipywidgets.HBox([self.prompt, self.layer], layout={"flex_flow": "row wrap"})
        lists = ipywidgets.HBox([self.op, self.position], layout={"flex_flow": "row wrap"})
        hint = html("detlab-hint", "<h4>One op at one position</h4>Click a cell of the heatmap, or choose here.")
        self.pick = ipywidgets.VBox([hint, lists])
        self.box = ipywidgets.VBox([above, self.place, self.pick, self.detail], layout={"display": "none"})

    def clear(self) -> None:
        """Hides everything."""
        self.chosen = None
        self.box.layout.display = "none"

    def show(self, comparison: Comparison, prompt: int | None = None) -> None:
        """Draws a comparison, at its first divergence's prompt where none is given."""
        self._comparison = comparison
        first = comparison.first.prompt if comparison.first else 0
        start = first if prompt is None else prompt
        self._fill(lambda: self._options(self.prompt, [(i, n) for n, i in enumerate(comparison.prompt_ids)], start))
        self.prompt.layout.display = "" if len(comparison.prompt_ids) > 1 else "none"
        self.box.layout.display = ""  # before drawing: a figure takes the width of the place it is in
        self._load(start)

    def _load(self, prompt: int) -> None:
        comparison = self._comparison
        assert comparison is not None
        self.prompt_number = prompt
        self._whole = grid = comparison.grid(prompt)
        self._cells = Cells(comparison, prompt)
        layers = [(f"layer {name}" if name.isdigit() else name, name) for name in dict.fromkeys(map(layer_name, grid.modules))]
        self._fill(lambda: self._options(self.layer, [("all layers", ""), *layers], ""))
        self._draw()

    def _draw(self) -> None:
        """Draws the layer that is chosen, and goes to its worst op."""
        comparison = self._comparison
        assert comparison is not None and self._whole is not None
        self._grid, self._rows = focus(self._whole, self.layer.value)
        grid = self._grid
        self._plan = plan = arrange(grid)
        self._show_figure(draw(comparison, grid, plan, self._height))
        if not grid.ops:
            self.chosen = None
            self.detail.value = "This prompt has no row that was computed in both runs."
            return
        worst = grid.state.max(1)
        labels = [
            (f"{label} — {STATE_WORDS[int(state)].split(';')[0]}", i)
            for i, (label, state) in enumerate(zip(op_labels(grid.modules, grid.ops), worst, strict=True))
        ]
        # Start where the runs part: the first op that differs most severely, at its first such position.
        line = int((grid.state == grid.state.max()).any(1).argmax())
        column = int(grid.state[line].argmax())
        self._fill(lambda: self._options(self.op, labels, line))
        self._fill(lambda: self._options(self.position, grid.positions, grid.positions[column]))
        self._cell_chosen()

    def _show_figure(self, figure: go.Figure) -> None:
        """Puts a figure into the one FigureWidget: each new widget would send plotly.js (5 MB) again."""
        replace_figure(self._figure, figure)
        for trace in self._figure.data:
            if trace.hovertemplate:
                trace.on_click(self._heatmap_clicked)

    def _heatmap_clicked(self, trace: Any, points: Any, _: object) -> None:
        if self._grid is None or self._plan is None or not points.ys:
            return
        lines = {label: i for i, label in enumerate(trace.y if trace.type == "heatmap" else ())}
        line = lines.get(points.ys[0])
        if line is None:  # a diamond knows its own line's name only
            axis = self._figure.layout.yaxis.categoryarray
            line = list(axis).index(points.ys[0]) if axis is not None and points.ys[0] in axis else None
        if line is None or points.xs[0] not in self._plan.positions:
            return
        row, position = self._plan.member(self._grid, line, self._plan.positions.index(points.xs[0]))
        self._fill(lambda: setattr(self.op, "value", row))
        self._fill(lambda: setattr(self.position, "value", position))
        self._cell_chosen()

    def _prompt_chosen(self, _: object) -> None:
        if not self._is_filling and self._comparison is not None and self.prompt.value is not None:
            self._load(self.prompt.value)

    def _layer_chosen(self, _: object) -> None:
        if not self._is_filling and self._comparison is not None and self.layer.value is not None:
            self._draw()

    def _cell_chosen(self, _: object = None) -> None:
        if self._is_filling or self._cells is None or self.op.value is None or self.position.value is None:
            return
        self.chosen = self._cells.cell(self._rows[self.op.value], self.position.value)
        rows = cell_rows(self.chosen)
        lines = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
        self.detail.value = f"<table>{lines}</table>"
        if self.on_choice is not None:
            self.on_choice()

    @staticmethod
    def _options(control: Any, options: Sequence[Any], value: Any) -> None:
        control.options = options
        control.value = value


def replace_figure(widget: Any, figure: go.Figure) -> None:
    """Puts a figure into a FigureWidget in place of what it showed."""
    figure.layout.height = None  # the style sheet's: a relayout that names a height pins the width, too
    for trace in figure.data:
        for name in ("z", "customdata") if trace.type == "heatmap" else ():
            if trace[name] is not None:
                trace[name] = _shortened(np.asarray(trace[name]))
    with widget.batch_update():
        widget.data = ()
        widget.layout = figure.layout
        widget.add_traces(figure.data)
    # A page that is still loading plotly.js (5 MB) misses these messages; it then draws what the widget's state holds.
    widget._widget_layout, widget._widget_data = deepcopy(widget._layout_obj._props), deepcopy(widget._data)


def _shortened(values: Array) -> Array:
    """Numbers of three digits, as many as are shown: a widget's messages are text, and float32 written out has seventeen."""
    known = np.isfinite(values)
    made = values.astype(np.float64)
    made[known] = [float(f"{value:.3g}") for value in made[known].tolist()]
    return made
