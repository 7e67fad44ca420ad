"""What the browser tests hold: a running JupyterLab, and a record of what a page did."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS, STOP_SECONDS = 60, 15
# Console errors that are no fault of ours, as regular expressions, each with its reason.
ALLOWED: tuple[str, ...] = ()
CHROMIUM = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Lab:
    """A running JupyterLab: its address, its token, and the folder it serves."""

    base: str
    token: str
    folder: Path

    def ask(self, path: str, method: str = "GET") -> Any:
        """Asks the server's REST API; the answer's JSON, or None where it has no body."""
        request = urllib.request.Request(f"{self.base}{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def stop_kernels(self) -> None:
        """Shuts every kernel down."""
        for kernel in self.ask("/api/kernels"):
            self.ask(f"/api/kernels/{kernel['id']}", "DELETE")

    def page(self, name: str) -> str:
        """Address of a notebook in the Lab, in a workspace of its own: no tab of an earlier page comes back."""
        return f"{self.base}/lab/workspaces/{secrets.token_hex(4)}/tree/{name}?token={self.token}"


@dataclass
class Watch:
    """What a page did besides showing itself: errors on its console, and requests to other hosts."""

    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    num_requests: int = 0

    def follow(self, page: Any) -> None:
        """Listens to a page."""
        page.on("console", lambda m: self.errors.append(f"{m.text} ({m.location})") if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._requested)
        page.on("websocket", lambda socket: self._seen(socket.url))

    def unexpected(self) -> list[str]:
        """Errors on the console that are not known to be no fault of ours."""
        return [error for error in self.errors if not any(re.search(pattern, error) for pattern in ALLOWED)]

    def _requested(self, request: Any) -> None:
        self._seen(request.url)

    def _seen(self, url: str) -> None:
        self.num_requests += 1
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "file") and parts.hostname not in ("127.0.0.1", "localhost"):
            self.outside.append(url)


@contextmanager
def serving(home: Path) -> Iterator[Lab]:
    """A JupyterLab with copies of the notebooks and prompts, and with settings of its own, all under an empty folder.

    Raises:
        RuntimeError: it did not come up; the message holds the end of its log.
    """
    folder = home / "work"
    for name in ("notebooks", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "*.html"))
    homes = {
        name: home / name.lower()
        for name in (
            "HOME",
            "IPYTHONDIR",
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_DATA_DIR",
            "JUPYTER_RUNTIME_DIR",
            "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR",
        )
    }
    for made in homes.values():
        made.mkdir()
    # Asking whether news may be fetched would cover a corner of the page.
    settings = homes["JUPYTERLAB_SETTINGS_DIR"] / "@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "XDG_"))}
    environment = kept | {name: str(path) for name, path in homes.items()}
    # The models in this user's cache are not downloaded again for the fresh home.
    environment["DETLAB_CACHE"] = str(_cache_dir())
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder,
        "IdentityProvider.token": token,
        "LabApp.news_url": "",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "LabApp.expose_app_in_browser": True,
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = home / "lab.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    running = Lab(f"http://127.0.0.1:{port}", token, folder)
    try:
        _wait_until_up(running, server, log)
        yield running
    finally:
        _stop(running, server)


def _cache_dir() -> Path:
    from detlab.environment import cache_dir

    return cache_dir()


def _wait_until_up(running: Lab, server: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            running.ask("/api/status")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not come up within {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def _stop(running: Lab, server: "subprocess.Popen[bytes]") -> None:
    """Shuts the kernels down through the API, then the server; by its own process id where it does not listen."""
    try:
        running.stop_kernels()
        running.ask("/api/shutdown", "POST")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(STOP_SECONDS)


# ------------------------------------------------------------------------------------------------------ inside the Lab
def write_notebook(lab: Lab, name: str, cells: list[str]) -> str:
    """Writes a notebook of code cells where the Lab serves it; returns its path there."""
    import nbformat

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    book.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(book, lab.folder / "notebooks" / f"{name}.ipynb")
    return f"notebooks/{name}.ipynb"


def open_notebook(page: Any, lab: Lab, name: str, num_cells: int = 1) -> None:
    """Opens a notebook and waits for its cells and its kernel."""
    page.goto(lab.page(name))
    page.wait_for_function(
        "count => window.jupyterapp && window.jupyterapp.shell.currentWidget?.content?.widgets?.length >= count", arg=num_cells
    )
    page.wait_for_function("window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")


def command(page: Any, name: str, arguments: dict[str, Any] | None = None) -> None:
    """Executes one of the Lab's commands by its name, which is the same in every language."""
    page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments or {}])


def wait_for_all_cells(page: Any, seconds: float = 240) -> None:
    """Returns when every cell has run, or one has failed."""
    page.wait_for_function(
        """() => {
            const cells = window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code');
            const failed = cells.some(c => c.model.outputs.toJSON().some(o => o.output_type === 'error'));
            return failed || cells.every(c => c.model.executionState === 'idle' && c.model.executionCount);
        }""",
        timeout=seconds * 1000,
    )


def cell_errors(page: Any) -> list[str]:
    outputs: list[str] = page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.content.widgets.filter(cell => cell.model.type === 'code')
            .flatMap(cell => cell.model.outputs.toJSON()).filter(o => o.output_type === 'error')
            .map(o => o.ename + ': ' + o.evalue)"""
    )
    return outputs


def scroll_to(page: Any, source: str) -> None:
    """Brings a cell into view: the Lab builds cells only when they come near."""
    page.evaluate(
        """async source => {
            const book = window.jupyterapp.shell.currentWidget.content;
            const at = book.widgets.findIndex(cell => cell.model.sharedModel.source.includes(source));
            book.activeCellIndex = at;
            await book.scrollToItem(at, 'start');
        }""",
        source,
    )
