"""`verify` and its certificate: what it shows, what it refuses to show, and what it leaves behind."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import detlab
from detlab.engine import session as engine
from detlab.engine.cache import CanonicalLayer
from detlab.engine.exact.linear import ExactLinear
from detlab.errors import UsageError
from detlab.verify import AxisResult, Certificate, apart, recheck
from detlab.verify.axes import AXES, Axis, Trial, axes_of
from detlab.verify.certificate import _checksum, upper_bound
from detlab.verify.serve import Way, kept_positions, logits_of
from tests.bit_classes import bitwise_equal, row_class_equal

PROMPTS = [
    {"id": "first", "tokens": [5, 6, 7, 8, 9, 10, 11, 12, 13]}, {"id": "<b>zwei</b>", "tokens": list(range(20, 50))},
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.fixture(scope="module")
def prompts():
    return [detlab.Prompt(p["id"], tokens=tuple(p["tokens"])) for p in PROMPTS]


@pytest.fixture(scope="module")
def certificate(model, prompts):
    return detlab.verify(model, prompts, trials=4, threads=[2])


# ---------------------------------------------------------------------------------------------------- what it shows
def test_every_axis_is_tried_and_holds(certificate):
    assert list(certificate.axes) == axes_of("invariant")
    assert certificate.holds and not certificate.is_refuted
    for axis in certificate.axes.values():
        assert axis.comparisons >= 4 and axis.mismatches == axis.token_mismatches == 0 and axis.first is None
        assert axis.control_comparisons >= 4 and axis.rows >= axis.comparisons
        assert axis.bound95 == 3 / axis.comparisons


def test_controls_part_where_the_machine_does(certificate):
    assert certificate.axes["sampling"].control_mismatches > 0  # on every machine: rows draw from one generator
    assert certificate.axes["run"].control_mismatches == 0
    if not row_class_equal(torch.float32, 576, 576, 1, 4):
        assert certificate.axes["decode"].control_mismatches > 0 and certificate.axes["decode"].verdict == "holds"
        assert certificate.axes["decode"].control_first.max_ulp > 0


def test_the_calls_are_on_record(certificate):
    seen = {name: axis.evidence for name, axis in certificate.axes.items()}
    for axis in ("batch", "position", "neighbours", "sampling"):
        assert seen[axis]["rows_sharing_a_pass"] > 1
    for axis in ("chunk", "decode", "cache"):
        assert seen[axis]["passes_that_hit_a_cache"] > 0 and seen[axis]["longest_cache_hit"] > 9
    assert seen["padding"]["passes_with_padding"] > 0 and seen["threads"]["threads"] == 2


def test_md5_is_that_of_the_text_served_alone(model, prompts, certificate):
    with detlab.deterministic(model):
        ids = torch.tensor([list(prompts[0].tokens)])
        greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **greedy)
        text = made[0].tolist()
        logits = logits_of(model, text, Way(), keep=kept_positions(len(text)))[0]
    assert certificate.md5["first"] == detlab.bits.md5(logits)
    assert list(certificate.md5) == ["first", "<b>zwei</b>"]


def test_class_map_and_circumstances(certificate):
    assert any(name.startswith("linear/") and "1536x576" in name for name in certificate.class_map)
    assert any(name.startswith("attention float32 64") for name in certificate.class_map)
    assert certificate.coverage.holds and certificate.environment.fingerprint()
    assert "no GPU ran any of this" in certificate.limits
    assert certificate.model["class"] == "LlamaForCausalLM" and certificate.model["dtype"] == "float32"


def test_the_model_is_left_as_it_was(model, certificate):
    assert engine.session_of(model) is None
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_sixteen_bits(prompts):
    """Logits of generate, which come in float32, are held against those of a call, which come in bfloat16."""
    model = detlab.load_model("tiny-gpt2", dtype="bfloat16")[0]
    found = detlab.verify(model, prompts, axes=["decode", "cache"], trials=4)
    assert found.holds and found.axes["decode"].comparisons == 4
    assert any("generates=True" in way for way in found.axes["decode"].ways)


def test_trials_scale_an_axis(model, prompts):
    found = detlab.verify(model, prompts, axes=["run"], trials=11).axes["run"]
    assert found.comparisons == found.control_comparisons == 11 and found.bound95 == 3 / 11


# ------------------------------------------------------------------------------------------ faults that must be found
def planted(model, axes, prompts, monkeypatch, fault, trials=4):
    """Plants a fault under the tier alone."""
    original = CanonicalLayer.update

    def update(self, keys, values, *more, **others):
        return original(self, fault(keys), values, *more, **others)

    monkeypatch.setattr(CanonicalLayer, "update", update)
    return detlab.verify(model, prompts, axes=axes, trials=trials)


def test_a_fault_of_one_bit_is_found_and_described(model, prompts, monkeypatch):
    def fault(keys):  # decoded tokens alone are computed differently
        return torch.nextafter(keys, torch.full_like(keys, math.inf)) if keys.shape[2] == 1 else keys

    found = planted(model, ["decode", "run"], prompts, monkeypatch, fault)
    assert not found.holds and found.is_refuted
    assert found.axes["run"].mismatches == 0 and found.axes["decode"].mismatches > 0
    first = found.axes["decode"].first
    assert first.prompt_id in ("first", "<b>zwei</b>") and first.position >= 0 and first.max_ulp >= 1 and first.elements[0] > 0
    said = str(found)
    assert "does not hold" in said and f"first on decode: prompt {first.prompt_id}, position {first.position}" in said


def test_a_fault_that_follows_the_row_is_found(model, prompts, monkeypatch):
    def fault(keys):
        keys = keys.clone()
        keys[2:] *= 1 + 2**-20
        return keys

    found = planted(model, ["position"], prompts, monkeypatch, fault, trials=12)  # enough to meet generate, which has a cache
    assert found.axes["position"].mismatches > 0 and found.axes["position"].verdict == "does not hold"


def test_an_uncovered_op_refutes(prompts):
    model = detlab.load_model("tiny-llama")[0]

    class Mixed(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return super().forward(x) + x.mean((0, 1))

    model.model.layers[0].mlp.__class__ = Mixed
    found = detlab.verify(model, prompts, axes=["batch", "neighbours"], trials=4)
    assert not found.holds and found.is_refuted and not found.coverage.holds
    assert found.axes["neighbours"].mismatches > 0
    assert "not covered: model.layers.0.mlp · aten::mean" in str(found)


# ----------------------------------------------------------------------------------------------------- the exact tier
@pytest.fixture(scope="module")
def exact(model, prompts):
    """The axes that are the exact tier's own; all five instruction sets are tried in tests/engine/exact."""
    least = list(apart.ISAS)[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "ISAS", {least: apart.ISAS[least]})
        patch.setattr(apart, "ALIGNMENTS", (4,))
        return detlab.verify(model, prompts, "exact", ["decode", "split", "isa", "alignment"], trials=3)


def test_the_exact_tier_promises_more(exact):
    assert axes_of("exact") == list(AXES) and not {"isa", "split", "alignment"} & set(axes_of("invariant"))
    assert exact.holds and exact.spec == "tri4" and "tier 'exact' (spec tri4) holds" in exact.headline
    seen = {name: axis.evidence for name, axis in exact.axes.items()}
    assert seen["split"]["most_parts_of_a_sum"] == 7 and seen["split"]["sums_in_parts"] > 40
    assert exact.axes["split"].verdict == "holds"  # on every machine: float32 sums in parts are other sums
    assert seen["alignment"]["tensors_moved"] > 10 and seen["alignment"]["inputs_moved"] > 10
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert seen["isa"]["settings_that_move_stock_kernels"] == 1 and exact.axes["isa"].verdict == "holds"
    assert any("isa=ATen default" in way for way in exact.axes["isa"].ways)
    assert any("parts=7" in way and "order=" in way for way in exact.axes["split"].ways)


def test_instruction_sets_are_beyond_the_invariant_tier(model, prompts, monkeypatch):
    least = list(apart.ISAS)[-1]
    monkeypatch.setattr(apart, "ISAS", {least: apart.ISAS[least]})
    found = detlab.verify(model, prompts[:1], axes=["isa"], trials=1)
    assert found.spec == "" and found.axes["isa"].verdict in ("does not hold", "not tested")
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert found.is_refuted and found.axes["isa"].first.max_ulp > 0


def test_ranks_that_add_in_float32_are_found(model, prompts, monkeypatch):
    original = ExactLinear.sums
    monkeypatch.setattr(ExactLinear, "sums", lambda self, digits: original(self, digits).float().double())
    found = detlab.verify(model, prompts, "exact", ["split"], trials=3)
    assert found.axes["split"].verdict == "does not hold" and found.is_refuted


def test_instruction_sets_that_stay_are_not_tested(model, prompts, monkeypatch):
    monkeypatch.setattr(apart, "ISAS", {"none": {}})
    found = detlab.verify(model, prompts, "exact", ["isa"], trials=1)
    assert found.axes["isa"].verdict == "not tested" and not found.holds and not found.is_refuted
    assert found.axes["isa"].note == "nothing was tested: settings that move stock kernels 0"


def test_another_party_runs_a_certificate_again(exact, tmp_path):
    stated = Certificate.load(exact.save(tmp_path / "certificate.json"))
    found = recheck(stated, axes=["split"])  # the model is the one that the certificate names
    assert found.holds and not found.is_refuted and found.found.md5 == exact.md5
    assert found.headline.startswith("certificate confirmed: 2 of 2 MD5s are those of the certificate, made 20")
    assert found.to_json()["differing"] == [] and list(found.found.axes) == ["split"]
    # A digest that was changed, and the checksum with it, is what running it again is for.
    forged = Certificate.load(exact.save(tmp_path / "forged.json"))
    forged.md5["first"] = "0" * 32
    found = recheck(Certificate.load(forged.save(tmp_path / "forged.json")), axes=["split"])
    assert not found.holds and found.is_refuted and found.differing == ["first"]
    assert found.headline.startswith("certificate refuted: 1 of 2 MD5s") and "other bits for first" in found.headline


def test_what_cannot_be_run_again(exact, certificate, model):
    other = detlab.load_model("tiny-llama")[0]
    with torch.no_grad():
        other.lm_head.weight[3, 4] += 1
    with pytest.raises(UsageError, match=r"this is not the certified model: its parameters have other bits than those of tiny"):
        recheck(exact, other)
    with pytest.raises(UsageError, match="the certificate has no axis run; it has decode, split, isa, alignment"):
        recheck(exact, model, axes=["run"])
    nameless = replace(exact, model=exact.model | {"name": "in memory"})
    with pytest.raises(UsageError, match=r"of a model in memory, which it cannot name; give the model \(--model\)"):
        recheck(nameless)
    # The invariant tier's bits are this machine's: other rules, other bits, and no one is refuted.
    elsewhere = replace(certificate, class_map=certificate.class_map | {"ledger": "another"}, md5={"first": "0" * 32})
    found = recheck(elsewhere, model, axes=["run"])
    assert not found.holds and not found.is_refuted and found.headline.startswith("certificate not confirmed")


# --------------------------------------------------------------------------------------------- what shows nothing
def test_an_axis_says_when_its_control_shows_nothing():
    axis = AxisResult("batch", comparisons=9, control_comparisons=9)
    assert axis.verdict == "control shows nothing here" and not axis.is_shown
    assert AxisResult("run", comparisons=9, control_comparisons=9, is_twin=True).verdict == "holds"
    assert AxisResult("batch").verdict == "not tested" and AxisResult("batch").bound95 is None
    assert AxisResult("batch", comparisons=3, mismatches=1).verdict == "does not hold"


def test_an_empty_test_is_none(model, prompts, monkeypatch):
    """Batches in which nothing shares a call would hold, and show nothing: they do not count."""
    alone = Axis("batch", "", lambda *_: iter([Trial(Way())] * 99), needs="rows")
    monkeypatch.setitem(AXES, "batch", alone)
    found = detlab.verify(model, prompts, axes=["batch"], trials=3)
    assert found.axes["batch"].verdict == "not tested" and found.axes["batch"].bound95 is None and not found.holds
    assert found.axes["batch"].note == "nothing was tested: rows sharing a pass 1"
    assert not found.is_refuted and "is not proved" in found.headline


def test_a_model_that_cannot_be_sent_is_not_tested_on_threads(prompts):
    model = detlab.load_model("tiny-llama")[0]
    model.__class__ = type("Own", (type(model),), {})
    found = detlab.verify(model, prompts, axes=["threads", "run"], trials=2)
    assert found.axes["threads"].verdict == "not tested" and "cannot be sent to a fresh process" in found.axes["threads"].note
    assert found.axes["run"].comparisons == 2 and not found.holds


@pytest.mark.parametrize(("failures", "trials"), [(1, 100), (5, 40), (39, 40)])
def test_the_bound_after_mismatches_is_exact(failures, trials):
    bound = upper_bound(failures, trials)
    tail = sum(math.comb(trials, k) * bound**k * (1 - bound) ** (trials - k) for k in range(failures + 1))
    assert abs(tail - 0.05) < 1e-9
    assert upper_bound(trials, trials) == 1.0 and upper_bound(0, 2) == 1.0


# --------------------------------------------------------------------------------------------------- the certificate
def test_json_has_the_pinned_shape(certificate):
    data = json.loads(json.dumps(certificate.to_json()))
    assert {"tier", "axes", "md5", "coverage", "environment", "class_map", "limits", "date", "version"} <= set(data)
    for axis in data["axes"].values():
        assert {"comparisons", "mismatches", "control_mismatches", "bound95"} <= set(axis)


def test_saved_and_loaded(certificate, tmp_path):
    path = certificate.save(tmp_path / "certificate.json")
    again = Certificate.load(path)
    assert again.to_json() == certificate.to_json() and str(again) == str(certificate)
    assert [p.name for p in tmp_path.iterdir()] == ["certificate.json"]


def test_a_changed_certificate_is_refused(certificate, tmp_path):
    path = certificate.save(tmp_path / "certificate.json")
    data = json.loads(path.read_text())
    data["axes"]["batch"]["mismatches"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="was changed since it was written"):
        Certificate.load(path)
    path.write_text(json.dumps(data | {"schema": 99}))
    with pytest.raises(UsageError, match="a certificate of schema 99; this version reads 3"):
        Certificate.load(path)
    path.write_text("{}")
    with pytest.raises(UsageError, match="holds no certificate"):
        Certificate.load(path)
    path.write_text("<!DOCTYPE html>")
    with pytest.raises(UsageError, match="is not JSON"):
        Certificate.load(path)
    with pytest.raises(UsageError, match="cannot be read"):
        Certificate.load(tmp_path / "none.json")
    fewer = {name: value for name, value in data.items() if name != "sha256"} | {"md5": {}}  # nothing would be left to disagree
    path.write_text(json.dumps(fewer | {"sha256": _checksum(fewer)}))
    with pytest.raises(UsageError, match="is damaged .*its digests are not those of its prompts"):
        Certificate.load(path)
    del data["sha256"], data["model"]
    path.write_text(json.dumps(data | {"sha256": _checksum(data)}))
    with pytest.raises(UsageError, match=r"is damaged \(KeyError: 'model'\). Run detlab.verify again."):
        Certificate.load(path)
    with pytest.raises(UsageError, match="does not exist. Make it first."):
        certificate.save(tmp_path / "no" / "certificate.json")


def test_pages_escape_and_load_nothing(certificate, tmp_path):
    page = certificate.save(tmp_path / "certificate.html").read_text()
    for text in (page, certificate._repr_html_()):
        assert "<b>zwei" not in text and "<script" not in text and "http://" not in text and "https://" not in text
    assert "&lt;b&gt;zwei&lt;/b&gt;" in page and "default-src 'none'" in page
    assert "no GPU ran any of this" in page and certificate.md5["first"] in page


# --------------------------------------------------------------------------------------------------------- bad usage
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"axes": []}, "verify needs at least one axis; got axes=[]. Choose from batch, position, neighbours, padding, chunk, "
                       "decode, cache, threads, sampling, run, isa, split, alignment."),
        ({"axes": ["split"]}, "axis 'split' needs tier='exact': under 'invariant' a sum in parts is another sum."),
        ({"axes": ["batches"]}, "verify knows no axis 'batches'; choose from batch, position,"),
        ({"axes": "batch,run"}, "axes='batch,run' is one text; give a list, such as axes=['batch']."),
        ({"axes": ["run", "run"]}, "an axis is named twice in axes=['run', 'run']; name each once."),
        ({"trials": 0}, "trials=0 is not possible; verify needs a whole number of at least 1."),
        ({"new_tokens": 0}, "new_tokens=0 is not possible;"),
        ({"threads": [0]}, "threads=[0] is not possible; give numbers of threads from 1 to 1024,"),
        ({"tier": "exakt"}, "tier='exakt' is not known;"),
    ],
)  # fmt: skip
def test_bad_usage_names_the_fix(model, prompts, more, message):
    with pytest.raises(UsageError) as caught:
        detlab.verify(model, prompts, **more)
    assert str(caught.value).startswith(message)


def test_prompts_and_models_that_cannot_be(model, prompts):
    with pytest.raises(UsageError, match="prompt"):
        detlab.verify(model, [])
    with pytest.raises(UsageError, match="the model holds 8192 positions"):
        detlab.verify(model, [[5] * 8192])
    with pytest.raises(UsageError, match="needs a transformers model; got str"):
        detlab.verify("tiny-llama", prompts)
    with pytest.raises(UsageError, match="a model that generates; Linear does not"):
        detlab.verify(nn.Linear(2, 2).eval(), prompts)
    with detlab.deterministic(model), pytest.raises(UsageError, match="the control needs it without"):
        detlab.verify(model, prompts)
    training = detlab.load_model("tiny-llama")[0].train()
    with pytest.raises(UsageError, match=r"in eval mode.*Call model.eval\(\)"):
        detlab.verify(training, prompts)


def test_an_interrupt_leaves_the_model_restored(model, prompts):
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model(input_ids=ids).logits

    def interrupt(done, total, what):
        assert 0 < done <= total and what in AXES
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        detlab.verify(model, prompts, axes=["batch", "run"], trials=4, progress=interrupt)
    assert engine.session_of(model) is None and not model._forward_pre_hooks
    with torch.no_grad():
        assert bitwise_equal(model(input_ids=ids).logits, before)
