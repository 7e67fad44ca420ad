"""How a condition serves: caches, autocast, aligned and moved copies, compiled modules, drawn tokens; undone afterwards."""

import copy

import pytest
import torch

import detlab
from detlab import Condition
from detlab.errors import MachineError, UsageError
from detlab.serving import choose, served_model, settings
from tests.bit_classes import bitwise_equal, draw

DENSE = ("tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-gemma3")
PROMPTS = [[11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 26, 27]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


class Stop(Exception):
    pass


def stop(*what):
    raise Stop


# ------------------------------------------------------------------------------------------------------------ caches
@pytest.mark.parametrize("name", DENSE)
def test_a_static_cache_gives_the_tokens_of_a_dynamic_one(name):
    model = detlab.load_model(name)[0]
    prompts = [list(range(3, 73)), [5, 6, 7]]  # the first is longer than Gemma's window
    dynamic, static = (
        detlab.run(model, prompts, Condition(cache=cache, batch_size=2, padding_side="left"), new_tokens=4)
        for cache in ("dynamic", "static")
    )
    assert static.tokens == dynamic.tokens
    writes = [{op.op for op in r.trace.ops if op.op.startswith("index_copy")} for r in (dynamic, static)]
    assert writes == [set(), {"index_copy_"}]  # keys and values went into buffers of the final length
    for a, b in zip(dynamic.logits, static.logits, strict=True):
        assert float((a - b).abs().max()) < 1e-4
    again = detlab.run(model, prompts, Condition(cache="static", batch_size=2, padding_side="left"), new_tokens=4)
    result = detlab.compare(static, again, controls=False)
    assert result.verdict == "identical" and result.first is None
    # A full window of Gemma's static cache rolls its slots, which is not followed: it is said, and not compared.
    lost = {op.module for op in static.trace.unlaid}
    assert lost == ({"model.layers.0.self_attn"} if name == "tiny-gemma3" else set())
    assert any("unlaid" in note for note in result.notes) == bool(lost)
    result = detlab.compare(dynamic, static, controls=False, measure=False)
    if result.logits_equal is False:
        assert result.verdict != "identical"


# ---------------------------------------------------------------------------------------- settings of the process
def test_autocast_is_on_during_the_run_alone(model):
    seen = []

    def look(*what):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    cast = detlab.run(model, PROMPTS, Condition(autocast="bfloat16"), new_tokens=1, progress=look)
    assert seen == [(True, torch.bfloat16)] * 2
    assert not torch.is_autocast_enabled("cpu")
    plain = detlab.run(model, PROMPTS, new_tokens=1)
    assert cast.md5 != plain.md5 and cast.environment.to_json()["flags"]["autocast_cpu"] != "False"
    assert any(t.dtype == "bfloat16" for t in cast.trace.tensors)
    assert detlab.run(model, PROMPTS, Condition(autocast="bfloat16"), new_tokens=1).md5 == cast.md5
    with pytest.raises(Stop):
        detlab.run(model, PROMPTS, Condition(autocast="bfloat16"), new_tokens=1, progress=stop)
    assert not torch.is_autocast_enabled("cpu")
    assert detlab.run(model, PROMPTS, new_tokens=1, trace=False).md5 == plain.md5


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("error", [None, Stop])
def test_deterministic_algorithms_are_undone(before, error):
    flag, warn_only = before
    try:
        torch.use_deterministic_algorithms(flag, warn_only=warn_only)
        try:
            with settings(Condition(deterministic_algorithms=True, threads=2), CPU):
                assert torch.are_deterministic_algorithms_enabled()
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
                if error is not None:
                    raise error
        except Stop:
            assert error is Stop
        assert torch.are_deterministic_algorithms_enabled() == flag
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        with settings(Condition(), CPU):  # a condition that says nothing leaves the flag alone
            assert torch.are_deterministic_algorithms_enabled() == flag
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_are_recorded_and_change_no_bit(model):
    run = detlab.run(model, PROMPTS, Condition(deterministic_algorithms=True), new_tokens=2)
    assert run.environment.to_json()["flags"]["deterministic_algorithms"] is True
    result = detlab.compare(detlab.run(model, PROMPTS, new_tokens=2), run)
    assert result.verdict == "identical" and not torch.are_deterministic_algorithms_enabled()


# ------------------------------------------------------------------------------------------------- copies of the model
@pytest.mark.parametrize("offset", [4, 16, 60])
def test_aligned_copies_lie_where_they_are_asked_to(model, offset):
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    with served_model(model, Condition(alignment=offset)) as served:
        assert served is not model
        for (name, ours), theirs in zip(served.named_parameters(), model.parameters(), strict=True):
            assert ours.data_ptr() % 64 == offset, name
            assert bitwise_equal(ours, theirs) and ours.is_contiguous()
    for parameter, (at, value) in zip(model.parameters(), before, strict=True):
        assert parameter.data_ptr() == at and bitwise_equal(parameter, value)
    with served_model(model, Condition()) as served:
        assert served is model


def test_alignment_that_fits_no_element(model):
    with pytest.raises(UsageError) as caught:
        detlab.run(model, PROMPTS, Condition(alignment=2), new_tokens=1)
    assert str(caught.value) == "alignment=2 does not fit 4-byte elements; give a multiple of 4."
    half = detlab.run(model, PROMPTS, Condition(alignment=2, dtype="bfloat16"), new_tokens=1, trace=False)
    assert half.tokens == detlab.run(model, PROMPTS, Condition(dtype="bfloat16"), new_tokens=1, trace=False).tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_here(model, device):
    with pytest.raises(MachineError) as caught:
        detlab.run(model, PROMPTS, Condition(device=device), new_tokens=1)
    start = f"device={device!r} is not to be had on this machine: "
    assert str(caught.value).startswith(start) and len(str(caught.value)) > len(start) and "\n" not in str(caught.value)


def test_the_own_device_by_name_is_the_model_itself(model):
    with served_model(model, Condition(device="cpu")) as served:
        assert served is model


def test_a_module_to_compile_that_is_not_there(model):
    with pytest.raises(UsageError) as caught:
        detlab.run(model, PROMPTS, Condition(compile="attention"), new_tokens=1)
    assert str(caught.value) == (
        "compile='attention': no module of LlamaForCausalLM has this name; there are 0, 1, act_fn, down_proj, embed_tokens, "
        "gate_proj, input_layernorm, k_proj, layers, lm_head, mlp, model."
    )


def test_a_forward_that_was_replaced_is_not_compiled(model):
    patched = copy.deepcopy(model)
    head = patched.lm_head
    head.forward = lambda x, old=head.forward: old(x)
    with pytest.raises(UsageError) as caught:
        detlab.run(patched, PROMPTS, Condition(compile="lm_head"), new_tokens=1)
    assert str(caught.value) == "compile='lm_head': the forward of such a module was replaced already; undo that first."
    assert "forward" in vars(head)


# ---------------------------------------------------------------------------------------------------- drawn tokens
def test_choosing_the_likeliest_or_drawing():
    logits = draw(4, 50)
    assert torch.equal(choose(logits, Condition()), logits.argmax(-1))
    torch.manual_seed(1)
    expected = torch.multinomial((logits / 0.5).softmax(-1), 1)[:, 0]
    torch.manual_seed(1)
    assert torch.equal(choose(logits, Condition(temperature=0.5)), expected)
    best = logits.topk(3).indices
    for seed in range(20):
        torch.manual_seed(seed)
        chosen = choose(logits, Condition(temperature=5.0, top_k=3))
        assert all(int(token) in row.tolist() for token, row in zip(chosen, best, strict=True))
    assert torch.equal(choose(logits, Condition(temperature=9.0, top_k=1)), logits.argmax(-1))
    assert choose(logits, Condition(temperature=1.0, top_k=500)).shape == (4,)  # more than there are


def test_drawing_is_reproducible_by_its_seed(model):
    condition = Condition(temperature=1.0, top_k=40, seed=11)
    one, two = (detlab.run(model, PROMPTS, condition, new_tokens=8) for _ in "ab")
    assert one.tokens == two.tokens and detlab.compare(one, two).verdict == "identical"
    other = detlab.run(model, PROMPTS, Condition(temperature=1.0, top_k=40, seed=12), new_tokens=8, trace=False)
    greedy = detlab.run(model, PROMPTS, new_tokens=8, trace=False)
    assert len({str(r.tokens) for r in (one, other, greedy)}) == 3


@pytest.mark.parametrize("settings_", [{"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_k": 0}])
def test_one_prompt_draws_the_tokens_of_generate(model, settings_):
    run = detlab.run(model, PROMPTS[:1], Condition(seed=4, **settings_), new_tokens=8, trace=False)
    torch.manual_seed(4)
    ids = torch.tensor(PROMPTS[:1])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_p=1.0, max_new_tokens=8,
                              min_new_tokens=8, **settings_)  # fmt: skip
    if model.config.eos_token_id not in run.tokens[0]:  # min_new_tokens keeps generate from drawing the end token
        assert run.tokens[0] == expected[0, ids.shape[1] :].tolist()
    assert run.tokens[0] != detlab.run(model, PROMPTS[:1], new_tokens=8, trace=False).tokens[0]


def test_the_stream_of_draws_is_shared_by_the_batch(model):
    """Case C9: rows change places, logits stay, and each row draws what its neighbour drew: no arithmetic differs."""
    base = {"batch_size": 2, "padding_side": "left", "temperature": 1.0, "seed": 42}
    a, b = (detlab.run(model, PROMPTS, Condition(**base, row=row), new_tokens=1) for row in (0, 1))
    result = detlab.compare(a, b)
    note = "tokens differ although the logits are bitwise equal: the random draws differ, not the arithmetic"
    assert a.tokens != b.tokens and {f.step for f in result.token_flips} == {0}
    assert result.logits_equal == (a.md5 == b.md5)
    if not result.logits_equal:  # on this machine the row's place in the batch changes bits
        assert result.verdict == "diverged" and note not in result.notes
        return
    assert result.verdict == "diverged" and result.first is None and result.origins == result.carriers == []
    assert note in result.notes and f"note: {note}" in str(result)
    # The twin: greedy, the rows may sit where they like.
    c, d = (detlab.run(model, PROMPTS, Condition(batch_size=2, padding_side="left", row=row), new_tokens=1) for row in (0, 1))
    greedy = detlab.compare(c, d)
    assert greedy.verdict == "identical" and note not in greedy.notes and greedy.token_flips == []


def test_other_seeds_alone_are_no_divergence_of_the_arithmetic(model):
    a, b = (detlab.run(model, PROMPTS, Condition(temperature=1.0, seed=seed), new_tokens=4) for seed in (1, 2))
    result = detlab.compare(a, b)
    assert result.teacher_forced and result.logits_equal  # b was fed a's tokens: one and the same computation
    assert result.verdict == "diverged" and result.first is None and result.token_flips
    assert any("the random draws differ, not the arithmetic" in note for note in result.notes)
