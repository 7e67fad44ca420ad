"""Ways of serving one text: which rows share a call, how they are padded, cut and cached. What is served stays the same.

Two ways that serve the same tokens must give the same logits; `verify` asks whether they do, bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, StaticCache

from detlab.serving import accepted, cache_argument, config_of, device_of, pad_token, seeded, takes_cache, vocabulary_of

__all__ = ["Way", "Watch", "generated", "kept_positions", "logits_of", "watched"]

_MOST_KEPT = 64


@dataclass(frozen=True)
class Way:
    """One way to serve a text.

    Attributes:
        batch: rows in the call.
        rows: where in the batch the text sits; the other rows are mates.
        mates: which mates: their tokens are drawn from it.
        is_ragged: mates have lengths of their own, longer ones among them, so that rows are padded on the left.
        left, right: pad tokens added to every row.
        chunk: tokens per call; None: one call, or one token per call where there is a start.
        start: tokens prefilled in one call, before those that are cut in chunks or decoded one by one.
        cache: "none", "dynamic", "static"; without one, or where the model takes none, each decoding step computes the whole
            text anew.
        generates: the model's own ``generate`` decodes the prompt, greedily or sampling.
        temperature: of sampling; 0 is greedy.
        threads: intra-op threads of the process; 0: those of this process.
        parts: parts in which each linear layer's sum is computed; see `detlab.verify.parts`.
        order: which terms each part has, and which part is added first.
        offset: bytes past a multiple of 64 at which weights and what modules take lie in memory; -1: where they happen to.
        isa: caps of the process's instruction sets, in words; "": none.
    """

    batch: int = 1
    rows: tuple[int, ...] = (0,)
    mates: int = 0
    is_ragged: bool = False
    left: int = 0
    right: int = 0
    chunk: int | None = None
    start: int | None = None
    cache: str = "none"
    generates: bool = False
    temperature: float = 0.0
    threads: int = 0
    parts: int = 1
    order: int = 0
    offset: int = -1
    isa: str = ""

    def __str__(self) -> str:
        """What differs from one plain prefill, or "alone, in one call"."""
        said = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(said) or "alone, in one call"

    def to_json(self) -> dict[str, Any]:
        """All settings as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Way:
        """Reads back what `to_json` gave."""
        return cls(**data | {"rows": tuple(data["rows"])})


def kept_positions(length: int) -> list[int]:
    """Positions whose logits are compared: all of a short text; of a long one the ends, tile edges and places between."""
    if length <= _MOST_KEPT:
        return list(range(length))
    edges = [p for p in (31, 32, 63, 64, 127, 128, 191, 192, 255, 256, 511, 512, 1023, 1024, 2047, 2048) if p < length]
    spread = [round(i * (length - 1) / 15) for i in range(16)]
    return sorted({*range(8), *edges, *spread, *range(length - 16, length)})


# ------------------------------------------------------------------------------------------------------------ batches
def _mates(way: Way, length: int, pool: Sequence[Sequence[int]], vocabulary: int, most: int) -> list[list[int]]:
    """Neighbours' tokens: from the pool, cut or repeated to length, or at random; ragged ones from 1 token up."""
    draw = random.Random(f"mates {way.mates} {way.batch}")
    mates = []
    for number in range(way.batch):
        wanted = draw.randint(1, min(most, length + 40)) if way.is_ragged else length
        other = pool[draw.randrange(len(pool))] if pool and draw.random() < 0.5 else None
        if other is None:
            mates.append([draw.randrange(vocabulary) for _ in range(wanted)])
        else:
            turned = [*other[number % len(other) :], *other[: number % len(other)]]
            mates.append((turned * (wanted // len(turned) + 1))[:wanted])
    return mates


def _batch(model: nn.Module, text: Sequence[int], way: Way, pool: Sequence[Sequence[int]],
           room: int) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """Token ids and mask, int64 [batch, width], and the column of the text's first token; room: positions a mate may take."""
    limit = getattr(config_of(model), "max_position_embeddings", None)
    most = (limit - room if isinstance(limit, int) else len(text) + 64) or 1
    rows = _mates(way, len(text), pool, vocabulary_of(model), max(1, most))
    for row in way.rows:
        rows[row] = list(text)
    width = max(map(len, rows)) + way.left
    pad = pad_token(model)
    ids = [[pad] * (width - len(row)) + row + [pad] * way.right for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) + [0] * way.right for row in rows]
    device = device_of(model)
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device), width - len(text)


def _spans(way: Way, width: int, first: int) -> list[tuple[int, int]]:
    """The calls, as columns (from, to)."""
    begin = first + way.start if way.start else 0
    size = way.chunk or (1 if begin else width)
    head = [(0, begin)] if begin else []
    return [*head, *((at, min(width, at + size)) for at in range(begin, width, size))]


@torch.no_grad()
def logits_of(model: Any, text: Sequence[int], way: Way, pool: Sequence[Sequence[int]] = (),
              keep: Sequence[int] | None = None) -> Tensor:  # fmt: skip
    """Serves a text whose tokens are all given.

    Args:
        model: a transformers causal language model.
        text: token ids.
        way: how.
        pool: texts that mates are cut from.
        keep: positions whose logits are returned, ascending; None for all.

    Returns:
        [rows of the text, kept positions, vocab], on the host; where a position is computed in several calls, the last.
    """
    ids, mask, first = _batch(model, text, way, pool, 0)
    keep = range(len(text)) if keep is None else keep
    number = {first + position: index for index, position in enumerate(keep)}
    places = (mask.cumsum(1) - 1).clamp_min(0)
    is_cached, name = way.cache != "none" and takes_cache(model), cache_argument(model)
    cache: Any = None
    if is_cached:
        config = config_of(model)
        cache = DynamicCache(config=config) if way.cache == "dynamic" else StaticCache(config, max_cache_len=ids.shape[1])
    rows = list(way.rows)
    kept: dict[int, Tensor] = {}
    for start, end in _spans(way, ids.shape[1], first):
        begin = start if is_cached else 0
        columns = [c - begin for c in range(start, end) if c in number]
        asked: dict[str, Any] = {
            "input_ids": ids[:, begin:end],
            "attention_mask": mask[:, :end],
            "position_ids": places[:, begin:end],
            "use_cache": is_cached,
            "logits_to_keep": torch.tensor(columns or [end - begin - 1], device=ids.device),
        }
        if cache is not None:
            asked[name] = cache
        out: Tensor = model(**accepted(model, asked)).logits
        if columns:
            if out.shape[1] != len(columns):  # a model that always returns all
                out = out[:, columns]
            kept.update({number[c + begin]: out[rows, i].cpu() for i, c in enumerate(columns)})
    return torch.stack([kept[index] for index in range(len(number))], 1)


@torch.no_grad()
def generated(model: Any, prompt: Sequence[int], way: Way, pool: Sequence[Sequence[int]], new_tokens: int,
              seed: int = 0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Lets the model's own ``generate`` continue a prompt.

    Returns:
        Token ids, int64 [rows of the prompt, new_tokens], and the raw logits that they were chosen from,
        [rows, new_tokens, vocab]; on the host.
    """
    ids, mask, _ = _batch(model, prompt, way, pool, new_tokens)
    samples = {"do_sample": True, "temperature": way.temperature, "top_k": 0, "top_p": 1.0} if way.temperature else {}
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=pad_token(model), return_dict_in_generate=True,
        output_logits=True, num_beams=1, **({"do_sample": False} | samples),
    )  # fmt: skip
    if way.cache == "static":
        config.cache_implementation = "static"
    if way.chunk:
        config.prefill_chunk_size = way.chunk
    with seeded(seed):
        made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    rows = list(way.rows)
    return made.sequences[rows, ids.shape[1] :].cpu(), torch.stack([step[rows] for step in made.logits], 1).cpu()


# ----------------------------------------------------------------------------------------------------------- evidence
class Watch:
    """What the model was really called with: a test of batches in which nothing shared a call would show nothing.

    Attributes:
        calls: forward passes.
        most_rows: rows that shared one.
        padded: forward passes with padding in the mask.
        cached: forward passes that found tokens in a cache.
        longest_cache: tokens found there at most.
        most_tokens: tokens per row of a forward pass, at most.
        caches: kinds of caches that were found filled.
    """

    def __init__(self) -> None:
        self.calls = self.most_rows = self.padded = self.cached = self.longest_cache = self.most_tokens = 0

    def to_json(self) -> dict[str, int]:
        """The counts."""
        return {
            "forward_passes": self.calls,
            "rows_sharing_a_pass": self.most_rows,
            "tokens_in_a_pass": self.most_tokens,
            "passes_with_padding": self.padded,
            "passes_that_hit_a_cache": self.cached,
            "longest_cache_hit": self.longest_cache,
        }

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        ids = kwargs.get("input_ids")
        if ids is None:
            return
        self.calls += 1
        self.most_rows = max(self.most_rows, ids.shape[0])
        self.most_tokens = max(self.most_tokens, ids.shape[1])
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and not bool((mask != 0).all()):
            self.padded += 1
        cache = kwargs.get(cache_argument(module))
        length = int(cache.get_seq_length()) if cache is not None else 0
        if length:
            self.cached += 1
            self.longest_cache = max(self.longest_cache, length)


@contextmanager
def watched(model: nn.Module) -> Iterator[Watch]:
    """Counts what the model is called with, for the length of a block."""
    watch = Watch()
    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield watch
    finally:
        handle.remove()
