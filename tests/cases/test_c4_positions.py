"""Case C4 (transformers 18388): GPT-2 with left padding and no position ids is another question, not another rounding."""

import pytest
import torch

import detlab
from tests.bit_classes import bitwise_equal, module_tensors

LENGTH, PAD = 21, 4
TOKENS = torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-gpt2")[0]


def arguments(pad, with_positions):
    ids = torch.tensor([[256] * pad + TOKENS])
    mask = torch.tensor([[0] * pad + [1] * LENGTH])
    given = {"input_ids": ids, "attention_mask": mask}
    return given | ({"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if with_positions else {})


def captured(model, given):
    with torch.no_grad(), detlab.capture(model) as trace:
        model(**given)
    assert trace.unlaid == []
    return trace


def embedded(model, given):
    with torch.no_grad(), module_tensors(model) as calls:
        model(**given)
    return calls[0]["out transformer.wpe"]


def test_positions_that_the_model_counts_over_padding(model):
    plain, padded = arguments(0, False), arguments(PAD, False)
    # The truth: every token of the padded prompt gets the embedding of a position four further on.
    assert not bitwise_equal(embedded(model, plain)[0, :1], embedded(model, padded)[0, PAD : PAD + 1])
    a, b = captured(model, plain), captured(model, padded)
    for x, y in ((a, b), (b, a)):
        result = detlab.compare(x, y)
        assert result.verdict == "different_inputs"  # no rounding
        first = result.first
        assert (first.kind, first.module, first.op, first.position) == ("carrier", "transformer.wpe", "embedding", 0)
        assert not first.inputs_matched and first.num_rows == LENGTH  # every position, not the last tile's
        assert first.inputs == {"weight": "matched", "indices": "differs"}
        assert first.source == "input position_ids"
        assert "indices already differed (from input position_ids)" in str(result)
        assert not [d for d in result.origins if d.op_index < first.op_index]


@pytest.mark.parametrize("pad", [0, PAD])
def test_right_positions(model, pad):
    """The twin: with the positions counted over the mask, the embedding gets the same input and gives the same bits."""
    plain, padded = arguments(0, True), arguments(pad, True)
    assert bitwise_equal(embedded(model, plain)[0], embedded(model, padded)[0, pad:])
    result = detlab.compare(captured(model, plain), captured(model, padded))
    entries = [*result.origins, *result.carriers]
    assert not [d for d in entries if d.module in ("transformer.wpe", "transformer.wte", "transformer")]
    assert not [d for d in entries if d.source.startswith("input")]
    if result.first is not None:  # attention of a padded prompt may round otherwise: that is an origin, in another place
        assert pad and result.first.inputs_matched
    elif not pad:
        assert result.verdict == "identical"


def test_positions_that_the_model_makes_itself_are_right_without_padding(model):
    result = detlab.compare(captured(model, arguments(0, False)), captured(model, arguments(0, True)))
    assert result.verdict == "identical" and result.first is None


def test_generate_counts_positions_over_the_mask(model):
    def generate(pad):
        given = arguments(pad, False)
        out = model.generate(**given, do_sample=False, max_new_tokens=6, min_new_tokens=6)
        return out[0, pad + LENGTH :].tolist()

    with detlab.capture(model) as a:
        expected = generate(0)
    with detlab.capture(model) as b:
        padded = generate(PAD)
    assert padded == expected
    result = detlab.compare(a, b)
    entries = [*result.origins, *result.carriers]
    assert not [d for d in entries if d.module in ("transformer.wpe", "transformer.wte") or d.source.startswith("input")]
    assert result.rows_compared > 1000
    # The same call through forward, with the model's own count, chooses other tokens' logits: the symptom of the report.
    with torch.no_grad():
        own = model(**arguments(PAD, False)).logits[0, -1]
        right = model(**arguments(PAD, True)).logits[0, -1]
        alone = model(**arguments(0, False)).logits[0, -1]
    assert float((right - alone).abs().max()) < 1e-4 < 1e-2 < float((own - alone).abs().max())


def test_runs_give_positions(model):
    """The runner passes positions: padding is no other question there."""
    left = detlab.Condition(padding_side="left", padding=PAD)
    runs = [detlab.run(model, [TOKENS], c, new_tokens=2) for c in (detlab.Condition(), left)]
    result = detlab.compare(*runs)
    assert not [d for d in (*result.origins, *result.carriers) if d.module == "transformer.wpe"]
    assert result.first is None or result.first.inputs_matched
