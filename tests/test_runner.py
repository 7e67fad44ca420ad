"""Runs: greedy decoding as `generate` does it, batches as the condition says, and nothing left behind."""

import copy
import gc
import inspect
import json
import weakref

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import _get_current_dispatch_mode

import detlab
from detlab import Condition
from detlab.errors import ModelError, PromptError, UsageError
from detlab.serving import make_batches
from tests.bit_classes import bitwise_equal, module_tensors

FAMILIES = ("tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-gemma3", "tiny-qwen3-moe", "tiny-mixtral")


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 250, (length,), generator=generator).tolist()


PROMPTS = [prompt(7), prompt(12), prompt(4)]
CONDITIONS = [
    "default", "batch_size=3", "batch_size=4,row=2,mates=random", "batch_size=2,mates=repeat", "batch_size=3,padding_side=left",
    "batch_size=2,row=1,padding_side=left,padding=3", "batch_size=3,padding_side=right", "cache=none", "attention=eager",
    "prefill_chunk=5", "batch_size=3,padding_side=left,prefill_chunk=4", "dtype=bfloat16", "padding_side=left,padding=2",
    "cache=none,batch_size=3,padding_side=right", "cache=static", "threads=2", "alignment=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return detlab.load_model("tiny-llama")[0]


def hooks_of(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def assert_same_outputs(a, b):
    assert a.tokens == b.tokens and a.md5 == b.md5
    for x, y in zip(a.logits, b.logits, strict=True):
        assert bitwise_equal(x, y)


# ------------------------------------------------------------------------------------------------ greedy decoding
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_generate(name):
    model = detlab.load_model(name)[0]
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    run = detlab.run(model, PROMPTS, new_tokens=6, trace=False)
    for tokens, ids in zip(run.tokens, PROMPTS, strict=True):
        expected = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **options)
        assert tokens == expected[0, len(ids) :].tolist()
        assert model.config.eos_token_id not in tokens
    assert len({tuple(t) for t in run.tokens}) == 3  # three prompts, three answers

    together = detlab.run(model, PROMPTS, Condition(batch_size=3, padding_side="left", padding=1), new_tokens=6, trace=False)
    width = 13
    ids = torch.tensor([[256] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    expected = model.generate(ids, attention_mask=mask, **options)
    assert together.tokens == expected[:, width:].tolist()


def test_drawn_tokens_are_those_of_generate(model):
    ids = [prompt(5, seed) for seed in range(3)]
    condition = Condition(batch_size=3, padding_side="left", temperature=0.8, top_k=20, seed=7)
    run = detlab.run(model, ids, condition, new_tokens=8, trace=False)
    torch.manual_seed(7)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 1.0, "max_new_tokens": 8, "min_new_tokens": 8}
    mask = torch.ones(3, 5, dtype=torch.long)
    assert run.tokens == model.generate(torch.tensor(ids), attention_mask=mask, **options)[:, 5:].tolist()
    assert run.tokens != detlab.run(model, ids, Condition(batch_size=3, padding_side="left"), new_tokens=8, trace=False).tokens


@pytest.mark.parametrize("text", ["default", "batch_size=3,padding_side=left", "batch_size=3,padding_side=right", "cache=none",
                                  "cache=static", "prefill_chunk=5", "attention=eager"])  # fmt: skip
def test_every_way_of_serving_answers_the_same_question(model, text):
    # No bits are promised between conditions; but a wrong mask or position would move logits by far more than rounding.
    expected = detlab.run(model, PROMPTS, new_tokens=5, trace=False)
    run = detlab.run(model, PROMPTS, Condition.parse(text), new_tokens=5, force=expected.tokens, trace=False)
    for a, b in zip(run.logits, expected.logits, strict=True):
        assert a.shape == b.shape == (5, 1024)
        assert float((a.double() - b.double()).abs().max()) < 1e-4
    assert run.tokens == expected.tokens


def test_logits_are_those_of_the_module(model):
    with module_tensors(model) as calls:
        run = detlab.run(model, PROMPTS[:1], new_tokens=3)
    assert len(calls) == 3
    for step, seen in enumerate(calls):
        assert bitwise_equal(run.logits[0][step], seen["out lm_head"][0, -1])


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_trace_changes_no_bit_and_a_replay_repeats_all(model, text):
    condition = Condition.parse(text)
    before = torch.get_num_threads()
    bare = detlab.run(model, PROMPTS, condition, new_tokens=3, trace=False)
    traced = detlab.run(model, PROMPTS, condition, new_tokens=3)
    assert bare.trace is None and traced.trace is not None and traced.condition == condition
    assert_same_outputs(bare, traced)
    again = traced.replay()
    assert_same_outputs(again, traced)
    assert [op.key for op in again.trace.ops] == [op.key for op in traced.trace.ops]
    for a, b in zip(again.trace.tensors, traced.trace.tensors, strict=True):
        assert np.array_equal(a.digests, b.digests)
    assert traced.trace.unlaid == [] and traced.trace.notes == []
    assert hooks_of(model) == hooks_of(copy.deepcopy(model)) and torch.get_num_threads() == before


# ---------------------------------------------------------------------------------------------- teacher forcing
def test_forced_tokens_are_fed(model):
    free = detlab.run(model, PROMPTS, new_tokens=4)
    same = detlab.run(model, PROMPTS, new_tokens=4, force=free.tokens)
    assert_same_outputs(free, same)
    assert free.forced is None and same.forced == free.tokens
    other = [[9, 8, 7, 6], [5, 5, 5, 5], [1, 2, 3, 4]]
    with module_tensors(model) as calls:
        forced = detlab.run(model, PROMPTS, new_tokens=4, force=other)
    fed = [seen["in model.embed_tokens"].reshape(-1).tolist() for seen in calls]
    assert fed[1:4] == [[9], [8], [7]] and fed[5:8] == [[5]] * 3
    assert forced.tokens != other and forced.tokens[0][0] == free.tokens[0][0]  # the model's own choices
    assert bitwise_equal(forced.logits[0][0], free.logits[0][0])
    whole = detlab.run(model, [p + o[:3] for p, o in zip(PROMPTS, other, strict=True)], new_tokens=0)
    for a, b in zip(forced.logits, whole.logits, strict=True):
        assert float((a[3] - b[0]).abs().max()) < 1e-4
    assert_same_outputs(forced.replay(), forced)
    assert_same_outputs(free.replay(force=other), forced)


@pytest.mark.parametrize("force", [[[1, 2]], [[1], [2], [3]], [[1, 2]] * 4])
def test_forced_tokens_must_fit(model, force):
    with pytest.raises(UsageError) as caught:
        detlab.run(model, PROMPTS, new_tokens=2, force=force)
    assert str(caught.value) == f"force needs 2 tokens for each of 3 prompts; got {[len(f) for f in force]}."


# ------------------------------------------------------------------------------------------------------- batches
def batches(text, inputs=PROMPTS, vocabulary=1000):
    return make_batches(inputs, Condition.parse(text), vocabulary)


def test_mates_have_the_length_of_the_prompt():
    for mates in ("prompts", "repeat", "random"):
        for row in (0, 3):
            made = batches(f"batch_size=4,row={row},mates={mates}")
            assert len(made) == 3
            for index, batch in enumerate(made):
                assert batch.prompts == [index if r == row else -1 for r in range(4)]
                assert batch.rows[row] == PROMPTS[index]
                assert {len(r) for r in batch.rows} == {len(PROMPTS[index])}
                others = [r for i, r in enumerate(batch.rows) if i != row]
                if mates == "repeat":
                    assert others == [PROMPTS[index]] * 3
                elif mates == "random":
                    assert len({tuple(r) for r in others}) == 3 and all(0 <= t < 1000 for r in others for t in r)
                else:  # the other prompts, cut or repeated
                    assert PROMPTS[(index + 1 + (1 if row == 0 else 0)) % 3][:4] == others[0][:4]


def test_random_mates_depend_on_the_seed_alone():
    one, two, other = (batches(f"batch_size=3,mates=random,seed={seed}") for seed in (1, 1, 2))
    assert [b.rows for b in one] == [b.rows for b in two] != [b.rows for b in other]


def test_padded_batches_hold_every_prompt_once():
    inputs = [prompt(n) for n in (3, 5, 2, 7, 4)]
    for size in (1, 2, 3, 5, 8):
        for row in range(size):
            made = batches(f"batch_size={size},row={row},padding_side=left", inputs)
            names = [p for b in made for p in b.prompts if p >= 0]
            assert sorted(names) == list(range(5)) and all(len(b.prompts) == len(b.rows) == size for b in made)
            for batch in made:
                for name, tokens in zip(batch.prompts, batch.rows, strict=True):
                    assert tokens == inputs[name] if name >= 0 else tokens in inputs
            assert made[0].prompts[row] == 0  # the group's first prompt sits in the row asked for


@pytest.mark.parametrize(
    ("text", "ids", "mask"),
    [
        ("batch_size=2,padding_side=left,padding=1", [[256, 256, 1, 2], [256, 3, 4, 5]], [[0, 0, 1, 1], [0, 1, 1, 1]]),
        ("batch_size=2,padding_side=right", [[1, 2, 256], [3, 4, 5]], [[1, 1, 0], [1, 1, 1]]),
    ],
)
def test_what_the_model_is_called_with(model, text, ids, mask):
    seen = []
    handle = model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw), with_kwargs=True)
    try:
        run = detlab.run(model, [[1, 2], [3, 4, 5]], Condition.parse(text), new_tokens=2)
    finally:
        handle.remove()
    assert seen[0]["input_ids"].tolist() == ids and seen[0]["attention_mask"].tolist() == mask
    positions = [[max(0, sum(row[: i + 1]) - 1) for i in range(len(row))] for row in mask]
    assert seen[0]["position_ids"].tolist() == positions
    assert seen[1]["input_ids"].tolist() == [[t[0]] for t in run.tokens]
    assert seen[1]["attention_mask"].tolist() == [[*row, 1] for row in mask]
    assert seen[1]["position_ids"].tolist() == [[2], [3]]  # the token after the prompt's last, whatever the padding
    assert run.trace.calls[1].positions[:, -1].tolist() == [2, 3]


@pytest.mark.parametrize(("text", "pieces"), [
    ("default", [(0, 12), (12, 13), (13, 14)]),
    ("prefill_chunk=5", [(0, 5), (5, 10), (10, 12), (12, 13), (13, 14)]),
    ("prefill_chunk=12", [(0, 12), (12, 13), (13, 14)]),
    ("prefill_chunk=100", [(0, 12), (12, 13), (13, 14)]),
    ("prefill_chunk=1", [(i, i + 1) for i in range(14)]),
    ("cache=none", [(0, 12), (0, 13), (0, 14)]),
])  # fmt: skip
def test_pieces_of_prefill_and_decode(model, text, pieces):
    run = detlab.run(model, [prompt(12)], Condition.parse(text), new_tokens=3)
    assert [(c.query.start, c.query.stop) for c in run.trace.calls] == pieces
    prefill = len(pieces) - 2
    assert [c.step for c in run.trace.calls] == [0] * prefill + [1, 2]


def test_prefill_alone(model):
    run = detlab.run(model, PROMPTS, new_tokens=0)
    assert run.tokens == [[], [], []] and run.num_steps == 0 and [tuple(x.shape) for x in run.logits] == [(1, 1024)] * 3
    assert bitwise_equal(run.logits[1][0], detlab.run(model, PROMPTS, new_tokens=2).logits[1][0])
    assert_same_outputs(run.replay(), run)


# ------------------------------------------------------------------------------------------------- what it refuses
def test_prompts_that_do_not_fit(model):
    short = copy.deepcopy(model)
    short.config.max_position_embeddings = 10
    detlab.run(short, [prompt(7)], new_tokens=3, trace=False)
    with pytest.raises(UsageError) as caught:
        detlab.run(short, [prompt(7), prompt(8)], new_tokens=3)
    assert str(caught.value) == (
        "prompt 'prompt-1' has 8 tokens and 3 more are asked for; the model holds 10 positions. "
        "Shorten the prompt or ask for fewer tokens."
    )


@pytest.mark.parametrize("token", [1024, 99999])
def test_token_ids_that_the_model_does_not_have(model, token):
    with pytest.raises(UsageError) as caught:
        detlab.run(model, [[3, 4], [5, token]])
    assert str(caught.value) == (
        f"prompt 'prompt-1' has token id {token}; the model's vocabulary is 0..1023. Is it another model's tokenizer?"
    )


def test_other_things_it_refuses(model):
    with pytest.raises(PromptError, match=r"^at least one prompt is needed; got an empty list\.$"):
        detlab.run(model, [])
    with pytest.raises(PromptError, match="token 1 must be an integer of 0 or more; got int -1"):
        detlab.run(model, [[1, -1]])
    with pytest.raises(UsageError, match=r"^run needs new_tokens of at least 0; got -1\.$"):
        detlab.run(model, PROMPTS, new_tokens=-1)
    with pytest.raises(UsageError, match=r"^run needs a Condition, such as Condition\(batch_size=8\); got 'batch_size=8'\.$"):
        detlab.run(model, PROMPTS, "batch_size=8")
    training = copy.deepcopy(model).train()
    message = "run needs a model in eval mode: dropout would make every run another one. Call model.eval()."
    with pytest.raises(UsageError) as caught:
        detlab.run(training, PROMPTS)
    assert str(caught.value) == message


def test_models_that_are_not_of_transformers():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(256, 8)
            self.head = torch.nn.Linear(8, 256)

        def forward(self, input_ids, attention_mask=None):
            return {"logits": self.head(self.embed(input_ids))}

    plain = Plain().eval()
    run = detlab.run(plain, [[1, 2, 3]], Condition(cache="none"), new_tokens=2)
    assert run.trace.unlaid == [] and run.num_steps == 2
    with pytest.raises(UsageError, match=r"^attention='eager': Plain is not a transformers model; leave it out\.$"):
        detlab.run(plain, [[1, 2, 3]], Condition(cache="none", attention="eager"))


def test_an_attention_that_a_model_does_not_have_is_refused_and_measured_around():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
    gemma2 = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **more)).eval()
    with pytest.raises(UsageError, match=r"^attention='sdpa': Gemma2ForCausalLM does not have it"):
        detlab.run(gemma2, [[1, 2, 3]], Condition(attention="sdpa"), new_tokens=1)
    assert gemma2.config._attn_implementation == "eager"
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)).eval()
    with pytest.raises(UsageError, match=r"^attention='sdpa': BloomForCausalLM has an attention of its own"):
        detlab.run(bloom, [[1, 2, 3]], Condition(attention="sdpa"), new_tokens=1)
    noise = detlab.triage(detlab.compare(*(detlab.run(gemma2, [[1, 2, 3]], Condition(batch_size=n)) for n in (1, 4)))).noise
    assert noise is None or "attention=sdpa" not in noise.to_json()["measured"]



# ----------------------------------------------------------------------------------------------------------- NaN
def test_nan_logits_are_reported(model):
    poisoned = copy.deepcopy(model)
    with torch.no_grad():
        poisoned.lm_head.weight[300, 5] = float("nan")
    assert detlab.run(model, PROMPTS[:2], new_tokens=2).nans == []
    a = detlab.run(poisoned, PROMPTS[:2], new_tokens=2)
    assert [(n.prompt, n.step, n.count) for n in a.nans] == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    assert a.tokens == [[300, 300], [300, 300]]
    b = detlab.run(poisoned, PROMPTS[:2], new_tokens=2)
    comparison = detlab.compare(a, b)
    assert comparison.verdict == "identical" and comparison.num_nan == (4, 4) and comparison.cosine is None
    assert "logits hold NaN: 4 in a, 4 in b; greedy tokens mean nothing there" in comparison.notes
    assert json.loads(json.dumps(comparison.to_json(), allow_nan=False))["num_nan"] == [4, 4]
    # Against a sound model: the weight is named, and the size of the difference says what it is.
    against = detlab.compare(detlab.run(model, PROMPTS[:2], new_tokens=2), a)
    assert against.verdict == "diverged" and against.num_nan == (0, 4)
    assert against.first.module == "lm_head" and against.first.inputs["mat2"] == "differs"
    assert against.first.max_ulp == 1 << 62 and "NaN on one side" in str(against.first)
    json.dumps(against.to_json(), allow_nan=False)


# ------------------------------------------------------------------------------------------------- dtype, attention
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in FAMILIES), ("tiny-llama", "float64"), ("tiny-gpt2", "float16")]
)
def test_a_cast_copy_is_what_loading_in_that_dtype_gives(name, dtype):
    model, loaded = detlab.load_model(name)[0], detlab.load_model(name, dtype=dtype)[0]
    cast = detlab.run(model, PROMPTS[:1], Condition(dtype=dtype), new_tokens=2)
    own = detlab.run(loaded, PROMPTS[:1], new_tokens=2)
    assert cast.logits[0].dtype == getattr(torch, dtype)
    assert_same_outputs(cast, own)
    assert detlab.compare(cast, own).verdict == "identical"
    if name != "tiny-gemma3":  # its embed_scale is a buffer that is cast where it is used
        for a, b in zip(cast.trace.tensors, own.trace.tensors, strict=True):
            assert a.dtype == b.dtype and np.array_equal(a.digests, b.digests)
    assert next(model.parameters()).dtype == torch.float32
    assert cast.md5 != detlab.run(model, PROMPTS[:1], new_tokens=2, trace=False).md5


@pytest.mark.parametrize("way", ["no_grad", "data"])
@pytest.mark.parametrize("text", ["dtype=bfloat16", "alignment=16"])
def test_a_copy_follows_its_model(model, text, way):
    changing = copy.deepcopy(model)
    condition = Condition.parse(text)
    before = detlab.run(changing, PROMPTS[:1], condition, new_tokens=1, trace=False)
    if way == "data":
        changing.lm_head.weight.data[:, 0] += 1
    else:
        with torch.no_grad():
            changing.lm_head.weight[:, 0] += 1
    after = detlab.run(changing, PROMPTS[:1], condition, new_tokens=1, trace=False)
    fresh = detlab.run(copy.deepcopy(changing), PROMPTS[:1], condition, new_tokens=1, trace=False)
    assert after.md5 == fresh.md5 != before.md5


def test_attention_is_restored(model):
    assert model.config._attn_implementation == "sdpa"
    detlab.run(model, PROMPTS, Condition(attention="eager"), new_tokens=1)
    assert model.config._attn_implementation == "sdpa"
    detlab.run(model, PROMPTS, Condition(attention="eager", dtype="bfloat16"), new_tokens=1)
    again = detlab.run(model, PROMPTS, Condition(dtype="bfloat16"), new_tokens=1)
    assert any("flash" in op.op for op in again.trace.ops)


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize(
    "text", ["attention=eager", "attention=eager,dtype=bfloat16", "threads=2,deterministic_algorithms=True"]
)
def test_an_interruption_leaves_nothing_behind(model, text, error):
    def interrupt(done, total, what):
        if done == 2:
            raise error

    condition = Condition.parse(text)
    expected = detlab.run(model, PROMPTS, condition, new_tokens=2)
    hooks, random_state, threads = hooks_of(model), torch.get_rng_state(), torch.get_num_threads()
    with pytest.raises(error):
        detlab.run(model, PROMPTS, condition, new_tokens=2, progress=interrupt)
    with pytest.raises(error):
        detlab.compare(expected, expected, progress=interrupt)
    assert model.config._attn_implementation == "sdpa" and hooks_of(model) == hooks
    assert torch.equal(torch.get_rng_state(), random_state) and torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled() and _get_current_dispatch_mode() is None and torch.is_grad_enabled()
    assert_same_outputs(detlab.run(model, PROMPTS, condition, new_tokens=2), expected)
    sdpa = detlab.run(model, PROMPTS, new_tokens=1)
    assert any("flash" in op.op for op in sdpa.trace.ops)


def test_random_state_is_left_alone(model):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    detlab.run(model, PROMPTS, Condition(seed=5, batch_size=2, mates="random", temperature=1.0), new_tokens=2)
    assert torch.equal(torch.get_rng_state(), before)


# --------------------------------------------------------------------------------------------------- what a run holds
def test_progress_counts_to_the_end(model):
    for text, new_tokens, total in (("default", 4, 12), ("batch_size=3,padding_side=left", 4, 4), ("default", 0, 3)):
        seen = []
        condition = Condition.parse(text)
        detlab.run(model, PROMPTS, condition, new_tokens=new_tokens, progress=lambda *what, seen=seen: seen.append(what))
        assert seen == [(i + 1, total, str(condition)) for i in range(total)]


def test_a_run_keeps_no_model_alive():
    model = detlab.load_model("tiny-llama")[0]
    run = detlab.run(model, PROMPTS, Condition(dtype="bfloat16"), new_tokens=1)
    assert run.is_live and "3 prompts x 1 tokens" in repr(run) and repr(run).startswith("Run(dtype=bfloat16: ")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and not run.is_live
    with pytest.raises(ModelError) as caught:
        run.replay()
    assert str(caught.value) == (
        "this run has no model at hand (it was loaded from disk, or the model was deleted); run it again."
    )


def test_texts_are_cut_at_the_end_token():
    model, tokenizer = detlab.load_model("tiny-llama")
    run = detlab.run(model, ["Hello", "What is a bit?"], new_tokens=5)
    assert run.inputs == [tokenizer(t)["input_ids"] for t in ("Hello", "What is a bit?")]
    assert run.prompt_ids == ["prompt-0", "prompt-1"]
    assert run.texts == [tokenizer.decode(t) for t in run.tokens]
    for end in (run.tokens[0][2], [run.tokens[0][2], 999]):
        model.config.eos_token_id = end
        cut = detlab.run(model, ["Hello", "What is a bit?"], new_tokens=5)
        assert cut.tokens == run.tokens and len(cut.logits[0]) == 5  # it runs on: every run has the same rows
        at = run.tokens[0].index(run.tokens[0][2])
        assert cut.texts[0] == tokenizer.decode(run.tokens[0][:at])
    assert detlab.run(model, [[5, 6]], new_tokens=1).texts is None


def test_public_signatures():
    assert list(inspect.signature(detlab.run).parameters) == [
        "model", "prompts", "condition", "new_tokens", "tokenizer", "save", "trace", "force", "progress",
    ]  # fmt: skip
