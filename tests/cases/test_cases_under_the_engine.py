"""Cases C1, C3, C8 and C9 under the invariant tier: the pairs that part become bit-identical.

The control is the same pair on the stock model, which must part wherever this machine's probed classes say so.
"""

import pytest
import torch

import detlab
from detlab import Condition
from tests.bit_classes import padded_attention_rows, row_class_equal

PROMPTS = [[(7 * i + 13 * j) % 250 + 3 for i in range(24)] for j in range(4)]
LONG = [[(11 * i) % 250 + 3 for i in range(300)]]


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


def pair(model, prompts, a, b, new_tokens, **engine):
    """Runs two settings; under the engine where ``engine`` names a tier."""
    return tuple(detlab.run(model, prompts, Condition(**settings, **engine), new_tokens=new_tokens) for settings in (a, b))


CASES = {
    "C1 batch": (PROMPTS[:1], {}, {"batch_size": 4}, 3),
    "C3 padding": ([p[:21] for p in PROMPTS[:1]], {}, {"padding_side": "left", "padding": 11}, 1),
    "C8 threads": (LONG, {"threads": 1}, {"threads": 2}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_pair_is_identical(model, case):
    prompts, a, b, new_tokens = CASES[case]
    first, second = pair(model, prompts, a, b, new_tokens, tier="invariant")
    result = detlab.compare(first, second)
    assert result.verdict == "identical"
    assert first.md5 == second.md5
    assert first.tokens == second.tokens


def test_the_stock_pairs_part_where_the_probes_say_so(model):
    for case, must_part in {
        "C1 batch": not row_class_equal(torch.float32, 576, 576, 1, 4),
        "C3 padding": bool(padded_attention_rows(torch.float32, 21, 11)),
    }.items():
        prompts, a, b, new_tokens = CASES[case]
        first, second = pair(model, prompts, a, b, new_tokens)
        assert (first.md5 != second.md5) >= must_part, case


def test_c9_a_sampled_text_belongs_to_its_prompt(model):
    """Alone, in a batch of four, and with the rows permuted: one text for each prompt."""
    settings = {"temperature": 0.8, "seed": 42, "tier": "invariant"}
    alone = detlab.run(model, PROMPTS, Condition(**settings), new_tokens=6)
    for row in range(4):
        ways = {"batch_size": 4, "padding_side": "left", "row": row}
        together = detlab.run(model, PROMPTS, Condition(**settings, **ways), new_tokens=6)
        assert together.tokens == alone.tokens and together.md5 == alone.md5
    other = detlab.run(model, PROMPTS, Condition(**settings | {"seed": 43}), new_tokens=6)
    assert other.tokens != alone.tokens


def test_c9_the_stock_stream_is_shared_by_the_batch(model):
    alone = detlab.run(model, PROMPTS[1:2], Condition(temperature=0.8, seed=42), new_tokens=6)
    together = detlab.run(model, PROMPTS, Condition(temperature=0.8, seed=42, batch_size=4, padding_side="left"), new_tokens=6)
    assert together.tokens[1] != alone.tokens[0]
