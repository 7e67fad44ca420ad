"""The panel in the notebook: choose two conditions, run, read the verdict, and click through to the op.

The panel sees no model: it is given a function that investigates. Whatever it draws is drawn by
`detlab.viz.figures`, and whatever can be clicked can also be chosen in a dropdown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
import plotly.graph_objects as go

from detlab.condition import Condition
from detlab.divergence.result import Comparison, Grid
from detlab.errors import DetlabError
from detlab.viz.arrange import Arrangement, arrange
from detlab.viz.figures import CONFIG, draw
from detlab.viz.why import why_lines
from detlab.viz.words import (
    STATE_WORDS,
    Cells,
    cell_rows,
    escape,
    first_in_words,
    op_labels,
    plural,
    style,
    verdict_words,
)

if TYPE_CHECKING:
    from detlab.investigate import Investigation

Progress = Callable[[int, int, str], None]
Investigate = Callable[[str, str, Progress], "Investigation"]

BATCH_SIZES = (1, 2, 4, 6, 8)
_OWN, _NO_SIDE = "model's own", "no padding"  # words, since a dropdown shows None as nothing
HEIGHT = 560  # of the heatmap, as in explorer.css, so that verdict and detail stay near


class Explorer:
    """A panel that compares two conditions and leads from the verdict to the op.

    Attributes:
        panel: the ipywidgets box; the explorer shows it where it stands last in a cell.
        result: the last investigation, or None.

    Args:
        investigate: called with both conditions as text and a progress function; returns an `Investigation`:
            ``lambda a, b, progress: detlab.investigate(model, prompts, a=a, b=b, progress=progress)``
        prompts_shown: prompts to list in the panel, as `load_prompts` returns them or as text.
        a, b: the conditions chosen at the start, such as "batch_size=4,padding_side=left".

    Raises:
        ConditionError: ``a`` or ``b`` is not a condition.
    """

    def __init__(
        self,
        investigate: Investigate,
        prompts_shown: Sequence[object] = (),
        *,
        a: str = "batch_size=1",
        b: str = "batch_size=4",
    ) -> None:
        self.result: Investigation | None = None
        self._pass = self._done = 0
        self._investigate = investigate
        self._choices = {"a": _Choice("a", Condition.parse(a)), "b": _Choice("b", Condition.parse(b))}
        self._run = _button()
        self._progress = ipywidgets.IntProgress(value=0, min=0, max=1, layout={"width": "240px", "display": "none"})
        self._progress.add_class("detlab-progress")
        self._status = _html("detlab-status")
        self._verdict = _html("detlab-verdict")
        self._view = _View()
        self._run.on_click(self._clicked)
        conditions = ipywidgets.HBox([c.box for c in self._choices.values()], layout={"flex_flow": "row wrap"})
        bar = ipywidgets.HBox(
            [self._run, self._progress, self._status],
            layout={"align_items": "center", "flex_flow": "row wrap"},
        )
        self.panel = ipywidgets.VBox(
            [
                ipywidgets.HTML(f"<style>{style('explorer.css')}</style>"),
                _html("detlab-prompts", _prompts(prompts_shown)),
                conditions,
                bar,
                self._verdict,
                self._view.box,
            ]
        )
        self.panel.add_class("detlab-explorer")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.panel._repr_mimebundle_(**options)

    def _clicked(self, _: object) -> None:
        self._run.disabled = True
        self._progress.value, self._progress.layout.display = 0, ""
        self._pass, self._done = 0, 0
        self._status.value, self._verdict.value = "running", ""
        self._view.clear()
        try:
            self.result = None
            result = self._investigate(self._choices["a"].text, self._choices["b"].text, self._report)
            self._show(result)
        except DetlabError as error:
            self._fail(str(error))
        except KeyboardInterrupt:
            self._fail("Interrupted. Nothing was concluded; press Run to start again.")
        except Exception as error:
            # Not one of detlab's own messages: name it here, and let the traceback reach the log.
            self._fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._run.disabled = False
            self._progress.layout.display = "none"

    def _report(self, done: int, total: int, what: str) -> None:
        if done <= self._done or not self._pass:  # each run, repetition and comparison counts from one
            self._pass += 1
        self._done = done
        self._progress.max, self._progress.value = max(1, total), done
        self._status.value = f"pass {self._pass}: {done} of {total} <code>{escape(what)}</code>"

    def _fail(self, message: str) -> None:
        self._status.value = "stopped"
        self._answer("error", "! Not tested", [message])

    def _show(self, result: Investigation) -> None:
        comparison = result.comparison
        self._view.show(comparison)
        self.result = result
        words = verdict_words(result.verdict)
        flips = len(comparison.token_flips)
        lines = [words.sentence, first_in_words(comparison), *why_lines(result)]
        if flips:
            lines.append(f"{flips} of {plural(len(comparison.prompt_ids), 'prompt')} got another token.")
        lines.append("Controls: " + _controls(comparison))
        lines += [f"Note: {note}" for note in comparison.notes]
        self._answer(words.css, f"{words.sign} {words.headline}", lines)
        self._status.value = f"done: {comparison.rows_compared:,} rows compared"

    def _answer(self, css: str, headline: str, lines: Sequence[str]) -> None:
        """The verdict, or why there is none, read out by screen readers."""
        text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
        top = f'<div class="detlab-answer detlab-{css}" role="{"alert" if css == "error" else "status"}">'
        self._verdict.value = f"{top}<strong>{escape(headline)}</strong>{text}</div>"


class _Choice:
    """The controls of one condition, and the condition they spell."""

    def __init__(self, name: str, start: Condition) -> None:
        sizes = sorted({*BATCH_SIZES, start.batch_size})
        # Settings that have no control here are kept as they were given.
        known = ("batch_size", "padding_side", "padding", "attention", "cache")
        self._rest = [part for part in str(start).split(",") if "=" in part and part.split("=")[0] not in known]
        self.batch_size = _dropdown("batch size", sizes, start.batch_size)
        self.padding_side = _dropdown("padding side", [_NO_SIDE, "left", "right"], start.padding_side or _NO_SIDE)
        self.padding = ipywidgets.BoundedIntText(
            value=start.padding,
            min=0,
            max=512,
            description="padding",
            style={"description_width": "90px"},
            layout={"width": "250px"},
        )
        self.attention = _dropdown("attention", [_OWN, "sdpa", "eager"], start.attention or _OWN)
        self.cache = _dropdown("cache", ["dynamic", "none"], start.cache)
        controls = {n: getattr(self, n) for n in known}
        for key, control in controls.items():
            control.add_class(f"detlab-{name}-{key.replace('_', '-')}")
            control.observe(self._changed, "value")
        self._echo = _html(f"detlab-{name}-echo")
        self.box = ipywidgets.VBox([_html("detlab-title", f"<h4>Run {name}</h4>"), *controls.values(), self._echo])
        self.box.add_class("detlab-condition")
        self._changed()

    @property
    def text(self) -> str:
        """The condition as text; it may be impossible, which `Condition.parse` then says."""
        parts = [f"batch_size={self.batch_size.value}"]
        if self.padding_side.value != _NO_SIDE:
            parts.append(f"padding_side={self.padding_side.value}")
        if self.padding.value:
            parts.append(f"padding={self.padding.value}")
        if self.attention.value != _OWN:
            parts.append(f"attention={self.attention.value}")
        if self.cache.value != "dynamic":
            parts.append(f"cache={self.cache.value}")
        return ",".join([*parts, *self._rest])

    def _changed(self, _: object = None) -> None:
        try:
            Condition.parse(self.text)
        except DetlabError as error:
            self._echo.value = f'<span class="detlab-bad">{escape(error)}</span>'
        else:
            self._echo.value = f'<code class="detlab-soft">{escape(self.text)}</code>'


class _View:
    """The heatmap, the dropdowns beside it, and the detail of the chosen cell."""

    def __init__(self) -> None:
        self._comparison: Comparison | None = None
        self._grid: Grid | None = None
        self._plan: Arrangement | None = None
        self._cells: Cells | None = None
        self._figure = go.FigureWidget()
        self._figure._config = dict(CONFIG)
        self._is_filling = False
        self.prompt = _dropdown("prompt", [], None, "detlab-prompt")
        self.op = _dropdown("op", [], None, "detlab-op", width="520px")
        self.position = _dropdown("position", [], None, "detlab-position")
        self.detail = _html("detlab-detail")
        self._place = ipywidgets.VBox([self._figure])
        self._place.add_class("detlab-heatmap")
        self.prompt.observe(self._prompt_chosen, "value")
        self.op.observe(self._cell_chosen, "value")
        self.position.observe(self._cell_chosen, "value")
        pick = ipywidgets.HBox([self.op, self.position], layout={"flex_flow": "row wrap"})
        hint = _html("detlab-hint", "<h4>One op at one position</h4>Click a cell above, or choose here.")
        self.box = ipywidgets.VBox([self.prompt, self._place, hint, pick, self.detail], layout={"display": "none"})

    def clear(self) -> None:
        self.box.layout.display = "none"

    def show(self, comparison: Comparison) -> None:
        self._comparison = comparison
        start = comparison.first.prompt if comparison.first else 0
        self._fill(lambda: self._options(self.prompt, [(i, n) for n, i in enumerate(comparison.prompt_ids)], start))
        self.prompt.layout.display = "" if len(comparison.prompt_ids) > 1 else "none"
        self.box.layout.display = ""  # before drawing: a figure takes the width of the place it is in
        self._draw(start)

    def _draw(self, prompt: int) -> None:
        comparison = self._comparison
        assert comparison is not None
        self._grid = grid = comparison.grid(prompt)
        self._plan = plan = arrange(grid)
        self._cells = Cells(comparison, prompt)
        self._show_figure(draw(comparison, grid, plan, HEIGHT))
        if not grid.ops:
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
        figure.layout.height = None  # the style sheet's: a relayout that names a height pins the width, too
        with self._figure.batch_update():
            self._figure.data = ()
            self._figure.layout = figure.layout
            self._figure.add_traces(figure.data)
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
            self._draw(self.prompt.value)

    def _cell_chosen(self, _: object = None) -> None:
        if self._is_filling or self._cells is None or self.op.value is None or self.position.value is None:
            return
        rows = cell_rows(self._cells.cell(self.op.value, self.position.value))
        lines = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
        self.detail.value = f"<table>{lines}</table>"

    def _fill(self, change: Callable[[], None]) -> None:
        """Changes dropdowns without reacting to them."""
        self._is_filling = True
        try:
            change()
        finally:
            self._is_filling = False

    @staticmethod
    def _options(control: Any, options: Sequence[Any], value: Any) -> None:
        control.options = options
        control.value = value


def _button() -> Any:
    button = ipywidgets.Button(description="Run", button_style="primary", tooltip="Run both conditions and compare them")
    button.add_class("detlab-run")
    return button


def _html(css: str, value: str = "") -> Any:
    widget = ipywidgets.HTML(value)
    widget.add_class(css)
    return widget


def _dropdown(description: str, options: Sequence[Any], value: Any, css: str = "", width: str = "250px") -> Any:
    control = ipywidgets.Dropdown(
        options=options,
        description=description,
        style={"description_width": "90px"},
        layout={"width": width, "max_width": "100%"},
    )
    if options:
        control.value = value
    if css:
        control.add_class(css)
    return control


def _controls(comparison: Comparison) -> str:
    held = {True: "held", False: "FAILED", None: "not run"}
    return ", ".join(f"{name.replace('_', ' ')} {held[value]}" for name, value in comparison.controls.items()) + "."


def _prompts(prompts: Sequence[object]) -> str:
    """The prompts as a folded list, escaped."""
    if not prompts:
        return ""
    items = "".join(f"<li>{escape(_prompt_text(prompt))}</li>" for prompt in prompts)
    return f"<details><summary>{plural(len(prompts), 'prompt')}</summary><ol>{items}</ol></details>"


def _prompt_text(prompt: Any, most: int = 300) -> str:
    """A prompt in one line: its name, and its text cut to ``most`` characters."""
    text = prompt if isinstance(prompt, str) else getattr(prompt, "text", None)
    if text is None:
        text = " / ".join(message["content"] for message in getattr(prompt, "messages", None) or ())
    text = text or f"{len(getattr(prompt, 'tokens', None) or ())} token ids"
    name = getattr(prompt, "id", "")
    return (f"{name}: " if name else "") + (text if len(text) <= most else text[: most - 1] + "…")
