"""The causal check: a's rows put in at the named origin. It proves what is the cause, and does not prove what is not."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import detlab
from detlab import Condition
from detlab.divergence.graft import all_origins
from detlab.divergence.replay import meet, replay, sides_of
from detlab.errors import ModelError, UsageError
from tests.bit_classes import bitwise_equal, module_tensors, row_class_equal
from tests.why_cases import batch_case, cache_case, compared, padding_case, tokens


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.fixture(scope="module")
def batch(model):
    return batch_case(model)


def test_the_batch_case_is_proved(batch):
    a, b, comparison = batch
    if comparison.first is None:  # this machine has one class of rows here
        assert row_class_equal(torch.float32, 576, 576, 1, 4)
        return
    result = detlab.graft(a, b, comparison.first)
    assert result.proved and result.left is None and result.divergence is comparison.first
    assert result.before == len(comparison.origins) + len(comparison.carriers)
    if len(comparison.origins) > 1:  # q, k and v each compute other bits: one of them alone is not the whole cause
        assert 0 < result.alone.differing < result.before and result.kind.differing == 0
        assert result.alone.first.module != comparison.first.module
        assert "proved: with a's rows at all ops named mm" in str(result)
    assert result.to_json()["proved"] is True


def test_the_padding_case_is_proved(model):
    a, b, comparison = padding_case(model)
    if comparison.first is None:
        return
    result = detlab.graft(a, b, comparison.first)
    assert result.proved and result.alone.rows == comparison.first.num_rows


def test_the_earlier_call_is_proved_to_be_the_cause(model):
    again, traces, comparison = cache_case(model)
    if comparison.first is None:
        return
    result = detlab.graft(*traces, comparison.first, again=again, model=model)
    assert result.proved
    with pytest.raises(UsageError, match=r"bare traces cannot be executed again by themselves: give the model and again="):
        detlab.graft(*traces, comparison.first)


class Late(TorchDispatchMode):
    """A second fault, in another kind of op: every silu moves one ULP in some runs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::silu":
            result[..., 3] = torch.nextafter(result[..., 3], result.new_tensor(9.0))
        return result


def test_what_is_left_is_named(model, monkeypatch):
    """Two causes: the rows of one origin alone, and of its kind, leave the other."""
    a = detlab.run(model, [tokens(24)], new_tokens=2)
    serve = detlab.divergence.graft.replay

    def served(condition):
        with Late():
            return detlab.run(model, [tokens(24)], condition, new_tokens=2, force=a.tokens)

    b = served(Condition(batch_size=4))
    comparison = detlab.compare(a, b, controls=False, measure=False)
    origins = {d.op for d in comparison.origins}
    assert "silu" in origins
    if "mm" not in origins:
        return
    chosen = next(d for d in comparison.origins if d.op == "mm")

    def faulty(side, wanted=(), targets=None):
        if side.name == "b":
            with Late():
                return serve(side, wanted, targets)
        return serve(side, wanted, targets)

    monkeypatch.setattr("detlab.divergence.graft.replay", faulty)
    result = detlab.graft(a, b, chosen)
    assert not result.proved and result.left.op == "silu" and "not proved" in str(result)
    assert result.kinds == ["mm", "silu"] and result.complete and result.others.differing == 0
    assert "with a's rows at all ops named mm and silu, everything matches" in str(result)


def test_a_replay_without_rows_repeats_the_run(batch):
    """The control of the harness: nothing put in, nothing changed; and one ULP put in is seen downstream."""
    _, b, comparison = batch
    if comparison.first is None:
        return
    _, side = sides_of(comparison)
    trace, _ = replay(side)
    assert detlab.compare(b.trace, trace).verdict == "identical"
    found = next(f for f in comparison.detail.ops.differing() if f.a == comparison.first.op_index)
    met = meet(side, found.b)
    assert bitwise_equal(met.func(*met.args, **met.kwargs), met.output)


def test_origins_behind_origins_are_listed(model, batch):
    """The truth: each linear layer, given a's own input, alone and among four rows."""
    _, _, comparison = batch
    if comparison.first is None:
        return
    with module_tensors(model) as calls:
        detlab.run(model, [tokens(24)], new_tokens=2, trace=False)
    expected = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        row = calls[1][f"in {name}"]
        if not bitwise_equal(module(row)[0], module(row.expand(4, -1, -1).contiguous())[0].detach()):
            expected.append(name)
    found = all_origins(comparison)
    assert {o.module for o in found if o.op == "mm"} == set(expected)
    masked = [o for o in found if o.is_masked]
    assert len(found) - len(masked) == len(comparison.origins) and len(masked) > 0
    assert all(o.own > 0 and o.total >= 0 and o.call == 1 for o in found)


class Doubling(torch.nn.Module):
    """Stands for a decoder layer, and doubles what it is given: exact in any float."""

    def __init__(self, layer):
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states * 2.0


def test_a_layer_that_doubles_what_it_is_given(model):
    """A fault behind layer 0; layer 1 is known to double everything, and to add nothing of its own."""
    sound = copy.deepcopy(model)
    sound.model.layers[1] = Doubling(sound.model.layers[1])
    faulty = copy.deepcopy(sound)

    def fault(module, args, output):
        output[0, 3, 5] += 0.25

    faulty.model.layers[0].mlp.down_proj.register_forward_hook(fault)
    runs = [detlab.run(one, [tokens(9)], new_tokens=0) for one in (sound, faulty)]
    first, second = detlab.compare(*runs, controls=False, measure=False).amplification()
    assert first.factor is None and first.outgoing == 0 and first.own == pytest.approx(0.25 / (9 * 576) ** 0.5)
    assert (second.incoming, second.own, second.factor) == (first.own, 0.0, 2.0)
    same = detlab.compare(runs[0], runs[0], controls=False, measure=False).amplification()
    assert all((one.incoming, one.outgoing, one.own, one.factor) == (0.0, 0.0, 0.0, None) for one in same)


def test_amplification_of_the_batch_case(model, batch):
    """What comes in is what the layer before handed on; rounding in a layer is about as large as what reaches it."""
    _, _, comparison = batch
    if comparison.first is None:
        return
    for prompt in (-1, len(comparison.prompt_ids)):  # rows of no prompt would be an empty answer
        with pytest.raises(UsageError, match=f"^prompt={prompt} is not possible; give a number from 0 to"):
            comparison.amplification(prompt=prompt)
    gains = comparison.amplification()
    assert [one.layer for one in gains] == [0, 1]
    assert gains[0].incoming == 0 and gains[0].factor is None and gains[0].outgoing == 0 and gains[0].own > 0
    assert gains[1].incoming == gains[0].own and gains[1].own > 0
    assert gains[1].factor == gains[1].outgoing / gains[1].incoming and 0.1 < gains[1].factor < 100


def test_what_cannot_be_grafted_says_why(model, batch):
    a, b, comparison = batch
    twins = [detlab.run(model, [tokens(9)], new_tokens=0) for _ in "ab"]
    with pytest.raises(UsageError, match="graft needs an origin, an op whose inputs matched"):
        detlab.graft(*twins)
    if comparison.first is not None:
        carrier = comparison.carriers[0]
        with pytest.raises(UsageError, match=r"graft needs an origin; .* only carried a difference on"):
            detlab.graft(a, b, carrier)
        with pytest.raises(UsageError, match="belongs to another comparison"):
            detlab.graft(b, a, comparison.first)


def test_a_model_that_is_gone_is_said():
    own = detlab.load_model("tiny-gpt2")[0]
    a, b, comparison = compared(own, tokens(24), Condition(), Condition(batch_size=4), new_tokens=2, controls=False)
    if comparison.first is None:
        return
    a._source.model = b._source.model = comparison.sides[1]._source.model = lambda: None
    with pytest.raises(ModelError, match="is gone"):
        detlab.graft(a, b, comparison.first)
