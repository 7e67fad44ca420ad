"""Scores over conditions, checked by hand; a text in two stages from one seed."""

import importlib
import json
from dataclasses import replace

import pytest
import torch

import detlab
from detlab.errors import MachineError, UsageError
from detlab.models import tokenizer_for
from tests.bit_classes import padded_attention_rows

stages = importlib.import_module("detlab.two_stages")
PROMPTS = ["a loan for a bakery", "a loan for a farm and its three old tractors", "no"]
CHOICES = {"yes": 1.0, "no": 0.0, "maybe": 0.5}
MIXED = ["", "batch_size=3,padding_side=left,padding=11", "dtype=bfloat16"]


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama", attention="sdpa")[0]


@pytest.fixture(scope="module")
def scores(model):
    return detlab.score(model, PROMPTS, CHOICES, MIXED)


def test_a_score_is_the_mean_worth_of_the_choices(model, scores):
    tokenizer = tokenizer_for(model)
    tokens = [tokenizer.encode(text, add_special_tokens=False)[0] for text in CHOICES]
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])).logits[0, -1, tokens].double()
        weights = logits.exp() / logits.exp().sum()
        assert abs(scores.scores[index][0] - float(weights[0] + weights[2] / 2)) < 1e-12
    assert scores.threshold == 0.5 and scores.conditions[0] == "default"
    assert scores.prompt_ids == ["prompt-0", "prompt-1", "prompt-2"]


def test_scores_spread_and_a_remedy_takes_the_spread_away(model, scores):
    assert all(row[2] != row[0] for row in scores.scores)  # another precision is another score on every machine
    lengths = [len(tokenizer_for(model).encode(p, add_special_tokens=False)) for p in PROMPTS]
    pads = [max(lengths) + 11 - n for n in lengths]
    if all(n - 1 in padded_attention_rows(torch.float32, n, pad) for n, pad in zip(lengths, pads, strict=True)):
        assert any(row[1] != row[0] for row in scores.scores)
    fixed = detlab.score(model, PROMPTS, CHOICES, MIXED[:2], remedy="tier-invariant")
    assert fixed.spread == fixed.std == [0.0] * 3 and fixed.flips == [] and fixed.remedy == "tier-invariant"
    assert "tier=invariant" in fixed.conditions[0]
    assert "the scores of 0 spread, by up to 0; decisions that flip at 0.5: 0" in str(fixed)


def test_decisions_flip_where_the_threshold_lies_between(model, scores):
    row = scores.scores[0]
    made = detlab.score(model, PROMPTS, CHOICES, MIXED, threshold=(min(row) + max(row)) / 2)
    assert "prompt-0" in made.flips and sorted(set(made.decisions[0])) == [False, True] and made.scores == scores.scores
    assert f"decisions that flip at {made.threshold:g}: {len(made.flips)}" in str(made)
    assert made.to_pandas()["decision"].nunique() == 2
    data = json.loads(json.dumps(made.to_json()))
    assert data["flips"] == made.flips and data["spread"][0] == max(row) - min(row)
    assert "<b>" not in replace(made, prompt_ids=["<b>", *PROMPTS[1:]])._repr_html_()


def test_what_cannot_be_scored(model):
    for choices in ({"yes": 1}, {"yes": 1, "yes, please": 0}, {"yes": 1, "": 0}):
        with pytest.raises(UsageError, match="^score needs two or more choices whose first tokens differ; got {'yes': "):
            detlab.score(model, PROMPTS, choices, MIXED)
    for choices in (["yes", "no"], {"yes": float("nan"), "no": 0}, {"yes": None, "no": 0}):  # a score of nan never "spreads"
        with pytest.raises(UsageError, match="^score needs choices, each with its worth"):
            detlab.score(model, PROMPTS, choices, MIXED)
    with pytest.raises(UsageError, match="^threshold=nan is not possible"):
        detlab.score(model, PROMPTS, CHOICES, MIXED, threshold=float("nan"))
    for conditions in ([], "batch_size=4"):
        with pytest.raises(UsageError, match="^score needs a list of conditions"):
            detlab.score(model, PROMPTS, CHOICES, conditions)
    with pytest.raises(UsageError, match="unknown remedy 'sedes'"):
        detlab.score(model, PROMPTS, CHOICES, MIXED, remedy="sedes")
    with pytest.raises(MachineError, match="'clock-lock' cannot be had here: advice"):
        detlab.score(model, PROMPTS, CHOICES, MIXED, remedy="clock-lock")


# ------------------------------------------------------------------------------------------------------- two stages
def test_a_text_in_two_stages_comes_from_prompt_and_seed(model):
    lengths = {"outline_tokens": 4, "text_tokens": 12, "temperature": 1.5}
    alone = [detlab.two_stages(model, [p], 7, **lengths)[0] for p in PROMPTS]
    together = detlab.two_stages(model, PROMPTS, 7, condition="tier=invariant,batch_size=3,padding_side=left", **lengths)
    assert [t.md5 for t in together] == [t.md5 for t in alone]
    assert [len(t.outline_tokens) for t in alone] == [4] * 3 and [len(t.text_tokens) for t in alone] == [12] * 3
    other = detlab.two_stages(model, PROMPTS, 8, **lengths)
    assert [t.outline_tokens for t in other] == [t.outline_tokens for t in alone]  # the outline draws nothing
    assert all(x.text_tokens != y.text_tokens for x, y in zip(other, alone, strict=True))
    greedy = detlab.run(model, PROMPTS, detlab.Condition(tier="invariant"), new_tokens=4, trace=False)
    assert greedy.tokens == [t.outline_tokens for t in alone]


def test_stock_draws_belong_to_the_batch(model):
    """The control: without a tier the same seed gives the same texts again, and others in another batch."""
    lengths = {"outline_tokens": 2, "text_tokens": 12, "temperature": 1.5}
    alone = [detlab.two_stages(model, [p], 7, condition="", **lengths)[0].md5 for p in PROMPTS]
    again = [detlab.two_stages(model, [p], 7, condition="", **lengths)[0].md5 for p in PROMPTS]
    together = detlab.two_stages(model, PROMPTS, 7, condition="batch_size=3,padding_side=left", **lengths)
    assert alone == again and [t.md5 for t in together][1:] != alone[1:]


def test_the_second_stage_reads_the_outline(model, monkeypatch):
    asked = []
    original = stages.run

    def run(model, prompts, *more, **others):
        asked.append(prompts)
        return original(model, prompts, *more, **others)

    monkeypatch.setattr(stages, "run", run)
    tokens, text = detlab.Prompt("t", tokens=(5, 6, 7)), detlab.Prompt("x", text="once")
    chat = detlab.Prompt("c", messages=({"role": "user", "content": "Why?"},))
    for prompt in (tokens, text):
        (made,) = detlab.two_stages(model, [prompt], 1, outline_tokens=2, text_tokens=2)
        follow = asked[-1][0]
        if prompt is tokens:
            assert follow.tokens == (5, 6, 7, *made.outline_tokens)
        else:
            assert follow.text == "once" + made.outline
        assert made.prompt_id == prompt.id and (made.text is None) == (prompt is tokens)  # of tokens no text is asked for
        assert f"{prompt.id}, seed 1" in str(made)
    first, second = stages._asked(chat), stages._followed(chat, "1. Tides", [])
    assert first.messages[0]["content"].startswith("Why?\n\n") and second.messages[0] == first.messages[0]
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user"] and second.messages[1]["content"] == "1. Tides"


def test_what_cannot_be_written(model):
    with pytest.raises(UsageError, match="condition='temperature=0.5' draws or has a seed of its own"):
        detlab.two_stages(model, PROMPTS, condition="temperature=0.5")
    with pytest.raises(UsageError, match="outline_tokens=0, text_tokens=96: give at least 1 of each"):
        detlab.two_stages(model, PROMPTS, outline_tokens=0)

