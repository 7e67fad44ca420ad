"""Why an op gave other bits, proved on the op itself; planted mechanisms are named, and what is none is not."""

import copy

import pytest
import torch
import transformers

import detlab
from detlab import Condition
from detlab.divergence.explain_result import (
    ARRIVAL,
    BODY_AND_TAIL,
    INSTRUCTION_SET,
    KERNEL,
    NO_ORIGIN,
    NOT_REPRODUCED,
    PARTITION,
)
from detlab.divergence.replay import meet, sides_of
from detlab.errors import UsageError
from tests.bit_classes import padded_attention_rows, row_class_equal
from tests.test_planted_faults import Fault, one_ulp
from tests.why_cases import batch_case, cache_case, compared, padding_case, racing_sum, sum_in_order, tokens, with_sum


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    """Trees are recovered on a busy machine, too."""
    monkeypatch.setattr("detlab.divergence.explain_trees.MOST_SECONDS", 60.0)


def assert_proved(found):
    assert found.reproduced == (True, True) and found.is_faithful == (True, True) and found.differs_alone
    assert found.factor("repetition").moves is False and found.factor("repetition").tried == 30


def test_the_batch_case(model):
    """C1, with fresh processes: the libraries' logs name the kernel."""
    _, _, comparison = batch_case(model)
    found = detlab.explain(comparison)
    if comparison.first is None:
        assert found.mechanism.kind == NO_ORIGIN
        return
    assert_proved(found)
    rows = found.factor("number of rows")
    assert rows.leads_to_b and (rows.ours, rows.theirs) == ("1", "4")
    sizes = [int(n) for group in rows.classes for n in group]
    for group in rows.classes:  # the classes of the table are those that this machine was probed for
        for other in (n for n in sizes if str(n) not in group):
            assert not row_class_equal(torch.float32, 576, 576, *sorted((int(group[0]), other)))
    assert not found.factor("contents of the other").moves
    if found.trees_differ:
        assert found.mechanism.kind in (KERNEL, PARTITION) and "the number of rows (1 in a, 4 in b)" in str(found.mechanism)
        assert all(tree.is_confirmed for tree in found.trees)
    assert found.kernels[0] and found.kernels[1] and found.kernels[0][0].name == "mm"
    assert found.errors is not None and max(found.errors) < 1e-5
    assert found.seconds < 60  # 20 on an idle machine
    table = found.to_pandas()
    assert list(table.columns) == ["factor", "tried", "classes", "moves", "a", "b", "gives_b"] and len(table) >= 6
    assert found.to_json()["mechanism"] == found.mechanism.kind and "<li>" in found._repr_html_()


@pytest.mark.parametrize("pad", [3, 11])
def test_the_padding_case(model, pad):
    _, _, comparison = padding_case(model, pad)
    found = detlab.explain(comparison, processes=False)
    if not padded_attention_rows(torch.float32, 21, pad) or comparison.first is None:
        return
    assert_proved(found)
    assert found.mechanism.kind == PARTITION and "Same kernel, another partition" in str(found.mechanism)
    shape = found.factor("shape of the call around the row")
    assert shape.leads_to_b and "as in b, other contents" in shape.like_b  # the shape, and not what stands beside the row
    assert found.stages


def test_the_earlier_call(model):
    again, _, comparison = cache_case(model)
    if comparison.first is None:
        return
    found = detlab.explain(comparison, again=again, model=model, processes=False)
    assert_proved(found)
    assert found.mechanism.kind == PARTITION and found.factor("tokens after the row").leads_to_b
    carrier = next(d for d in comparison.carriers if d.call == 1)
    told = detlab.explain(carrier)
    assert told.mechanism.kind == NO_ORIGIN and "was given other inputs" in str(told)


def test_threads(model):
    """C8: the same kernel, split among threads."""
    own = detlab.load_model("tiny-llama", attention="sdpa")[0]
    _, _, comparison = compared(own, tokens(299, 6), Condition(threads=1), Condition(threads=2), new_tokens=2, measure=False)
    if comparison.first is None:
        return
    found = detlab.explain(comparison, processes=False, repetitions=5)
    assert found.reproduced == (True, True) and found.factor("threads").leads_to_b
    assert found.mechanism.kind == PARTITION and "the number of threads (1 in a, 2 in b)" in str(found.mechanism)


def test_another_instruction_set(model):
    _, _, comparison = compared(model, tokens(24), Condition(), Condition(aten_isa="avx2"), measure=False, controls=False)
    if comparison.first is None:
        return
    found = detlab.explain(comparison, processes=False)
    assert found.reproduced == (True, True) and found.factor("instruction set").leads_to_b
    assert found.mechanism.kind == INSTRUCTION_SET and "ATEN_CPU_CAPABILITY=avx2" in str(found.mechanism)


def test_another_address(model):
    """Weights four bytes off: the same kernel starts its vectors elsewhere."""
    _, _, comparison = compared(model, tokens(24), Condition(), Condition(alignment=4), new_tokens=2, measure=False)
    if comparison.first is None:
        return
    found = detlab.explain(comparison, processes=False, repetitions=3)
    assert found.reproduced == (True, True) and found.factor("memory address").leads_to_b
    assert found.mechanism.kind == PARTITION and "4 bytes past 64 in b" in str(found.mechanism)


def test_rows_of_another_length():
    """Softmax over the scores of a chunk: nothing can be changed in the op alone but the length of its rows, and it says so."""
    own = detlab.load_model("tiny-llama", dtype="bfloat16", attention="eager")[0]
    _, _, comparison = compared(own, tokens(37), Condition(), Condition(prefill_chunk=7), measure=False)
    origins = [d for d in comparison.origins if d.op == "_softmax"]
    if not origins:
        return
    found = detlab.explain(origins[0], processes=False, repetitions=3)
    of_the_op = [f for f in found.factors if f.name not in ("memory address", "dtype of accumulation")]
    assert found.reproduced == (True, True) and not any(f.moves for f in of_the_op)
    assert found.mechanism.kind == PARTITION and "the shapes of _softmax's inputs differ" in str(found.mechanism)


def test_vector_body_and_scalar_tail():
    """A row length that is no multiple of the vectors: the last row of a call ends in scalars, among others it does not."""
    sizes = {"hidden_size": 64, "intermediate_size": 154, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256, max_position_embeddings=64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own = transformers.LlamaForCausalLM(config).eval()
    x = torch.linspace(-4.0, 4.0, 23 * 154).view(1, 23, 154)
    alone, among = torch.nn.functional.silu(x), torch.nn.functional.silu(x.expand(4, -1, -1).contiguous())[:1]
    _, _, comparison = compared(own, tokens(23), Condition(), Condition(batch_size=4), controls=False)
    origins = [d for d in comparison.origins if d.op == "silu"]
    if not origins:  # the probe of random numbers, too, sees no tail here, or other ops part first
        assert torch.equal(alone, among) or comparison.origins
        return
    found = detlab.explain(origins[0], processes=False)
    assert_proved(found)
    assert found.mechanism.kind == BODY_AND_TAIL and found.tail, str(found)


# ------------------------------------------------------------------------------------------------------ planted mechanisms
def test_a_sum_of_four_parts_in_another_order(model):
    orders = ([0, 1, 2, 3], [3, 1, 2, 0])
    a, b = (with_sum(model, lambda x, order=order: sum_in_order(x, order)) for order in orders)
    runs = [detlab.run(m, [tokens(9)], new_tokens=0) for m in (a, b)]
    comparison = detlab.compare(*runs)
    assert comparison.first is not None and comparison.first.op == "detlab_planted.sum_in_order"
    found = detlab.explain(comparison, processes=False)
    assert_proved(found)
    assert found.factor("arguments that are no tensors").leads_to_b
    assert found.trees_differ and found.mechanism.kind == PARTITION
    assert "the accumulation trees differ" in str(found.mechanism)
    assert detlab.graft(*runs, comparison.first).alone.differing == 0


def test_a_sum_of_two_parts_in_another_order_is_the_same(model):
    a, b = (with_sum(model, lambda x, order=order: sum_in_order(x, order)) for order in ([0, 1], [1, 0]))
    runs = [detlab.run(m, [tokens(9)], new_tokens=0) for m in (a, b)]
    comparison = detlab.compare(*runs)
    assert comparison.verdict == "identical" and detlab.explain(comparison).mechanism.kind == NO_ORIGIN


@pytest.mark.parametrize("parts", [4, 2])
def test_arrival_order(model, parts):
    """A sum whose parts come in another order each time; with two parts, orders are the same sum."""
    racing = with_sum(model, lambda x: racing_sum(x, parts))
    runs = [detlab.run(racing, [tokens(9)], new_tokens=0) for _ in "ab"]
    comparison = detlab.compare(*runs, controls=False, measure=False)
    if parts == 2:
        assert comparison.verdict == "identical"
        return
    found = detlab.explain(comparison, processes=False)
    assert found.mechanism.kind == ARRIVAL and found.factor("repetition").moves
    assert "Arrival order: the same call, repeated" in str(found)


def test_what_is_no_property_of_the_op_is_not_explained(model):
    """A fault below the op in one of the runs: executed alone, the op does not give those bits, and this is said."""
    prompts = [[11, 12, 13, 14, 15, 16, 17], [21, 22, 23], [31, 32, 33, 34, 35]]
    a = detlab.run(model, prompts, new_tokens=0)
    with Fault(model, "model.layers.0.self_attn.q_proj", "mm", lambda t: one_ulp(t, 0, 2)):
        b = detlab.run(model, prompts, new_tokens=0)
    comparison = detlab.compare(a, b, controls=False, measure=False)
    assert comparison.first.inputs_matched
    found = detlab.explain(comparison, processes=False)
    assert found.mechanism.kind == NOT_REPRODUCED and found.is_faithful == (True, False)
    assert "does not give the bits of b" in str(found)


def test_a_carrier_is_no_mechanism(model):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight = twin.model.layers[0].self_attn.q_proj.weight
        weight += 0.01
    runs = [detlab.run(m, [tokens(9)], new_tokens=0) for m in (model, twin)]
    found = detlab.explain(detlab.compare(*runs))
    assert found.mechanism.kind == NO_ORIGIN and "parameter model.layers.0.self_attn.q_proj.weight" in str(found)


def test_what_explain_refuses():
    with pytest.raises(UsageError, match=r"explain takes a Divergence or a Comparison; got str"):
        detlab.explain("first")
    loose = detlab.Divergence("origin", "m", "mm", 0, 0, 0, "0", 0, {}, 1)
    with pytest.raises(UsageError, match="made by hand"):
        detlab.explain(loose)


def test_a_repetition_ends_with_the_op_that_was_wanted(model):
    """What comes after it is not executed; the model and its next run are as they were."""
    first, second, comparison = compared(model, tokens(8), Condition(), Condition(), new_tokens=4, measure=False)
    side = sides_of(comparison)[0]
    wanted = next(op.index for op in side.trace.ops if op.call == 1 and op.op == "mm")
    calls = []
    handle = model.register_forward_pre_hook(lambda module, args: calls.append(1))
    try:
        met = meet(side, wanted)
    finally:
        handle.remove()
    assert len(calls) == 2 and len(side.trace.calls) == 4
    assert met.record is not None
    assert met.record.digests.tolist() == side.trace.tensors[side.trace.ops[wanted].outputs[0]].digests.tolist()
    assert detlab.compare(first, second.replay()).verdict == "identical"


def test_rows_that_share_an_expert():
    """Another number of rows for an expert is what moves a product of sorted rows; held against the bit classes of mm."""
    experts = detlab.load_model("tiny-mixtral")[0]
    _, _, comparison = batch_case(experts)
    first = next((d for d in comparison.origins if d.op == "_grouped_mm"), None)
    if first is None:
        assert comparison.first is None or row_class_equal(torch.float32, 576, 576, 1, 4)
        return
    found = detlab.explain(first, processes=False)
    assert found.reproduced == (True, True)
    rows = found.factor("rows that share the row's expert")
    assert rows.leads_to_b and (int(rows.theirs), rows.moves) == (4 * int(rows.ours), True)
    assert "the number of rows that share the row's expert" in str(found.mechanism)
    assert found.mechanism.kind in (KERNEL, PARTITION) and found.trees_differ


def test_both_sides_are_one_sum_in_float64(model):
    """What differs by rounding alone agrees once everything is accumulated in float64, and is another number then."""
    _, _, comparison = batch_case(model)
    if comparison.first is None:
        return
    found = detlab.explain(comparison, processes=False)
    wide = found.factor("dtype of accumulation")
    assert wide.moves and wide.tried == 3
    assert ("float64, then rounded", "b's call in float64, then rounded") in wide.classes
    if found.trees_differ:  # both factors were drawn at random: how products are rounded is known
        assert {tree.arithmetic.products for tree in found.trees} <= {"rounded", "fused", "blocks"}


def test_a_kernel_that_fuses_is_another_than_one_that_rounds():
    """GPT-2's weights lie the other way in memory: terms follow each other in both kernels; one rounds products, one fuses."""
    own = detlab.load_model("tiny-gpt2")[0]
    _, _, comparison = batch_case(own)
    if comparison.first is None or comparison.first.op != "addmm":
        return
    found = detlab.explain(comparison, processes=False)
    ways = [tree.arithmetic.products for tree in found.trees]
    if ways[0] != ways[1] and "none" not in ways:
        assert found.mechanism.kind == KERNEL
        if "terms" not in found.mechanism.sentence:
            assert "rounds each product, then adds it" in str(found.mechanism) and "fused multiply-add" in str(found.mechanism)
