"""The axes of the invariance matrix: what may change around a text, and in which ways it is tried.

Each axis is an endless list of ways. The first of them hit the edges of known kernels' tiles; the others are drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, cycle

from detlab.verify.serve import Way

__all__ = ["AXES", "Axis", "Trial", "axes_of"]

_MOST_TOKENS = 320  # of one call: longer texts are tried in smaller batches


@dataclass(frozen=True)
class Trial:
    """One serving, and what it is compared with.

    Attributes:
        way: how the text is served.
        against: how it is served for comparison; None is the axis-free way of its kind: alone in one call, or generated
            alone with a dynamic cache.
    """

    way: Way
    against: Way | None = None


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        name: its name.
        asks: what must not change the bits, in words.
        trials: (length of the text, length of its prompt, random numbers) -> trials without end.
        is_twin: the stock model is expected to be equal here, too; on other axes, to part where the machine's kernels do.
        needs: what the record of calls must show, or the axis was not tested: "rows", "padding", "cache", "parts",
            "settings", "offset" or nothing.
        is_apart: tried in fresh processes (`detlab.verify.apart`).
        only: the tiers that promise it; it is tried on others where it is asked for by name. None: all.
        needs_tier: the only tier for which it means something; None: all.
    """

    name: str
    asks: str
    trials: Callable[[int, int, random.Random], Iterator[Trial]]
    is_twin: bool = False
    needs: str = ""
    is_apart: bool = False
    only: tuple[str, ...] | None = None
    needs_tier: str | None = None


def axes_of(tier: str) -> list[str]:
    """The axes that a tier promises, by name."""
    return [name for name, axis in AXES.items() if axis.only is None or tier in axis.only]


def _sized(batch: int, length: int) -> int:
    return max(2, min(batch, _MOST_TOKENS // length))


def _alternate(batch: int, offset: int) -> tuple[int, ...]:
    return tuple(range(offset, batch, 2))


def _batch(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    for size in chain((2, 3, 8, 5, 4, 7), iter(lambda: draw.randint(2, 17), 0)):
        batch = _sized(size, length)
        row = draw.randrange(batch)
        yield Trial(Way(batch=batch, rows=(row,), mates=draw.randrange(10**6)))
        batch = _sized(draw.choice((2, 3, 4, 5)), prompt)
        yield Trial(Way(batch=batch, rows=(batch - 1,), mates=draw.randrange(10**6), generates=True))


def _position(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    for size in chain((5, 8), iter(lambda: draw.randint(3, 13), 0)):
        batch = _sized(size, length)
        mates = draw.randrange(10**6)
        for offset in (0, 1):  # in every second row, and then in the others: every row, among mates
            yield Trial(Way(batch=batch, rows=_alternate(batch, offset), mates=mates))
        batch = _sized(size, prompt)
        yield Trial(Way(batch=batch, rows=_alternate(batch, draw.randrange(2)), mates=mates, generates=True))


def _neighbours(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    for size in chain((3, 2, 5), iter(lambda: draw.randint(2, 9), 0)):
        batch = _sized(size, length)
        one = Way(batch=batch, rows=(draw.randrange(batch),), mates=draw.randrange(10**6))
        yield Trial(one, replace(one, mates=draw.randrange(10**6) + 10**6))
        one = replace(one, batch=_sized(size, prompt), rows=(0,), generates=True)
        yield Trial(one, replace(one, mates=one.mates + 1))


def _padding(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    for amount in chain((1, 37, 5), iter(lambda: draw.randint(1, 37), 0)):
        yield Trial(Way(left=amount))
        yield Trial(Way(left=amount + 6, generates=True))
        yield Trial(Way(right=amount))
        batch = _sized(4, length + 40)
        row, mates = draw.randrange(batch), draw.randrange(10**6)
        yield Trial(Way(batch=batch, rows=(row,), is_ragged=True, mates=mates, generates=True))


def _chunk(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    sizes = [size for size in (7, 16, 3, 33, 64) if size < length] or [1]
    for size in chain(sizes, iter(lambda: draw.randint(1, max(1, length - 1)), 0)):
        batch = draw.choice((1, 2, 3)) if length < 200 else 1
        start = length - 6 * size if length > 8 * size else None  # of a long text, the last pieces
        row, mates = batch - 1, draw.randrange(10**6)
        yield Trial(Way(batch=batch, rows=(row,), start=start, chunk=size, cache="dynamic", mates=mates))


def _decode(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    yield Trial(Way(generates=True), Way())  # the tokens that generate chose, prefilled in one call
    yield Trial(Way(start=1 if length <= 32 else length - 24, cache="dynamic"))
    while True:
        batch = min(draw.choice((1, 2, 3, 4)), _sized(4, length))
        begin = draw.randint(max(1, length - 10), max(1, length - 3))
        yield Trial(Way(batch=batch, rows=(0,), start=begin, cache="dynamic", mates=draw.randrange(10**6)))
        yield Trial(Way(batch=2, rows=(1,), generates=True, mates=draw.randrange(10**6)), Way())


def _cache(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    while True:
        yield Trial(Way(generates=True, cache="static"))
        begin = max(1, length - 4)
        yield Trial(Way(start=begin, cache="static"), Way(start=begin, cache="dynamic"))
        yield Trial(Way(start=max(1, length - 3)), Way(start=max(1, length - 3), cache="dynamic"))
        chunk = draw.randint(max(1, length // 8), max(1, length - 1))
        yield Trial(Way(chunk=chunk, cache="static"), Way(chunk=chunk, cache="dynamic"))


def _sampling(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    for temperature in cycle((0.8, 1.0, 0.6)):
        alone = Way(generates=True, temperature=temperature)
        batch = _sized(draw.choice((2, 3, 4)), prompt)
        mates, row = draw.randrange(10**6), draw.randrange(1, batch)
        yield Trial(replace(alone, batch=batch, rows=(row,), mates=mates), alone)
        yield Trial(replace(alone, batch=batch, rows=(row,), mates=mates, is_ragged=True), alone)
        yield Trial(replace(alone, batch=batch, rows=(0,), mates=mates, left=draw.randint(0, 37)), alone)


def _run(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    while True:
        yield Trial(Way())
        yield Trial(Way(generates=True))


def _split(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    """Odd orders deal the terms out at random, even ones as neighbours; the parts are added in an order of their own."""
    for number in count():
        parts, order = (7, 2, 4)[(number + number // 3) % 3], 2 * draw.randrange(10**6)
        if number % 3 == 0:
            yield Trial(Way(parts=parts, order=order))
        elif number % 3 == 1:
            begin = max(1, length - 3)
            yield Trial(Way(parts=parts, order=order + 1, start=begin, cache="dynamic"), Way(start=begin, cache="dynamic"))
        else:
            batch = _sized(3, length)
            yield Trial(Way(parts=parts, order=order + 1, batch=batch, rows=(batch - 1,), mates=order))


def _apart(length: int, prompt: int, draw: random.Random) -> Iterator[Trial]:
    """Tried in fresh processes, one for each setting, which is made there."""
    while True:
        yield Trial(Way())
        batch = _sized(4, length)
        yield Trial(Way(batch=batch, rows=(batch - 1,), is_ragged=True, mates=draw.randrange(10**6)), Way())
        yield Trial(Way(start=max(1, length - 4), cache="dynamic"))


AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis("batch", "how many rows share a call", _batch, needs="rows"),
        Axis("position", "the row in which the text sits", _position, needs="rows"),
        Axis("neighbours", "what the other rows say", _neighbours, is_twin=True, needs="rows"),
        Axis("padding", "padding, on the left or on the right", _padding, needs="padding"),
        Axis("chunk", "the pieces in which a prompt is prefilled", _chunk, needs="cache"),
        Axis("decode", "whether a token is decoded with a cache or prefilled", _decode, needs="cache"),
        Axis("cache", "the kind of cache: dynamic, static or none", _cache, needs="cache"),
        Axis("threads", "the number of threads, in fresh processes", _apart, is_apart=True),
        Axis("sampling", "slot, mates and padding of a sampled request", _sampling, needs="rows"),
        Axis("run", "doing it again", _run, is_twin=True),
        Axis("isa", "the instruction sets that kernels may use, in fresh processes", _apart, needs="settings", is_apart=True,
             only=("exact",)),
        Axis("split", "the parts in which a layer's sum is computed, as tensor-parallel ranks would", _split, needs="parts",
             only=("exact",), needs_tier="exact"),
        Axis("alignment", "where in memory tensors begin, in fresh processes", _apart, needs="offset", is_apart=True,
             only=("exact",)),
    )  # fmt: skip
}
