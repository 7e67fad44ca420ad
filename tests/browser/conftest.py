"""A real JupyterLab on the loopback address and a real browser in front of it, both with nothing kept from before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import CHROMIUM, Lab, serving

ARTIFACTS = Path(__file__).with_name("artifacts")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab with copies of the notebooks and prompts, and with settings of its own; all tests share it."""
    with serving(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture
def lab(server: Lab) -> Iterator[Lab]:
    """The same, with no kernel left behind: the next test has the machine for itself."""
    yield server
    server.stop_kernels()


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
