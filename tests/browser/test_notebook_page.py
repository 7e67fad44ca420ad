"""A notebook of the workshop in a real JupyterLab, from opening it to its last cell: nothing fails, nothing is loaded."""

from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, Watch, cell_errors, command, open_notebook, scroll_to, wait_for_all_cells

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK, PICTURE = "notebooks/01-addition-is-not-associative.ipynb", "viz.draw_tree("


def test_a_notebook_runs_to_its_end_and_shows_its_pictures(lab: Lab, browser: Any, artifacts: Path) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 1200})
    page = context.new_page()
    page.set_default_timeout(30_000)
    watch = Watch()
    watch.follow(page)
    try:
        open_notebook(page, lab, NOTEBOOK, num_cells=6)
        command(page, "notebook:run-all-cells")
        wait_for_all_cells(page)
        assert cell_errors(page) == []
        scroll_to(page, PICTURE)
        page.locator(".jp-OutputArea .js-plotly-plot .main-svg").first.wait_for()
        page.screenshot(path=artifacts / "notebook-01.png")
    except Exception:
        page.screenshot(path=artifacts / "notebook-01-failed.png")
        raise
    finally:
        context.close()
    assert watch.num_requests > 10
    assert watch.outside == []
    assert watch.unexpected() == []
