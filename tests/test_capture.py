"""Capture: it sees every op, under the right module and with the right rows, and changes nothing."""

import copy
import gc
import random
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import detlab
from detlab import bits
from detlab.errors import CaptureError, UsageError
from detlab.trace.records import split_keys
from tests.bit_classes import bitwise_equal, draw

DENSE = ("tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-gemma3")
SPARSE = ("tiny-qwen3-moe", "tiny-mixtral")


@pytest.fixture(scope="module")
def models():
    loaded = {}

    def get(name, dtype="float32", attention="sdpa"):
        key = (name, dtype, attention)
        if key not in loaded:
            loaded[key] = detlab.load_model(name, dtype=dtype, attention=attention)[0]
        return loaded[key]

    return get


def batch_of(lengths, width=None, seed=1):
    """Token ids and mask of prompts of these lengths, padded on the left."""
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), 256)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, 250, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


def prefill_and_decode(model, ids, mask, steps=2):
    """Logits of every call, and the cache at the end."""
    logits, cache = [], None
    for step in range(steps + 1):
        start = 0 if step == 0 else ids.shape[1] - 1
        positions = positions_of(mask)[:, start:]
        out = model(ids[:, start:], attention_mask=mask, position_ids=positions, use_cache=True, cache=cache)
        cache = out.cache
        logits.append(out.logits)
        ids = torch.cat([ids, torch.full_like(ids[:, :1], 40 + step)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    kept = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return [t.detach() for t in (*logits, *kept)]


# ----------------------------------------------------------------------------------------- it changes nothing
@pytest.mark.parametrize("gradients", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_bits_are_those_without_capture(models, dtype, attention, gradients):
    model = models("tiny-llama", dtype, attention)
    ids, mask = batch_of([24, 13, 1])
    with gradients():
        expected = prefill_and_decode(model, ids, mask)
        with detlab.capture(model) as trace:
            actual = prefill_and_decode(model, ids, mask)
        again = prefill_and_decode(model, ids, mask)
    assert len(trace.calls) == 3 and trace.unlaid == [] and trace.notes == []
    for a, e, g in zip(actual, expected, again, strict=True):
        assert bitwise_equal(a, e) and bitwise_equal(g, e)


@pytest.mark.parametrize("name", [*DENSE[1:], *SPARSE])
def test_output_bits_of_every_family_are_those_without_capture(models, name):
    model = models(name)
    ids, mask = batch_of([70, 33])  # beyond Gemma's sliding window of 64
    with torch.no_grad():
        expected = prefill_and_decode(model, ids, mask, 1)
        with detlab.capture(model, save="full") as trace:
            actual = prefill_and_decode(model, ids, mask, 1)
    assert len(trace.saved) > 100
    for a, e in zip(actual, expected, strict=True):
        assert bitwise_equal(a, e)


def test_gradients_are_those_without_capture(models):
    def gradients(watch):
        model = copy.deepcopy(models("tiny-llama")).requires_grad_(True)
        with watch(model):
            model(batch_of([9, 4])[0]).logits.square().mean().backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(lambda m: nullcontext()), gradients(detlab.capture), strict=True):
        assert bitwise_equal(a, b)


def test_random_state_is_left_alone(models):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with torch.no_grad(), detlab.capture(models("tiny-llama"), save="full"):
        models("tiny-llama")(batch_of([9, 4])[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[2], strict=True))


def test_sampling_is_left_alone(models):
    def sample():
        torch.manual_seed(5)
        ids, mask = batch_of([9, 4])
        return models("tiny-llama").generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=5, min_new_tokens=5)

    with detlab.capture(models("tiny-llama")):
        watched = sample()
    assert torch.equal(watched, sample())


# ------------------------------------------------------------------------------------------- it sees every op
class Counter(TorchDispatchMode):
    """Counts ops by itself, with the innermost module that its own hooks know."""

    def __init__(self, model):
        super().__init__()
        self.ops = []
        self.stack = []
        self.modules = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, a, name=name: self.stack.append(name))
            module.register_forward_hook(self.leave(name))

    def leave(self, name):
        def hook(module, args, output):
            assert self.stack.pop() == name
            self.modules.append((name, type(module).__name__))

        return hook

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) or (isinstance(result, (tuple, list)) and result):
            name = func._schema.name.removeprefix("aten::").replace("::", ".")
            self.ops.append((self.stack[-1] if self.stack else "(outside)", name))
        return result


@pytest.mark.parametrize("gradients", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_every_op_is_in_the_trace_under_its_module(models, name, gradients):
    ids, mask = batch_of([12, 7])
    model = models(name)
    with gradients():
        with detlab.capture(model) as trace:
            prefill_and_decode(model, ids, mask, 1)
        counted = copy.deepcopy(model)
        counter = Counter(counted)
        with counter:
            prefill_and_decode(counted, ids, mask, 1)
    # Of an output of a factory that somebody holds (here: until it is hashed), torch itself hands out a detached view.
    seen = [(op.module, op.op) for op in trace.ops if op.op != "detach"]
    assert seen == [op for op in counter.ops if op[1] != "detach"] and len(seen) > 200
    assert [(m.module, m.class_name) for m in trace.modules] == counter.modules
    assert [op.index for op in trace.ops] == list(range(len(trace.ops)))
    assert sum(op.is_view for op in trace.ops) > 100
    for m in trace.modules:
        inside = trace.ops[m.first_op : m.end_op]
        is_own = [op.module == m.module or op.module.startswith(f"{m.module}.") or not m.module for op in inside]
        assert all(is_own)
    occurrences = {}
    for op in trace.ops:
        if op.module == "(outside)":
            continue
        at = (op.call, op.module, op.op)
        assert op.occurrence == occurrences.get(at, 0)
        occurrences[at] = op.occurrence + 1


def test_inference_mode_shows_the_same_ops(models):
    ids, mask = batch_of([12, 7])
    found = []
    for gradients in (torch.no_grad, torch.inference_mode):
        with gradients(), detlab.capture(models("tiny-llama")) as trace:
            prefill_and_decode(models("tiny-llama"), ids, mask, 1)
        found.append(trace)
    programs = [[(op.module, op.op) for op in trace.ops if "detach" not in op.op] for trace in found]
    assert programs[0] == programs[1]
    assert detlab.compare(*found).verdict == "identical"
    assert detlab.compare(*found).rows_compared == detlab.compare(found[0], found[0]).rows_compared


@pytest.mark.parametrize("name", DENSE)
def test_no_op_of_a_dense_model_is_unlaid(models, name):
    ids, mask = batch_of([12, 7, 1])
    for attention in ("sdpa", "eager"):
        model = models(name, "float32", attention)
        with torch.no_grad(), detlab.capture(model) as trace:
            prefill_and_decode(model, ids, mask, 1)
        assert trace.unlaid == []
        head = [m for m in trace.modules if m.module == "lm_head"]
        assert [trace.tensors[m.output].status for m in head] == ["rows", "rows"]


@pytest.mark.parametrize("name", SPARSE)
def test_experts_are_followed(models, name):
    with torch.no_grad(), detlab.capture(models(name)) as trace:
        models(name)(*batch_of([12, 7, 1]))
    (head,) = [m for m in trace.modules if m.module == "lm_head"]
    assert trace.tensors[head.output].status == "rows"


# ------------------------------------------------------------------------------------- rows are what they are said to be
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_digests_are_those_of_the_modules_outputs(models, dtype):
    model = models("tiny-llama", dtype)
    lengths, width = [12, 7, 1], 14
    ids, mask = batch_of(lengths, width)
    outputs = []
    handles = []
    for name, module in model.named_modules():
        if not list(module.children()):
            handles.append(module.register_forward_hook(lambda m, a, out, name=name: outputs.append((name, out))))
    try:
        with torch.no_grad(), detlab.capture(model) as trace:
            model(ids, attention_mask=mask, position_ids=positions_of(mask))
    finally:
        for handle in handles:
            handle.remove()
    records = {m.module: m for m in trace.modules}
    num_rows = 0
    for name, out in outputs:
        if not isinstance(out, torch.Tensor) or out.ndim != 3:
            continue
        keys, digests = trace.rows(records[name].output)
        expected = {}
        for row, length in enumerate(lengths):
            for position in range(length):
                slot = width - length + position
                expected[row, position] = bits.row_digests(out[row, slot].reshape(1, -1))[0]
        found = dict(zip(zip(*(part.tolist() for part in split_keys(keys)), strict=True), digests, strict=True))
        assert found == expected, name
        num_rows += len(found)
    assert num_rows == 23 * 20  # embedding, 2 layers of 10 modules, norm and head; 20 tokens


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DENSE)
def test_a_changed_token_changes_no_row_of_another_prompt_or_before_it(models, name, attention, padding):
    model = models(name, "float32", attention)
    traces = []
    for token in (77, 78):
        ids, mask = batch_of([9, 9, 9] if not padding else [9, 6, 8], 9 + padding)
        ids[1, -4] = token
        with torch.no_grad(), detlab.capture(model) as trace:
            prefill_and_decode(model, ids, mask, 1)
        traces.append(trace)
    position = (9 if not padding else 6) - 4
    a, b = traces
    num_changed = 0
    for op in a.ops:
        for number in op.outputs if not op.is_view else ():
            keys, before = a.rows(number)
            other, after = b.rows(number)
            assert np.array_equal(keys, other)
            prompt, at = split_keys(keys[before != after])
            assert (prompt == 1).all() and (at >= position).all(), (op.module, op.op)
            num_changed += len(prompt)
    assert num_changed > 100
    head = [m.output for m in a.modules if m.module == "lm_head"]
    for number in head:
        keys, before = a.rows(number)
        assert (split_keys(keys[before != b.rows(number)[1]])[0] == 1).any()


def test_values_are_kept_where_asked_for(models):
    model = models("tiny-llama")
    ids, mask = batch_of([5, 3])
    with torch.no_grad(), detlab.capture(model, save=lambda op: op.module == "lm_head") as trace:
        out = model(ids, attention_mask=mask)
    ((number, kept),) = trace.saved.items()
    assert trace.producer(number).module == "lm_head"
    assert bitwise_equal(kept.reshape(out.logits.shape), out.logits)
    with torch.no_grad(), detlab.capture(model) as trace:
        model(ids, attention_mask=mask)
    assert trace.saved == {}
    with torch.no_grad(), detlab.capture(model, save="full") as trace:
        model(ids, attention_mask=mask)
    assert set(trace.saved) == {n for op in trace.ops if not op.is_view for n in op.outputs}
    seen = []
    with torch.no_grad(), detlab.capture(model, observer=lambda *what: seen.append(what)) as trace:
        model(ids, attention_mask=mask)
    assert [(op.index, record.number) for op, record, *_ in seen] == [
        (op.index, n) for op in trace.ops if not op.is_view for n in op.outputs
    ]


def test_save_that_is_no_choice(models):
    with pytest.raises(UsageError, match=r'^capture: save is "digest", "full" or a function of an OpRecord; got \'all\'\.$'):
        with detlab.capture(models("tiny-llama"), save="all"):
            pass


class Joining(nn.Module):
    """Puts rows one after another, as caches do; what was joined is kept for the test."""

    def __init__(self, join):
        super().__init__()
        self.join = join
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs_embeds):
        self.joined = self.join(inputs_embeds * self.weight)
        return self.joined * 1


@pytest.mark.parametrize(
    "join",
    [
        lambda x: torch.cat([x[:, :2], x[:, 2:]], 1),
        lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
        lambda x: torch.cat([x[:, 3:], (x * 3)[:, :3]], 1),
        lambda x: torch.cat([x[:, 2:4], (x * 2)[:, :1]], 1),  # a window
        lambda x: torch.cat([torch.cat([x[:, :2], x[:, 2:3] * 2], 1)[:, 1:], x[:, 3:] * 5], 1),
        lambda x: torch.cat([x[:1], x[1:]], 0),
    ],
)
def test_joined_rows_are_those_that_are_there(join):
    model = Joining(join)
    x = draw(2, 5, 4, seed=4)
    with torch.no_grad(), detlab.capture(model) as trace:
        model(inputs_embeds=x)
    cat = [op for op in trace.ops if op.op == "cat"][-1]
    keys, digests = trace.rows(cat.outputs[0])
    assert len(keys) == model.joined.shape[0] * model.joined.shape[1]
    assert sorted(digests.tolist()) == sorted(bits.row_digests(model.joined.reshape(-1, 4)).tolist())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3"])
def test_the_rows_of_a_cache_are_those_that_it_holds(models, name):
    model = models(name)
    ids, mask = batch_of([70, 66])  # Gemma's window of 64 slides
    held = []
    with torch.no_grad(), detlab.capture(model) as trace:
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        for step in range(3):
            mask = torch.cat([mask, mask[:, -1:]], 1)
            cache = model(torch.full((2, 1), 40 + step), attention_mask=mask, use_cache=True, cache=cache).cache
            held.append(cache.layers[0].keys.clone())
    for step, keys_held in enumerate(held, start=1):
        op = next(o for o in trace.ops if o.call == step and o.module == "model.layers.0.self_attn" and o.op == "cat"
                  and len(trace.tensors[o.outputs[0]].shape) == 4 and trace.tensors[o.outputs[0]].shape[2] > 60)  # fmt: skip
        keys, digests = trace.rows(op.outputs[0])
        newest = {}
        for key, digest in zip(keys.tolist(), digests.tolist(), strict=True):
            newest[key] = digest
        for row, length in enumerate((70, 66)):
            for slot in range(1, 30):  # the last rows of what the cache holds
                position = length + step - slot
                expected = bits.row_digests(keys_held[row, :, keys_held.shape[2] - slot].reshape(1, -1))[0]
                assert newest[(row << 32) + position + 2] == expected, (step, row, position)
        total = trace.tensors[op.outputs[0]].shape[2]
        assert len(keys) == sum(min(length + step, total) for length in (70, 66))


# ----------------------------------------------------------------------------------------------- changes in place
class Changing(nn.Module):
    """y = 2x, then something is done to y, then z = 3y."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs_embeds):
        y = inputs_embeds * 2
        shown = y.view(y.shape)
        self.change(y)
        return (y * 3 + shown * 0) * self.weight


def last_input(trace, op="mul", occurrence=1):
    """Digests of what the op took as its first argument."""
    (found,) = [o for o in trace.ops if (o.op, o.occurrence) == (op, occurrence)]
    return trace.rows(found.inputs[0][1])[1]


CHANGES = {
    "nothing": lambda y: None,
    "add_": lambda y: y.add_(1),
    "through a view": lambda y: y[:, 0].add_(1),
    "through .data": lambda y: y.data.add_(1),
    "through detach": lambda y: y.detach()[:, 1].zero_(),
    "copy_": lambda y: y.copy_(torch.ones_like(y)),
    "setitem": lambda y: y.__setitem__((0, 0), 5.0),
    "out=": lambda y: torch.add(y, 1, out=y),
    "foreach": lambda y: torch._foreach_add_([y], 1.0),
    "swapped rows": lambda y: y[0].copy_(y[0].flip(0).clone()),
}


@pytest.mark.parametrize("gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_are_seen(change, gradients):
    x = draw(1, 3, 4, seed=3)
    model = Changing(CHANGES[change])
    with gradients():
        with detlab.capture(model, save="full") as trace:
            model(inputs_embeds=x)
        changed = x * 2
        CHANGES[change](changed)
    expected = bits.row_digests(changed[0])
    assert np.array_equal(last_input(trace), expected)
    assert np.array_equal(last_input(trace, occurrence=2), expected)  # shown, a view taken before
    first = trace.ops[0].outputs[0]
    assert np.array_equal(trace.rows(first)[1], bits.row_digests(x[0] * 2))  # hashed before it was changed
    assert bitwise_equal(trace.saved[first], x * 2)


def weight_digest(model):
    with torch.no_grad(), detlab.capture(model) as trace:
        model(inputs_embeds=draw(1, 3, 4, seed=3))
    (record,) = [t for t in trace.tensors if t.kind == "parameter"]
    assert record.name == "weight" and record.status == "whole"
    return record.digests.tolist()


def change(parameter, way):
    """Another value of one element, written in one of the ways that there are."""
    other = parameter.detach().clone()
    other.view(-1)[2] = torch.nextafter(other.view(-1)[2], torch.tensor(9.0))
    if way == "no_grad":
        with torch.no_grad():
            parameter.copy_(other)
    elif way == "data":
        parameter.data.copy_(other)
    elif way == "numpy":
        parameter.detach().numpy()[:] = other.numpy()
    else:
        parameter.data = other


@pytest.mark.parametrize("way", ["no_grad", "new data"])  # what LIMITATIONS.md says of bare captures
def test_a_parameter_changed_between_bare_captures_is_seen(way):
    model = Changing(CHANGES["nothing"])
    before = weight_digest(model)
    assert weight_digest(model) == before
    change(model.weight, way)
    after = weight_digest(model)
    assert after != before and after == weight_digest(model)


@pytest.mark.parametrize("way", ["no_grad", "data", "numpy", "new data"])
def test_a_parameter_changed_between_runs_is_seen(way):
    model = detlab.load_model("tiny-llama")[0]
    name = "model.layers.0.post_attention_layernorm.weight"
    runs = [detlab.run(model, [[5, 6, 7]], new_tokens=0) for _ in "ab"]
    change(model.get_parameter(name), way)
    runs.append(detlab.run(model, [[5, 6, 7]], new_tokens=0))
    same, other = (detlab.compare(runs[0], run, controls=False, measure=False) for run in runs[1:])
    assert same.verdict == "identical" and same.notes == ["controls were not run"]
    assert f"parameter {name} differs between a and b" in other.notes


# ------------------------------------------------------------------------------------- it leaves nothing behind
def hooks_of(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt()])
def test_an_exception_leaves_no_hooks_and_nothing_saved(models, error, tmp_path):
    model = models("tiny-llama")
    ids, mask = batch_of([5, 3])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits

    def fail(module, args):
        raise error

    before = hooks_of(model)
    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(type(error)):
        with detlab.capture(model, path=tmp_path / "trace") as trace:
            model(ids, attention_mask=mask)
    handle.remove()
    assert hooks_of(model) == before and _get_current_dispatch_mode() is None
    assert list(tmp_path.iterdir()) == []
    assert trace.ops[-1].module.startswith("model.layers.1")
    assert all(len(t.digests) for t in trace.tensors if t.kind == "op" and not t.parts and 0 not in t.shape)
    with torch.no_grad(), detlab.capture(model, path=tmp_path / "trace") as trace:  # and it can be captured again
        assert bitwise_equal(model(ids, attention_mask=mask).logits, expected)
    assert hooks_of(model) == before
    assert detlab.compare(detlab.load_trace(tmp_path / "trace"), trace).verdict == "identical"


def test_a_call_that_fails_is_followed_by_one_that_is_laid(models):
    model = models("tiny-llama")
    ids, mask = batch_of([5, 3])
    with torch.no_grad(), detlab.capture(model) as trace:
        with pytest.raises(Exception, match="."):
            model(ids + 5000, attention_mask=mask)
        model(ids, attention_mask=mask)
    with torch.no_grad(), detlab.capture(model) as alone:
        model(ids, attention_mask=mask)
    second = [op for op in trace.ops if op.call == 1]
    assert [(op.module, op.op) for op in second] == [(op.module, op.op) for op in alone.ops]
    for ours, theirs in zip(second, alone.ops, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert np.array_equal(trace.rows(a)[1], alone.rows(b)[1])


def test_the_garbage_collector_is_as_before(models):
    model = models("tiny-llama")
    assert gc.get_freeze_count() == 0 and gc.isenabled()
    with torch.no_grad(), detlab.capture(model):
        model(batch_of([3])[0])
    with pytest.raises(Stop), detlab.capture(model):
        raise Stop
    assert gc.get_freeze_count() == 0 and gc.isenabled()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with detlab.capture(model):
            pass
        assert gc.get_freeze_count() == frozen  # the caller's choice
    finally:
        gc.unfreeze()


class Stop(Exception):
    pass


def test_nested_captures_are_refused(models):
    model = models("tiny-llama")
    before = hooks_of(model)
    message = r"^capture: this LlamaForCausalLM is being captured already; end that capture first\.$"
    with detlab.capture(model):
        with pytest.raises(CaptureError, match=message), detlab.capture(model):
            pass
    assert hooks_of(model) == before
    with detlab.capture(model), detlab.capture(models("tiny-gpt2")):  # another model is another matter
        pass


def test_a_compiled_model_is_refused(models):
    compiled = torch.compile(models("tiny-llama"))
    message = r"^capture: the model is compiled as a whole, so its modules cannot be told apart\. Capture model\._orig_mod\.$"
    with pytest.raises(CaptureError, match=message), detlab.capture(compiled):
        pass
    with torch.no_grad(), detlab.capture(compiled._orig_mod) as trace:
        compiled._orig_mod(batch_of([3])[0])
    assert len(trace.ops) > 100


class Leaky(nn.Module):
    """Makes a large tensor, and watches whether it is let go."""

    def __init__(self):
        super().__init__()
        self.is_dead = []
        self.seen = []

    def forward(self, inputs_embeds):
        for _ in range(3):
            big = inputs_embeds.repeat(1, 1, 64) * 1.5
            self.seen.append(weakref.ref(big))
            assert big.numel() * 4 > 64 << 10  # larger than what may wait to be hashed
            out = big.sum(-1, keepdim=True) + inputs_embeds
            del big
            self.is_dead.append(self.seen[-1]() is None)
        return out


def test_big_tensors_are_let_go_at_once():
    model = Leaky()
    gc.disable()
    try:
        with torch.no_grad(), detlab.capture(model) as trace:
            model(inputs_embeds=draw(2, 16, 64))
    finally:
        gc.enable()
    assert model.is_dead == [True] * 3 and len(trace.ops) > 5


def test_the_model_can_be_let_go():
    model = detlab.load_model("tiny-llama")[0]
    with torch.no_grad(), detlab.capture(model) as trace:
        model(batch_of([3])[0])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(trace.ops) > 100


# ---------------------------------------------------------------------------------------------- bare captures
def test_direct_calls_are_laid_without_a_runner(models):
    model = models("tiny-llama")
    ids, mask = batch_of([6, 4])
    with torch.no_grad(), detlab.capture(model) as trace:
        out = model(ids, attention_mask=mask, use_cache=True)
        token = torch.tensor([[7], [9]])
        model(token, attention_mask=torch.cat([mask, mask[:, -1:]], 1), cache=out.cache)
    first, second = trace.calls
    assert (first.step, second.step, first.query, second.query) == (0, 1, range(6), range(6, 7))
    assert first.positions.tolist() == [[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3]]
    assert second.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6], [-1, -1, 0, 1, 2, 3, 4]]
    assert second.tokens.tolist() == [[7], [9]] and second.prompts.tolist() == [0, 1]
    # The decode step's keys are the rows of the cache and the new ones.
    (flash,) = [op for op in trace.ops if op.call == 1 and "flash" in op.op and op.module == "model.layers.0.self_attn"]
    keys = {name: number for name, number, _ in flash.inputs}["key"]
    prompt, position = split_keys(trace.rows(keys)[0])
    assert list(zip(prompt.tolist(), position.tolist(), strict=True)) == [(0, i) for i in range(7)] + [(1, i) for i in range(5)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_is_captured(models, attention):
    model = models("tiny-llama", "float32", attention)
    ids, mask = batch_of([6, 4])
    options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    expected = model.generate(ids, attention_mask=mask, **options)
    with detlab.capture(model) as trace:
        actual = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(actual, expected)
    assert trace.unlaid == [] and trace.notes == []
    assert [(c.step, c.query) for c in trace.calls] == [(i, range(0, 6) if i == 0 else range(5 + i, 6 + i)) for i in range(4)]
    assert trace.calls[3].positions[1].tolist() == [-1, -1, 0, 1, 2, 3, 4, 5, 6]
    assert [c.tokens[0].tolist() for c in trace.calls[1:]] == [[t] for t in expected[0, 6:9].tolist()]
    with detlab.capture(model) as again:
        model.generate(ids, attention_mask=mask, **options)
    assert detlab.compare(trace, again).verdict == "identical"


def test_embeddings_in_place_of_ids(models):
    model = models("tiny-llama")
    ids, mask = batch_of([6, 4])
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        with detlab.capture(model) as by_embeds:
            model(inputs_embeds=embeds, attention_mask=mask)
        with detlab.capture(model) as by_ids:
            model(ids, attention_mask=mask)
    assert by_embeds.unlaid == [] and by_embeds.calls[0].tokens.tolist() == [[-1] * 6] * 2
    assert detlab.compare(by_embeds, by_ids).verdict == "identical"


def test_a_call_without_tokens_is_noted():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = draw(2, 4)
    with torch.no_grad(), detlab.capture(model) as trace:
        model(x)
    note = "a call without input_ids or inputs_embeds has no token rows: its tensors are unlaid"
    assert trace.notes == [note]
    assert len(trace.unlaid) == sum(not op.is_view for op in trace.ops) >= 2
    comparison = detlab.compare(trace, trace)
    assert note in comparison.notes and comparison.rows_compared == 0
    assert comparison.verdict != "identical"  # nothing was compared, so nothing is known to be identical


def test_a_mask_that_names_no_padding_is_noted(models):
    ids, _ = batch_of([6, 6])
    mask = torch.zeros(2, 1, 6, 6)
    with torch.no_grad(), detlab.capture(models("tiny-llama")) as trace:
        models("tiny-llama")(ids, attention_mask=mask)
    assert trace.notes == ["a mask that is not [batch, slots] does not name padding: token slots were taken as positions"]
    assert trace.calls[0].positions.tolist() == [list(range(6))] * 2


def test_what_runs_between_calls_is_outside(models):
    model = models("tiny-llama")
    with torch.no_grad(), detlab.capture(model) as trace:
        x = torch.ones(3) * 2
        model(batch_of([3])[0])
        x + 1
    outside = [op.op for op in trace.ops if op.module == "(outside)"]
    assert [op for op in outside if op in ("ones", "mul", "add")] == ["ones", "mul", "add"]
    assert trace.unlaid == []


def test_the_summary_counts(models):
    model = models("tiny-llama")
    with torch.no_grad(), detlab.capture(model) as trace:
        model(batch_of([3])[0])
    views = sum(op.is_view for op in trace.ops)
    text = f"1 calls, {len(trace.ops) - views} ops and {views} views in {len(trace.modules)} module calls, "
    assert trace.summary() == text + f"{trace.num_digests} row digests" and repr(trace) == f"Trace({trace.summary()})"
    size = sum(p.numel() for p in model.parameters())
    assert trace.model == {"class": "LlamaForCausalLM", "dtype": "float32", "parameters": size}
