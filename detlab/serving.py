"""How a condition serves prompts: which rows share a batch, how they are padded, and the model as the condition wants it."""

from __future__ import annotations

import copy
import inspect
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from detlab.condition import Condition
from detlab.errors import UsageError
from detlab.prompts import Prompt
from detlab.trace.calls import CACHE_NAMES


@dataclass
class Batch:
    """One batch: tokens per row without padding, and the prompt each row serves (-1: a mate)."""

    rows: list[list[int]]
    prompts: list[int]


def make_batches(inputs: list[list[int]], condition: Condition, vocabulary: int) -> list[Batch]:
    """Groups prompts as the condition says; every batch has exactly ``batch_size`` rows."""
    size, count = condition.batch_size, len(inputs)
    draw = random.Random(condition.seed)
    made = []
    if condition.padding_side is None:
        for prompt, tokens in enumerate(inputs):
            rows, names = [], []
            for row in range(size):
                is_question = row == condition.row
                rows.append(tokens if is_question else _mate(inputs, prompt, row, condition.mates, draw, vocabulary))
                names.append(prompt if is_question else -1)
            made.append(Batch(rows, names))
        return made
    for first in range(0, count, size):
        group = list(range(first, min(first + size, count)))
        names = [group[i] if i < len(group) else -1 for i in range(size)]
        rows = [inputs[name] if name >= 0 else inputs[(first + i) % count] for i, name in enumerate(names)]
        first_row = size - condition.row  # rotate, so that the group's first prompt sits in the row asked for
        made.append(Batch(rows[first_row:] + rows[:first_row], names[first_row:] + names[:first_row]))
    return made


def _mate(inputs: list[list[int]], prompt: int, row: int, mates: str, draw: random.Random, vocabulary: int) -> list[int]:
    """A neighbour of the prompt's own length."""
    length = len(inputs[prompt])
    if mates == "repeat":
        return inputs[prompt]
    if mates == "random":
        return [draw.randrange(vocabulary) for _ in range(length)]
    other = inputs[(prompt + 1 + row) % len(inputs)]
    return (other * (length // len(other) + 1))[:length]


def padded(batch: Batch, condition: Condition, pad: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of a batch, both int64 [batch, width]."""
    width = max(len(row) for row in batch.rows) + condition.padding
    ids, mask = [], []
    for row in batch.rows:
        spare = width - len(row)
        fill, zeros = [pad] * spare, [0] * spare
        ones = [1] * len(row)
        left = condition.padding_side == "left"
        ids.append(fill + row if left else row + fill)
        mask.append(zeros + ones if left else ones + zeros)
    return torch.tensor(ids), torch.tensor(mask)


# -------------------------------------------------------------------------------------------------------- the model
def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device


def config_of(model: nn.Module) -> Any:
    """The configuration of the model's language part; None where it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def vocabulary_of(model: nn.Module) -> int:
    """Number of token ids."""
    return int(getattr(config_of(model), "vocab_size", 256))


def pad_token(model: nn.Module) -> int:
    """The token that fills padding; masked, so any will do where the model names none."""
    pad = getattr(config_of(model), "pad_token_id", None)
    return int(pad) if isinstance(pad, int) and pad >= 0 else 0


def accepted(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Drops what the model's forward does not take; position ids are left out by models that have none."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def cache_argument(model: nn.Module) -> str:
    """The name under which the model takes a KV cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


def check_inputs(model: nn.Module, prompts: list[Prompt], inputs: list[list[int]], new_tokens: int) -> None:
    """Refuses prompts that the model cannot take: more positions than it has, token ids that it does not know."""
    limit = getattr(config_of(model), "max_position_embeddings", None)
    vocabulary = vocabulary_of(model)
    for prompt, tokens in zip(prompts, inputs, strict=True):
        if limit is not None and len(tokens) + new_tokens > limit:
            raise UsageError(
                f"prompt {prompt.id!r} has {len(tokens)} tokens and {new_tokens} more are asked for; "
                f"the model holds {limit} positions. Shorten the prompt or ask for fewer tokens."
            )
        if max(tokens) >= vocabulary or min(tokens) < 0:
            raise UsageError(
                f"prompt {prompt.id!r} has token id {max(tokens) if max(tokens) >= vocabulary else min(tokens)}; "
                f"the model's vocabulary is 0..{vocabulary - 1}. Is it another model's tokenizer?"
            )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's generators for a run and gives the caller's random state back."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        yield


_copies: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = weakref.WeakKeyDictionary()


@contextmanager
def served_model(model: nn.Module, condition: Condition) -> Iterator[nn.Module]:
    """The model as the condition wants it: cast copy, attention implementation; the original is left as it was."""
    served: Any = model
    if condition.dtype is not None:
        wanted = getattr(torch, condition.dtype)
        if next(model.parameters()).dtype != wanted:
            served = _cast_copy(model, condition.dtype)
    config: Any = getattr(served, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if condition.attention is None or condition.attention == before:
        yield served
        return
    if not hasattr(served, "set_attn_implementation"):
        name = type(served).__name__
        raise UsageError(f"attention={condition.attention!r}: {name} is not a transformers model; leave it out.")
    served.set_attn_implementation(condition.attention)
    try:
        yield served
    finally:
        served.set_attn_implementation(before)


def _cast_copy(model: nn.Module, dtype: str) -> nn.Module:
    """A copy with parameters and saved buffers in ``dtype``, as loading in that dtype gives.

    Buffers that are not saved (rotary inverse frequencies) stay as they are: ``model.to(dtype)`` would round them, and
    the copy would be another model than the one that users load.
    """
    known = _copies.setdefault(model, {})
    if dtype not in known:
        wanted = getattr(torch, dtype)
        twin = copy.deepcopy(model)
        for module in twin.modules():
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(wanted)
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                    setattr(module, name, buffer.to(wanted))
        known[dtype] = twin
    return known[dtype]
