"""How long a large comparison takes to draw, and how large the drawings are: 30 layers, 40 ops or more each, 1,000 tokens.

python benchmarks/large_drawing.py [TOKENS [ROUNDS]]

The model is random and narrow, since its arithmetic does not matter here: what is drawn are ops times tokens. One op is
changed on purpose in the larger batch, so that most cells differ and are sized, which is the most that a drawing can hold.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from _harness import save

import detlab
from detlab.viz.view import View

LAYERS, GOAL_SECONDS, GOAL_MB = 30, 3.0, 5.0


def planted(num_tokens: int) -> detlab.Comparison:
    """A comparison in which nearly all cells differ."""
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=num_tokens + 8, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output * (1.0 if output.shape[0] == 1 else 1.0 + 2.0**-12)
    )
    tokens = torch.randint(1, 512, (num_tokens,)).tolist()
    return detlab.investigate(model, [tokens], b="batch_size=2", new_tokens=1, controls=False, why=False)


def measured(draw: Callable[[], Any], rounds: int) -> tuple[float, list[float], Any]:
    """(median CPU seconds, all of them, the last result); the first round counts, since a reader waits for it."""
    seconds, made = [], None
    for _ in range(rounds):
        started = time.process_time()
        made = draw()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds), sorted(seconds), made


def main(num_tokens: int, rounds: int) -> None:
    """Draws everything that a reader may see of a large comparison."""
    torch.set_num_threads(1)
    found = planted(num_tokens)
    comparison = found.comparison
    grid = comparison.grid(0)
    per_layer = sum(module.startswith("model.layers.7.") for module in grid.modules)
    print(f"{LAYERS} layers, {per_layer} ops in a layer, {len(grid.ops):,} lines x {len(grid.positions):,} tokens")
    differing, sized = int((grid.state > 1).sum()), int((grid.max_abs > 0).sum())
    print(f"{differing:,} of {grid.state.size:,} cells differ, {sized:,} of them sized")

    def panel() -> View:
        view = View()
        view.show(comparison)
        return view

    def layer() -> View:
        view.layer.value = ""
        view.layer.value = "7"
        return view

    view = panel()
    rows: dict[str, dict[str, Any]] = {}
    for name, draw, size in (
        ("heatmap", lambda: detlab.viz.heatmap(comparison).to_json(), len),
        ("overview", lambda: detlab.viz.overview(comparison).to_json(), len),
        ("panel: heatmap, lists and facts", panel, state_bytes),
        ("panel: drill down to one layer", layer, state_bytes),
        ("report, without plotly.js", lambda: detlab.viz.report_html(found), lambda text: len(text.encode()) - plotly_bytes()),
    ):
        middle, seconds, made = measured(draw, rounds)
        rows[name] = {"cpu_s": middle, "first_s": seconds[-1], "spread_s": [seconds[0], seconds[-1]], "mb": size(made) / 1e6}
        mb = rows[name]["mb"]
        verdict = "met" if seconds[-1] < GOAL_SECONDS and mb < GOAL_MB else "MISSED"
        print(f"{name:34} {middle:6.2f} s CPU (worst {seconds[-1]:.2f})  {mb:6.2f} MB  {verdict}")
    in_browser = browser_seconds(detlab.viz.heatmap(comparison))
    if in_browser is None:
        print("in a browser: not measured, there is no Chromium on PATH")
    else:
        print(f"{'heatmap, drawn by the browser':34} {in_browser:6.2f} s (wall)")
    save("large_drawing", {
        "browser_wall_s": in_browser,
        "layers": LAYERS, "ops_per_layer": per_layer, "lines": len(grid.ops), "tokens": len(grid.positions),
        "cells_differing": differing, "goal": {"seconds": GOAL_SECONDS, "mb": GOAL_MB}, "rows": rows,
    })  # fmt: skip


def state_bytes(view: View) -> int:
    """What a page is sent for a panel, without plotly.js: traces as a message and as the widget's state, and the lists."""
    (figure,) = view.place.children
    lists = [control.options for control in (view.op, view.position, view.layer)]
    return 2 * len(json.dumps(figure.get_state(("_widget_data", "_widget_layout")))) + len(json.dumps(lists))


def browser_seconds(figure: Any) -> float | None:
    """Wall seconds from the call of plotly.js to the picture, in headless Chromium; None where there is none."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        return None
    from playwright.sync_api import sync_playwright
    from plotly.offline import get_plotlyjs

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        page.set_content("<div id=place></div>")
        page.add_script_tag(content=get_plotlyjs())
        seconds = page.evaluate(
            """async text => {
                const figure = JSON.parse(text), started = performance.now();
                await Plotly.newPlot("place", figure.data, figure.layout);
                await new Promise(requestAnimationFrame);
                return (performance.now() - started) / 1000;
            }""",
            figure.to_json(),
        )
        browser.close()
    return float(seconds)


def plotly_bytes() -> int:
    """Of plotly.js, which every report carries."""
    from plotly.offline import get_plotlyjs

    return len(get_plotlyjs().encode())


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["1000", "5"][len(sys.argv) - 1 :])))
