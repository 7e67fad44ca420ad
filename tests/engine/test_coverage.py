"""Coverage names each op whose bits may depend on the batch, with its module; strict mode refuses the model."""

import json

import pytest
import torch

import detlab
from detlab.coverage import Coverage
from detlab.engine import observer
from detlab.errors import CoverageError
from detlab.models import FAMILIES


@pytest.fixture
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_op_of_the_families_is_covered_or_safe(name):
    found = detlab.coverage(detlab.load_model(name)[0])
    assert found.holds and found.uncovered == []
    counts = found.counts()
    assert counts["covered"] > 40 and counts["safe"] > 40 and counts["uncovered"] == 0
    assert f"{counts['covered']} covered" in str(found) and found.model == found.to_json()["model"]
    assert detlab.coverage(detlab.load_model(name)[0]).to_json() == found.to_json()


def plant(model, function):
    """Adds something to the output of the first layer's MLP."""

    class Mixed(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return super().forward(x) + function(x)

    model.model.layers[0].mlp.__class__ = Mixed


def rows_of(x):
    return x.reshape(-1, x.shape[-1])


@pytest.mark.parametrize(
    ("op", "function", "reason"),
    [
        ("bmm", lambda x: torch.bmm(x, x.new_ones(x.shape[0], x.shape[-1], x.shape[-1])) * 1e-3, "a matrix product"),
        ("sum", lambda x: x.sum(0, keepdim=True), "it reduces over other dimensions than the last"),
        ("mean", lambda x: x.mean((0, 1), keepdim=True), "it reduces over other dimensions than the last"),
        ("mm", lambda x: (rows_of(x) @ x.new_ones(x.shape[-1], x.shape[-1])).view_as(x) * 1e-3, "a matrix product"),
        ("cumsum", lambda x: rows_of(x).cumsum(0).view_as(x), "it reduces over other dimensions than the last"),
    ],
)
def test_a_planted_op_is_named_with_its_module(model, op, function, reason):
    plant(model, function)
    found = detlab.coverage(model)
    assert {(o.module, o.op) for o in found.uncovered} == {("model.layers.0.mlp", f"aten::{op}")}
    assert reason in found.uncovered[0].reason and not found.holds
    assert f"uncovered: model.layers.0.mlp · aten::{op}" in str(found)
    with pytest.raises(CoverageError) as caught:
        with detlab.deterministic(model):
            pass
    assert str(caught.value).startswith(f"model.layers.0.mlp · aten::{op} is not covered by tier 'invariant'")
    assert "Use strict=False to run without this op's invariance" in str(caught.value)
    with detlab.deterministic(model, strict=False):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_the_model_is_left_as_it_was(model):
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        detlab.coverage(model)
        assert torch.equal(model(input_ids=ids).logits.view(torch.int32), before.view(torch.int32))
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


def test_class_maps_of_the_kernels_that_ran_are_shown(model):
    found = detlab.coverage(model)
    assert all(known.members and known.words in str(found) for known in found.class_maps if "linear/" in known.kernel)
    sizes = {known.kernel.split()[-2] for known in found.class_maps}
    assert {"576x1024", "1536x576"} <= sizes and "576x49152" not in sizes  # of this model's layers, and of no other's
    text = next(known.words for known in found.class_maps if " 1536x576 " in known.kernel)
    assert ": one class at " in text and " rows" in text and text in found._repr_html_()
    data = json.loads(json.dumps(found.to_json()))
    assert Coverage.from_json(data) == found
    assert {"kernel", "words", "members", "others"} == set(data["class_maps"][0])
    assert detlab.coverage(model, "exact").class_maps == []


def test_inside_a_block_the_maps_are_seen_too(model):
    with detlab.deterministic(model):
        assert detlab.coverage(model).class_maps


def test_text_is_escaped(model):
    model.__class__ = type("<b>Odd</b>", (type(model),), {})
    html = detlab.coverage(model)._repr_html_()
    assert "<b>Odd" not in html and "&lt;b&gt;Odd" in html


class SumOfAnotherOrder:
    """A row-wise sum that adds its last eight terms first where it is given so many rows."""

    _schema = torch.ops.aten.sum.dim_IntList._schema

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, x, dim, keepdim=False):
        if len(x) == self.rows:
            x = torch.cat([x[:, -8:], x[:, :-8]], 1)
        return x.sum(dim, keepdim)


@pytest.mark.parametrize("rows", [2, 7])
def test_a_sum_whose_order_follows_the_number_of_rows_is_uncovered(rows):
    values = torch.ones(4, 64)  # the model's own values show nothing: each sum of ones is exact
    assert observer._measure(torch.ops.aten.sum.dim_IntList, (values, [-1]), {})[0] == "safe"
    status, reason = observer._measure(SumOfAnotherOrder(rows), (values, [-1]), {})
    assert status == "uncovered" and "measured here: a row's bits change with the rows around it" in reason
