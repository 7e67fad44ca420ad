"""The report in a real browser, from a file: figures are drawn, nothing is loaded, and no text becomes a script."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from detlab.viz import write_report
from tests.browser.lab import Watch
from tests.viz_cases import diverged, renamed

pytestmark = pytest.mark.browser

EVIL = "<script>window.obeyed = true</script><img src=x onerror='window.obeyed = true'>"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_opens_offline(scheme: Any, browser: Any, artifacts: Path, tmp_path: Path) -> None:
    source = diverged()
    path = write_report(replace(renamed(source, prompt_ids=[EVIL, "second"], notes=[EVIL]), call=EVIL), tmp_path / "r.html")
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    page.set_default_timeout(20_000)
    watch = Watch()
    watch.follow(page)
    page.goto(path.as_uri())
    page.locator("#heatmap .heatmaplayer image").first.wait_for()
    page.locator("#overview .barlayer path").first.wait_for()
    page.wait_for_timeout(300)
    page.screenshot(path=artifacts / f"report-{scheme}.png", full_page=True)
    assert page.evaluate("window.obeyed") is None
    assert page.locator("body").evaluate("body => body.scrollWidth <= window.innerWidth")
    text, back = (
        page.locator("body").evaluate(f"body => getComputedStyle(body).{name}") for name in ("color", "backgroundColor")
    )
    assert contrast(text, back) > 7
    context.close()
    assert (watch.num_requests, watch.outside, watch.errors) == (1, [], [])


def contrast(text: str, back: str) -> float:
    """WCAG contrast of a colour, which may let some of the other through, on another: `rgb(r, g, b)` or `rgba(r, g, b, a)`."""

    def channels(colour: str) -> list[float]:
        return [float(part) for part in re.findall(r"[\d.]+", colour)]

    def luminance(channels: list[float]) -> float:
        parts = [channel / 255 for channel in channels]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    below = channels(back)[:3]
    *above, alpha = (*channels(text), 1.0)[:4]
    mixed = [alpha * top + (1 - alpha) * bottom for top, bottom in zip(above, below, strict=True)]
    bright, dark = sorted((luminance(mixed), luminance(below)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
