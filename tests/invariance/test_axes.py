"""The invariance matrix, sampled: each axis on each family and dtype, at places that hit the edges of known kernels' tiles.

All comparisons are bitwise, over the whole vocabulary. Each has its control: the same servings of the stock model, which must
part where this machine's probed classes say so. benchmarks/invariance_matrix.py holds the whole matrix.
"""

import random

import pytest
import torch
from transformers.pytorch_utils import Conv1D

import detlab
from detlab.models import FAMILIES
from detlab.verify.serve import Way, generated, logits_of, watched
from tests.bit_classes import bitwise_equal, padded_attention_rows, row_class_equal

DTYPES = ("float32", "bfloat16")
LENGTH = 70


def text_of(length, seed=0):
    draw = random.Random(f"text {length} {seed}")
    return [draw.randrange(3, 250) for _ in range(length)]


class Subject:
    """A family in a dtype; servings of each text are made once, under the tier and with it off."""

    def __init__(self, name, dtype):
        self.name, self.dtype = name, getattr(torch, dtype)
        self.model = detlab.load_model(name, dtype=dtype)[0]
        self.references = {}

    def serve(self, ways, length=LENGTH, *, is_tier, keep=None, seed=0):
        """Logits of the text, served alone in one call, and in each of the ways: [(way, row, logits)]."""
        text, pool = text_of(length, seed), [text_of(23, 1), text_of(90, 2)]
        if not is_tier:
            served = [(w, logits_of(self.model, text, w, pool, keep)) for w in (Way(), *ways)]
        else:
            with detlab.deterministic(self.model), watched(self.model) as self.watch:
                served = [(w, logits_of(self.model, text, w, pool, keep)) for w in (Way(), *ways)]
        return served[0][1][0], [(way, row, logits[i]) for way, logits in served[1:] for i, row in enumerate(way.rows)]

    def assert_equal(self, ways, **more):
        expected, served = self.serve(ways, is_tier=True, **more)
        parted = [f"{way}, row {row}" for way, row, logits in served if not bitwise_equal(logits, expected)]
        assert served and not parted

    def stock_parts(self, ways, **more):
        expected, served = self.serve(ways, is_tier=False, **more)
        return any(not bitwise_equal(logits, expected) for _, _, logits in served)

    def classes_differ(self, few, many):
        """Whether a product of the model gives ``few`` rows other bits than the same rows among ``many``."""
        linears = [m for m in self.model.modules() if isinstance(m, (torch.nn.Linear, Conv1D))]
        sizes = {tuple(m.weight.shape if isinstance(m, torch.nn.Linear) else m.weight.shape[::-1]) for m in linears}
        return any(not row_class_equal(self.dtype, k, n, few, many, draws=1) for n, k in sorted(sizes) if n < 1024)


@pytest.fixture(scope="module", params=[(name, dtype) for name in FAMILIES for dtype in DTYPES], ids="-".join)
def subject(request):
    return Subject(*request.param)


DECODE = {"start": LENGTH - 3, "cache": "dynamic"}
# In bfloat16 the stock classes part in two elements of ten thousand: a control decodes enough tokens to meet one.
MANY = {"start": LENGTH - 32, "cache": "dynamic"}


def test_batch_and_position(subject):
    batches = [Way(batch=5, rows=(0, 2, 4), mates=1), Way(batch=5, rows=(1, 3), mates=1), Way(batch=17, rows=(16,), mates=2)]
    decoding = [Way(batch=size, rows=(size - 1,), mates=size, **DECODE) for size in (2, 3, 4, 9)]
    subject.assert_equal([*batches, *decoding])
    assert subject.watch.most_rows == 17 and subject.watch.longest_cache == LENGTH - 1

    def parts(seed):
        _, ((_, _, alone), (_, _, among_four)) = subject.serve(
            [Way(batch=size, mates=3, **MANY) for size in (1, 4)], is_tier=False, seed=seed
        )
        return not bitwise_equal(alone, among_four)

    assert not subject.classes_differ(1, 4) or any(map(parts, range(6)))


def test_neighbours_change_nothing_even_with_the_tier_off(subject):
    """But for stock mixtures of experts: how many rows an expert sees depends on what the neighbours say."""
    for is_tier in (True, False) if subject.name not in ("tiny-qwen3-moe", "tiny-mixtral") else (True,):
        ways = [Way(batch=4, rows=(1, 2), mates=mates, **DECODE) for mates in (1, 2)]
        _, ((_, _, a), (_, _, b), (_, _, c), (_, _, d)) = subject.serve(ways, is_tier=is_tier)
        if is_tier:
            assert bitwise_equal(a, b) and bitwise_equal(a, c)
        assert bitwise_equal(a, c) and bitwise_equal(b, d), f"other mates, other bits (tier: {is_tier})"


def test_padding(subject):
    length, keep = 200, [0, 1, 31, 32, 63, 64, 127, 128, 191, 192, 196, 197, 198, 199]
    ways = [Way(left=1), Way(left=37), Way(right=5), Way(batch=2, rows=(1,), is_ragged=True, mates=4)]
    ways += [Way(batch=2, rows=(0,), is_ragged=True, mates=5, start=198, cache="dynamic")]
    subject.assert_equal(ways, length=length, keep=keep)
    assert subject.watch.padded >= 5
    if subject.name != "tiny-gemma3":  # its masks are of two kinds; the probe knows one
        assert subject.stock_parts(ways[:2], length=length) or not padded_attention_rows(subject.dtype, length, 37)


def test_chunks_and_decode(subject):
    chunks = [Way(chunk=33, cache="dynamic"), Way(start=48, chunk=7, cache="dynamic"), Way(start=60, chunk=3, cache="dynamic")]
    decode = [Way(start=LENGTH - 6, cache="dynamic"), Way(batch=3, rows=(1,), start=1, chunk=23, cache="dynamic")]
    subject.assert_equal([*chunks, *decode])
    assert subject.watch.cached > 10 and subject.watch.longest_cache == LENGTH - 1
    may_part = subject.classes_differ(1, LENGTH) or subject.classes_differ(3, LENGTH)
    assert subject.stock_parts([Way(start=28, chunk=3, cache="dynamic"), Way(**MANY)]) or not may_part


def test_caches(subject):
    ways = [Way(start=LENGTH - 3, cache=cache) for cache in ("static", "dynamic", "none")]
    subject.assert_equal([*ways, Way(chunk=16, cache="static"), Way(left=9, start=LENGTH - 2, cache="static")])
    assert subject.watch.cached >= 4
    assert subject.stock_parts([Way(**MANY)]) or not subject.classes_differ(1, LENGTH)


def test_threads(subject):
    """In this process; fresh processes are tried below, and by the whole matrix."""
    ways = [Way(), Way(batch=3, rows=(2,), mates=6, **DECODE), Way(left=5)]
    expected, _ = subject.serve([], is_tier=True)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            subject.assert_equal(ways)
            again, _ = subject.serve([], is_tier=True)
            assert bitwise_equal(again, expected)
    finally:
        torch.set_num_threads(1)


def test_generate(subject):
    """The model's own generate: ragged left padding, a static cache, chunks, another slot."""
    prompt, pool = text_of(30), [text_of(44, 3)]
    ways = [
        Way(generates=True, batch=3, rows=(0, 2), is_ragged=True, mates=7), Way(generates=True, cache="static"),
        Way(generates=True, left=11), Way(generates=True, chunk=7), Way(generates=True, batch=2, rows=(1,), mates=2),
    ]  # fmt: skip

    def differing():
        tokens, logits = generated(subject.model, prompt, Way(generates=True), pool, 5)
        found = []
        for way in ways:
            other, values = generated(subject.model, prompt, way, pool, 5)
            same = [torch.equal(other[i], tokens[0]) and bitwise_equal(values[i], logits[0]) for i in range(len(way.rows))]
            found += [str(way)] * (not all(same))
        return found

    with detlab.deterministic(subject.model):
        assert differing() == []
    assert differing() or not subject.classes_differ(1, 2)


def test_a_sampled_text_belongs_to_its_request(subject):
    prompt, pool = text_of(25), [text_of(44, 3)]
    alone = Way(generates=True, temperature=0.8)
    ways = [
        Way(generates=True, temperature=0.8, batch=3, rows=(1, 2), mates=1),
        Way(generates=True, temperature=0.8, batch=3, rows=(2,), is_ragged=True, mates=2),
    ]

    def differing():
        expected, _ = generated(subject.model, prompt, alone, pool, 8)
        rows = [row for way in ways for row in generated(subject.model, prompt, way, pool, 8)[0]]
        return sum(not torch.equal(row, expected[0]) for row in rows)

    with detlab.deterministic(subject.model, seed=11):
        assert differing() == 0
        other, _ = generated(subject.model, prompt, alone, pool, 8)
    with detlab.deterministic(subject.model, seed=12):
        assert not torch.equal(other, generated(subject.model, prompt, alone, pool, 8)[0])  # it does sample
    assert differing() > 0  # one generator for the whole batch: a row draws what others left over
