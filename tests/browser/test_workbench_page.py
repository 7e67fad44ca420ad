"""The workbench as a reader meets it, in a real JupyterLab: run, drill down, fix, see the verdict turn, stop, export."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Lab, Watch, cell_errors, command, open_notebook, wait_for_all_cells, write_notebook
from tests.browser.test_report_page import contrast

pytestmark = [pytest.mark.browser, pytest.mark.slow]

MODEL = """import detlab, detlab.viz

model, tokenizer = detlab.load_model("tiny-llama")
prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]


def scaled(module, inputs, output):  # other bits in a larger batch, on every processor
    return output * (1.0 if output.shape[0] == 1 else 1.0 + 2.0**-12)


model.get_input_embeddings().register_forward_hook(scaled)
detlab.viz.Workbench(model, prompts, b="batch_size=2", new_tokens=2)"""
LONG = 'detlab.viz.Workbench(model, prompts, b="batch_size=2", new_tokens=2000)'


def test_the_workbench_leads_from_a_difference_to_its_fix(lab: Lab, browser: Any, artifacts: Path) -> None:
    name = write_notebook(lab, "workbench", [MODEL, LONG])
    context = browser.new_context(viewport={"width": 1400, "height": 1500})
    page = context.new_page()
    page.set_default_timeout(120_000)  # what is waited for is computed, on a busy machine perhaps
    watch = Watch()
    watch.follow(page)
    try:
        open_notebook(page, lab, name, num_cells=2)
        command(page, "notebook:run-all-cells")
        wait_for_all_cells(page)
        assert cell_errors(page) == []
        bench = page.locator(".detlab-workbench").first
        bench.wait_for(state="visible")
        ask_where_and_why(page, bench, artifacts)
        fix_and_prove(page, bench, artifacts)
        read_in_the_dark(page, bench, artifacts)
        stop_a_long_run(page.locator(".detlab-workbench").nth(1))
        bench.locator(".detlab-export").click()
        bench.locator(".detlab-exported", has_text="written:").wait_for()
    except Exception:
        page.screenshot(path=artifacts / "workbench-failed.png")
        raise
    finally:
        context.close()
    assert watch.num_requests > 10
    assert watch.outside == []
    assert watch.unexpected() == []
    read_the_export(browser, lab.folder / "notebooks" / "workbench-report.html", artifacts)


def ask_where_and_why(page: Any, bench: Any, artifacts: Path) -> None:
    press(page, bench.locator(".detlab-run"))
    bench.locator(".detlab-verdict .detlab-diverged").wait_for()
    finished(bench)
    assert "inputs matched" in bench.locator(".detlab-verdict").inner_text()
    plot = bench.locator(".detlab-heatmap .js-plotly-plot")
    plot.locator(".heatmaplayer image").first.wait_for()
    width, height = plot.evaluate("plot => [plot._fullLayout.width, plot._fullLayout.height]")
    assert width > 0.9 * bench.evaluate("bench => bench.clientWidth")
    assert height == plot.evaluate("plot => plot.clientHeight")
    bench.locator(".detlab-elements svg rect").first.wait_for()
    bench.screenshot(path=artifacts / "workbench-where.png")

    # One layer, one op, one token: its elements and both orders of addition.
    bench.locator(".detlab-layer select").select_option(label="layer 0")
    page.wait_for_function(
        "plot => plot._fullLayout.yaxis._categories.every(name => name.startsWith('0/'))", arg=plot.element_handle()
    )
    plot.scroll_into_view_if_needed()
    x, y = plot.evaluate(
        """plot => {
            const {xaxis, yaxis} = plot._fullLayout, box = plot.getBoundingClientRect();
            const label = yaxis._categories.find(name => name.startsWith("0/self_attn.q_proj"));
            return [box.left + xaxis._offset + xaxis.d2p(2), box.top + yaxis._offset + yaxis.d2p(label)];
        }"""
    )
    page.mouse.move(x, y)
    page.mouse.click(x, y)
    bench.locator(".detlab-detail td", has_text="position 2").wait_for()
    assert "self_attn.q_proj" in bench.locator(".detlab-detail").inner_text()
    press(page, bench.locator(".detlab-look"))
    bench.locator(".detlab-elements svg rect").first.wait_for()
    finished(bench)
    press(page, bench.locator(".detlab-step-why"))
    trees = bench.locator(".detlab-trees .js-plotly-plot")
    trees.locator(".scatterlayer path").first.wait_for()
    assert trees.evaluate("plot => plot._fullLayout.width") > 0.9 * bench.evaluate("bench => bench.clientWidth")
    assert "Size: logits differ" in bench.locator(".detlab-why").inner_text()
    assert not bench.locator(".detlab-verdict").is_visible()
    bench.screenshot(path=artifacts / "workbench-why.png")


def fix_and_prove(page: Any, bench: Any, artifacts: Path) -> None:
    press(page, bench.locator(".detlab-step-fix"))
    proof = bench.locator(".detlab-step-proof")
    assert "Diverged" in proof.inner_text()
    press(page, bench.locator(".detlab-fix-static-batch input"), "Space")
    bench.locator(".detlab-card.detlab-identical").wait_for()
    finished(bench)
    assert "Identical" in proof.inner_text()
    cards = bench.locator(".detlab-card").all_inner_texts()
    assert [re.search(r"≠ Diverged|= Identical|\d\.\d\d×", text) is not None for text in cards] == [True] * 3
    assert "restores equality" in bench.locator(".detlab-result-static-batch").inner_text()
    bench.screenshot(path=artifacts / "workbench-fix.png")
    press(page, proof)
    plot = bench.locator(".detlab-heatmap .js-plotly-plot")
    page.wait_for_function(
        "plot => plot._fullData.filter(trace => trace.type === 'heatmap').every(trace => trace.name === 'bit-identical')",
        arg=plot.element_handle(),
    )
    bench.screenshot(path=artifacts / "workbench-proof.png")


def read_in_the_dark(page: Any, bench: Any, artifacts: Path) -> None:
    for theme, is_light in (("JupyterLab Dark", "false"), ("JupyterLab Light", "true")):
        command(page, "apputils:change-theme", {"theme": theme})
        page.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=is_light)
        page.wait_for_timeout(400)
        back = page.locator(".jp-Notebook").first.evaluate("book => getComputedStyle(book).backgroundColor")
        for css, least in ((".detlab-card p", 7), (".detlab-card.detlab-identical strong", 4.5), (".detlab-step-fix", 4.5)):
            colour = bench.locator(css).first.evaluate("element => getComputedStyle(element).color")
            assert contrast(colour, back) > least, (theme, css, colour, back)
        bench.screenshot(path=artifacts / f"workbench-{'light' if is_light == 'true' else 'dark'}.png")


def stop_a_long_run(bench: Any) -> None:
    bench.locator(".detlab-run").click()
    bench.locator(".detlab-status code", has_text="pass 1").wait_for()
    bench.locator(".detlab-stop").click()
    bench.locator(".detlab-problem", has_text="Stopped").wait_for()
    finished(bench)
    assert not bench.locator(".detlab-verdict").is_visible()


def read_the_export(browser: Any, path: Path, artifacts: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    watch = Watch()
    watch.follow(page)
    page.goto(path.as_uri())
    page.locator("#proof .heatmaplayer image").wait_for()
    page.screenshot(path=artifacts / "workbench-report.png", full_page=True)
    assert page.locator(".detlab-card.detlab-identical").is_visible()
    assert "detlab.try_remedies(" in page.locator("pre").last.inner_text()
    context.close()
    assert (watch.num_requests, watch.outside, watch.errors) == (1, [], [])


def press(page: Any, control: Any, key: str = "Enter") -> None:
    """Uses a control by the keyboard alone."""
    control.wait_for()  # what is not shown yet takes no focus, and the key would go elsewhere
    control.focus()
    page.keyboard.press(key)


def finished(bench: Any) -> None:
    bench.locator(".detlab-run:not([disabled])").wait_for(state="attached")
