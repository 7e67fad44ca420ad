"""Work in a thread of its own, so that the page stays alive while a model runs, and a button can stop it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable

__all__ = ["Job"]

#: Seconds between two reports of progress that are passed on.
_PAUSE = 0.1
Act = Callable[[], None]


def _here() -> Callable[[Act], object]:
    """How to get something done in this thread: by its event loop, or, where it has none, at once in whichever thread asks."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        return lambda act: act()


class Job:
    """One piece of work at a time.

    Widgets are changed in the thread that started the work, where clicks are handled, too: what the work finds is handed over.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._later: Callable[[Act], object] = lambda act: act()
        self._reported = 0.0

    def start(self, work: Act, done: Callable[[BaseException | None], None]) -> None:
        """Starts the work; ``done`` hears in the starting thread what ended it: None where it came to its end."""
        later = self._later = _here()
        context = contextvars.copy_context()  # the kernel's: what belongs to which cell

        def body() -> None:
            ended: BaseException | None = None
            try:
                context.run(work)
            except BaseException as error:  # an interruption, too, ends in words on the page
                ended = error
            later(lambda: done(ended))

        self._thread = threading.Thread(target=body, name="detlab-workbench", daemon=True)
        self._thread.start()

    def show(self, act: Act) -> None:
        """Called by the work: does something in the starting thread."""
        self._later(act)

    def report(self, act: Act) -> None:
        """The same for progress, of which most is left out: each report is a message to the page."""
        if time.monotonic() - self._reported >= _PAUSE:
            self._reported = time.monotonic()
            self._later(act)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the work has ended; False where it has not in ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()
