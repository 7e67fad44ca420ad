"""The panel in the notebook: choose two conditions, run, read the verdict, and click through to the op.

The panel sees no model: it is given a function that investigates. Whatever it draws is drawn by
`detlab.viz.figures`, and whatever can be clicked can also be chosen in a dropdown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from detlab.condition import Condition
from detlab.errors import DetlabError
from detlab.viz.controls import Choice, button, html, prompts_list
from detlab.viz.view import View
from detlab.viz.why import why_lines
from detlab.viz.words import controls_in_words, escape, first_in_words, plural, style, verdict_words

if TYPE_CHECKING:
    from detlab.investigate import Investigation

Progress = Callable[[int, int, str], None]
Investigate = Callable[[str, str, Progress], "Investigation"]


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
        self._choices = {"a": Choice("a", Condition.parse(a)), "b": Choice("b", Condition.parse(b))}
        self._run = button("Run", "detlab-run", "Run both conditions and compare them", "primary")
        self._progress = ipywidgets.IntProgress(value=0, min=0, max=1, layout={"width": "240px", "display": "none"})
        self._progress.add_class("detlab-progress")
        self._status = html("detlab-status")
        self._verdict = html("detlab-verdict")
        self._view = View()
        self._run.on_click(self._clicked)
        conditions = ipywidgets.HBox([c.box for c in self._choices.values()], layout={"flex_flow": "row wrap"})
        bar = ipywidgets.HBox(
            [self._run, self._progress, self._status],
            layout={"align_items": "center", "flex_flow": "row wrap"},
        )
        self.panel = ipywidgets.VBox(
            [
                ipywidgets.HTML(f"<style>{style('explorer.css')}</style>"),
                html("detlab-prompts", prompts_list(prompts_shown)),
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
        lines.append("Controls: " + controls_in_words(comparison))
        lines += [f"Note: {note}" for note in comparison.notes]
        self._answer(words.css, f"{words.sign} {words.headline}", lines)
        self._status.value = f"done: {comparison.rows_compared:,} rows compared"

    def _answer(self, css: str, headline: str, lines: Sequence[str]) -> None:
        """The verdict, or why there is none, read out by screen readers."""
        text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
        top = f'<div class="detlab-answer detlab-{css}" role="{"alert" if css == "error" else "status"}">'
        self._verdict.value = f"{top}<strong>{escape(headline)}</strong>{text}</div>"
