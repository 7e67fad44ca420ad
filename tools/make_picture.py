"""Makes the README's picture: SmolLM2 in bfloat16, one prompt alone against the same prompt in a left-padded batch of six.

python tools/make_picture.py CHROMIUM        # writes docs/divergence.png
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import detlab

ROOT = Path(__file__).resolve().parent.parent


def main(chromium: str) -> None:
    """Runs the investigation and photographs its heatmap."""
    model, _ = detlab.load_model("smollm2-135m", dtype="bfloat16")
    prompts = detlab.load_prompts(ROOT / "data" / "prompts" / "assistant.jsonl")[:6]
    result = detlab.investigate(model, prompts, b="batch_size=6,padding_side=left", new_tokens=6)
    figure = detlab.viz.heatmap(result.comparison)
    figure.update_layout(width=1100, height=620, paper_bgcolor="white", plot_bgcolor="white")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "figure.html"
        figure.write_html(page_file, include_plotlyjs=True)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1120, "height": 640})
        page.goto(page_file.as_uri())
        page.wait_for_selector(".main-svg")
        page.wait_for_timeout(500)
        target = ROOT / "docs" / "divergence.png"
        target.parent.mkdir(exist_ok=True)
        page.screenshot(path=target)
        browser.close()
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1024} kB, verdict {result.verdict}")


if __name__ == "__main__":
    found = sys.argv[1] if len(sys.argv) > 1 else shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        raise SystemExit("make_picture: no Chromium on PATH; name one: python tools/make_picture.py /path/to/chromium")
    main(found)
