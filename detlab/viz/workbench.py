"""The workbench: where two conditions part, why, what fixes it, and the proof, in one panel for any model.

It shows an `Inquiry` and never touches the model: the inquiry runs it, in a thread, so that Stop can be pressed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets
import plotly.graph_objects as go

from detlab.condition import Condition
from detlab.errors import DetlabError
from detlab.inquiry import Fix, Inquiry, Stopped, Switch
from detlab.viz.answers import proof_html, steps, switch_words
from detlab.viz.controls import Choice, Filling, button, html, prompts_list
from detlab.viz.elements import elements_in_words, histogram
from detlab.viz.figures import CONFIG
from detlab.viz.job import Job
from detlab.viz.report import write_report
from detlab.viz.trees import draw_trees
from detlab.viz.view import View, replace_figure
from detlab.viz.why import why_lines
from detlab.viz.words import controls_in_words, escape, first_in_words, plural, style, verdict_words

_WITHOUT, _WITH = "without a fix", "with the fix"
_HEIGHT, _TREE_LINES, _FEW_HEIGHT = 430, 8, 470
_STEPS = {
    "Where": "Where do the conditions part?",
    "Why": "Why do they part?",
    "Fix": "What fixes it?",
    "Proof": "Is it proved, and at what cost?",
}


class Workbench(Filling):
    """One panel for one model: where do two conditions part, why, what fixes it, and is it proved, at what cost.

    While it runs, the model must not be used elsewhere: a tier counts for the model, in all threads. Stop ends a run at the
    next module of the model, leaves the model as it was, and concludes nothing.

    Attributes:
        inquiry: what was asked and answered so far, without any widget.
        panel: the ipywidgets box; the workbench shows it where it stands last in a cell.
        fix: the remedies that are switched on, with what they did; None where none is.

    Args:
        model: a transformers causal language model in eval mode, of any make.
        prompts: what `load_prompts` returns, or strings, or lists of token ids.
        a, b: the conditions chosen at the start, as objects or as text.
        new_tokens: tokens to decode after prefill.
        tokenizer: needed for text where the model was not loaded by `load_model`.

    Raises:
        UsageError: the prompts cannot be used with this model. ConditionError: ``a`` or ``b`` is not a condition.
    """

    def __init__(self, model: Any, prompts: Any, *, a: Condition | str = "batch_size=1", b: Condition | str = "batch_size=4",
                 new_tokens: int = 8, tokenizer: Any = None) -> None:  # fmt: skip
        self.inquiry = Inquiry(model, prompts, new_tokens=new_tokens, tokenizer=tokenizer)
        self.fix: Fix | None = None
        self._job = Job()
        self._is_busy = False
        start = [Condition.parse(c) if isinstance(c, str) else c for c in (a, b)]
        self._build(prompts, Choice("a", start[0]), Choice("b", start[1]))

    # ------------------------------------------------------------------------------------------------------- what it does
    def run(self) -> None:
        """Presses Run: where do the conditions part, and why? Returns at once; `wait` waits."""
        self._run_clicked(None)

    def stop(self) -> None:
        """Presses Stop."""
        if self._is_busy:
            self.inquiry.stop()
            self._status.value = "stopping"

    def switch(self, name: str, on: bool = True) -> None:
        """Presses the switch of a remedy.

        Raises:
            KeyError: there is no such switch on this machine.
        """
        self._switches[name].value = on

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until what runs has ended; False where it has not in ``timeout`` seconds."""
        return self._job.wait(timeout)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.panel._repr_mimebundle_(**options)

    # -------------------------------------------------------------------------------------------------------------- where
    def _run_clicked(self, _: object) -> None:
        self._clear()
        a, b = (choice.text for choice in self._choices)
        inquiry = self.inquiry

        def work() -> None:
            inquiry.where(a, b, self._progressed)
            self._job.show(self._show_where)
            inquiry.why(self._progressed)
            self._job.show(self._show_why)
            first = inquiry.result.comparison.first if inquiry.result is not None else None
            if first is not None and first.op_index >= 0 and first.position >= 0:
                inquiry.look(first.op_index, first.prompt, first.position, self._progressed)
                self._job.show(self._show_look)

        self._start(work)

    def _clear(self) -> None:
        self.fix = None
        self._view.clear()
        for place in (self._verdict, self._why, self._found, self._proof, self._exported):
            place.value = ""
        self._fill(self._switch_off)
        for line in self._results.values():
            line.value = ""
        self._go("Where")

    def _show_where(self) -> None:
        result = self.inquiry.result
        if result is None:
            return
        comparison, words = result.comparison, verdict_words(result.verdict)
        lines = [words.sentence, first_in_words(comparison)]
        flips = len(comparison.token_flips)
        if flips:
            lines.append(f"{flips} of {plural(len(comparison.prompt_ids), 'prompt')} got another token.")
        lines.append("Controls: " + controls_in_words(comparison))
        lines += [f"Note: {note}" for note in comparison.notes]
        self._answer(self._verdict, words.css, f"{words.sign} {words.headline}", lines)
        self._show_fix()

    # ---------------------------------------------------------------------------------------------------------------- why
    def _show_why(self) -> None:
        result = self.inquiry.result
        lines = why_lines(result) if result is not None else []
        self._why.value = "".join(f"<p>{escape(line)}</p>" for line in lines or ["There is no difference to explain."])
        self._show_steps()

    def _look_clicked(self, _: object) -> None:
        cell, prompt = self._view.chosen, self._view.prompt_number
        if cell is None or cell.op_index < 0:
            return

        def work() -> None:
            self.inquiry.look(cell.op_index, prompt, cell.position, self._progressed)
            self._job.show(self._show_look)

        self._start(work)

    def _show_look(self) -> None:
        """The elements and trees of the chosen cell, where they were looked at."""
        cell = self._view.chosen
        is_stock = self._versions.value == _WITHOUT
        key = None if cell is None else (cell.op_index, self._view.prompt_number, cell.position)
        found = self.inquiry.looks.get(key) if is_stock and key is not None else None
        self._look.disabled = self._is_busy or not is_stock or cell is None or cell.op_index < 0
        _toggle(self._trees, "detlab-empty", True)
        if found is None:
            self._found.value = ""
            return
        notes = "".join(f'<p class="detlab-soft">{escape(note)}</p>' for note in found.notes)
        self._found.value = f"<p>{escape(elements_in_words(found))}</p>{histogram(found)}{notes}"
        a, b = found.trees
        if a is not None and b is not None:
            assert self.inquiry.result is not None
            labels = self.inquiry.result.comparison.label_a, self.inquiry.result.comparison.label_b
            if not self._trees.children:
                self._trees.children = (_figure_widget(),)  # made when first needed: it brings plotly.js (5 MB) along
            figure = draw_trees(a, b, labels=labels, most=_TREE_LINES)
            _toggle(self._trees, "detlab-empty", False)
            _toggle(self._trees, "detlab-few", figure.layout.height < _FEW_HEIGHT)
            replace_figure(self._trees.children[0], figure)

    # ------------------------------------------------------------------------------------------------------ fix and proof
    def _switched(self, change: Any) -> None:
        if self._is_filling or self.inquiry.result is None:
            return
        names = [name for name, control in self._switches.items() if control.value]
        turned = change["owner"]
        self._exported.value = ""
        if not names:
            self.fix = None
            self._show_fix()
            return

        def work() -> None:
            fix = self.inquiry.fix(names, self._progressed)
            self._job.show(lambda: self._fixed(fix))

        def failed() -> None:  # the switch goes back: what is shown is what was measured
            self._fill(lambda: setattr(turned, "value", not turned.value))

        self._start(work, failed)

    def _fixed(self, fix: Fix) -> None:
        self.fix = fix
        for name in fix.names:
            both = f"with {' + '.join(n for n in fix.names if n != name)}: " if len(fix.names) > 1 else ""
            self._results[name].value = escape(both + switch_words(fix.attempt))
        self._show_fix()

    def _show_fix(self) -> None:
        result, fix = self.inquiry.result, self.fix
        assert result is not None
        self._proof.value = proof_html(result, fix)
        has_both = fix is not None and fix.comparison is not None
        _toggle(self._versions, "detlab-empty", not has_both)
        self._fill(lambda: setattr(self._versions, "value", _WITH if has_both and self._step == "Proof" else _WITHOUT))
        self._show_version()
        self._show_steps()

    def _show_version(self, _: object = None) -> None:
        if self._is_filling or self.inquiry.result is None:
            return
        comparison = self.inquiry.result.comparison
        if self._versions.value == _WITH and self.fix is not None and self.fix.comparison is not None:
            self._view.show(self.fix.comparison, comparison.first.prompt if comparison.first else 0)
        else:
            self._view.show(comparison)
        self._show_look()

    def _go(self, step: str) -> None:
        """Shows a step: the parts that belong to it, and the pair with the fix where the proof is looked at."""
        self._step = step
        has_both = self.fix is not None and self.fix.comparison is not None
        self._versions.value = _WITH if has_both and step == "Proof" else _WITHOUT
        self._show_steps()

    def _show_steps(self) -> None:
        """The answers so far on the buttons of the steps, and the parts of the step that is chosen."""
        has_answer = self.inquiry.result is not None
        for at, step in enumerate(steps(self.inquiry.result, self.fix), start=1):
            control = self._buttons[step.name]
            answer = (step.answer or _STEPS[step.name]).replace("_", "_\u200b")  # long names of ops may break there
            control.description = f"{at}  {step.name}\n{answer}"
            control.disabled = not has_answer and step.name != "Where"
            for css in ("identical", "diverged", "control-flow", "other"):
                _toggle(control, f"detlab-{css}", css == step.css)
            _toggle(control, "detlab-current", step.name == self._step)
        for part, shown in self._parts:
            _toggle(part, "detlab-off", self._step not in shown or not (has_answer or id(part) in self._always))

    def _export_clicked(self, _: object) -> None:
        result = self.inquiry.result
        if result is None:
            return
        fixes = [fix for fix in self.inquiry.fixes.values() if fix is not self.fix]
        fixes += [self.fix] if self.fix is not None else []
        try:
            path = write_report(result, self._file.value, fixes=fixes, looks=list(self.inquiry.looks.values()))
        except DetlabError as error:
            self._exported.value = f'<span class="detlab-bad">{escape(error)}</span>'
        else:
            self._exported.value = f"written: <code>{escape(path.resolve())}</code>, {path.stat().st_size / 1e6:.1f} MB"

    # ------------------------------------------------------------------------------------------------------------- inside
    def _start(self, work: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        if self._is_busy:
            return
        self.inquiry.go_on()
        self._set_busy(True)
        self._bar.value, self._status.value, self._problem.value = 0.0, "running", ""

        def done(error: BaseException | None) -> None:
            self._set_busy(False)
            self._status.value = "" if error is None else "stopped"
            if error is not None and failed is not None:
                failed()
            if isinstance(error, Stopped):
                self._answer(self._problem, "other", "Stopped", ["What was under way is dropped; the model is as it was."])
            elif isinstance(error, DetlabError):
                self._answer(self._problem, "error", "! Not tested", [str(error)])
            elif error is not None:  # not one of detlab's own messages: name it here, and let the traceback reach the log
                self._answer(self._problem, "error", "! Not tested", [f"{type(error).__name__}: {error}"])
                logging.getLogger("detlab").error("the workbench failed", exc_info=error)
            self._show_look()

        self._job.start(work, done)

    def _progressed(self, share: float, what: str) -> None:
        def act() -> None:
            self._bar.value, self._status.value = share, f"<code>{escape(what)}</code>"

        self._job.report(act)

    def _set_busy(self, busy: bool) -> None:
        self._is_busy = busy
        self._run.disabled = self._export.disabled = self._look.disabled = busy
        self._stop.disabled = not busy
        self._bar.layout.visibility = "visible" if busy else "hidden"
        for control in self._switches.values():
            control.disabled = busy

    def _switch_off(self) -> None:
        for control in self._switches.values():
            control.value = False

    @staticmethod
    def _answer(place: Any, css: str, headline: str, lines: Sequence[str]) -> None:
        text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
        top = f'<div class="detlab-answer detlab-{css}" role="{"alert" if css == "error" else "status"}">'
        place.value = f"{top}<strong>{escape(headline)}</strong>{text}</div>"

    def _build(self, prompts: Any, a: Choice, b: Choice) -> None:
        self._choices = (a, b)
        self._run = button("Run", "detlab-run", "Run both conditions, compare and explain", "primary")
        self._stop = button("Stop", "detlab-stop", "Stop what runs; nothing half-done is kept")
        self._bar = ipywidgets.FloatProgress(value=0.0, min=0.0, max=1.0, layout={"width": "220px", "visibility": "hidden"})
        self._bar.add_class("detlab-progress")
        self._status, self._problem = html("detlab-status"), html("detlab-problem")
        self._verdict, self._why, self._found = html("detlab-verdict"), html("detlab-why"), html("detlab-elements")
        self._proof, self._exported = html("detlab-proof"), html("detlab-exported")
        self._versions = ipywidgets.ToggleButtons(options=[_WITHOUT, _WITH], value=_WITHOUT)
        self._versions.add_class("detlab-versions")
        self._view = View(_HEIGHT)
        self._look = button("Look inside", "detlab-look", "Execute both sides again, to see this op's elements and additions")
        self._trees = ipywidgets.VBox([])
        self._trees.add_class("detlab-trees")
        self._export = button("Export report", "detlab-export", "Write everything found here into one HTML file")
        self._file = ipywidgets.Text(value="workbench-report.html", description="file", layout={"width": "340px"})
        self._file.add_class("detlab-file")
        self._switches: dict[str, Any] = {}
        self._results: dict[str, Any] = {}
        self._buttons = {name: button(name, f"detlab-step-{name.lower()}", tip) for name, tip in _STEPS.items()}
        for name, control in self._buttons.items():
            control.on_click(lambda _, name=name: self._go(name))
        self._run.on_click(self._run_clicked)
        self._stop.on_click(lambda _: self.stop())
        self._look.on_click(self._look_clicked)
        self._export.on_click(self._export_clicked)
        self._versions.observe(self._show_version, "value")
        self._view.on_choice = self._show_look
        row = {"align_items": "center", "flex_flow": "row wrap"}
        view = self._view
        above = ipywidgets.HBox([view.prompt, view.layer], layout=row)
        facts = ipywidgets.VBox([view.detail, self._look], layout={"flex": "1 1 520px", "width": "auto"})
        # From the top down; each part with the steps that show it.
        self._parts: list[tuple[Any, tuple[str, ...]]] = [
            (ipywidgets.HBox([c.box for c in self._choices], layout={"flex_flow": "row wrap"}), ("Where",)),
            (self._verdict, ("Where",)),
            (self._why, ("Why",)),
            (self._proof, ("Fix", "Proof")),
            (self._fix_box(self.inquiry.switches()), ("Fix",)),
            (self._versions, ("Proof",)),
            (above, ("Where", "Proof")),
            (view.place, ("Where", "Proof")),
            (view.pick, ("Where", "Why")),
            (ipywidgets.HBox([facts, self._found], layout={"flex_flow": "row wrap"}), ("Where", "Why")),
            (self._trees, ("Why",)),
            (ipywidgets.HBox([self._file, self._export, self._exported], layout=row), ("Proof",)),
        ]
        self._always = {id(self._parts[0][0])}  # the conditions, before there is any answer
        step_bar = ipywidgets.HBox(list(self._buttons.values()))
        step_bar.add_class("detlab-step-bar")
        bar = ipywidgets.HBox([self._run, self._stop, self._bar, self._status], layout=row)
        sheet = f"<style>{style('explorer.css')}{style('proof.css')}{style('workbench.css')}</style>"
        self.panel = ipywidgets.VBox(
            [ipywidgets.HTML(sheet), step_bar, html("detlab-prompts", _listed(prompts)), bar, self._problem]
            + [part for part, _ in self._parts]
        )
        self.panel.add_class("detlab-explorer")
        self.panel.add_class("detlab-workbench")
        self._step = "Where"
        self._set_busy(False)
        self._show_steps()

    def _fix_box(self, switches: Sequence[Switch]) -> Any:
        lines = []
        for one in switches:
            if one.reason:
                continue
            control = ipywidgets.Checkbox(value=False, description=one.name, indent=False, tooltip=one.mechanism)
            control.add_class(f"detlab-fix-{one.name}")
            control.observe(self._switched, "value")
            self._switches[one.name], self._results[one.name] = control, html(f"detlab-result-{one.name}")
            line = ipywidgets.HBox([control, html("detlab-claim", escape(one.claim)), self._results[one.name]])
            line.add_class("detlab-switch")
            lines.append(line)
        missing = [one for one in switches if one.reason]
        items = "".join(f"<li><strong>{escape(one.name)}</strong>: {escape(one.reason)}</li>" for one in missing)
        note = f"<details><summary>{len(missing)} more cannot be tried here</summary><ul>{items}</ul></details>"
        made = ipywidgets.VBox([*lines, html("detlab-missing", note if missing else "")])
        made.add_class("detlab-switches")
        return made


def _toggle(widget: Any, css: str, on: bool) -> None:
    """Adds or removes a class, where that changes anything: each change is a message to the page."""
    if on != (css in widget._dom_classes):
        (widget.add_class if on else widget.remove_class)(css)


def _figure_widget() -> Any:
    made = go.FigureWidget()
    made._config = dict(CONFIG)
    return made


def _listed(prompts: Any) -> str:
    return prompts_list([prompts] if isinstance(prompts, str) else list(prompts))
