"""Traces under the exact tier: a part is one op, whose rows are followed; how it cuts its work shows nowhere."""

import copy

import pytest
import torch

import detlab
from detlab import Condition

PROMPTS = [[(5 * i + 11 * j) % 250 + 3 for i in range(length)] for j, length in enumerate((21, 9, 34))]
TOGETHER = {"batch_size": 3, "padding_side": "left", "row": 1}


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral"])
def test_parts_are_laid_out_and_identical(name):
    model = detlab.load_model(name)[0]
    alone = detlab.run(model, PROMPTS, Condition(tier="exact"), new_tokens=2)
    for other in (Condition(tier="exact", batch_size=4), Condition(tier="exact", **TOGETHER))[name == "tiny-mixtral" :]:
        together = detlab.run(model, PROMPTS, other, new_tokens=2)
        result = detlab.compare(alone, together)
        assert result.verdict == "identical" and alone.md5 == together.md5
        assert {record.op for record in together.trace.unlaid} == set()
    ops = {record.op for record in alone.trace.ops}
    assert {"detlab.exact_linear", "detlab.exact_norm", "detlab.exact_attention"} <= ops and "_int_mm" not in ops
    assert not {op for op in ops if op.startswith("onednn")}
    untraced = detlab.run(model, PROMPTS, Condition(tier="exact"), new_tokens=2, trace=False)
    assert untraced.md5 == alone.md5


def test_a_weight_off_by_a_little_is_found_at_its_module():
    model = detlab.load_model("tiny-llama")[0]
    faulty = copy.deepcopy(model)
    where = "model.layers.1.mlp.down_proj"
    with torch.no_grad():
        flat = faulty.get_submodule(where).weight.view(-1).view(torch.int32)
        flat += 1
    runs = [detlab.run(m, PROMPTS, Condition(tier="exact"), new_tokens=1) for m in (model, faulty)]
    result = detlab.compare(*runs)
    assert result.verdict == "diverged" and result.first.inputs_matched
    assert (result.first.module, result.first.op) == (where, "detlab.exact_linear")
