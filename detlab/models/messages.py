"""What the user reads while a model loads: detlab's own lines, and little of transformers and the hub."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import transformers

__all__ = ["first_line", "no_progress_bars", "quiet_retries", "say"]


def say(text: str) -> None:
    """Writes one line to stderr, so that stdout stays the result's."""
    print(f"detlab: {text}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Gives the first line of an error's message as a sentence: foreign errors ramble."""
    lines = str(error).strip().splitlines()
    line = lines[0].strip() if lines else type(error).__name__
    return line if line.endswith((".", "!", "?")) else line + "."


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hides transformers' progress bars; its warnings stay."""
    settings = transformers.utils.logging
    was_enabled = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            settings.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def quiet_retries(progress: bool) -> Iterator[None]:
    """Replaces the hub client's two warnings a retry by one line in all; its other warnings stay."""
    has_said = not progress

    def keep(record: logging.LogRecord) -> bool:
        nonlocal has_said
        text = record.getMessage()
        if "thrown while requesting" not in text and not text.startswith("Retrying in"):
            return True
        if not has_said:
            has_said = True
            say("No answer from the hub yet; trying again for up to half a minute ...")
        return False

    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
