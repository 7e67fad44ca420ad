"""The workbench, driven by its controls without a browser: what is pressed here is what a reader presses."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import pytest
from plotly.callbacks import Points

from detlab.condition import Condition
from detlab.divergence.look import Look
from detlab.errors import ConditionError, UsageError
from detlab.inquiry import Fix
from detlab.viz import Workbench, report_html
from detlab.viz.answers import fixes_table, proof_html, steps, switch_words, verdict_of
from detlab.viz.arrange import arrange, focus, layer_name
from detlab.viz.elements import bins, elements_in_words, histogram
from tests.viz_cases import PLANTED, PROMPTS, diverged, large_grid, renamed, tiny

EVIL = "<script>alert('x')</script>"


def parts(widget: Any) -> Any:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from parts(child)


def find(bench: Workbench, css: str) -> Any:
    (found,) = [w for w in parts(bench.panel) if css in getattr(w, "_dom_classes", ())]
    return found


def is_shown(bench: Workbench, css: str) -> bool:
    """Whether nothing hides a widget: neither itself nor what it lies in."""

    def path(widget: Any, seen: tuple[Any, ...]) -> tuple[Any, ...]:
        if css in getattr(widget, "_dom_classes", ()):
            return (*seen, widget)
        return next((way for child in getattr(widget, "children", ()) if (way := path(child, (*seen, widget)))), ())

    return not any({"detlab-off", "detlab-empty"} & set(w._dom_classes) for w in path(bench.panel, ()))


def press(bench: Workbench, css: str) -> None:
    find(bench, css).click()
    assert bench.wait(120)


def turn(bench: Workbench, name: str, on: bool = True) -> None:
    find(bench, f"detlab-fix-{name}").value = on
    assert bench.wait(120)


def fresh(**options: Any) -> Workbench:
    return Workbench(tiny(), PROMPTS, b="batch_size=2", new_tokens=2, **options)


@pytest.fixture(scope="module")
def ran() -> Workbench:
    bench = fresh()
    press(bench, "detlab-run")
    return bench


@pytest.fixture
def bench(ran: Workbench) -> Any:
    """A workbench that has run, with no remedy on, at its first step."""
    yield ran
    ran._fill(ran._switch_off)
    ran.fix = None
    ran._show_fix()
    press(ran, "detlab-step-where")


# --------------------------------------------------------------------------------------------------------------- where
def test_before_a_run_there_is_one_step_and_nothing_else() -> None:
    bench = fresh()
    assert is_shown(bench, "detlab-a-batch-size")
    assert not any(is_shown(bench, css) for css in ("detlab-verdict", "detlab-heatmap", "detlab-switches", "detlab-export"))
    buttons = [find(bench, f"detlab-step-{name}") for name in ("where", "why", "fix", "proof")]
    assert [button.disabled for button in buttons] == [False, True, True, True]
    assert find(bench, "detlab-stop").disabled
    assert not find(bench, "detlab-run").disabled


def test_a_run_answers_where_and_why(bench: Workbench) -> None:
    verdict = find(bench, "detlab-verdict").value
    assert "≠ Diverged" in verdict
    assert f"{PLANTED[0]} · {PLANTED[1]}" in verdict
    assert "Controls: a repeated held, b repeated held." in verdict
    assert "Size: logits differ" in find(bench, "detlab-why").value
    where, why, fix, proof = (find(bench, f"detlab-step-{name}") for name in ("where", "why", "fix", "proof"))
    assert where.description.replace("\u200b", "") == "1  Where\n≠ model.embed_tokens · mul, position 0"
    assert why.description.startswith("2  Why\n")
    assert (fix.description, proof.description) == ("3  Fix\nnone applied", "4  Proof\n≠ Diverged")
    assert "detlab-diverged" in proof._dom_classes
    assert find(bench, "detlab-status").value == ""
    assert find(bench, "detlab-problem").value == ""


def test_the_first_difference_is_looked_at_unasked(bench: Workbench) -> None:
    assert PLANTED[0] in find(bench, "detlab-detail").value
    assert "of 576 elements of this row differ" in find(bench, "detlab-elements").value
    assert "<svg" in find(bench, "detlab-elements").value


def test_a_page_that_loads_late_finds_the_figure_in_the_widgets_state(bench: Workbench) -> None:
    (figure,) = find(bench, "detlab-heatmap").children
    state = figure.get_state(("_widget_data", "_widget_layout"))
    assert [trace["type"] for trace in state["_widget_data"]] == [trace.type for trace in figure.data]
    assert state["_widget_layout"]["title"]["text"] == figure.layout.title.text


def test_each_step_shows_its_own_parts(bench: Workbench) -> None:
    shows = {
        "where": ("detlab-a-batch-size", "detlab-verdict", "detlab-heatmap", "detlab-op", "detlab-detail", "detlab-elements"),
        "why": ("detlab-why", "detlab-op", "detlab-detail", "detlab-elements"),
        "fix": ("detlab-proof", "detlab-switches"),
        "proof": ("detlab-proof", "detlab-heatmap", "detlab-export", "detlab-file"),
    }
    for step, own in shows.items():
        press(bench, f"detlab-step-{step}")
        assert "detlab-current" in find(bench, f"detlab-step-{step}")._dom_classes
        for css in {css for names in shows.values() for css in names}:
            assert is_shown(bench, css) == (css in own), (step, css)


def test_a_cell_leads_to_its_layer_op_token_elements_and_trees(bench: Workbench) -> None:
    layers = find(bench, "detlab-layer")
    assert [label for label, _ in layers.options][:2] == ["all layers", "embed_tokens"]
    layers.value = "0"
    ops = find(bench, "detlab-op")
    assert all(label.startswith("0/") for label, _ in ops.options)
    ops.value = next(value for label, value in ops.options if label.startswith("0/self_attn.q_proj · mm"))
    find(bench, "detlab-position").value = 3
    assert "model.layers.0.self_attn.q_proj" in find(bench, "detlab-detail").value
    assert "position 3" in find(bench, "detlab-detail").value
    assert find(bench, "detlab-elements").value == ""
    press(bench, "detlab-look")
    assert "of 576 elements of this row differ" in find(bench, "detlab-elements").value
    press(bench, "detlab-step-why")
    assert is_shown(bench, "detlab-trees")
    (figure,) = find(bench, "detlab-trees").children
    assert "576 terms" in " ".join(a.text for a in figure.layout.annotations)
    layers.value = ""
    assert len(find(bench, "detlab-op").options) == len(bench.inquiry.result.comparison.grid(0).ops)
    assert not is_shown(bench, "detlab-trees")


def test_a_click_in_a_layer_leads_to_that_layers_op(bench: Workbench) -> None:
    find(bench, "detlab-layer").value = "1"
    (figure,) = find(bench, "detlab-heatmap").children
    trace = next(t for t in figure.data if t.type == "heatmap" and t.name.startswith("carrier"))
    label = next(text for text in figure.layout.yaxis.categoryarray if text.startswith("1/mlp.down_proj"))
    points = Points(point_inds=[(0, 0)], xs=[4], ys=[label], trace_name=trace.name, trace_index=0)
    trace._dispatch_on_click(points, None)
    assert "model.layers.1.mlp.down_proj" in find(bench, "detlab-detail").value
    assert "position 4" in find(bench, "detlab-detail").value
    find(bench, "detlab-layer").value = ""


# ------------------------------------------------------------------------------------------------------- fix and proof
def test_a_fix_turns_the_proof_and_switching_it_off_turns_it_back(bench: Workbench) -> None:
    press(bench, "detlab-step-fix")
    assert "none applied" in find(bench, "detlab-proof").value
    turn(bench, "static-batch")
    proof = find(bench, "detlab-proof").value
    assert proof.index("≠ Diverged") < proof.index("with static-batch") < proof.index("= Identical") < proof.index("cost")
    assert re.search(r"<strong>\d+\.\d\d×</strong>", proof)
    assert "= restores equality: 0 of 2 differ; cost" in find(bench, "detlab-result-static-batch").value
    assert find(bench, "detlab-step-proof").description == "4  Proof\n= Identical"
    assert "detlab-identical" in find(bench, "detlab-step-proof")._dom_classes
    press(bench, "detlab-step-proof")
    assert [t.name for t in find(bench, "detlab-heatmap").children[0].data if t.type == "heatmap"] == ["bit-identical"]
    find(bench, "detlab-versions").value = "without a fix"
    assert len([t for t in find(bench, "detlab-heatmap").children[0].data if t.type == "heatmap"]) > 1
    turn(bench, "static-batch", False)
    assert bench.fix is None
    assert "none applied" in find(bench, "detlab-proof").value
    assert find(bench, "detlab-step-proof").description == "4  Proof\n≠ Diverged"
    assert "restores equality" in find(bench, "detlab-result-static-batch").value  # what it did is still known


def test_a_remedy_that_does_nothing_says_so(bench: Workbench) -> None:
    turn(bench, "seeds")
    assert "≠ no effect: 2 of 2 differ" in find(bench, "detlab-result-seeds").value
    assert find(bench, "detlab-proof").value.count("≠ Diverged") == 2
    assert "every bit of both is as before" in find(bench, "detlab-proof").value


def test_switches_add_up_and_a_contradiction_goes_back(bench: Workbench) -> None:
    turn(bench, "static-batch")
    turn(bench, "seeds")
    assert bench.fix.names == ("seeds", "static-batch")
    assert "with static-batch: = restores equality" in find(bench, "detlab-result-seeds").value
    turn(bench, "power-of-two-batch")
    assert find(bench, "detlab-fix-power-of-two-batch").value is False
    assert "conflict" in find(bench, "detlab-problem").value
    assert bench.fix.names == ("seeds", "static-batch")
    turn(bench, "seeds", False)
    assert find(bench, "detlab-problem").value == ""
    assert bench.fix.names == ("static-batch",)


def test_what_cannot_be_tried_has_no_switch_but_a_reason() -> None:
    bench = fresh()
    text = find(bench, "detlab-missing").value
    assert "clock-lock" in text and "advice: detlab never changes a clock" in text
    assert not [w for w in parts(bench.panel) if "detlab-fix-clock-lock" in getattr(w, "_dom_classes", ())]


# --------------------------------------------------------------------------------------------------- running, stopping
def test_while_it_runs_only_stop_can_be_pressed_and_it_ends_in_words() -> None:
    bench = fresh()
    reached, go_on, seen = threading.Event(), threading.Event(), []
    where = bench.inquiry.where

    def slow(a: str, b: str, progress: Any) -> Any:
        def report(share: float, what: str) -> None:
            progress(share, what)
            reached.set()
            assert go_on.wait(60)

        return where(a, b, report)

    bench.inquiry.where = slow  # type: ignore[method-assign]
    find(bench, "detlab-run").click()
    assert reached.wait(60)
    names = ("detlab-run", "detlab-look", "detlab-export", "detlab-stop", "detlab-fix-seeds")
    seen = [find(bench, css).disabled for css in names]
    bar, status = find(bench, "detlab-progress"), find(bench, "detlab-status")
    assert (bar.layout.visibility, bar.value > 0, "pass 1" in status.value) == ("visible", True, True)
    find(bench, "detlab-stop").click()
    assert status.value == "stopping"
    go_on.set()
    assert bench.wait(60)
    assert seen == [True, True, True, False, True]
    assert "Stopped" in find(bench, "detlab-problem").value
    assert bench.inquiry.result is None
    assert not is_shown(bench, "detlab-heatmap")
    assert [find(bench, css).disabled for css in names] == [False, True, False, True, False]
    assert bar.layout.visibility == "hidden"
    bench.inquiry.where = where  # type: ignore[method-assign]
    press(bench, "detlab-run")
    assert "Diverged" in find(bench, "detlab-verdict").value


def test_a_fix_that_was_stopped_is_switched_off_again(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    fix = bench.inquiry.fix

    def stopped(names: Any, progress: Any) -> Fix:
        bench.stop()
        return fix(names, progress)

    monkeypatch.setattr(bench.inquiry, "fix", stopped)
    turn(bench, "greedy")
    assert find(bench, "detlab-fix-greedy").value is False
    assert "Stopped" in find(bench, "detlab-problem").value
    assert (bench.fix, ("greedy",) in bench.inquiry.fixes) == (None, False)


def test_an_impossible_pair_is_explained() -> None:
    bench = fresh()
    find(bench, "detlab-b-padding").value = 4
    press(bench, "detlab-run")
    assert "padding=4 needs a side" in find(bench, "detlab-problem").value
    assert "Traceback" not in find(bench, "detlab-problem").value
    assert find(bench, "detlab-step-why").disabled


def test_what_is_not_detlabs_error_is_named_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = fresh()

    def breaks(*_: object) -> Any:
        raise ZeroDivisionError("division by <zero>")

    bench.inquiry.where = breaks  # type: ignore[method-assign]
    press(bench, "detlab-run")
    assert "ZeroDivisionError: division by &lt;zero&gt;" in find(bench, "detlab-problem").value
    assert "ZeroDivisionError" in caplog.text
    assert not find(bench, "detlab-run").disabled


def test_bad_arguments_are_refused_at_once() -> None:
    with pytest.raises(ConditionError, match="batchsize"):
        Workbench(tiny(), PROMPTS, a="batchsize=1")
    with pytest.raises(UsageError):
        Workbench(tiny(), [], new_tokens=1)
    for nothing in ("tiny-llama", None, (tiny(), None)):
        with pytest.raises(UsageError, match=r"a model is needed, as `model, tokenizer = .*` gives it; got"):
            Workbench(nothing, PROMPTS)


def test_conditions_may_be_objects() -> None:
    made = Workbench(tiny(), PROMPTS, a=Condition(), b=Condition(batch_size=2, padding_side="left"))
    assert [choice.text for choice in made._choices] == ["batch_size=1", "batch_size=2,padding_side=left"]


def test_every_control_can_be_reached_by_keyboard() -> None:
    """Each is a native element: a button, a list, a box, a field; nothing works by the mouse alone but the heatmap."""
    native = (ipywidgets.Button, ipywidgets.Dropdown, ipywidgets.Checkbox, ipywidgets.Text, ipywidgets.BoundedIntText)
    bench = fresh()
    found = [w for w in parts(bench.panel) if isinstance(w, (*native, ipywidgets.ToggleButtons))]
    assert len(found) > 25
    assert all(w.tabbable is not False for w in found)
    assert all(w.description or isinstance(w, ipywidgets.ToggleButtons) for w in found)


def test_it_shows_itself_as_its_panel(ran: Workbench) -> None:
    bundle = ran._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == ran.panel.model_id


# -------------------------------------------------------------------------------------------------------------- export
def test_the_export_holds_all_four_answers_and_the_calls(bench: Workbench, tmp_path: Path) -> None:
    turn(bench, "seeds")
    turn(bench, "seeds", False)
    turn(bench, "static-batch")
    press(bench, "detlab-step-proof")
    find(bench, "detlab-file").value = str(tmp_path / "out.html")
    press(bench, "detlab-export")
    assert "out.html" in find(bench, "detlab-exported").value
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    heads = ["Where do two runs part?", "Why", "Inside an op", "Op by op", "What fixes it", "Proof and cost", "Run it again"]
    places = [text.index(f">{head}</h") for head in heads]
    assert places == sorted(places)
    assert bench.inquiry.result.call.replace("'", "&#x27;") in text
    assert "remedies=[&#x27;static-batch&#x27;]" in text
    assert "restores equality: 0 of 2 differ" in text and "no effect" in text
    assert 'data-figure="proof"' in text
    find(bench, "detlab-file").value = str(tmp_path / "missing" / "out.html")
    press(bench, "detlab-export")
    assert "does not exist. Make it first." in find(bench, "detlab-exported").value


def test_text_from_outside_is_escaped(bench: Workbench) -> None:
    turn(bench, "static-batch")
    attempts = bench.fix.attempts
    evil = replace(attempts.attempts[0], remedy=EVIL, reason=EVIL, note=EVIL, a=EVIL, b=EVIL)
    fix = replace(bench.fix, names=(EVIL,), attempts=replace(attempts, attempts=[evil]), call=EVIL)
    source = renamed(diverged(), prompt_ids=[EVIL, "x"])
    look = Look(EVIL, EVIL, 0, 0, "float32", np.array([0, 3]), 1.0, notes=[EVIL])
    for text in (proof_html(source, fix), fixes_table([fix]), report_html(source, [fix], [look])):
        assert "<script>alert" not in text
        assert "&lt;script&gt;" in text


# ----------------------------------------------------------------------------------------------------- pure functions
def test_steps_have_no_answer_before_there_is_one() -> None:
    assert [(step.name, step.answer) for step in steps(None, None)] == [(n, "") for n in ("Where", "Why", "Fix", "Proof")]
    assert [step.answer for step in steps(replace(diverged(), triage=None, explanation=None), None)][1] == "not asked yet"


def test_a_bound_is_said_only_where_it_says_something(bench: Workbench) -> None:
    turn(bench, "static-batch")
    after = bench.fix.attempt.after
    assert "at 95 %" not in proof_html(diverged(), bench.fix)  # two answers bound nothing
    attempts = bench.fix.attempts
    many = replace(attempts, attempts=[replace(attempts.attempts[0], after=replace(after, of=100))])
    assert "at most 3% of such answers do, at 95 % (3 / 100)" in proof_html(diverged(), replace(bench.fix, attempts=many))


def test_a_fix_that_was_not_tried_is_no_proof(bench: Workbench) -> None:
    turn(bench, "one-thread")  # the planted hook keeps the model from a fresh process
    assert verdict_of(bench.fix) == ("other", "?", "Not tried")
    assert switch_words(bench.fix.attempt).startswith("? not applicable: ")
    assert "= Identical" not in find(bench, "detlab-proof").value


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        ([], []),
        ([0, 0], [("0", 2)]),
        ([0, 1], [("0", 1), ("1", 1)]),
        ([2, 3, 4, 5], [("0", 0), ("1", 0), ("2", 1), ("≤4", 2), ("≤8", 1)]),
        ([1 << 62, 1], [("0", 0), ("1", 1), ("NaN", 1)]),
    ],
)
def test_bins_hold_every_element_once(distances: list[int], expected: list[tuple[str, int]]) -> None:
    assert bins(np.array(distances, np.int64)) == expected


def test_a_histogram_is_words_and_bars() -> None:
    draw = np.random.default_rng(0).integers(0, 5000, 1000)
    found = Look("m", "mm", 0, 0, "bfloat16", draw, 0.5)
    counted = bins(found.ulps)
    assert sum(count for _, count in counted) == 1000
    assert histogram(found).count("<rect") == len(counted)
    assert f'aria-label="{elements_in_words(found)}"' in histogram(found)
    assert histogram(replace(found, ulps=np.zeros(0, np.int64))) == ""
    assert elements_in_words(replace(found, ulps=np.zeros(7, np.int64))) == "None of 7 elements of this row differs."


def test_a_layer_is_cut_out_with_its_own_rows() -> None:
    grid = large_grid()
    part, rows = focus(grid, "17")
    assert {layer_name(grid.modules[row]) for row in rows} == {"17"}
    assert len(rows) == len(part.ops) == 40
    assert np.array_equal(part.state, grid.state[rows])
    assert focus(grid)[1] == list(range(len(grid.ops)))
    plan = arrange(part)
    assert len(plan.labels) == 40  # every op of a layer has its own line
