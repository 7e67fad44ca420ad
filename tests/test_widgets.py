"""The panel, driven as a reader drives it: by its controls, found by the classes that the browser test uses."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from plotly.callbacks import Points

import detlab.viz
from detlab.condition import Condition
from detlab.errors import ConditionError, ControlError
from detlab.viz import Explorer
from tests.viz_cases import PLANTED, ask, diverged, identical, other_path, renamed


def parts(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from parts(child)


def find(explorer: Explorer, css: str) -> Any:
    (found,) = [w for w in parts(explorer.panel) if css in getattr(w, "_dom_classes", ())]
    return found


def figure_of(explorer: Explorer) -> Any:
    (figure,) = find(explorer, "detlab-heatmap").children
    return figure


def press_run(explorer: Explorer) -> None:
    find(explorer, "detlab-run").click()


def shown(explorer: Explorer) -> str:
    return str(find(explorer, "detlab-verdict").value)


def detail(explorer: Explorer) -> str:
    return str(find(explorer, "detlab-detail").value)


@pytest.fixture
def explorer() -> Explorer:
    """An explorer that has run, without running anything."""
    made = Explorer(lambda a, b, progress: diverged())
    press_run(made)
    return made


def test_the_public_names_are_pinned() -> None:
    names = "Explorer Workbench class_map_figure draw_tree draw_trees heatmap noise_budget overview report_html write_report"
    assert detlab.viz.__all__ == names.split()
    assert all(hasattr(detlab.viz, name) for name in detlab.viz.__all__)


def test_the_controls_spell_the_conditions() -> None:
    asked = []

    def investigate(a: str, b: str, progress: Any) -> Any:
        asked.append((a, b))
        return diverged()

    explorer = Explorer(investigate, a="batch_size=2", b="batch_size=4,padding_side=left,row=1")
    find(explorer, "detlab-a-cache").value = "none"
    find(explorer, "detlab-a-attention").value = "eager"
    find(explorer, "detlab-b-batch-size").value = 8
    find(explorer, "detlab-b-padding").value = 3
    press_run(explorer)
    assert asked == [("batch_size=2,attention=eager,cache=none", "batch_size=8,padding_side=left,padding=3,row=1")]
    assert Condition.parse(asked[0][1]).row == 1
    assert asked[0][1] in find(explorer, "detlab-b-echo").value


@pytest.mark.parametrize("css", ["batch-size", "padding-side", "padding", "attention", "cache"])
def test_every_choice_of_a_control_is_a_word_that_can_be_seen(css: str) -> None:
    control = find(Explorer(lambda *_: diverged()), f"detlab-a-{css}")
    assert control.description
    assert control.value is not None
    assert all(option is not None for option in getattr(control, "options", ()))


def test_a_verdict_is_worded_and_coloured() -> None:
    for make, word, css in (
        (diverged, "Diverged", "detlab-diverged"),
        (identical, "Identical", "detlab-identical"),
        (other_path, "Control flow", "detlab-control-flow"),
    ):
        explorer = Explorer(lambda a, b, progress, make=make: make())
        press_run(explorer)
        assert explorer.result is make()
        assert word in shown(explorer)
        assert css in shown(explorer)
        assert "a repeated held, b repeated held" in shown(explorer)
        assert 'role="status"' in shown(explorer)


def test_the_button_is_disabled_and_the_bar_moves_while_running() -> None:
    seen = []

    def investigate(a: str, b: str, progress: Any) -> Any:
        for done, total in ((1, 4), (3, 4), (1, 8)):
            progress(done, total, "<b>what</b>")
            bar, button = find(explorer, "detlab-progress"), find(explorer, "detlab-run")
            seen.append((bar.value, bar.max, bar.layout.display, button.disabled, find(explorer, "detlab-status").value))
        return diverged()

    explorer = Explorer(investigate)
    press_run(explorer)
    assert [entry[:4] for entry in seen] == [(1, 4, "", True), (3, 4, "", True), (1, 8, "", True)]
    assert seen[1][4] == "pass 1: 3 of 4 <code>&lt;b&gt;what&lt;/b&gt;</code>"
    assert seen[2][4].startswith("pass 2: 1 of 8")
    assert find(explorer, "detlab-run").disabled is False
    assert find(explorer, "detlab-progress").layout.display == "none"


def test_a_real_investigation_reports_its_progress() -> None:
    explorer = Explorer(lambda a, b, progress: ask(a, b, progress), a="batch_size=1", b="batch_size=2")
    press_run(explorer)
    assert "Diverged" in shown(explorer)
    assert "rows compared" in find(explorer, "detlab-status").value


def test_an_impossible_setting_is_explained_before_and_after_run() -> None:
    explorer = Explorer(lambda a, b, progress: ask(a, b, progress))
    find(explorer, "detlab-b-padding").value = 4
    message = "padding=4 needs a side: add padding_side=&quot;left&quot; or padding_side=&quot;right&quot;."
    assert message in find(explorer, "detlab-b-echo").value
    press_run(explorer)
    assert message in shown(explorer)
    assert "Not tested" in shown(explorer)
    assert "Traceback" not in shown(explorer)
    assert explorer.result is None
    assert find(explorer, "detlab-run").disabled is False
    find(explorer, "detlab-b-padding-side").value = "right"
    assert message not in find(explorer, "detlab-b-echo").value


def test_an_error_replaces_an_earlier_verdict(explorer: Explorer) -> None:
    def fails(a: str, b: str, progress: Any) -> Any:
        raise ControlError("the control failed: <a> gave other bits")

    assert explorer.result is not None
    explorer._investigate = fails
    press_run(explorer)
    assert "Diverged" not in shown(explorer)
    assert "the control failed: &lt;a&gt; gave other bits" in shown(explorer)
    assert explorer.result is None
    hidden = [w for w in parts(explorer.panel) if getattr(w.layout, "display", None) == "none"]
    assert any(find(explorer, "detlab-heatmap") in list(parts(w)) for w in hidden)


def test_what_is_not_detlabs_error_is_named_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(a: str, b: str, progress: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    explorer = Explorer(breaks)
    press_run(explorer)
    assert "ZeroDivisionError" in caplog.text  # ipywidgets logs what a callback raises
    assert "ZeroDivisionError: division by zero" in shown(explorer)
    assert find(explorer, "detlab-run").disabled is False


def test_an_interruption_ends_in_words() -> None:
    def interrupted(a: str, b: str, progress: Any) -> Any:
        raise KeyboardInterrupt

    explorer = Explorer(interrupted)
    press_run(explorer)
    assert "Interrupted" in shown(explorer)
    assert find(explorer, "detlab-run").disabled is False


def test_the_detail_opens_where_the_runs_part(explorer: Explorer) -> None:
    assert PLANTED[0] in detail(explorer)
    assert "differs although its inputs matched (origin)" in detail(explorer)
    assert "origin" in find(explorer, "detlab-op").label


def test_lists_lead_to_any_op_and_position(explorer: Explorer) -> None:
    ops, position = find(explorer, "detlab-op"), find(explorer, "detlab-position")
    grid = diverged().comparison.grid(0)
    assert len(ops.options) == len(grid.ops)
    assert list(position.options) == grid.positions
    ops.value, position.value = 0, 3
    assert "position 3" in detail(explorer)
    assert "bit-identical" in detail(explorer)
    ops.value = grid.modules.index("model.layers.0.self_attn.q_proj")
    assert "an input already differed (carrier)" in detail(explorer)
    assert "model.layers.0.self_attn.q_proj" in detail(explorer)


def test_a_click_on_a_cell_and_on_a_diamond_leads_to_its_op(explorer: Explorer) -> None:
    figure = figure_of(explorer)
    axis = list(figure.layout.yaxis.categoryarray)
    carriers = next(t for t in figure.data if t.type == "heatmap" and t.name.startswith("carrier"))
    marks = next(t for t in figure.data if t.type == "scatter" and t.name.startswith("origin"))
    label = next(text for text in axis if text.startswith("1/mlp.down_proj"))
    for trace, x, y in ((carriers, 4, label), (marks, 2, f"{PLANTED[0]} · {PLANTED[1]}")):
        points = Points(point_inds=[(0, 0)], xs=[x], ys=[y], trace_name=trace.name, trace_index=0)
        trace._dispatch_on_click(points, None)
        assert find(explorer, "detlab-op").label.startswith(y)
        assert find(explorer, "detlab-position").value == x
        assert f"position {x}" in detail(explorer)


def test_another_prompt_is_drawn_on_demand(explorer: Explorer) -> None:
    prompts = find(explorer, "detlab-prompt")
    assert [label for label, _ in prompts.options] == diverged().comparison.prompt_ids
    prompts.value = 1
    assert diverged().comparison.prompt_ids[1] in figure_of(explorer).layout.title.text
    assert "size not measured" in "".join(t.name or "" for t in figure_of(explorer).data)
    assert f"prompt {diverged().comparison.prompt_ids[1]}" in detail(explorer)


def test_one_figure_widget_serves_every_run(explorer: Explorer) -> None:
    before = figure_of(explorer)
    explorer._investigate = lambda a, b, progress: identical()
    press_run(explorer)
    assert figure_of(explorer) is before
    assert [t.name for t in before.data if t.type == "heatmap"] == ["bit-identical"]
    assert before.layout.height is None
    assert before._config["displaylogo"] is False
    press_run(explorer)
    assert len([t for t in before.data if t.type == "heatmap"]) == 1


def test_text_from_outside_is_escaped() -> None:
    evil = "<script>alert('x')</script>"
    source = diverged()
    first = replace(source.comparison.first, module=evil)
    result = renamed(source, prompt_ids=[evil, "x"], first=first, notes=[evil])
    explorer = Explorer(lambda a, b, progress: result, [evil, "plain"])
    press_run(explorer)
    for widget in parts(explorer.panel):
        if css := set(getattr(widget, "_dom_classes", ())) & {"detlab-prompts", "detlab-verdict", "detlab-detail"}:
            assert "<script" not in widget.value, css
    assert "&lt;script&gt;" in shown(explorer)
    assert "&lt;script&gt;" in find(explorer, "detlab-prompts").value


def test_prompts_are_listed_by_name_and_text() -> None:
    from detlab.prompts import Prompt

    prompts = [
        Prompt("one", text="first text"),
        Prompt("two", messages=({"role": "user", "content": "second text"},)),
        Prompt("three", tokens=(1, 2, 3)),
        "long " * 200,
    ]
    text = find(Explorer(lambda *_: diverged(), prompts), "detlab-prompts").value
    assert "4 prompts" in text
    for words in ("one: first text", "two: second text", "three: 3 token ids", "…"):
        assert words in text
    assert find(Explorer(lambda *_: diverged()), "detlab-prompts").value == ""


def test_an_impossible_start_is_refused() -> None:
    with pytest.raises(ConditionError, match="unknown condition key 'batchsize'"):
        Explorer(lambda *_: diverged(), a="batchsize=1")


def test_the_explorer_shows_itself_as_its_panel(explorer: Explorer) -> None:
    bundle = explorer._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.panel.model_id
