"""Invariance at sizes beside the kernels' tiles: GPT-NeoX's and Pythia's, odd widths and vocabularies, biases, three formats.

Hidden sizes of 200, 540 and 577, intermediate sizes of 540, 577 and 1000, a vocabulary of 50257, with and without biases,
in float32, bfloat16 and float16; and SmolLM2 with its own weights. One comparison is one text served in some way, all its
kept rows of logits held bit by bit against the same text alone in one call. The control serves some of the same with the
tier off.

    python benchmarks/odd_sizes.py [MODEL ...]
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from _harness import RESULTS, save

import detlab
from detlab import bits
from detlab.engine.probes import draw
from detlab.verify.certificate import upper_bound
from detlab.verify.serve import Way, kept_positions, logits_of

NAME = "odd_sizes"
DTYPES = ("float32", "bfloat16", "float16")
_NEOX: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 512}
_LLAMA: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox 200, 540": ("GPTNeoX", {**_NEOX, "hidden_size": 200, "intermediate_size": 540}),
    "gpt-neox 540, 577": ("GPTNeoX", {**_NEOX, "hidden_size": 540, "intermediate_size": 577}),
    "pythia-70m's layers": ("GPTNeoX", {**_NEOX, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}),
    "gpt2 200, vocabulary 50257": (
        "GPT2", {"n_embd": 200, "n_layer": 1, "n_head": 4, "n_positions": 512, "vocab_size": 50257},
    ),
    "llama 577, 1000, one head": (
        "Llama", {**_LLAMA, "hidden_size": 577, "intermediate_size": 1000, "num_attention_heads": 1, "num_key_value_heads": 1,
                  "head_dim": 64},
    ),
    "llama 200, 577, biases": (
        "Llama", {**_LLAMA, "hidden_size": 200, "intermediate_size": 577, "num_attention_heads": 5, "num_key_value_heads": 1,
                  "head_dim": 40, "attention_bias": True, "mlp_bias": True},
    ),
    "llama 1000, 540": (
        "Llama", {**_LLAMA, "hidden_size": 1000, "intermediate_size": 540, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "head_dim": 80},
    ),
}  # fmt: skip


def built(name: str, dtype: str) -> Any:
    """A model with weights whose bits are the same on every machine."""
    if name == "smollm2-135m":
        return detlab.load_model(name, dtype=dtype)[0]
    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, kind + suffix)(config).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(draw(*parameter.shape, dtype=torch.float32, seed=number) * scale)
            if parameter.ndim == 1 and not number % 2:
                parameter.add_(1.0)  # norms, mostly
    return model.to(getattr(torch, dtype))


def text_of(length: int, seed: int = 0) -> list[int]:
    """Token ids."""
    chosen = random.Random(f"text {length} {seed}")
    return [chosen.randrange(3, 250) for _ in range(length)]


def ways(is_quick: bool) -> Iterator[tuple[int, Way]]:
    """Lengths of texts, and ways to serve them; few where a call takes long."""
    for length in (43, 17) if is_quick else (43, 1, 17, 150):
        for size in (2, 3, 5, 8) if is_quick or length > 100 else (*range(2, 18), 24, 32):
            for is_ragged in (False, True):
                rows = tuple(range(size % 2, size, 2)) if is_ragged else tuple(range(size))
                yield length, Way(batch=size, rows=rows, mates=size, is_ragged=is_ragged)
        for amount in (1, 3, 8, 11, 31, 37) if is_quick else range(1, 38):
            yield length, Way(left=amount)
            yield length, Way(right=amount)
            yield length, Way(batch=3, rows=(0, 1, 2), left=amount)
        if length > 1:
            for chunk in (1, 2, 3, 5, 7, 16, 33):
                yield length, Way(chunk=chunk, cache="dynamic")
                yield length, Way(batch=4, rows=(0, 1, 2, 3), chunk=chunk, cache="dynamic")
            for cache in ("dynamic", "static", "none"):
                yield length, Way(start=length - 4, cache=cache)
                yield length, Way(batch=6, rows=(0, 2, 4, 5), start=length - 4, cache=cache, left=9)


def measure(model: Any, is_quick: bool, most: int | None = None) -> list[int]:
    """Comparisons and mismatches, of the first ways or of all."""
    references: dict[int, torch.Tensor] = {}
    found = [0, 0]
    for number, (length, way) in enumerate(ways(is_quick)):
        if most is not None and number >= most:
            break
        text, keep = text_of(length), kept_positions(length)
        if length not in references:
            references[length] = logits_of(model, text, Way(), [], keep)[0]
        for logits in logits_of(model, text, way, [text_of(23, 1), text_of(90, 2)], keep):
            found[0] += 1
            found[1] += not bits.equal(logits.contiguous(), references[length].contiguous())
    return found


def main(chosen: list[str]) -> int:
    """Runs, prints and keeps; 1 where a bit differed."""
    torch.set_num_threads(1)
    names = chosen or [*MODELS, "smollm2-135m"]
    unknown = [name for name in names if name not in (*MODELS, "smollm2-135m")]
    if unknown:
        print(f"no model {', '.join(unknown)}; there are {', '.join([*MODELS, 'smollm2-135m'])}", file=sys.stderr)
        return 2
    rows: dict[str, Any] = {}
    path = RESULTS / f"{NAME}.json"
    if chosen and path.exists():
        import json

        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    here = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    for name in names:
        for dtype in DTYPES if name in MODELS else DTYPES[:2]:
            started = time.perf_counter()
            model, is_quick = built(name, dtype), name not in MODELS or dtype == "float16"  # torch's float16 is slow on a CPU
            with torch.no_grad():
                with detlab.deterministic(model):
                    tier = measure(model, is_quick)
                stock = measure(model, is_quick, 60)
            rows[f"{name}, {dtype}"] = {
                "comparisons": tier[0], "mismatches": tier[1], "bound95": upper_bound(tier[1], tier[0]),
                "control_comparisons": stock[0], "control_mismatches": stock[1], "commit": here,
            }  # fmt: skip
            print(
                f"{name:28} {dtype:9} {tier[1]} of {tier[0]:,} differ; with the tier off {stock[1]} of {stock[0]} "
                f"({time.perf_counter() - started:.0f} s)", flush=True,
            )  # fmt: skip
            save(NAME, {"rows": rows})
    total = sum(row["comparisons"] for row in rows.values())
    wrong = sum(row["mismatches"] for row in rows.values())
    print(f"in all: {wrong} of {total:,} comparisons differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
