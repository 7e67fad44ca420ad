"""The invariance matrix in full: every axis on every family in float32 and bfloat16, with the stock model as control.

One comparison is one text served in some way, all its kept rows of logits (whole vocabulary) held bit by bit against the same
text served alone in one call. The control serves the same with the tier off. Takes about an hour; what was run is kept after
each table, so that parts can be run alone.

    python benchmarks/invariance_matrix.py [TABLE ...]      such as "tiny-llama float32", "long prompts", "completions"
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import RESULTS, save

import detlab
from detlab import bits
from detlab.models import FAMILIES
from detlab.verify.certificate import upper_bound
from detlab.verify.serve import Way, generated, kept_positions, logits_of, watched

NAME = "invariance_matrix"
BATCHES = (*range(1, 11), 15, 16, 17, 32)
CHUNKS = (1, 3, 7, 16, 33, 64)
SOME = (1, 5, 8, 16, 17, 31, 32, 33, 37)
Table = dict[str, dict[str, Any]]


def text_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"text {length} {seed}")
    return [draw.randrange(3, 250) for _ in range(length)]


def ways(is_large: bool) -> Iterator[tuple[str, int, Way]]:
    """Axis, length of the text, way; all compared with the text alone in one call."""
    short = 21 if is_large else 70
    for size in BATCHES:
        yield "batch", short, Way(batch=size, rows=(size - 1,), mates=size)
        yield "batch, decoding", short, Way(batch=size, rows=(0,), mates=size, start=short - 2, cache="dynamic")
    for size in (5, 17) if is_large else (2, 5, 17, 32):
        for offset in (0, 1):
            yield "row", short, Way(batch=size, rows=tuple(range(offset, size, 2)), mates=offset)
    for length in (21, 150, 200, 505, 1000):
        few = SOME[:3] if is_large else SOME
        for amount in range(1, 38) if length < (100 if is_large else 200) else few:
            yield "left padding", length, Way(left=amount)
            yield "right padding", length, Way(right=amount)
        if not is_large or length < 500:
            yield "ragged batch", length, Way(batch=3, rows=(1,), is_ragged=True, mates=length)
            decoding = {"start": length - 2, "cache": "dynamic"}
            yield "ragged batch", length, Way(batch=3, rows=(0, 2), is_ragged=True, mates=length + 1, **decoding)
        for size in CHUNKS:
            start = None if length <= 200 and not (is_large and size == 1) else length - 3 * size - 2
            if start is None or start > 0:
                yield "chunks", length, Way(chunk=size, start=start, cache="dynamic")
    for batch in (1,) if is_large else (1, 3):
        yield "decode, every position", 200, Way(batch=batch, rows=(batch - 1,), start=1, cache="dynamic", mates=batch)
    for length in (21, 200):
        for cache in ("static", "dynamic", "none"):
            yield "cache", length, Way(start=length - 4, cache=cache)
            yield "cache", length, Way(left=9, start=length - 4, cache=cache)
        yield "cache", length, Way(chunk=16, cache="static")


def measure(model: Any, is_large: bool, note: Callable[[str], None]) -> dict[str, list[int]]:
    """Axis -> [comparisons, mismatches], with the model as it is."""
    counts: dict[str, list[int]] = {}
    references: dict[int, torch.Tensor] = {}
    for axis, length, way in ways(is_large):
        keep = list(range(length)) if axis.startswith("decode") else kept_positions(length)
        text, pool = text_of(length), [text_of(23, 1), text_of(90, 2)]
        key = -length if axis.startswith("decode") else length
        if key not in references:
            references[key] = logits_of(model, text, Way(), pool, keep)[0]
        count = counts.setdefault(axis, [0, 0])
        for logits in logits_of(model, text, way, pool, keep):
            count[0] += 1
            count[1] += not bits.equal(logits.contiguous(), references[key].contiguous())
        note(axis)
    alone = Way(generates=True, temperature=0.8)
    prompt, pool = text_of(25), [text_of(44, 3)]
    expected, _ = generated(model, prompt, alone, pool, 12)
    count = counts.setdefault("sampling, every slot", [0, 0])
    for slot in range(4):
        for is_ragged in (False, True):
            way = Way(generates=True, temperature=0.8, batch=4, rows=(slot,), is_ragged=is_ragged, mates=slot)
            count[0] += 1
            count[1] += not torch.equal(generated(model, prompt, way, pool, 12)[0][0], expected[0])
    return counts


def matrix(name: str, dtype: str) -> Table:
    """All axes on one model."""
    model, _ = detlab.load_model(name, dtype=dtype)
    is_large = name == "smollm2-135m"
    started, calls = time.perf_counter(), [0]

    def note(axis: str) -> None:
        calls[0] += 1
        if calls[0] % 100 == 0:
            print(f"    {axis}: {calls[0]} ways, {time.perf_counter() - started:.0f} s", flush=True)

    with detlab.deterministic(model, seed=7), watched(model) as watch:
        tier = measure(model, is_large, note)
    stock = measure(model, is_large, note)
    table: Table = {axis: row(*tier[axis], *stock[axis]) for axis in tier}
    prompts = [text_of(30), text_of(64, 1), text_of(150, 2)]
    for count in (1, 2, 3, 4):  # a fresh process for each
        found = detlab.verify(model, prompts, axes=["threads"], trials=6, threads=[count]).axes["threads"]
        numbers = (found.comparisons, found.mismatches, found.control_comparisons, found.control_mismatches)
        table[f"{count} threads, fresh process"] = row(*numbers)
    table["seen"] = watch.to_json()
    return table


def row(comparisons: int, mismatches: int, control_comparisons: int, control_mismatches: int) -> dict[str, Any]:
    return {
        "comparisons": comparisons, "mismatches": mismatches, "bound95": upper_bound(mismatches, comparisons),
        "control_comparisons": control_comparisons, "control_mismatches": control_mismatches,
    }  # fmt: skip


def long_prompts(trials: int = 50) -> Table:
    """One prompt alone, among others, and after a prefix in the cache: first tokens and logits, trial by trial."""
    model, _ = detlab.load_model("tiny-llama", dtype="bfloat16")
    table: Table = {}
    for length in (1, 511, 2048, 4097):
        prompt = text_of(length)

        def differing(count: int, prompt: list[int] = prompt, length: int = length) -> list[int]:
            draw = random.Random(f"long {length}")
            tokens, logits = generated(model, prompt, Way(generates=True), [], 2)
            found = [0, 0]
            for trial in range(count):
                mode = ("single", "mixed", "prefix")[trial % 3]
                way = Way(generates=True)
                if mode == "mixed":
                    size = draw.choice((2, 3)) if length < 1000 else 2
                    way = Way(generates=True, batch=size, rows=(draw.randrange(size),), is_ragged=length < 1000, mates=trial)
                elif mode == "prefix" and length > 1:
                    way = Way(generates=True, chunk=draw.randint(length // 2, length - 1))
                other, values = generated(model, prompt, way, [], 2)
                found[0] += 1
                same = bits.equal(values[0].contiguous(), logits[0].contiguous())
                found[1] += not (same and torch.equal(other[0], tokens[0]))
            return found

        with detlab.deterministic(model):
            tier = differing(trials)
        table[f"{length} tokens, single / mixed / prefix"] = row(*tier, *differing(9))
        print(f"    {length} tokens: {tier}", flush=True)
    return table


def completions(name: str, dtype: str, question: str, total: int, largest: int) -> Table:
    """One prompt, many greedy completions of 100 tokens in random batches: how many distinct texts there are.

    The random tiny-llama has no near ties (1 distinct text of 1,000, with the tier off as well): it would show nothing.
    """
    model, tokenizer = detlab.load_model(name, dtype=dtype)
    prompt = tokenizer(question)["input_ids"]
    pool = [tokenizer(text)["input_ids"] for text in ("Write a poem.", "What is seventeen times twenty-three, and why?")]

    def distinct() -> tuple[int, int]:
        draw, texts, made, number = random.Random(1), set(), 0, 0
        while made < total:
            size, number = draw.randint(1, largest), number + 1
            rows = tuple(sorted(draw.sample(range(size), max(1, size - draw.randint(0, size // 2)))))[: total - made]
            way = Way(generates=True, batch=size, rows=rows, is_ragged=True, mates=number)
            texts |= {tuple(tokens) for tokens in generated(model, prompt, way, pool, 100)[0].tolist()}
            made += len(rows)
        return made, len(texts)

    with detlab.deterministic(model):
        made, tier = distinct()
    _, stock = distinct()
    print(f"    {made} completions: {tier} distinct under the tier, {stock} without", flush=True)
    return {f"{made} completions of 100 tokens": {"distinct": tier, "distinct_with_the_tier_off": stock}}


def tables() -> dict[str, Callable[[], Table]]:
    named: dict[str, Callable[[], Table]] = {}
    for name in (*FAMILIES, "smollm2-135m"):
        for dtype in ("float32", "bfloat16"):
            named[f"{name} {dtype}"] = lambda name=name, dtype=dtype: matrix(name, dtype)
    named["tiny-llama float16"] = lambda: matrix("tiny-llama", "float16")
    named["long prompts"] = long_prompts
    long = "Tell me about the tides of the sea, and why there are two of them each day."
    named["completions tiny-gemma3"] = lambda: completions("tiny-gemma3", "bfloat16", "Why?", 1000, 32)
    named["completions smollm2-135m"] = lambda: completions("smollm2-135m", "bfloat16", long, 100, 16)
    return named


def main(chosen: list[str]) -> int:
    """Runs tables, prints and keeps them; 1 where a bit differed."""
    torch.set_num_threads(1)
    known = tables()
    unknown = [name for name in chosen if name not in known]
    if unknown:
        print(f"no table {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    path = RESULTS / f"{NAME}.json"
    results: dict[str, Table] = {}
    commits: dict[str, str] = {}  # of each table, as they may be run at different times
    if chosen and path.exists():  # the other tables stay
        stored = json.loads(path.read_text(encoding="utf-8"))
        results, commits = stored["tables"], stored["commits"]
    wrong = 0
    for name in chosen or known:
        print(f"\n{name}", flush=True)
        started = time.perf_counter()
        results[name] = known[name]()
        for axis, found in results[name].items():
            if "comparisons" in found:
                wrong += found["mismatches"]
                control = f"{found['control_mismatches']} of {found['control_comparisons']}"
                print(f"  {axis:36} {found['mismatches']:4} of {found['comparisons']:5} differ; with the tier off {control}")
            else:
                wrong += found.get("distinct", 1) - 1
                print(f"  {axis}: {found}")
        print(f"  {time.perf_counter() - started:.0f} s", flush=True)
        here = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
        commits[name] = here.strip()
        save(NAME, {"tables": results, "commits": commits})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
