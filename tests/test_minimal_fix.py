"""The smallest fix: delta debugging against planted answers, and on cases whose answer is known."""

import json
import random
from dataclasses import replace

import pytest
import torch

import detlab
from detlab import serving
from detlab.engine.session import session_of
from detlab.errors import UsageError
from detlab.remedies.minimal import MINIMAL, NOT_FIXED, NOTHING, SMALL, Part, _Search, ddmin
from tests.bit_classes import bitwise_equal, padded_attention_rows, row_class_equal

PROMPT = [[(7 * i) % 250 + 3 for i in range(24)]]
# The tier's parts in tiny-llama of two layers: 7 linear layers each and the head, 2 norms each and the last, and the rest.
PARTS = {"linear": 15, "norm": 5, "activation": 2, "rotary": 1, "attention": 1}
OF = sum(PARTS.values())
SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 1024))


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama", attention="sdpa")[0]


def parts(count):
    return [Part(f"layers.{i}", "linear") for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 19, 40])
@pytest.mark.parametrize("needed", [0, 1, 2, 7, 40])
def test_ddmin_finds_what_was_planted(count, needed):
    items = parts(count)
    planted = frozenset(random.Random(f"{count} {needed}").sample(items, min(count, needed)))
    asked = set()

    def agrees(chosen):
        asked.add(chosen)
        return planted <= chosen

    assert frozenset(ddmin(items, agrees)) == planted
    assert len(asked) <= 3 * count + 8 * max(1, len(planted)) * count.bit_length()


def test_ddmin_keeps_one_of_two_that_do_alike():
    items = parts(9)
    found = ddmin(items, lambda chosen: items[2] in chosen or items[6] in chosen)
    assert found in ([items[2]], [items[6]])


def test_ddmin_is_minimal_one_element_at_a_time():
    """Also where a set does more than its parts: two that only help together, or a third alone."""
    items = parts(12)

    def agrees(chosen):
        return {items[1], items[8]} <= chosen or items[5] in chosen and items[11] in chosen and items[0] in chosen

    found = ddmin(items, agrees)
    assert agrees(frozenset(found))
    assert not any(agrees(frozenset(found) - {part}) for part in found)


def test_c1_needs_the_linear_layers(model):
    made = detlab.minimal_fix(model, PROMPT, "", "batch_size=4", new_tokens=2)
    assert session_of(model) is None and model.config._attn_implementation == "sdpa"
    assert serving.TIER_HOOK == "detlab.deterministic:serving_under"
    classes = {shape: row_class_equal(torch.float32, *shape, 1, 4) for shape in SHAPES}
    if made.verdict == NOTHING:
        assert any(classes.values())
        return
    assert made.verdict == MINIMAL and made.prompts == 1 and made.of == OF
    assert all(count == 1 for count in made.without.values()) and list(made.without) == made.parts
    if not any(classes.values()):
        assert made.kinds() == {"linear": PARTS["linear"]}
        assert "model.layers.0.self_attn.q_proj" in {p.module for p in made.parts}
    # The set does what it says through the public way in, the model called by hand: and not without its last part.
    for chosen in (made.parts, made.parts[:-1]):
        with detlab.deterministic(model, strict=False, options=replace(made, parts=chosen).options()), torch.no_grad():
            rows = [decoded(model, count) for count in (1, 4)]
        assert bitwise_equal(*rows) == (chosen == made.parts)


def decoded(model, count):
    """Logits of one decoded token, by the model's own cache, in a batch of so many alike."""
    first = model(torch.tensor(PROMPT * count), use_cache=True)
    return model(torch.tensor([[7]] * count), cache=first.cache, use_cache=True).logits[0]


@pytest.fixture(scope="module")
def c3(model):
    return detlab.minimal_fix(model, [PROMPT[0][:21]], "", "padding_side=left,padding=11", new_tokens=1)


def test_c3_needs_the_attention(c3):
    if c3.verdict == NOTHING:
        assert not padded_attention_rows(torch.float32, 21, 11)
        return
    assert c3.verdict == MINIMAL
    assert Part("", "attention") in c3.parts or not padded_attention_rows(torch.float32, 21, 11)
    if all(row_class_equal(torch.float32, *shape, 21, 32) for shape in SHAPES):
        assert c3.parts == [Part("", "attention")] and f"they agree with 1 of the {OF} parts" in str(c3)


def test_the_result_in_every_form(c3):
    data = json.loads(json.dumps(c3.to_json()))
    assert data["verdict"] == c3.verdict and len(data["parts"]) == len(c3.to_pandas()) == len(c3.parts)
    assert "a = default, b = padding_side=left,padding=11" in c3._repr_html_()
    hostile = replace(c3, verdict=MINIMAL, parts=[Part("<script>", "linear")])
    assert "<script>" not in hostile._repr_html_()


def test_nothing_to_fix(model):
    made = detlab.minimal_fix(model, PROMPT, "", "", new_tokens=1)
    assert made.verdict == NOTHING and made.parts == [] and "nothing to fix" in str(made)


def test_a_search_that_ends_early_says_so(model, monkeypatch):
    def planted(self, chosen):  # what differs is planted; the search and its count are real
        return int(not {Part("lm_head", "linear"), Part("", "attention")} <= chosen)

    monkeypatch.setattr(_Search, "differing", planted)
    full = detlab.minimal_fix(model, PROMPT, "", "", new_tokens=0)
    assert full.verdict == MINIMAL and set(full.parts) == {Part("lm_head", "linear"), Part("", "attention")}
    monkeypatch.undo()
    early = detlab.minimal_fix(model, PROMPT, "", "batch_size=4", new_tokens=2, max_tests=5)
    if early.verdict != NOTHING:
        assert early.verdict == SMALL and early.tests == 5 and "not proved minimal: the search ended" in str(early)
        assert 0 < len(early.parts) <= early.of and early.without == {}


def test_what_the_tier_does_not_fix(model):
    made = detlab.minimal_fix(model, PROMPT, "", "dtype=bfloat16", new_tokens=1)
    assert made.verdict == NOT_FIXED and made.parts == [] and f"part even with all {OF} parts" in str(made)


@pytest.mark.parametrize(
    ("b", "why"),
    [
        ("mkl_isa=AVX2", "runs in this process, and mkl_isa=AVX2 needs a fresh one: start Python with MKL_CBWR=AVX2"),
        ("compile=mlp", "cannot combine compile='mlp' with a tier's parts"),
        ("autocast=bfloat16", "cannot combine autocast='bfloat16'"),
        ("tier=invariant", "give conditions of tier 'stock', not 'invariant'"),
        ("attention=eager", "needs one attention implementation on both sides"),
    ],
)
def test_conditions_that_cannot_be_searched(model, b, why):
    with pytest.raises(UsageError) as caught:
        detlab.minimal_fix(model, PROMPT, "", b)
    assert why in str(caught.value)
    with pytest.raises(UsageError, match="max_tests=0"):
        detlab.minimal_fix(model, PROMPT, max_tests=0)
