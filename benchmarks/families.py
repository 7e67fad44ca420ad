"""The invariant tier on every causal language model of transformers, tiny and random: held, refused and why, or wrong.

One text is served alone, in batches, padded, in chunks, token by token, with a dynamic, a static and no cache, and by
``generate``. A family is held where all its logits are the same, bit by bit, and as near to the float64 model's as the stock
model's are. The stock model is served in the same ways, as a control. A way that gives the stock float32 model another answer
(padding, where a family does not heed it) or an error is not asked of the tier. Each family has a process of its own; what
was found is kept after each, so that some can be run alone.

    python benchmarks/families.py [--dtype float32|bfloat16] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import multiprocessing
import random
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from _harness import RESULTS, save
from _tiny_families import build, families
from torch import Tensor
from transformers.cache_utils import StaticCache

import detlab
from detlab import bits
from detlab.errors import DetlabError

LENGTH, NEW = 45, 6
SECONDS, MEMORY = 240, 12 << 30
OTHER = 0.03  # relative: from here on, a way asks the stock model another question
Served = dict[str, list[tuple[Tensor, Tensor]]]  # way -> (logits, those of the text alone)


def text_of(length: int, seed: int, vocabulary: int = 250) -> Tensor:
    drawn = random.Random(f"families {seed}")
    return torch.tensor([drawn.randrange(3, vocabulary) for _ in range(length)])


class Server:
    """Serves texts to one model, with the arguments that its forward has."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = set(inspect.signature(type(model).forward).parameters)
        self.text = text_of(LENGTH, 0)
        self.alone = self.call(self.text[None]).logits[0]

    def call(self, ids: Tensor, mask: Tensor | None = None, cache: Any = None, use_cache: bool = False, start: int = 0) -> Any:
        """One call; the mask covers what came before, too."""
        batch, tokens = ids.shape
        given: dict[str, Any] = {"input_ids": ids}
        if mask is not None:
            given["attention_mask"] = mask
        if "position_ids" in self.names:
            whole = torch.ones(batch, start + tokens, dtype=torch.long) if mask is None else mask
            given["position_ids"] = (whole.cumsum(1) - 1).clamp_min(0)[:, start:]
        if "use_cache" in self.names:
            given["use_cache"] = use_cache
        if cache is not None:
            given["cache" if "cache" in self.names else "past_key_values"] = cache
        return self.model(**given)

    def batch(self, size: int) -> list[Tensor]:
        """Every row of a batch of other texts, the text among them in turn."""
        rows = []
        for place in (0, size - 1):
            ids = torch.stack([text_of(LENGTH, 1 + row) for row in range(size)])
            ids[place] = self.text
            rows.append(self.call(ids).logits[place])
        return rows

    def padded(self, left: int = 0, right: int = 0) -> list[Tensor]:
        """In the second row of two, padded; the first has no padding."""
        width = left + LENGTH + right
        ids, mask = torch.zeros(2, width, dtype=torch.long), torch.ones(2, width, dtype=torch.long)
        ids[0], ids[1, left : left + LENGTH] = text_of(width, 1), self.text
        mask[1, :left] = 0
        mask[1, left + LENGTH :] = 0
        return [self.call(ids, mask).logits[1, left : left + LENGTH]]

    def pieces(self, sizes: list[int], cache: Any = None, left: int = 0) -> list[Tensor]:
        """In pieces, with a cache."""
        ids = torch.cat([torch.zeros(left, dtype=torch.long), self.text])
        mask = torch.ones(2, LENGTH + left, dtype=torch.long)
        both = torch.stack([text_of(LENGTH + left, 1), ids])
        mask[1, :left] = 0
        found, at = [], 0
        while at < LENGTH + left:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            stop = min(at + size, LENGTH + left)
            if left:
                out = self.call(both[:, at:stop], mask[:, :stop], cache, True, at)
            else:
                out = self.call(ids[None, at:stop], None, cache, True, at)
            cache = getattr(out, "cache", None)
            cache = getattr(out, "past_key_values", None) if cache is None else cache
            if cache is None:
                raise NotImplementedError("no cache")
            found.append(out.logits[-1])
            at = stop
        return [torch.cat(found)[left:]]

    def static(self) -> StaticCache:
        """A static cache that holds the text."""
        return StaticCache(config=self.model.config, max_cache_len=64)

    def generated(self, left: int = 0, **options: Any) -> list[tuple[Tensor, Tensor]]:
        """What ``generate`` chose, and the logits of it all in one call."""
        prompt = self.text[:20]
        ids, mask = prompt[None], torch.ones(1, 20, dtype=torch.long)
        if left:
            ids = torch.stack([text_of(20 + left, 1), torch.cat([torch.zeros(left, dtype=torch.long), prompt])])
            mask = torch.ones_like(ids)
            mask[1, :left] = 0
        asked = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
        out = self.model.generate(
            ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **asked, **options
        )
        tokens = out.sequences[-1, left:]
        logits = self.call(tokens[None, :-1]).logits[0, -NEW:]
        return [(torch.stack([step[-1] for step in out.logits]).to(logits.dtype), logits)]  # generate widens them

    def ways(self) -> dict[str, Callable[[], list[Any]]]:
        """What serves the text, by name."""
        found: dict[str, Callable[[], list[Any]]] = {
            **{f"batch of {size}": lambda size=size: self.batch(size) for size in (2, 5)},
            **{f"{left} padded left": lambda left=left: self.padded(left=left) for left in (3, 11)},
            "7 padded right": lambda: self.padded(right=7),
            "cached": lambda: self.pieces([LENGTH]),
            **{f"chunks of {size}": lambda size=size: self.pieces([size]) for size in (7, 16)},
            "decoded": lambda: self.pieces([1]),
            "prefilled, decoded": lambda: self.pieces([30, 1]),
            "padded left, decoded": lambda: self.pieces([30, 1], left=5),
            "static cache": lambda: self.pieces([30, 1], self.static()),
            "static cache, chunks": lambda: self.pieces([16], self.static()),
            "generate": self.generated,
            "generate, padded": lambda: self.generated(left=7),
            "generate, static cache": lambda: self.generated(cache_implementation="static", disable_compile=True),
            "generate, no cache": lambda: self.generated(use_cache=False),
        }
        return found

    def serve(self, only: set[str] | None = None) -> tuple[Served, dict[str, str]]:
        """All ways, or those; and what went wrong in which."""
        served: Served = {}
        failed = {}
        for name, way in self.ways().items():
            if only is None or name in only:
                try:
                    made = way()
                    served[name] = [pair if isinstance(pair, tuple) else (pair, self.alone) for pair in made]
                except Exception as error:  # a model's own refusal has any class
                    failed[name] = said(error)
        return served, failed


def said(error: BaseException) -> str:
    """An error's words; a detlab error speaks for itself."""
    words = re.sub(r"\s+", " ", str(error))[:400]
    return words if isinstance(error, DetlabError) else f"{type(error).__name__}: {words}"


def error_of(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, over that of what is expected."""
    return float((found.double() - expected.double()).square().mean().sqrt() / expected.double().square().mean().sqrt())


def differing(served: Served) -> dict[str, int]:
    return {name: sum(not bits.equal(a.contiguous(), b.contiguous()) for a, b in pairs) for name, pairs in served.items()}


def double_of(model: Any) -> Any:
    twin = copy.deepcopy(model).double()
    if twin._can_set_experts_implementation():
        twin.set_experts_implementation("eager")
    return twin


def same_answer(served: Served) -> set[str]:
    return {name for name, pairs in served.items() if all(error_of(a, b) < OTHER for a, b in pairs)}


@torch.no_grad()
def judge(kind: str, dtype: str, asked: set[str] | None) -> dict[str, Any]:
    """One family in one dtype."""
    try:
        model = build(kind).to(getattr(torch, dtype))
        stock = Server(model)
        expected = stock.alone
        if not expected.isfinite().all():
            raise ValueError("logits that are no numbers")
    except Exception as error:
        return {"status": "not built", "why": said(error)}
    served, failed = stock.serve()
    asked = same_answer(served) if asked is None else asked & set(served)
    try:
        exact = Server(double_of(model)).alone
    except Exception:  # code that knows no float64: the stock model is what there is
        exact = None
    control = differing(served)
    result: dict[str, Any] = {
        "control comparisons": sum(len(served[name]) for name in asked),
        "control mismatches": sum(control[name] for name in asked),
        "not asked": sorted(set(stock.ways()) - asked),
        "asked": sorted(asked),
    }
    try:
        with detlab.deterministic(model):
            tier = Server(model)
            served, failed = tier.serve(asked)
    except Exception as error:
        kind_of = "refused" if isinstance(error, DetlabError) else "broken"
        return result | {"status": kind_of, "why": said(error)}
    if exact is None:
        near, far = 0.0, error_of(tier.alone, expected)
    else:
        near, far = error_of(expected, exact), error_of(tier.alone, exact)
    slack = 1e-5 if dtype == "float32" else 0.02
    parted = {name: count for name, count in differing(served).items() if count}
    result |= {
        "comparisons": sum(map(len, served.values())), "mismatches": sum(parted.values()), "parted": parted,
        "refused ways": failed, "error": far, "stock error": near,
    }  # fmt: skip
    if parted:
        return result | {"status": "WRONG", "why": f"other bits: {', '.join(parted)}"}
    if not far <= 4 * near + slack:
        return result | {"status": "WRONG", "why": f"another answer: off by {far:.1e}, the stock model by {near:.1e}"}
    why = "; ".join(f"{name}: {words}" for name, words in failed.items())
    unnamed = [name for name, words in failed.items() if re.match(r"\w+(Error|Exception|Interrupt)\w*: ", words)]
    return result | {"status": "broken" if unnamed else "held", "why": why}


def walk(kind: str, dtypes: list[str], pipe: Any) -> None:
    """In a process of its own: all dtypes of a family, one after the other."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    asked: set[str] | None = None
    for dtype in dtypes:
        found = judge(kind, dtype, asked)
        if asked is None and "asked" in found:
            asked = set(found["asked"])
        found.pop("asked", None)
        pipe.send((dtype, found))
    pipe.close()


def apart(kind: str, dtypes: list[str]) -> dict[str, dict[str, Any]]:
    """A family's results, whatever becomes of its process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=walk, args=(kind, dtypes, theirs))
    process.start()
    theirs.close()
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + SECONDS
    while len(found) < len(dtypes):
        try:
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                break
            dtype, result = ours.recv()
            found[dtype] = result
        except EOFError:
            break
    if process.is_alive() and len(found) < len(dtypes):
        process.kill()
    process.join()
    for dtype in dtypes:
        why = f"ended with code {process.exitcode}, after {SECONDS} s at most"
        found.setdefault(dtype, {"status": "not built", "why": why})
    return found


def main(arguments: list[str]) -> int:
    """Walks the families, prints and keeps what was found; 1 where one answers wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    given = parser.parse_args(arguments)
    dtypes = [given.dtype] if given.dtype else ["float32", "bfloat16"]
    torch.set_num_threads(1)
    names = families()
    unknown = [kind for kind in given.families if kind not in names]
    if unknown:
        print(f"no family {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    path = RESULTS / "families.json"
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["families"] if given.families and path.exists() else {}
    started = time.monotonic()
    for kind in given.families or names:
        before = time.monotonic()
        found = apart(kind, dtypes)
        rows[kind] = rows.get(kind, {}) | {"class": names[kind], **found}
        save("families", {"families": rows})
        for dtype, result in found.items():
            counts = ""
            if "comparisons" in result:
                counts = f"{result['mismatches']} of {result['comparisons']} differ, "
            if "control comparisons" in result:
                counts += f"stock {result['control mismatches']} of {result['control comparisons']}"
            seconds = f"{time.monotonic() - before:.0f} s"
            print(f"{kind:22} {dtype:8} {result['status']:9} {counts:42} {seconds:>5}  {result['why'][:300]}", flush=True)
    for dtype in dtypes:
        counted = Counter(row[dtype]["status"] for row in rows.values() if dtype in row)
        print(f"{dtype}: {', '.join(f'{count} {status}' for status, count in counted.most_common())} of {len(rows)} families")
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(row.get(dtype, {}).get("status") in ("WRONG", "broken") for row in rows.values() for dtype in dtypes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
