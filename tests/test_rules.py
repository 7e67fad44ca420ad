"""Rules: what each op does to rows, found out by experiment.

One row of an input is changed, and the op runs again: the rows of its output that change must be those that the layout
and the relation ("row": that row alone; "context": rows at or after it of the same prompt) say. A rule may give up; it
must not be wrong.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from detlab.trace.layout import cut_of, feature, has_rows, plain, rows_of, unpair
from detlab.trace.plans import Kinds, make_plan, op_info
from tests.bit_classes import draw
from tests.test_layout import Follow, batch, token

B, T, D = 3, 4, 6
ROWS = (batch(B), token(T))
FLAT = (batch(B) + token(T),)


def names(layout):
    """(batch row, slot) of each row of a layout."""
    cut = cut_of(layout)
    if cut.pairs is not None:
        return [unpair(number) for number in cut.pairs]
    slots = [None] if cut.slots is None else cut.slots
    rows = [None] if cut.batch is None else cut.batch
    return [(b, s) for b in rows for s in slots]


def changed_rows(before, after, layout):
    """The names of the rows that differ."""
    size = before.element_size()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    differs = before.contiguous().view(kind) != after.contiguous().view(kind)
    rows = rows_of(differs, layout)
    return {name for name, row in zip(names(layout), rows.grid, strict=True) if row.any()}


def follow(fn, inputs):
    """Runs ``fn`` on (tensor, layout) pairs: outputs, their layouts, and how to know every op that ran."""
    with Follow() as mode:
        tensors = [mode.know(tensor, layout) for tensor, layout in inputs]
        result = fn(*tensors)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    return outputs, [mode.layout_of(out) for out in outputs], mode


def assert_reaches(fn, inputs, which, relation, spared=()):
    """Changes each row of input ``which`` in turn; checks which rows of every output of ``fn`` follow."""
    outputs, layouts, _ = follow(fn, inputs)
    tensor, layout = inputs[which]
    rows = rows_of(torch.arange(tensor.numel()).reshape(tensor.shape), layout)
    for out_layout in layouts:
        assert out_layout is not None and has_rows(out_layout)
    reached = [set() for _ in layouts]
    for (b, s), places in zip(names(layout), rows.grid, strict=True):
        touched = tensor.clone()
        flat = touched.view(-1)
        if tensor.is_floating_point():
            flat[places] += torch.linspace(0.5, 2.0, len(places)).cos()
        else:
            flat[places] = (flat[places] + 1) % 7
        changed = [(touched, layout) if i == which else pair for i, pair in enumerate(inputs)]
        again, _, _ = follow(fn, changed)
        for before, after, out_layout, seen in zip(outputs, again, layouts, reached, strict=True):
            found = changed_rows(before, after, out_layout)
            if relation == "row":
                allowed = {(b, s), (b, None), (None, s)}
            else:
                allowed = {(b, other) for other in range(s, 100)}
            assert found <= allowed, f"input row {(b, s)} reaches {sorted(found - allowed)} of {out_layout}"
            seen |= found
    for output, out_layout, seen in zip(outputs, layouts, reached, strict=True):
        if output.is_floating_point():  # every row of the output was reached by some row of the input
            assert {name for name in set(names(out_layout)) - seen if name[1] not in spared} == set()


def values(*shape, seed=0):
    return draw(*shape, seed=seed + 1)


X = (values(B, T, D), (*ROWS, feature(D)))
X2 = (values(B * T, D, seed=1), (*FLAT, feature(D)))
HEADS = (values(B, 2, T, D, seed=2), (batch(B), feature(2), token(T), feature(D)))
KEYS = (values(B, 2, T, D, seed=3), (batch(B), feature(2), token(T), feature(D)))
IDS = (torch.arange(B * T).reshape(B, T) * 5 % 7, ROWS)
W = (values(8, D, seed=4), plain([8, D]))
W3 = (values(D, 8, seed=5), plain([D, 8]))
BIAS = (values(8, seed=6), plain([8]))
TABLE = (values(7, D, seed=7), plain([7, D]))
NORM = (values(D, seed=8), plain([D]))
MASK = torch.ones(T, T, dtype=torch.bool).tril()


def rotate_half(x):
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((-second, first), -1)


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        pytest.param(lambda x, w: F.linear(x, w), [X, W], id="linear of three dimensions"),
        pytest.param(lambda x, w, b: F.linear(x, w, b), [X, W, BIAS], id="linear with bias (addmm)"),
        pytest.param(lambda x, w: F.linear(x, w), [X2, W], id="linear of two dimensions"),
        pytest.param(lambda x, w: F.linear(x[:, -1:], w), [X, W], id="linear of the last token"),
        pytest.param(lambda x, w: F.linear(x[:, -1], w), [X, W], id="linear of the last token, dropped"),
        pytest.param(lambda x, w: x.view(-1, D) @ w, [X, W3], id="Conv1D"),
        pytest.param(lambda x, w: torch.addmm(w[0, :8], x.view(-1, D), w), [X, W3], id="GPT-2's addmm"),
        pytest.param(lambda x, w: x @ w, [X, W3], id="matmul with a broadcast matrix"),
        pytest.param(lambda x, w: torch.mv(x, w), [X2, NORM], id="mv"),
        pytest.param(lambda x, w: torch.bmm(x, w.expand(B, D, 8)), [X, W3], id="bmm with an expanded matrix"),
        pytest.param(lambda x: F.softmax(x, -1), [X], id="softmax"),
        pytest.param(lambda x: F.log_softmax(x, -1), [X], id="log_softmax"),
        pytest.param(lambda x, w: F.layer_norm(x, (D,), w, w), [X, NORM], id="layer_norm"),
        pytest.param(lambda x, w: F.rms_norm(x, (D,), w), [X, NORM], id="rms_norm"),
        pytest.param(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), [X, NORM], id="RMSNorm"),
        pytest.param(lambda x: (x.float() * 2).to(torch.bfloat16), [X], id="casts"),
        pytest.param(lambda x: F.silu(x) * F.gelu(x, approximate="tanh"), [X], id="activations"),
        pytest.param(lambda x: (lambda a, b: a * torch.sigmoid(b))(*x.chunk(2, -1)), [X], id="gated halves"),
        pytest.param(lambda x: x.cos() + rotate_half(x) * x.sin(), [X], id="rotary embedding"),
        pytest.param(lambda x: rotate_half(x.transpose(1, 2)) * 2, [HEADS], id="rotary embedding of heads"),
        pytest.param(lambda x: x.mean(-1), [X], id="mean"),
        pytest.param(lambda x: x.sum(2, keepdim=True), [X], id="sum, kept"),
        pytest.param(lambda x: x.sum((1, 3)), [HEADS], id="sum over heads"),
        pytest.param(lambda x: x.amax(-1), [X], id="amax"),
        pytest.param(lambda x: x.var(-1, keepdim=True), [X], id="var"),
        pytest.param(lambda x: x.max(-1), [X], id="max with its place"),
        pytest.param(lambda x: torch.linalg.vector_norm(x, dim=-1), [X], id="norm"),
        pytest.param(lambda x: x.norm(2, -1, keepdim=True), [X], id="norm of whole order"),
        pytest.param(lambda x: F.normalize(x, dim=-1), [X], id="normalize"),
        pytest.param(lambda x: x.logsumexp(-1), [X], id="logsumexp"),
        pytest.param(lambda x: x.topk(2, -1), [X], id="topk"),
        pytest.param(lambda x: x.topk(2, 2), [X], id="topk counted from the front"),
        pytest.param(lambda x: x.sort(2, descending=True), [X], id="sort"),
        pytest.param(lambda x: x.cumsum(-1), [X], id="cumsum of features"),
        pytest.param(lambda x: x.gather(-1, x.argsort(-1)), [X], id="gather of features"),
        pytest.param(lambda x: x.masked_fill(x > 0, -1.0), [X], id="masked_fill"),
        pytest.param(lambda x: torch.where(x > 0, x, x.new_zeros(())), [X], id="where"),
        pytest.param(lambda x: torch.stack([x, x * 2], 2), [X], id="stack"),
        pytest.param(lambda x: torch.cat([x, x * 2], -1), [X], id="cat of features"),
        pytest.param(lambda x: torch.cat([x[:, :1], x[:, 1:] * 2], 1), [X], id="cat of tokens"),
        pytest.param(lambda x: x.repeat_interleave(2, 1), [HEADS], id="repeat_kv"),
        pytest.param(lambda x: x[:, :, None].expand(B, 2, 3, T, D).reshape(B, 6, T, D), [HEADS], id="expanded heads"),
        pytest.param(lambda x: x.transpose(1, 2).reshape(B, T, -1), [HEADS], id="heads merged"),
        pytest.param(lambda x: F.pad(x, (0, 2)) * 1, [X], id="padded features"),
        pytest.param(lambda x: F.pad(x, (0, 0, 0, 2))[:, :T] * 1, [X], id="slots padded behind, and cut again"),
        pytest.param(lambda x: x.clone().add_(1).mul_(2), [X], id="in place"),
        pytest.param(lambda x: torch.zeros_like(x).copy_(x), [X], id="copy into its like"),
        pytest.param(lambda x: torch.zeros(B, T, D).copy_(x), [X], id="copy into something plain"),
        pytest.param(lambda ids, table: F.embedding(ids, table), [IDS, TABLE], id="embedding"),
        pytest.param(lambda ids, table: table[ids], [IDS, TABLE], id="a table indexed"),
        pytest.param(lambda ids: F.one_hot(ids, 7) * 2, [IDS], id="one_hot"),
        pytest.param(lambda x: x.flip(-1) * 1, [X], id="flip of features"),
        pytest.param(lambda x: x.flip(1) * 2, [X], id="flip of tokens"),
        pytest.param(lambda x: x.index_select(1, torch.tensor([2, 2, 0])) * 2, [X], id="tokens selected"),
        pytest.param(lambda x: x.view(-1, D)[torch.tensor([5, 0, 5, 11])] * 2, [X], id="rows picked"),
        pytest.param(lambda x: x.view(B * T, D)[:, :2] * 1, [X], id="router logits cut"),
    ],
)  # fmt: skip
def test_a_row_reaches_its_own_row_only(fn, inputs):
    assert_reaches(fn, inputs, 0, "row")


def eager(q, k, v, mask=MASK):
    scores = q @ k.transpose(2, 3) / math.sqrt(D)
    scores = scores.masked_fill(~mask, -math.inf)
    return (F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2).reshape(B, -1, 2 * D)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=MASK.expand(B, 1, T, T)).transpose(1, 2).flatten(2)


def decode(q, k, v):
    """One new token against four cached ones."""
    q = q[:, :, -1:]
    return F.scaled_dot_product_attention(q, torch.cat([k, q], 2), torch.cat([v, q], 2))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("fn", [eager, sdpa, masked_sdpa], ids=["eager", "sdpa", "sdpa with a mask"])
def test_attention_reaches_itself_and_what_comes_after(fn, which):
    # The first token sees itself alone, with a weight of 1 whatever its query and key are.
    spared = (0,) if which < 2 else ()
    assert_reaches(fn, [HEADS, KEYS, KEYS], which, "row" if which == 0 else "context", spared)


def test_cached_attention():
    cached = (batch(B), feature(2), token(-T, 0), feature(D))
    query = (HEADS[0][:, :, -1:].contiguous(), (batch(B), feature(2), token(0, 1), feature(D)))
    outputs, layouts, _ = follow(decode, [query, (KEYS[0], cached), (KEYS[0], cached)])
    assert layouts == [(batch(B), feature(2), token(0, 1), feature(D))]
    assert_reaches(decode, [query, (KEYS[0], cached), (KEYS[0], cached)], 0, "row")
    assert_reaches(decode, [query, (KEYS[0], cached), (KEYS[0], cached)], 1, "context")


def test_scores_name_their_columns():
    _, (layout,), _ = follow(lambda q, k: q @ k.transpose(2, 3), [HEADS, KEYS])
    assert layout == (batch(B), feature(2), token(T), token(T))
    folded = follow(lambda q, k: torch.bmm(q.reshape(B * 2, T, D), k.reshape(B * 2, T, D).mT), [HEADS, KEYS])[1]
    assert folded == [(batch(B) + feature(2), token(T), token(T))]
    # A key's row changes one column of every score row, and that column is named after it.
    before = HEADS[0] @ KEYS[0].transpose(2, 3)
    for slot in range(T):
        touched = KEYS[0].clone()
        touched[1, :, slot] += 0.5
        differs = rows_of(before != HEADS[0] @ touched.transpose(2, 3), layout)
        assert differs.columns[slot] == slot
        at = differs.grid.reshape(B, T, 2, T)
        assert at[1, :, :, slot].all() and at.sum() == T * 2


def test_one_token_and_one_prompt():
    one = (values(1, 1, D), (batch(1), token(1), feature(D)))
    outputs, layouts, _ = follow(lambda x, w: F.linear(x, w).view(1, 1, 2, 4).transpose(1, 2), [one, W])
    assert layouts == [(batch(1), feature(2), token(1), feature(4))]
    past = (values(1, 2, T, 4), (batch(1), feature(2), token(-T, 0), feature(4)))
    joined = follow(lambda x, p, w: torch.cat([p, F.linear(x, w).view(1, 1, 2, 4).transpose(1, 2)], 2), [one, past, W])[1]
    assert joined == [(batch(1), feature(2), token(-T, 1), feature(4))]


# ---------------------------------------------------------------------------------------------- what must be given up
@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        pytest.param(lambda x: x.sum(0), [X], id="sum over prompts"),
        pytest.param(lambda x: x.mean(0, keepdim=True), [X], id="mean over prompts"),
        pytest.param(lambda x: x.sort(1).values, [X], id="sort along tokens"),
        pytest.param(lambda x: x.topk(2, 1).values, [X], id="topk along tokens"),
        pytest.param(lambda x: x.gather(1, x.argsort(1)), [X], id="gather along tokens"),
        pytest.param(lambda x: x.roll(1, 1), [X], id="roll"),
        pytest.param(lambda x: x[x[:, :, 0] > 0], [X], id="a mask that picks rows"),
        pytest.param(lambda x: x.masked_select(x > 0), [X], id="elements picked"),
        pytest.param(lambda x: x.view(T, B, D) * 1, [X], id="rows cut"),
        pytest.param(lambda x: x.repeat(2, 1, 1), [X], id="rows repeated"),
        pytest.param(lambda x: F.pad(x, (0, 0, 1, 0)), [X], id="tokens padded in front"),
        pytest.param(lambda x: F.pad(x, (0, 0, 0, -1, 1, 0)), [X], id="tokens cut and prompts padded"),
        pytest.param(lambda x: x.unfold(1, 2, 1) * 1, [X], id="windows"),
        pytest.param(lambda x: F.conv1d(x.transpose(1, 2), values(D, D, 2)), [X], id="convolution along tokens"),
        pytest.param(lambda x: x @ x.transpose(1, 2).flip(0), [X], id="prompts crossed"),
        pytest.param(lambda x: x.view(-1, D) @ x.view(-1, D).t(), [X], id="every row with every other"),
        pytest.param(lambda x: x + x.transpose(0, 1), [(values(3, 3, D), (batch(3), token(3), feature(D)))], id="transposed"),
        pytest.param(lambda x: torch.cat([x, x * 2], 1).unflatten(1, (2, T)), [X], id="tokens interleaved"),
    ],
)  # fmt: skip
def test_rows_that_mix_are_given_up(fn, inputs):
    _, layouts, _ = follow(fn, inputs)
    assert layouts == [None]


def test_crossed_prompts_are_not_laid_by_accident():
    # The batched product of row i with row i of a reversed batch: both say "batch", but another order.
    _, (layout,), _ = follow(lambda x: torch.bmm(x, x.flip(0).transpose(1, 2)), [X])
    assert layout is None


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x.sum(1), (batch(B), feature(D))),
        (lambda x: x.mean(1, keepdim=True), (batch(B), (), feature(D))),
        (lambda x: x.sum(), ()),
        (lambda x: x.sum((0, 1)), plain([D])),
    ],
)
def test_sums_over_tokens_are_rows_of_the_whole_prompt_or_none(fn, expected):
    assert follow(fn, [X])[1] == [expected]


# ------------------------------------------------------------------------------------------------------- relations
def relations(fn, inputs):
    """name -> relation for the last op of ``fn``, as a capture would record it."""
    found = {}

    class Planner(Follow):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = {id(a): self.layout_of(a) for a in flat_tensors(args)}
            result = super().__torch_dispatch__(func, types, args, kwargs)
            sources = []
            for position, value in enumerate(args):
                for tensor in flat_tensors([value]):
                    sources.append((position, before[id(tensor)]))
            outputs = [result] if isinstance(result, torch.Tensor) else list(result)
            plan = make_plan(op_info(func), args, kwargs or {}, sources, outputs, self.layout_of, Kinds())
            found.clear()
            found.update(plan.inputs)
            return result

    with Planner() as mode:
        fn(*[mode.know(tensor, layout) for tensor, layout in inputs])
    return found


def flat_tensors(values):
    out = []
    for value in values:
        if isinstance(value, torch.Tensor):
            out.append(value)
        elif isinstance(value, (list, tuple)):
            out += flat_tensors(value)
    return out


def test_relations_say_what_an_output_row_sees():
    assert relations(lambda x, w: torch.mm(x, w), [X2, W3]) == {"self": "row", "mat2": "whole"}
    assert relations(lambda b, x, w: torch.addmm(b, x, w), [BIAS, X2, W3]) == {"self": "whole", "mat1": "row", "mat2": "whole"}
    assert relations(lambda a, b: torch.cat([a, b], 2), [X, X]) == {"tensors[0]": "row", "tensors[1]": "row"}
    flash = relations(sdpa, [HEADS, KEYS, KEYS])
    assert {name: flash[name] for name in ("query", "key", "value")} == {"query": "row", "key": "context", "value": "context"}
    fold = (lambda t: (t[0].reshape(B * 2, T, D), (batch(B) + feature(2), token(T), feature(D))))  # noqa: E731
    assert relations(lambda q, k: torch.bmm(q, k.mT), [fold(HEADS), fold(KEYS)]) == {"self": "row", "mat2": "context"}
    assert relations(lambda x: x.sum((0, 1)), [X]) == {"self": "context"}
    assert relations(lambda x: x.cumsum(1), [X]) == {"self": "context"}


def test_an_unknown_op_is_unlaid():
    @torch.library.custom_op("detlab_tests::mix", mutates_args=())
    def mix(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0).clone()

    assert follow(lambda x: mix(x), [X])[1] == [None]
    assert follow(lambda x: mix(x) * 2, [X])[1] == [None]  # and so is what is made of it


# ---------------------------------------------------------------------------------------- experts: rows sorted, and back
def test_rows_that_are_sorted_by_a_known_order_keep_their_names():
    order = torch.tensor([3, 1, 0, 2, 7, 5, 4, 6, 11, 10, 9, 8])
    back = order.argsort()
    outputs, layouts, _ = follow(lambda x: x.view(-1, D)[order] * 2, [X])
    assert names(layouts[0]) == [(int(i) // T, int(i) % T) for i in order]
    assert_reaches(lambda x: x.view(-1, D)[order] * 2, [X], 0, "row")
    _, (layout,), _ = follow(lambda x: ((x.view(-1, D)[order] * 2)[back]).view(B, T, D), [X])
    assert layout == (batch(B), token(T), feature(D))
    twice = follow(lambda x: x.view(-1, D)[torch.arange(24) // 2].view(12, 2, D).sum(1).view(B, T, D), [X])[1]
    assert twice == [(batch(B), token(T), feature(D))]
    assert_reaches(lambda x: x.view(-1, D)[torch.arange(24) // 2].view(12, 2, D).sum(1).view(B, T, D), [X], 0, "row")
