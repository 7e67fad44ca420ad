"""Makes the README's pictures of the workbench, in a real JupyterLab: before and after a fix.

python tools/make_screenshots.py [CHROMIUM]      # writes docs/workbench-before.png and docs/workbench-after.png
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' JupyterLab serves here, too

from tests.browser.lab import CHROMIUM, cell_errors, command, open_notebook, serving, wait_for_all_cells, write_notebook  # noqa: E402

CELL = """import detlab, detlab.viz

model, tokenizer = detlab.load_model("smollm2-135m", dtype="bfloat16")
prompts = detlab.load_prompts("../data/prompts/assistant.jsonl")[:4]
detlab.viz.Workbench(model, prompts, a="batch_size=1", b="batch_size=4,padding_side=left", new_tokens=4)"""
FIX = "tier-invariant"
WIDTH, MOST_BYTES = 1240, 300_000
RUN_SECONDS = 600


def main(chromium: str) -> None:
    """Runs the workbench as a reader would, and photographs it twice."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as lab, sync_playwright() as playwright:
        write_notebook(lab, "workbench", [CELL])
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM)
        page = browser.new_page(viewport={"width": WIDTH + 60, "height": 1600})
        open_notebook(page, lab, "notebooks/workbench.ipynb")
        command(page, "application:toggle-left-area")
        command(page, "notebook:run-all-cells")
        wait_for_all_cells(page)
        if errors := cell_errors(page):
            raise SystemExit(f"make_screenshots: the cell failed: {errors[0]}")
        bench = page.locator(".detlab-workbench").first
        bench.locator(".detlab-run").click()
        wait(bench, ".detlab-run:not([disabled])")
        photograph(page, bench, "workbench-before.png")
        bench.locator(".detlab-step-fix").click()
        bench.locator(f".detlab-fix-{FIX} input").click()
        bench.locator(".detlab-card", has_text=f"with {FIX}").wait_for(timeout=RUN_SECONDS * 1000)
        wait(bench, ".detlab-run:not([disabled])")
        bench.locator(".detlab-step-proof").click()
        photograph(page, bench, "workbench-after.png")
        browser.close()


def wait(bench: Any, css: str) -> None:
    """Waits for something in the workbench."""
    bench.locator(css).wait_for(state="attached", timeout=RUN_SECONDS * 1000)


def photograph(page: Any, bench: Any, name: str) -> None:
    """One picture of the whole workbench, small enough for a repository."""
    page.mouse.move(2, 2)
    page.wait_for_timeout(1500)
    target = ROOT / "docs" / name
    target.parent.mkdir(exist_ok=True)
    bench.screenshot(path=target)
    size = target.stat().st_size
    print(f"{target.relative_to(ROOT)}: {size // 1000} kB")
    if size > MOST_BYTES:
        raise SystemExit(f"make_screenshots: {name} has {size:,} bytes, {MOST_BYTES:,} at most; show less.")


if __name__ == "__main__":
    found = sys.argv[1] if len(sys.argv) > 1 else shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        raise SystemExit("make_screenshots: no Chromium on PATH; name one: python tools/make_screenshots.py /path/to/chromium")
    main(found)
