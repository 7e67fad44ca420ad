"""A real JupyterLab on the loopback address and a real browser in front of it, both with nothing kept from before."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = Path(__file__).with_name("artifacts")
START_SECONDS, STOP_SECONDS = 60, 15
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


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """JupyterLab with copies of the notebooks and prompts, and with settings of its own."""
    folder = tmp_path / "work"
    for name in ("notebooks", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "*.html"))
    homes = {
        name: tmp_path / name.lower()
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
    for home in homes.values():
        home.mkdir()
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
    log = tmp_path / "lab.log"
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
    pytest.fail(f"JupyterLab did not come up within {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def _stop(running: Lab, server: "subprocess.Popen[bytes]") -> None:
    """Shuts the kernels down through the API, then the server; by its own process id where it does not listen."""
    try:
        for kernel in running.ask("/api/kernels"):
            running.ask(f"/api/kernels/{kernel['id']}", "DELETE")
        running.ask("/api/shutdown", "POST")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(STOP_SECONDS)


@pytest.fixture
def browser(chromium_path: str) -> Iterator[Any]:
    """A headless browser with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=CHROMIUM)
        try:
            yield chromium
        finally:
            chromium.close()


@pytest.fixture
def artifacts() -> Path:
    """Folder of the screenshots, ignored by git."""
    ARTIFACTS.mkdir(exist_ok=True)
    return ARTIFACTS
