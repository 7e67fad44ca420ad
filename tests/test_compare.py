"""Comparison: what it reports agrees with the raw tensors, which plain hooks read; and it says what it could not see."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

import detlab
from detlab import Condition
from detlab.divergence.rows import ORIGIN
from detlab.errors import ControlError, TraceError, TraceMismatch, UsageError
from detlab.trace.records import split_keys
from tests.bit_classes import bitwise_equal, draw, module_tensors, row_class_equal


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 250, (length,), generator=generator).tolist()


PROMPTS = [prompt(9), prompt(5), prompt(12)]
ALONE, FOUR = Condition(), Condition(batch_size=4)
# Where the first decode step of a batch of four differs from that of one: the first product of layer 0.
DECODE_DIFFERS = not row_class_equal(torch.float32, 576, 576, 1, 4)


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


@pytest.fixture(scope="module")
def pair(model):
    """The same prompts alone and among three mates, with what plain hooks saw of both."""
    runs, seen = [], []
    for condition in (ALONE, FOUR):
        runs.append(detlab.run(model, PROMPTS, condition, new_tokens=3))
        with module_tensors(model) as calls:
            bare = detlab.run(model, PROMPTS, condition, new_tokens=3, trace=False)
        assert bare.md5 == runs[-1].md5
        seen.append(calls)
    return *runs, *seen


# ------------------------------------------------------------------------------------------------------- identical
@pytest.mark.parametrize("text", ["default", "batch_size=3,padding_side=left", "attention=eager", "cache=none,dtype=bfloat16"])
def test_the_same_condition_is_identical(model, text):
    condition = Condition.parse(text)
    a, b = (detlab.run(model, PROMPTS, condition, new_tokens=2) for _ in "ab")
    result = detlab.compare(a, b)
    assert result.verdict == "identical" and result.first is None and result.notes == []
    assert result.origins == result.carriers == result.token_flips == [] and not result.sizes
    assert result.controls == {"a_repeated": True, "b_repeated": True} and result.logits_equal and not result.teacher_forced
    assert result.cosine == pytest.approx(1.0) and result.num_nan == (0, 0) and result.rows_compared > 1000
    assert detlab.first_divergence(a, b) is None
    assert f"all {result.rows_compared:,} rows compared are bitwise equal" in str(result)
    assert result.to_pandas().empty and result.grid().state.max() <= 1


def test_labels_name_the_conditions(pair):
    result = detlab.compare(pair[0], pair[1], controls=False, measure=False)
    assert (result.label_a, result.label_b) == ("default", "batch_size=4")
    assert result.controls == {"a_repeated": None, "b_repeated": None} and "controls were not run" in result.notes


# -------------------------------------------------------------------------------------- what it reports is what happened
def raw_state(seen_a, seen_b, name):
    """{(prompt, step, position): whether the rows differ} of a module's output, from the hooks' tensors."""
    state = {}
    for index, ids in enumerate(PROMPTS):
        for step in range(3):
            # Prompts are served one after the other, three calls each; the question sits in batch row 0.
            a, b = (seen[3 * index + step][name] for seen in (seen_a, seen_b))
            assert a.shape[0] == 1 and b.shape[0] == 4 and a.shape[1:] == b.shape[1:]
            for slot in range(a.shape[1]):
                position = slot if step == 0 else len(ids) + step - 1
                state[index, step, position] = not bitwise_equal(a[0, slot], b[0, slot])
    return state


def reported_state(result, module):
    """The same, as the comparison reports it, of the op that made the module's output."""
    trace = result.trace
    out = {m.output for m in trace.modules if m.module == module}
    state = {}
    for found in result.detail.ops:
        op = trace.ops[found.a]
        if op.outputs[0] in out:
            prompts, positions = (part.tolist() for part in split_keys(found.keys))
            for row in zip(prompts, positions, found.state.tolist(), strict=True):
                state[row[0], trace.calls[op.call].step, row[1]] = row[2] > 1
    return state


MODULES = ["model.embed_tokens", *(f"model.layers.{layer}.{part}" for layer in (0, 1) for part in (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj",
)), "model.norm", "lm_head"]  # fmt: skip


def test_every_row_of_every_module_is_reported_as_it_is(pair):
    a, b, seen_a, seen_b = pair
    result = detlab.compare(a, b)
    num_differing = 0
    for module in MODULES:
        raw, reported = raw_state(seen_a, seen_b, f"out {module}"), reported_state(result, module)
        assert reported == raw, module
        num_differing += sum(raw.values())
    assert (num_differing > 0) == (result.verdict == "diverged") >= DECODE_DIFFERS
    assert result.logits_equal == (not any(raw_state(seen_a, seen_b, "out lm_head").values()))
    assert result.controls == {"a_repeated": True, "b_repeated": True}


def test_the_first_divergence_is_the_first_that_hooks_see(pair):
    a, b, seen_a, seen_b = pair
    result = detlab.compare(a, b)
    names = [name for name in seen_a[0] if name.startswith("out ") and name[4:] in MODULES]
    expected = None
    for index in range(len(PROMPTS)):
        for step in range(3):
            for name in names:
                state = raw_state(seen_a, seen_b, name)
                bad = [p for (i, s, p), differs in state.items() if (i, s) == (index, step) and differs]
                if bad and expected is None:
                    expected = (name[4:], index, step, min(bad))
    assert (expected is not None) >= DECODE_DIFFERS  # the control: this must diverge where the probe says so
    if expected is None:  # this machine has another map: nothing happened, and nothing is reported
        assert result.first is None and result.verdict == "identical"
        return
    first = result.first
    assert expected == (first.module, first.prompt, first.call, first.position)
    assert first.kind == "origin" and first.inputs_matched and set(first.inputs.values()) == {"matched"}
    assert first.prompt_id == "prompt-0" and first.source == ""
    if DECODE_DIFFERS:
        assert (first.module, first.op) == ("model.layers.0.self_attn.q_proj", "mm")
        if row_class_equal(torch.float32, 576, 576, 9, 36):  # as on the reference map; elsewhere prefill may differ too
            assert first.phase == "decode step 1" and first.position == len(PROMPTS[0])
    assert detlab.first_divergence(a, b) == first_without_sizes(first)


def first_without_sizes(first):
    bare = copy.copy(first)
    bare.max_abs = bare.max_ulp = bare.share = None
    return bare


def steps_apart(x, y):
    """ULPs between two float32 tensors, over Python integers."""
    def place(value):
        bits = value & 0x7FFFFFFF
        return -bits if value & 0x80000000 else bits

    pairs = zip(x.view(torch.int32).reshape(-1).tolist(), y.view(torch.int32).reshape(-1).tolist(), strict=True)
    return [abs(place(a) - place(b)) for a, b in pairs]


def test_sizes_are_those_of_the_tensors(pair):
    a, b, seen_a, seen_b = pair
    result = detlab.compare(a, b)
    if result.first is None:
        assert not DECODE_DIFFERS
        return
    num_checked = 0
    for entry in [*result.origins, *result.carriers]:
        if entry.op != "mm" or entry.prompt != result.first.prompt:
            continue
        x, y = (seen[entry.call][f"out {entry.module}"][0] for seen in (seen_a, seen_b))
        rows = [slot for slot in range(len(x)) if not bitwise_equal(x[slot], y[slot])]
        x, y = x[rows], y[rows]
        assert entry.num_rows == len(rows)
        assert entry.max_abs == float((x.double() - y.double()).abs().max())
        assert entry.max_ulp == max(steps_apart(x, y))
        assert entry.share == pytest.approx(float((x != y).double().mean()))
        num_checked += 1
    assert num_checked >= 2 * 15  # two decode steps of prompt 0, 7 products a layer and the head
    keys, max_abs, max_ulp = result.sizes[result.first.op_index]
    assert len(keys) == len(max_abs) == len(max_ulp) and max_abs.max() == result.first.max_abs


def test_sizes_of_a_batch_against_single_prompts(model):
    """One op of the batch meets three calls: each entry is sized by its own prompt's rows, or not at all."""
    together, alone = Condition(batch_size=3, padding_side="left"), ALONE
    a, b = (detlab.run(model, PROMPTS, c, new_tokens=2) for c in (together, alone))
    result, back = detlab.compare(a, b), detlab.compare(b, a)
    assert result.rows_compared == back.rows_compared and result.verdict == back.verdict
    seen = []
    for condition in (together, alone):
        with module_tensors(model) as calls:
            detlab.run(model, PROMPTS, condition, new_tokens=2, trace=False)
        seen.append(calls)
    num_sized = 0
    for entry in [*result.origins, *result.carriers]:
        if entry.op != "mm":
            continue
        if entry.prompt != result.first.prompt:
            assert entry.max_ulp is entry.max_abs is entry.share is None
            continue
        pad = 12 - len(PROMPTS[entry.prompt]) if entry.call == 0 else 0
        x = seen[0][entry.call][f"out {entry.module}"][entry.prompt, pad:]
        y = seen[1][2 * entry.prompt + entry.call][f"out {entry.module}"][0]
        rows = [slot for slot in range(len(x)) if not bitwise_equal(x[slot], y[slot])]
        assert entry.num_rows == len(rows) and entry.max_ulp == max(steps_apart(x[rows], y[rows]))
        num_sized += 1
    assert num_sized > 10 or result.first is None


def test_rows_of_whole_prompts_are_no_origins_where_a_token_differed():
    class Pooling(nn.Module):
        """Adds the mean over all tokens to each, as a bidirectional model would."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, inputs_embeds):
            x = inputs_embeds * self.weight
            return x + x.mean(1, keepdim=True)

    model = Pooling()
    x = draw(2, 4, 6, seed=5)
    traces = []
    for nudge in (0.0, 0.25):
        changed = x.clone()
        changed[1, 2, 3] += nudge
        with torch.no_grad(), detlab.capture(model) as trace:
            model(inputs_embeds=changed)
        traces.append(trace)
    result = detlab.compare(*traces)
    assert result.verdict == "different_inputs" and result.origins == []
    states = {result.trace.ops[f.a].op: (split_keys(f.keys), f.state.tolist()) for f in result.detail.ops}
    (prompts, positions), state = states["mean"]
    assert (prompts.tolist(), positions.tolist(), state) == ([0, 1], [-2, -2], [1, 2])
    assert states["add"][1] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert result.first.op == "mul" and result.first.source == "input inputs_embeds" and result.first.position == 2


def bare(model, *batches):
    with torch.no_grad(), detlab.capture(model) as trace:
        for ids in batches:
            model(torch.tensor(ids))
    return trace


def test_bare_traces_of_other_tokens_are_another_question(model):
    a, b = bare(model, [[5, 6, 7, 8], [9, 10, 11, 12]]), bare(model, [[5, 6, 70, 8], [9, 10, 11, 12]])
    result = detlab.compare(a, b)
    assert result.verdict == "different_inputs" and result.origins == []
    assert (result.first.op, result.first.source, result.first.position) == ("embedding", "input input_ids", 2)
    assert result.notes == ["prompt 0 holds other tokens from position 2 on: 7 in a, 70 in b"]
    assert "verdict: different_inputs" in str(result)
    assert detlab.compare(b, a).notes == ["prompt 0 holds other tokens from position 2 on: 70 in a, 7 in b"]
    same = detlab.compare(a, bare(model, [[5, 6, 7, 8], [9, 10, 11, 12]]))  # the twin
    assert same.verdict == "identical" and same.notes == []
    longer = detlab.compare(bare(model, [[5, 6, 7]]), bare(model, [[5, 6, 7, 8]]))  # what they share is one question
    assert longer.verdict != "different_inputs" and longer.notes == []


def test_many_prompts_of_other_tokens_are_counted(model):
    result = detlab.compare(bare(model, [[i, 5] for i in range(6)]), bare(model, [[i, 6] for i in range(6)]))
    first = "prompt 0 holds other tokens from position 1 on: 5 in a, 6 in b"
    assert result.notes == [f"6 prompts hold other tokens, the first of them: {first}"]
    assert result.verdict == "different_inputs"


def test_prompts_of_one_bare_trace_only_are_named(model):
    result = detlab.compare(bare(model, [[5, 6, 7], [8, 9, 10]]), bare(model, [[5, 6, 7]]))
    assert "prompts that are in a only: 1" in result.notes and result.verdict != "different_inputs"


def test_bare_traces_without_a_token_in_common(model):
    def shifted(mask, ids):
        with torch.no_grad(), detlab.capture(model) as trace:
            model(torch.tensor(ids), attention_mask=torch.tensor(mask))
        return trace

    a, b = shifted([[1, 1]], [[5, 6]]), shifted([[1, 1]], [[5, 6]])
    b.calls[0].positions += 10  # as a cache that no call of the trace filled would do
    b.calls[0]._keys.clear()
    result = detlab.compare(a, b)
    assert result.verdict == "different_inputs" and result.first is None and result.rows_compared == 0
    assert "no token position was computed in both traces" in result.notes


def test_a_flip_in_bare_traces_is_no_other_question(model):
    """Where arithmetic parted first, the tokens that follow from it are a consequence, and are told beside it."""
    a = bare(model, [[5, 6, 7]], [[5, 6, 7, 8]])
    b = copy.deepcopy(bare(model, [[5, 6, 7]], [[5, 6, 7, 9]]))
    op = next(op for op in b.ops if op.op == "mm")
    b.tensors[op.outputs[0]].digests = b.tensors[op.outputs[0]].digests ^ 1
    result = detlab.compare(a, b)
    assert result.verdict == "diverged" and result.first.inputs_matched and result.first.op == "mm"


# ------------------------------------------------------------------------------------------------- other code paths
def test_another_attention_kernel_is_another_code_path(model):
    a, b = (detlab.run(model, PROMPTS, Condition(attention=kind), new_tokens=2) for kind in ("sdpa", "eager"))
    result = detlab.compare(a, b)
    assert result.controls == {"a_repeated": True, "b_repeated": True}
    if result.logits_equal:  # a machine on which both kernels give the same bits
        assert result.verdict == "identical"
        return
    assert result.verdict == "control_flow" and not result.first.inputs_matched
    assert result.first.module == "model.layers.0.self_attn.o_proj"
    assert result.first.source == "model.layers.0.self_attn · _scaled_dot_product_flash_attention_for_cpu in a, bmm in b"
    assert any("ops ran in a only: _scaled_dot_product_flash_attention_for_cpu" in note for note in result.notes)
    assert any("ops ran in b only: " in note and "_softmax" in note for note in result.notes)
    assert str(result).splitlines()[2] == "verdict: control_flow"


def test_another_dtype_is_no_kernel_question(model):
    a = detlab.run(model, PROMPTS[:1], ALONE, new_tokens=2)
    b = detlab.run(model, PROMPTS[:1], Condition(dtype="bfloat16"), new_tokens=2, force=a.tokens)
    result = detlab.compare(a, b)
    assert result.verdict != "identical" and result.logits_equal is False
    assert any("float32 against bfloat16" in note for note in result.notes)
    assert any("is float32 in a, bfloat16 in b" in note for note in result.notes)


# -------------------------------------------------------------------------------------------------------- questions
def test_other_prompts_are_another_question(model):
    a = detlab.run(model, [[5, 6, 7], [8, 9]], new_tokens=1)
    for others, message in (
        ([[5, 6, 7], [8, 4]], "prompt 1 ('prompt-1' against 'prompt-1') differs from token 1 on. "),
        ([[5, 6], [8, 9]], "prompt 0 ('prompt-0' against 'prompt-0') differs from token 2 on. "),
        ([[5, 6, 7]], "2 against 1."),
    ):
        with pytest.raises(TraceMismatch) as caught:
            detlab.compare(a, detlab.run(model, others, new_tokens=1))
        assert str(caught.value).startswith("the runs answer different prompts: " + message)


def test_what_cannot_be_compared(model):
    a = detlab.run(model, [[5, 6, 7]], new_tokens=1)
    with pytest.raises(TraceError, match=r"^compare needs two runs with traces; run again with trace=True\.$"):
        detlab.compare(a, detlab.run(model, [[5, 6, 7]], new_tokens=1, trace=False))
    message = r"^compare takes two runs or two traces; got one of each\. Pass run\.trace for the run\.$"
    with pytest.raises(UsageError, match=message):
        detlab.compare(a, a.trace)


def test_runs_of_other_lengths_are_compared_as_far_as_both_go(model):
    a, b = (detlab.run(model, PROMPTS, new_tokens=n) for n in (4, 2))
    result, back = detlab.compare(a, b), detlab.compare(b, a)
    assert result.verdict == back.verdict == "identical" and result.logits_equal
    assert result.rows_compared == back.rows_compared == detlab.compare(b, b).rows_compared


# ------------------------------------------------------------------------------------------------ flips, teacher forcing
def tampered(run, prompt_index, step):
    """A run whose free text went another way at one step, as if a near tie had been decided differently."""
    other = copy.copy(run)
    other.tokens = [list(t) for t in run.tokens]
    other.tokens[prompt_index][step] += 1
    return other


def test_a_flip_is_reported_beside_a_comparison_of_the_same_tokens(model):
    a = detlab.run(model, PROMPTS, new_tokens=4)
    # b really decodes other tokens from step 1 on: it is forced to.
    tokens = [list(t) for t in a.tokens]
    tokens[1][1] = tokens[1][1] + 1
    b = detlab.run(model, PROMPTS, new_tokens=4, force=tokens)
    b.tokens, b.forced = tokens, None
    result = detlab.compare(a, b)
    assert result.teacher_forced
    (flip,) = result.token_flips
    assert (flip.prompt, flip.prompt_id, flip.step, flip.b_token) == (1, "prompt-1", 1, flip.a_token + 1)
    assert f"token flip: prompt prompt-1, step 1: {flip.a_token} against {flip.b_token}" in str(result)
    # Fed the same tokens, every row of both is identical: the flip is all that there is, and it is no arithmetic.
    assert result.first is None and result.logits_equal
    assert result.rows_compared == detlab.compare(a, a).rows_compared
    assert result.verdict == "diverged"


def test_runs_that_were_forced_are_compared_as_they_were_fed(model, tmp_path):
    """The tokens that count are those that were fed, not those that the model would have chosen."""
    force = [[9, 8, 7], [5, 5, 5], [1, 2, 3]]
    a = detlab.run(model, PROMPTS, new_tokens=3, force=force)
    other = detlab.run(model, PROMPTS, new_tokens=3, force=[[9, 8, 99], [5, 66, 5], [1, 2, 3]])
    same = detlab.run(model, PROMPTS, new_tokens=3, force=force)
    same.tokens = [[t + 1 for t in tokens] for tokens in same.tokens]  # chosen otherwise, and never fed
    result = detlab.compare(a, same)
    assert not result.teacher_forced and result.first is None and len(result.token_flips) == 3
    result = detlab.compare(a, other)  # prompt 0's last token was fed to no call; prompt 1 was
    assert result.teacher_forced and result.verdict == "identical" and result.token_flips == []
    last = detlab.run(model, PROMPTS, new_tokens=3, force=[[9, 8, 99], [5, 5, 5], [1, 2, 3]])
    assert not detlab.compare(a, last).teacher_forced  # the last token is fed to no call
    loaded = [detlab.load_trace(run.save(tmp_path / name)) for name, run in (("a", a), ("b", other), ("c", last))]
    result = detlab.compare(loaded[0], loaded[2])
    assert result.verdict == "identical" and not any("rows after each flip are left out" in note for note in result.notes)
    result = detlab.compare(*loaded[:2])
    assert result.verdict == "identical" and any("rows after each flip are left out" in note for note in result.notes)
    longer = detlab.run(model, PROMPTS, new_tokens=5)
    assert detlab.compare(a, longer).verdict == detlab.compare(longer, a).verdict == "identical"


def test_saved_runs_leave_out_what_comes_after_a_flip(model, tmp_path):
    a = detlab.run(model, PROMPTS, new_tokens=4)
    tokens = [list(t) for t in a.tokens]
    tokens[1][1] = tokens[1][1] + 1
    b = detlab.run(model, PROMPTS, new_tokens=4, force=tokens)
    b.tokens, b.forced = tokens, None
    loaded = [detlab.load_trace(run.save(tmp_path / name)) for name, run in (("a", a), ("b", b))]
    result = detlab.compare(*loaded)
    assert not result.teacher_forced and len(result.token_flips) == 1
    note = "texts part and the model is not at hand to feed b the tokens of a: rows after each flip are left out"
    assert note in result.notes
    assert "the model is not at hand: controls were not run and differences were not sized" in result.notes or (
        result.first is None and result.controls == {"a_repeated": None, "b_repeated": None}
    )
    # Rows up to the flip are identical; rows fed other tokens would not be, and are not compared.
    assert result.first is None and result.logits_equal
    compared = {(int(p), int(q)) for f in result.detail.ops for p, q in zip(*split_keys(f.keys), strict=True) if q >= 0}
    last = {p: max(q for r, q in compared if r == p) for p in range(3)}
    assert last == {0: len(PROMPTS[0]) + 2, 1: len(PROMPTS[1]) + 0, 2: len(PROMPTS[2]) + 2}


def near_ties(model):
    """A copy of the model whose head has pairs of nearly equal rows, so that rounding decides between two tokens."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight = twin.lm_head.weight
        weight[1::2] = weight[::2] * (1 + 2**-23)
    return twin


def test_natural_flips_of_near_ties(model):
    twin = near_ties(model)
    prompts = [prompt(6, seed) for seed in range(5)]
    a, b = (detlab.run(twin, prompts, c, new_tokens=5) for c in (ALONE, FOUR))
    result = detlab.compare(a, b)
    expected = []
    for index, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        at = next((i for i in range(5) if x[i] != y[i]), None)
        if at is not None:
            expected.append((index, at, x[at], y[at]))
    assert [(f.prompt, f.step, f.a_token, f.b_token) for f in result.token_flips] == expected
    assert result.teacher_forced == bool(expected)
    if result.first is None:  # another map: the same bits, and so the same tokens
        assert expected == [] and result.verdict == "identical" and not DECODE_DIFFERS
        return
    assert result.verdict == "diverged" and result.first.inputs_matched
    if expected:  # the comparison went on past the flip: rows of the last step were compared
        steps = {result.trace.calls[result.trace.ops[f.a].call].step for f in result.detail.ops}
        assert steps == set(range(5))
    assert result.rows_compared == detlab.compare(a, a).rows_compared


def test_saved_runs_of_one_text_are_compared_whole(pair, tmp_path):
    a, b, *_ = pair
    live = detlab.compare(a, b)
    loaded = detlab.compare(detlab.load_trace(a.save(tmp_path / "a")), detlab.load_trace(b.save(tmp_path / "b")))
    assert loaded.verdict == live.verdict and loaded.rows_compared == live.rows_compared
    assert [d.to_json() | {"max_ulp": 0, "max_abs": 0, "share": 0} for d in loaded.origins] == [
        d.to_json() | {"max_ulp": 0, "max_abs": 0, "share": 0} for d in live.origins
    ]
    assert loaded.controls == {"a_repeated": None, "b_repeated": None}
    assert "the model is not at hand: controls were not run and differences were not sized" in loaded.notes
    mixed = detlab.compare(a, detlab.load_trace(tmp_path / "b"))  # production against a laptop
    assert mixed.verdict == live.verdict and mixed.rows_compared == live.rows_compared


# --------------------------------------------------------------------------------------------------------- controls
class Noisy(nn.Module):
    """Adds one ULP to one element in every call after the first ``quiet``: a race, made visible."""

    def __init__(self, inner, quiet):
        super().__init__()
        self.inner, self.quiet, self.count = inner, quiet, 0

    def forward(self, x):
        out = self.inner(x)
        self.count += 1
        out = out.clone()
        towards = out[..., 0] + (1.0 if self.count > self.quiet else 0.0)
        out[..., 0] = torch.nextafter(out[..., 0], towards)
        return out


@pytest.mark.parametrize(("quiet", "side"), [(2, "a"), (6, "b")])
def test_a_model_that_does_not_repeat_itself_is_no_subject(model, quiet, side):
    noisy = copy.deepcopy(model)
    # Two prompts, one call each: runs a and b are quiet; the repetition of a (or of b alone) is not.
    noisy.model.layers[1].mlp = Noisy(noisy.model.layers[1].mlp, 2 * 2 if side == "a" else 3 * 2)
    a, b = (detlab.run(noisy, PROMPTS[:2], c, new_tokens=1) for c in (Condition(), Condition(batch_size=2)))
    with pytest.raises(ControlError) as caught:
        detlab.compare(a, b)
    condition = "default" if side == "a" else "batch_size=2"
    assert str(caught.value).startswith(
        f"the control failed: {side} ({condition}) gave other bits when it was repeated, first in model.layers.1.mlp · add. "
    )
    assert str(caught.value).endswith("The difference is run-to-run, so comparing conditions would show nothing.")
    # Left out, the control says that it was.
    bare = detlab.compare(a, b, controls=False, measure=False)
    assert bare.controls == {"a_repeated": None, "b_repeated": None} and "controls were not run" in bare.notes


def test_a_hook_that_is_gone_is_named_as_such(model):
    handle = model.model.norm.register_forward_hook(lambda module, args, out: out.abs().mul(1.0) * 0 + out)
    a = detlab.run(model, PROMPTS[:1], new_tokens=1)
    handle.remove()
    with pytest.raises(ControlError) as caught:
        detlab.compare(a, a)
    assert str(caught.value) == (
        "the control failed: a (default) ran other ops when it was repeated, (model) · alias instead of model.norm · abs. "
        "Was the model changed, or a hook added or removed? Run the condition again, then compare."
    )


def test_a_quiet_model_passes_the_same_control(model):
    quiet = copy.deepcopy(model)
    quiet.model.layers[1].mlp = Noisy(quiet.model.layers[1].mlp, 10**9)
    a, b = (detlab.run(quiet, PROMPTS[:2], c, new_tokens=1) for c in (Condition(), Condition(batch_size=2)))
    assert detlab.compare(a, b).controls == {"a_repeated": True, "b_repeated": True}


# ------------------------------------------------------------------------------------------ what could not be laid out
@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-qwen3-moe"])
def test_a_difference_behind_unlaid_ops_is_not_called_identical(name):
    model = detlab.load_model(name)[0]
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.lm_head.weight[7, 7] += 1
    a, b, same = (detlab.run(m, PROMPTS[:1], new_tokens=1) for m in (model, changed, model))
    assert detlab.compare(a, same).verdict == "identical"
    result = detlab.compare(a, b)
    assert result.verdict == "diverged" and result.logits_equal is False
    assert any("are unlaid, so not compared" in note for note in result.notes)
    assert "parameter lm_head.weight differs between a and b" in result.notes
    # Bare traces have no logits beside them; still nothing may be called identical that is known to differ.
    assert detlab.compare(a.trace, same.trace).verdict == "identical"
    assert detlab.compare(a.trace, b.trace).verdict != "identical"


class Rolling(nn.Module):
    """Moves tokens about in a way that no rule follows."""

    def __init__(self):
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.ones(4)) for _ in "ab")

    def forward(self, inputs_embeds):
        return (inputs_embeds * self.before).roll(1, 1) * self.after


def test_unlaid_ops_are_compared_as_a_whole_where_the_calls_are_one():
    model, changed = Rolling(), Rolling()
    changed.after.data[2] = 1 + 2**-23
    x = draw(2, 3, 4, seed=6)
    traces = []
    for served, given in ((model, x), (model, x.clone()), (changed, x), (changed, torch.cat([x, x]))):
        with torch.no_grad(), detlab.capture(served) as trace:
            served(inputs_embeds=given)
        traces.append(trace)
    assert [op.op for op in traces[0].unlaid] == ["roll", "mul"]
    assert detlab.compare(*traces[:2]).verdict == "identical"
    result = detlab.compare(traces[0], traces[2])
    assert result.verdict == "diverged" and result.first is None
    assert "1 ops that could not be laid out differ as a whole, the first of them (model) · mul" in result.notes
    assert "parameter after differs between a and b" in result.notes
    # Of calls with other mates the whole tensors differ in any case, which says nothing.
    assert not any("differ as a whole" in note for note in detlab.compare(traces[0], traces[3]).notes)


def test_module_level_origins_have_matching_inputs(model):
    changed = copy.deepcopy(model)
    name = "model.layers.1.post_attention_layernorm"
    with torch.no_grad():
        changed.get_parameter(f"{name}.weight")[40] += 2**-20
    traces = []
    for served in (model, changed):
        with torch.no_grad(), detlab.capture(served, level="modules") as trace:
            served(torch.tensor([PROMPTS[0]]))
        traces.append(trace)
    result = detlab.compare(*traces)
    assert result.verdict == "diverged" and result.first.module == name
    assert result.origins == []  # one weight differs, and everything after it carries that on


# -------------------------------------------------------------------------------------------------------------- output
def test_json_has_the_promised_keys(pair):
    a, b, *_ = pair
    result = detlab.compare(a, b)
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert {"verdict", "first", "origins", "token_flips", "rows_compared", "controls"} <= set(data)
    assert data["verdict"] == result.verdict and data["rows_compared"] == result.rows_compared
    assert len(data["origins"]) == data["num_origins"] == len(result.origins)
    assert data["num_carriers"] == len(result.carriers) and data["token_flips"] == []
    assert result.to_json(most=2)["num_origins"] == len(result.origins) and len(result.to_json(most=2)["origins"]) <= 2
    wanted = {"module", "op", "call", "prompt", "position", "inputs_matched", "max_ulp", "max_abs"}
    for entry in data["origins"]:
        assert wanted <= set(entry) and entry["inputs_matched"] is True
        if entry["prompt"] == data["first"]["prompt"]:
            assert entry["max_ulp"] >= 1 and entry["max_abs"] > 0
    if DECODE_DIFFERS:
        assert data["first"] == data["origins"][0] and data["controls"] == {"a_repeated": True, "b_repeated": True}
    assert list(data) == [
        "verdict", "a", "b", "first", "origins", "num_origins", "num_carriers", "token_flips", "rows_compared", "controls",
        "logits_equal", "cosine", "num_nan", "teacher_forced", "notes",
    ]  # fmt: skip


def test_table_and_grid(pair):
    a, b, seen_a, seen_b = pair
    result = detlab.compare(a, b)
    table = result.to_pandas()
    assert len(table) == len(result.origins) + len(result.carriers)
    assert list(table.columns[:7]) == ["kind", "module", "op", "occurrence", "call", "prompt_id", "position"]
    assert (table["kind"] == "origin").sum() == len(result.origins)
    for index in range(3):
        grid = result.grid(index)
        assert grid.prompt == index and grid.positions == list(range(len(PROMPTS[index]) + 2))
        assert grid.state.shape == grid.max_abs.shape == (len(grid.modules), len(grid.positions))
        line = next(i for i, m in enumerate(grid.modules) if m == "model.layers.0.self_attn.q_proj")
        raw = raw_state(seen_a, seen_b, "out model.layers.0.self_attn.q_proj")
        differs = [raw[index, max(0, p - len(PROMPTS[index]) + 1), p] for p in grid.positions]
        assert (grid.state[line] == ORIGIN).tolist() == differs
        assert (grid.max_abs[line][np.array(differs) == 0] == 0).all()
    if DECODE_DIFFERS:
        assert list(table.iloc[0][["module", "op", "call"]]) == [result.first.module, "mm", result.first.call]
        assert table["kind"].iloc[0] == "origin" and result.grid().prompt == 0


def test_markup_is_escaped(model):
    name = detlab.Prompt("<script>alert(1)</script>", tokens=(5, 6, 7))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight[0, 0] += 1
    a, b = (detlab.run(m, [name], new_tokens=1) for m in (model, twin))
    result = detlab.compare(a, b)
    assert "<script>" in str(result) and "<script>" not in result._repr_html_() and "&lt;script&gt;" in result._repr_html_()
