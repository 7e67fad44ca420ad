"""The kind of a difference: planted faults are each named, and rounding is called rounding only where it is."""

import copy
from contextlib import contextmanager

import pytest
import torch

import detlab
from detlab import Condition
from detlab.divergence.replay import sides_of
from detlab.divergence.triage_probes import reads_other_tokens
from detlab.divergence.triage_result import RUN_TO_RUN, SEMANTICS, STATE
from detlab.errors import UsageError
from tests.why_cases import batch_case, compared, padding_case, racing_sum, tokens, with_sum

PROMPT = tokens(12, 9)


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


def against(model, other, new_tokens=0, **options):
    """The verdict on two models under one condition."""
    runs = [detlab.run(m, [PROMPT], new_tokens=new_tokens) for m in (model, other)]
    return detlab.triage(detlab.compare(*runs, controls=False, measure=False), **({"noise": False} | options))


def bare(model, first, second, **options):
    """The verdict on two calls of the model: arguments of forward, or functions of the model."""
    def serve(given):
        with torch.no_grad():
            return given() if callable(given) else model(**given)

    traces = []
    for given in (first, second):
        with detlab.capture(model) as trace:
            serve(given)
        traces.append(trace)
    again = [lambda: serve(first), lambda: serve(second)]
    comparison = detlab.compare(*traces)
    return detlab.triage(comparison, again=again, model=model, **options), comparison


# ------------------------------------------------------------------------------------------------------------ rounding
def test_another_batch_size_is_rounding_within_the_noise(model):
    _, _, comparison = batch_case(model)
    found = detlab.triage(comparison)
    if comparison.first is None:
        assert found.verdict == "identical"
        return
    assert (found.verdict, found.cause) == ("rounding", "mm")
    assert found.noise is not None and len(found.noise.measured) >= 3
    assert found.size is not None and 0 < found.size < 1e-3 and found.nearer in ("a", "b", "neither")
    assert found.is_acceptable == (found.size <= 2 * found.noise.largest) and "path noise" in found.size_words()
    assert [one.layer for one in found.growth] == [-1, 0, 1] and all(one.max_abs >= 0 for one in found.growth)
    assert found.to_json()["verdict"] == "rounding" and "<strong>rounding" in found._repr_html_()


def test_padding_is_rounding(model):
    _, _, comparison = padding_case(model)
    found = detlab.triage(comparison, noise=False)
    assert found.verdict == ("identical" if comparison.first is None else "rounding")


def test_two_formats_under_a_tier_are_measured(model):
    """The noise is measured around a run under a tier, too, which takes no other attention."""
    conditions = (Condition(tier="invariant"), Condition(tier="invariant", dtype="bfloat16"))
    runs = [detlab.run(model, [PROMPT], condition, new_tokens=1) for condition in conditions]
    found = detlab.triage(detlab.compare(*runs, controls=False, measure=False))
    assert found.noise is None or found.noise.largest == 0


def test_equal_runs_get_no_verdict_but_identical(model):
    _, _, comparison = compared(model, PROMPT, Condition(), Condition())
    found = detlab.triage(comparison)
    assert (found.verdict, found.cause, found.evidence) == ("identical", "", [])


# ------------------------------------------------------------------------------------------------------- planted faults
def test_a_weight_that_is_off_by_one_ulp(model):
    """Smaller than the noise, and no rounding."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight = twin.model.layers[0].post_attention_layernorm.weight
        weight[40] = torch.nextafter(weight[40], weight.new_tensor(9.0))
    found = against(model, twin)
    assert (found.verdict, found.cause) == (SEMANTICS, "weights")
    assert "parameter model.layers.0.post_attention_layernorm.weight differs" in found.sentence
    stored = next(e for e in found.evidence if e.name == "stored")
    assert stored.numbers == {"elements": 1, "max_ulp": 1}


def test_a_buffer_that_was_cast_to_bfloat16(model):
    twin = copy.deepcopy(model)
    frequencies = twin.model.rotary_emb.inv_freq
    twin.model.rotary_emb.inv_freq = frequencies.to(torch.bfloat16).float()
    found = against(model, twin)
    assert (found.verdict, found.cause) == (SEMANTICS, "buffers") and "buffer model.rotary_emb.inv_freq" in found.sentence


def masks(leak):
    """A causal mask [1, 1, tokens, tokens], additive; with ``leak``, position 4 sees position 7."""
    length = len(PROMPT)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if leak:
        seen[4, 4:8] = True
    return torch.where(seen, 0.0, float("-inf"))[None, None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_that_leaks_a_future_position(attention):
    own = detlab.load_model("tiny-llama", attention=attention)[0]
    ids = torch.tensor([PROMPT])
    plain, leaky = ({"input_ids": ids, "attention_mask": masks(leak)} for leak in (False, True))
    found, comparison = bare(own, plain, leaky)
    assert comparison.first is not None and comparison.first.position == 4
    assert (found.verdict, found.cause) == (SEMANTICS, "mask"), str(found)
    assert "the mask of b lets position 4 see the future position" in found.sentence
    same, _ = bare(own, plain, dict(plain))
    assert same.verdict == "identical"


@contextmanager
def patched_mask(model, change):
    """Lets every attention of a model see a changed mask; the runner then serves it without knowing."""
    handles = []
    for layer in model.model.layers:
        def before(module, args, kwargs):
            size = kwargs["hidden_states"].shape[1]
            return args, kwargs | {"attention_mask": change(size)}

        handles.append(layer.self_attn.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_a_run_that_is_not_causal(model):
    def leaky(size):
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        seen[2, -1] = True
        return torch.where(seen, 0.0, float("-inf"))[None, None]

    twin = copy.deepcopy(model)
    with patched_mask(twin, leaky):
        found = against(model, twin)
    assert (found.verdict, found.cause) == (SEMANTICS, "mask")
    assert "position 2" in found.sentence


@pytest.fixture(scope="module")
def experts():
    return detlab.load_model("tiny-mixtral")[0]


def test_rows_that_experts_share_are_no_leak(experts):
    """How many rows an expert gets depends on later tokens, and so does its product's rounding: no mask is wrong there."""
    _, _, comparison = compared(experts, tokens(24), Condition(), Condition(batch_size=4), new_tokens=1, measure=False)
    for side in sides_of(comparison):
        found = reads_other_tokens(side)
        if found is None:  # this machine's grouped product has one class there
            continue
        assert found.name == "other tokens" and "by rounding alone" in found.found
        assert 0 < found.numbers["float64"] < 1e-10
    if comparison.first is not None:
        assert detlab.triage(comparison, noise=False).verdict == "rounding"


def test_experts_behind_a_mask_that_leaks(experts):
    """The twin: a leak that is one is told from the experts' rounding, in float64."""
    def leaky(size):
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        seen[2, -1] = True
        return torch.where(seen, 0.0, float("-inf"))[None, None]

    twin = copy.deepcopy(experts)
    with patched_mask(twin, leaky):
        run = detlab.run(twin, [PROMPT], new_tokens=0)
        found = reads_other_tokens(sides_of(detlab.compare(run, run, controls=False, measure=False))[0])
    assert found is not None and found.name == "mask" and "is not causal" in found.found
    assert found.numbers["float64"] > 1e-6


def test_padding_that_is_read(model):
    """The pad token is exchanged; a mask that lets it through makes rows move, in float64 as well."""
    def blind(size):
        return torch.full((size, size), float("-inf")).triu(1)[None, None]

    condition = Condition(padding_side="left", padding=2)
    sound = detlab.run(model, [PROMPT], condition, new_tokens=0)
    assert reads_other_tokens(sides_of(detlab.compare(sound, sound, controls=False, measure=False))[0]) is None
    twin = copy.deepcopy(model)
    with patched_mask(twin, blind):
        run = detlab.run(twin, [PROMPT], condition, new_tokens=0)
        found = reads_other_tokens(sides_of(detlab.compare(run, run, controls=False, measure=False))[0])
    assert found is not None and (found.name, found.found[:16]) == ("mask", "a reads padding:")


def test_a_weight_that_is_not_a_number(model):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    found = against(model, twin)
    assert (found.verdict, found.cause) == (SEMANTICS, "weights")
    stored = next(e for e in found.evidence if e.name == "stored")
    assert stored.found.endswith("0 are NaN in a, 1 in b")


def test_positions_that_are_off_by_one_in_a_padded_row(model):
    pad = 3
    ids = torch.tensor([[256] * pad + PROMPT])
    mask = torch.tensor([[0] * pad + [1] * len(PROMPT)])
    right = (mask.cumsum(1) - 1).clamp_min(0)
    given = {"input_ids": ids, "attention_mask": mask}
    found, _ = bare(model, given | {"position_ids": right}, given | {"position_ids": right + mask})
    assert (found.verdict, found.cause) == (SEMANTICS, "positions") and "position_ids" in found.sentence


def test_dropout_left_on():
    own = copy.deepcopy(detlab.load_model("tiny-gpt2")[0])
    for block in own.transformer.h:
        block.mlp.dropout.p = 0.1
        block.mlp.dropout.train()
    found, _ = bare(own, {"input_ids": torch.tensor([PROMPT])}, {"input_ids": torch.tensor([PROMPT])})
    assert (found.verdict, found.cause) == (SEMANTICS, "dropout") and "model.eval()" in found.sentence


def test_a_cache_that_grows_between_calls(model):
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).cache
    found, _ = bare(model, {"input_ids": ids[:, 6:], "cache": cache}, {"input_ids": ids[:, 6:], "cache": cache}, probes=False)
    assert (found.verdict, found.cause) == (STATE, "cache") and "the cache held 6 tokens in a, 12 in b" in found.sentence


def test_a_cached_value_that_was_changed(model):
    ids = torch.tensor([PROMPT])

    def filled(amount):
        with torch.no_grad():
            cache = model(ids[:, :6], use_cache=True).cache
        cache.layers[1].values[0, 2, 4] += amount
        return {"input_ids": ids[:, 6:], "cache": cache}

    found, _ = bare(model, filled(0.0), filled(1.0), probes=False)
    assert (found.verdict, found.cause) == (STATE, "cache") and "cache.layers.1.values" in found.sentence


def test_a_value_changed_in_place_after_its_op(model):
    def changed(amount):
        def hook(module, args, out):
            out.data[0, 4, 3] += amount

        def call():
            handle = model.model.layers[0].mlp.register_forward_hook(hook)
            try:
                model(torch.tensor([PROMPT]))
            finally:
                handle.remove()

        return call

    found, _ = bare(model, changed(0.0), changed(0.5))
    assert (found.verdict, found.cause) == (SEMANTICS, "changed in place")


def test_a_row_that_sees_no_key():
    """A fully masked row in eager attention is NaN: no rounding, and the row is named."""
    own = detlab.load_model("tiny-llama", attention="eager")[0]
    empty = masks(False)
    empty[0, 0, 5] = float("-inf")
    ids = torch.tensor([PROMPT])
    plain = {"input_ids": ids, "attention_mask": masks(False)}
    found, comparison = bare(own, plain, {"input_ids": ids, "attention_mask": empty})
    assert comparison.first is not None and comparison.first.position == 5
    assert found.verdict == SEMANTICS and found.cause == "mask", str(found)


@pytest.mark.parametrize("parts", [4, 2])
def test_run_to_run(model, parts):
    racing = with_sum(model, lambda x: racing_sum(x, parts))
    runs = [detlab.run(racing, [PROMPT], new_tokens=0) for _ in "ab"]
    found = detlab.triage(detlab.compare(*runs, controls=False, measure=False), noise=False)
    if parts == 2:
        assert found.verdict == "identical"
    else:
        assert found.verdict == RUN_TO_RUN and "detlab_planted.racing_sum" in found.sentence


# --------------------------------------------------------------------------------------------------------- token flips
def test_a_near_tie_is_one_by_numbers(model):
    """Two candidates made equal: which of them wins is noise. Two far apart: no tie."""
    a, b, comparison = batch_case(model)
    if comparison.first is None:
        return
    from detlab.divergence.result import TokenFlip

    order = a.logits[0][1].argsort(descending=True)
    comparison.token_flips = [TokenFlip(0, "prompt-0", 1, int(order[0]), int(order[200]))]
    far = detlab.triage(comparison).flips[0]
    assert far.is_near_tie is False and far.margin_64 == pytest.approx(far.margin_a, abs=1e-3) and "no near tie" in str(far)
    comparison.token_flips = [TokenFlip(0, "prompt-0", 1, int(order[0]), int(order[0]))]
    near = detlab.triage(comparison).flips[0]
    assert near.margin_64 == 0 and near.is_near_tie is True and "a near tie" in str(near)
    comparison.token_flips = []


def test_what_triage_refuses():
    with pytest.raises(UsageError, match="triage takes a Comparison; got int"):
        detlab.triage(3)


def test_sampling_is_explained_by_no_kernel(model):
    """Its ops may round otherwise as well; that is not what made the texts part."""
    seeded = Condition(temperature=1.0, seed=42)
    found = detlab.investigate(model, [tokens(24)], seeded, Condition(temperature=1.0, seed=42, batch_size=4), new_tokens=4)
    assert found.triage is not None and found.triage.verdict == "sampling"
    assert found.explanation is None and "mechanism" not in str(found)
