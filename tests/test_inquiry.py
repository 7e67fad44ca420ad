"""The four questions without widgets: answers are complete or absent, and the model is left as it was."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from detlab.divergence.look import look
from detlab.errors import ConditionError, UsageError
from detlab.inquiry import Inquiry, Stopped
from detlab.models import load_model
from detlab.process import digests_of
from detlab.remedies import REMEDIES
from tests.viz_cases import PLANTED, PROMPTS, diverged, tiny


def asked(b: str = "batch_size=2") -> Inquiry:
    made = Inquiry(tiny(), PROMPTS, new_tokens=2)
    made.where("", b)
    return made


@pytest.fixture(scope="module")
def inquiry() -> Inquiry:
    return asked()


def hooks() -> int:
    return len(nn.modules.module._global_forward_pre_hooks) + len(nn.modules.module._global_forward_hooks)


def stopping(inquiry: Inquiry, after: int) -> Callable[[float, str], None]:
    """Progress that asks to stop once it has been heard a number of times, as a click in another thread does."""
    heard = 0

    def report(share: float, what: str) -> None:
        nonlocal heard
        heard += 1
        if heard == after:
            inquiry.stop()

    return report


def test_where_and_why_are_what_investigate_says(inquiry: Inquiry) -> None:
    result = inquiry.why()
    assert result.verdict == "diverged"
    assert (result.comparison.first.module, result.comparison.first.op) == PLANTED
    assert str(result.comparison.first) == str(diverged().comparison.first)
    assert result.triage is not None
    assert result.call == diverged().call


def test_progress_is_a_share_that_ends_at_one() -> None:
    heard: list[tuple[float, str]] = []
    made = Inquiry(tiny(), PROMPTS, new_tokens=2)
    made.where("", "batch_size=2", lambda share, what: heard.append((share, what)))
    shares = [share for share, _ in heard]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.25
    assert shares[-1] == 1.0
    assert all(0 <= share <= 1 for share in shares)


def test_a_question_needs_the_one_before_it() -> None:
    made = Inquiry(tiny(), PROMPTS, new_tokens=2)
    for ask in (made.why, lambda: made.look(0, 0, 0), lambda: made.fix(["seeds"])):
        with pytest.raises(UsageError, match=r"no pair of conditions yet: ask where\(a, b\) first"):
            ask()
    with pytest.raises(ConditionError):
        made.where("", "batchsize=2")
    assert made.result is None


def test_another_pair_drops_what_was_said_of_the_first() -> None:
    made = asked()
    first = made.result.comparison.first
    made.look(first.op_index, first.prompt, first.position)
    made.fix(["seeds"])
    assert made.looks and made.fixes
    made.where("", "")
    assert (made.looks, made.fixes, made.result.verdict) == ({}, {}, "identical")


# ---------------------------------------------------------------------------------------------------------------- look
def test_a_look_counts_the_planted_difference_element_by_element(inquiry: Inquiry) -> None:
    first = inquiry.result.comparison.first
    found = inquiry.look(first.op_index, first.prompt, first.position)
    weights = tiny().get_input_embeddings().weight[PROMPTS[first.prompt][first.position]].detach()
    scaled = weights * (1.0 + 2.0**-12)
    steps = (weights.view(torch.int32).long() - scaled.view(torch.int32).long()).abs()
    assert found.dtype == "float32"
    assert np.array_equal(found.ulps, steps.numpy())
    assert found.num_differing == int((weights != scaled).sum()) > 500
    assert found.max_abs == float((weights.double() - scaled.double()).abs().max())
    assert found.notes == ["no accumulation tree: mul is not a sum whose terms can be set"]


def test_a_look_at_what_is_identical_finds_nothing(inquiry: Inquiry) -> None:
    comparison = inquiry.result.comparison
    op = next(o.a for o in comparison.detail.ops if comparison.trace.ops[o.a].op == "embedding")
    found = inquiry.look(op, 0, 0)
    assert found.num_differing == 0
    assert len(found.ulps) == 576
    assert found.notes == ["no accumulation tree: embedding is not a sum whose terms can be set"]


def test_a_look_reads_both_orders_of_addition(inquiry: Inquiry) -> None:
    comparison = inquiry.result.comparison
    ops = [o for o in comparison.detail.ops if comparison.trace.ops[o.a].module.endswith("0.self_attn.q_proj")]
    op = next(o.a for o in ops if comparison.trace.ops[o.a].op == "mm")
    found = inquiry.look(op, 0, 0)
    assert [tree.n for tree in found.trees] == [576, 576]
    assert all(tree.is_confirmed for tree in found.trees)
    assert found.num_differing > 0
    assert inquiry.look(op, 0, 0) is found


def test_a_row_that_was_not_computed_is_refused(inquiry: Inquiry) -> None:
    comparison = inquiry.result.comparison
    with pytest.raises(UsageError, match="op 0 was not computed for prompt 0, position 99, in both runs; choose another cell."):
        look(comparison, 0, 0, 99)


# ----------------------------------------------------------------------------------------------------------------- fix
def test_a_remedy_that_helps_and_one_that_does_not(inquiry: Inquiry) -> None:
    helps, idle = inquiry.fix(["static-batch"]), inquiry.fix(["seeds"])
    assert (helps.verdict, helps.attempt.verdict) == ("identical", "restores equality")
    assert helps.comparison.verdict == "identical"
    assert helps.comparison.rows_compared > 0
    assert all(helps.comparison.controls.values())
    assert helps.attempt.cost > 0
    assert (idle.verdict, idle.attempt.verdict, idle.comparison.verdict) == ("diverged", "no effect", "diverged")
    assert helps.call == (
        "detlab.try_remedies(model, prompts, a='', b='batch_size=2', remedies=['static-batch'], new_tokens=2)"
    )
    assert inquiry.fix(["static-batch"]) is helps


def test_remedies_are_combined_in_one_order(inquiry: Inquiry) -> None:
    both = inquiry.fix(["static-batch", "seeds"])
    assert both.names == ("seeds", "static-batch")
    assert inquiry.fix(["seeds", "static-batch"]) is both
    assert both.verdict == "identical"
    with pytest.raises(UsageError, match="conflict"):
        inquiry.fix(["static-batch", "power-of-two-batch"])
    with pytest.raises(UsageError, match="unknown remedy 'luck'"):
        inquiry.fix(["luck"])


def test_a_compiled_fix_is_tried_without_the_hook_of_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook would get into what is compiled, and break its graph at every module: other code than anybody else's."""
    made, before, seen = asked(), hooks(), []

    def tried(*_: object, **__: object) -> None:
        seen.append(hooks() - before)
        raise Stopped

    monkeypatch.setattr("detlab.inquiry.try_remedies", tried)
    for name in ("seeds", "compiled"):
        with pytest.raises(Stopped):
            made.fix([name])
    assert seen == [1, 0]


def test_what_cannot_be_tried_says_why_and_proves_nothing(inquiry: Inquiry) -> None:
    fix = inquiry.fix(["one-thread"])  # the planted hook cannot travel to a fresh process
    assert fix.verdict == "untried"
    assert "hooks" in fix.attempt.reason
    assert fix.comparison is None


def test_runs_under_a_fix_cannot_be_executed_without_it(inquiry: Inquiry) -> None:
    comparison = inquiry.fix(["static-batch"]).comparison
    assert not any(side.is_live for side in comparison.sides)


def test_switches_list_every_remedy_and_the_reasons(inquiry: Inquiry) -> None:
    switches = inquiry.switches()
    assert {one.name for one in switches} == set(REMEDIES)
    flags = [bool(one.reason) for one in switches]
    assert flags == sorted(flags)
    assert switches[0].how == "tier"
    assert next(one for one in switches if one.name == "clock-lock").reason.startswith("advice")


# ---------------------------------------------------------------------------------------------------------------- stop
def test_a_stopped_run_concludes_nothing_and_leaves_the_model_alone() -> None:
    made = asked()
    before, num_hooks = digests_of(made.model), hooks()
    with pytest.raises(Stopped):
        made.where("", "batch_size=2", stopping(made, 3))
    assert (made.result, made.looks, made.fixes) == (None, {}, {})
    assert (digests_of(made.model), hooks()) == (before, num_hooks)
    assert made.where("", "batch_size=2").verdict == "diverged"


def test_a_stopped_fix_under_a_tier_takes_the_tier_out_again() -> None:
    model, _ = load_model("tiny-llama")
    made = Inquiry(model, PROMPTS, new_tokens=2)
    made.where("", "batch_size=2")
    result, forwards = made.result, [module.forward for module in model.modules()]
    before = digests_of(model)
    names = [type(module).__name__ for module in model.modules()]
    for after in (12, 40):
        with pytest.raises(Stopped):
            made.fix(["tier-invariant"], stopping(made, after))
        assert made.fixes == {}
        assert made.result is result
        assert [type(module).__name__ for module in model.modules()] == names
        assert [module.forward for module in model.modules()] == forwards
        assert digests_of(model) == before
    assert made.fix(["tier-invariant"]).verdict == "identical"


def test_a_stopped_explanation_keeps_the_earlier_one() -> None:
    made = asked()
    made.why()
    triage = made.result.triage
    made.stop()
    with pytest.raises(Stopped):
        made.why()
    assert made.result.triage is triage


def test_a_stop_that_came_too_late_can_be_taken_back() -> None:
    made = Inquiry(tiny(), PROMPTS, new_tokens=1)
    made.stop()
    made.go_on()
    assert made.where("", "").verdict == "identical"


def test_a_thread_of_its_own_gives_the_same_bits() -> None:
    here, there = asked(), Inquiry(tiny(), PROMPTS, new_tokens=2)
    worker = threading.Thread(target=lambda: there.where("", "batch_size=2"))
    worker.start()
    worker.join(120)
    assert there.result is not None
    assert (there.result.a.md5, there.result.b.md5) == (here.result.a.md5, here.result.b.md5)
    assert there.result.a.trace.num_digests == here.result.a.trace.num_digests


def test_only_the_inquirys_own_thread_is_stopped() -> None:
    """A model that another thread runs meanwhile goes on."""
    made = asked()
    errors: list[BaseException] = []

    def report(share: float, what: str) -> None:
        made.stop()
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join(60)

    def elsewhere() -> None:
        try:
            with torch.no_grad():
                tiny()(torch.tensor([[1, 2, 3]]))
        except BaseException as error:
            errors.append(error)

    with pytest.raises(Stopped):
        made.where("", "", report)
    assert errors == []


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3-moe"])
def test_any_model_can_be_asked(family: str) -> None:
    model, _ = load_model(family)
    made = Inquiry(model, PROMPTS[:1], new_tokens=1)
    assert made.where("batch_size=2", "batch_size=2").verdict == "identical"
    assert made.where("attention=sdpa", "attention=eager").comparison.rows_compared > 0
    assert made.fix(["eager-attention"]).verdict == "identical"
