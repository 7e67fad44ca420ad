"""Controls that panels share: one condition as dropdowns, and single widgets with a class by which they are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from detlab.condition import Condition
from detlab.errors import DetlabError
from detlab.viz.words import escape, plural

BATCH_SIZES = (1, 2, 4, 6, 8)
_OWN, _NO_SIDE = "model's own", "no padding"  # words, since a dropdown shows None as nothing


class Filling:
    """Sets its own controls, and knows that it was not the user."""

    _is_filling = False

    def _fill(self, change: Callable[[], None]) -> None:
        """Changes controls without reacting to them."""
        self._is_filling = True
        try:
            change()
        finally:
            self._is_filling = False


class Choice:
    """The controls of one condition, and the condition they spell."""

    def __init__(self, name: str, start: Condition) -> None:
        sizes = sorted({*BATCH_SIZES, start.batch_size})
        # Settings that have no control here are kept as they were given.
        known = ("batch_size", "padding_side", "padding", "attention", "cache")
        self._rest = [part for part in str(start).split(",") if "=" in part and part.split("=")[0] not in known]
        self.batch_size = dropdown("batch size", sizes, start.batch_size)
        self.padding_side = dropdown("padding side", [_NO_SIDE, "left", "right"], start.padding_side or _NO_SIDE)
        self.padding = ipywidgets.BoundedIntText(
            value=start.padding,
            min=0,
            max=512,
            description="padding",
            style={"description_width": "90px"},
            layout={"width": "250px"},
        )
        self.attention = dropdown("attention", [_OWN, "sdpa", "eager"], start.attention or _OWN)
        self.cache = dropdown("cache", ["dynamic", "none"], start.cache)
        controls = {n: getattr(self, n) for n in known}
        for key, control in controls.items():
            control.add_class(f"detlab-{name}-{key.replace('_', '-')}")
            control.observe(self._changed, "value")
        self._echo = html(f"detlab-{name}-echo")
        self.box = ipywidgets.VBox([html("detlab-title", f"<h4>Run {name}</h4>"), *controls.values(), self._echo])
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


def button(description: str, css: str, tooltip: str, style: str = "") -> Any:
    """A button."""
    made = ipywidgets.Button(description=description, button_style=style, tooltip=tooltip)
    made.add_class(css)
    return made


def html(css: str, value: str = "") -> Any:
    """A place for HTML; what comes from outside must be escaped."""
    widget = ipywidgets.HTML(value)
    widget.add_class(css)
    return widget


def dropdown(description: str, options: Sequence[Any], value: Any, css: str = "", width: str = "250px") -> Any:
    """A list to choose from."""
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


def prompts_list(prompts: Sequence[object]) -> str:
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
