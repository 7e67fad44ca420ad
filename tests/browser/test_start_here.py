"""The first notebook as a reader meets it: opened, run, and used, in a real browser."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, Watch, cell_errors, command, open_notebook, scroll_to, wait_for_all_cells

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOK = "notebooks/00-start-here.ipynb"
STEP_SECONDS = 30


def test_the_first_notebook_runs_and_its_panel_leads_to_the_op(lab: Lab, browser: Any, artifacts: Path) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 1500})
    page = context.new_page()
    page.set_default_timeout(STEP_SECONDS * 1000)
    watch = Watch()
    watch.follow(page)
    try:
        open_notebook(page, lab, NOTEBOOK, num_cells=6)
        command(page, "notebook:run-all-cells")
        wait_for_all_cells(page)
        assert cell_errors(page) == []
        page.screenshot(path=artifacts / "after-run-all.png")

        scroll_to(page, "viz.overview(")
        page.locator(".jp-OutputArea .js-plotly-plot .heatmaplayer image").first.wait_for()
        page.screenshot(path=artifacts / "figures.png")

        panel = page.locator(".detlab-explorer").first
        scroll_to(page, "viz.Explorer(")
        panel.wait_for(state="visible")
        page.screenshot(path=artifacts / "panel.png")
        use_the_panel(page, artifacts)
        command(page, "apputils:change-theme", {"theme": "JupyterLab Dark"})
        page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
        page.wait_for_timeout(500)
        page.screenshot(path=artifacts / "dark.png")
        page.locator(".detlab-explorer").first.screenshot(path=artifacts / "panel-dark.png")
    except Exception:
        page.screenshot(path=artifacts / "failed.png")
        raise
    finally:
        context.close()
    assert watch.num_requests > 10
    assert watch.outside == []
    assert watch.unexpected() == []


def use_the_panel(page: Any, artifacts: Path) -> None:
    panel = page.locator(".detlab-explorer").first
    answer = panel.locator(".detlab-verdict")

    # A setting that no run can have is explained, and no traceback shows.
    panel.locator(".detlab-b-padding input").fill("4")
    panel.locator(".detlab-b-padding input").press("Tab")
    panel.locator(".detlab-b-echo", has_text="padding_side").wait_for()
    panel.locator(".detlab-run").click()
    answer.locator(".detlab-error", has_text="padding_side").wait_for()
    page.screenshot(path=artifacts / "panel-error.png")

    panel.locator(".detlab-b-padding-side select").select_option("left")
    panel.locator(".detlab-b-batch-size select").select_option("8")
    panel.locator(".detlab-b-echo", has_text="batch_size=8,padding_side=left,padding=4").wait_for()
    panel.locator(".detlab-run").click()
    panel.locator(".detlab-run[disabled]").wait_for(state="attached")
    answer.locator(".detlab-identical, .detlab-diverged, .detlab-control-flow").wait_for()
    assert re.search(r"Identical|Diverged|Control flow", answer.inner_text())
    assert "held" in answer.inner_text()
    plot = panel.locator(".detlab-heatmap .js-plotly-plot")
    plot.locator(".heatmaplayer image").first.wait_for(state="attached")
    panel.locator(".detlab-run:not([disabled])").wait_for(state="attached")
    width = plot.evaluate("plot => plot._fullLayout.width")
    assert width > 0.9 * panel.evaluate("panel => panel.clientWidth")
    panel.screenshot(path=artifacts / "panel-light.png")

    # Through the lists, which work from the keyboard.
    detail = panel.locator(".detlab-detail")
    ops = panel.locator(".detlab-op select")
    assert ops.locator("option").count() > 10
    ops.select_option(index=0)
    panel.locator(".detlab-position select").select_option(index=2)
    detail.locator("td", has_text="position 2").wait_for()
    assert "embedding" in detail.inner_text()
    assert "bit-identical" in detail.inner_text()

    # Through the heatmap: the cell under the pointer is the one that is told about.
    plot.scroll_into_view_if_needed()
    labels, position, x, y = page.evaluate(
        """() => {
            const plot = document.querySelector('.detlab-heatmap .js-plotly-plot');
            const {xaxis, yaxis} = plot._fullLayout, box = plot.getBoundingClientRect();
            const labels = yaxis._categories.slice(-4, -1), position = 5;  // lines can be as thin as a pixel
            const x = xaxis._offset + xaxis.d2p(position), y = yaxis._offset + yaxis.d2p(labels[1]);
            return [labels, position, box.left + x, box.top + y];
        }"""
    )
    page.mouse.move(x, y)
    page.mouse.click(x, y)
    detail.locator("td", has_text=f"position {position}").wait_for()
    assert any(label.split(" · ")[1].split(" #")[0] in detail.inner_text() for label in labels), detail.inner_text()
    panel.screenshot(path=artifacts / "panel-detail.png")
