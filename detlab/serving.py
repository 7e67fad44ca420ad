"""How a condition serves prompts: which rows share a batch, how they are padded, and the model as the condition wants it."""

from __future__ import annotations

import copy
import importlib
import inspect
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from detlab import bits
from detlab.condition import Condition
from detlab.errors import MachineError, UsageError
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


def takes_cache(model: nn.Module) -> bool:
    """Whether the model takes a KV cache at all; the first GPT does not."""
    return any(name in inspect.signature(model.forward).parameters for name in CACHE_NAMES)


def check_model(model: object) -> None:
    """Refuses what is no module: a name, or the pair that `load_model` returns, in the place of its model.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a model is needed, as `model, tokenizer = detlab.load_model(...)` gives it; got {type(model).__name__}."
        )


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


@contextmanager
def settings(condition: Condition, device: torch.device) -> Iterator[None]:
    """Process-wide settings of a condition, undone on leaving: threads, deterministic algorithms, autocast."""
    threads, flag = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if condition.threads is not None:
            torch.set_num_threads(condition.threads)
        if condition.deterministic_algorithms:
            torch.use_deterministic_algorithms(True)
        if condition.autocast is None:
            yield
        else:
            with torch.autocast(device.type, getattr(torch, condition.autocast)):
                yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(flag, warn_only=warn_only)


_Key = tuple[str | None, str | None, int]
_copies: weakref.WeakKeyDictionary[nn.Module, dict[_Key, tuple[list[int], nn.Module]]] = weakref.WeakKeyDictionary()


@contextmanager
def served_model(model: nn.Module, condition: Condition) -> Iterator[nn.Module]:
    """The model as the condition wants it (cast, moved, compiled, another attention); the original stays as it was."""
    served: Any = _copy_for(model, condition)
    config: Any = getattr(served, "config", None)
    before = getattr(config, "_attn_implementation", None)
    swap = condition.attention is not None and condition.attention != before
    if swap and not hasattr(served, "set_attn_implementation"):
        name = type(served).__name__
        raise UsageError(f"attention={condition.attention!r}: {name} is not a transformers model; leave it out.")
    compiled = _modules_to_compile(served, condition.compile)
    try:
        if swap:
            _set_attention(served, condition.attention)
        if not compiled:
            yield served
            return
        torch._dynamo.reset()  # what was compiled for another run must not count against this one's limit
        for module in compiled:
            module.forward = torch.compile(module.forward)
        # A module that is called in many shapes must not fall back to eager code without a word.
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            yield served
    finally:
        for module in compiled:
            module.__dict__.pop("forward", None)
        if swap:
            served.set_attn_implementation(before)


def _set_attention(served: Any, name: str | None) -> None:
    """Another attention implementation, or an error: some models refuse, and others only log that they keep their own."""
    try:
        served.set_attn_implementation(name)
    except ValueError as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"attention={name!r}: {type(served).__name__} does not have it ({why}).") from error
    if served.config._attn_implementation != name:
        raise UsageError(f"attention={name!r}: {type(served).__name__} has an attention of its own; leave it out.")


def _modules_to_compile(model: nn.Module, suffix: str | None) -> list[Any]:
    if suffix is None:
        return []
    found = [m for name, m in model.named_modules() if name == suffix or name.endswith(f".{suffix}")]
    if not found:
        some = ", ".join(sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if name})[:12])
        raise UsageError(f"compile={suffix!r}: no module of {type(model).__name__} has this name; there are {some}.")
    if any("forward" in vars(module) for module in found):
        raise UsageError(f"compile={suffix!r}: the forward of such a module was replaced already; undo that first.")
    return found


def _copy_for(model: nn.Module, condition: Condition) -> nn.Module:
    """The model itself, or a copy that is cast, moved or realigned; it is kept until the model's weights change, or it goes."""
    first = next(model.parameters())
    dtype = condition.dtype if condition.dtype is not None and getattr(torch, condition.dtype) != first.dtype else None
    device = condition.device
    if device is not None:
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise MachineError(f"device={device!r} is not to be had on this machine: {reason}") from None
        if torch.device(device).type == first.device.type == "cpu":
            device = None
    key = (dtype, device, condition.alignment)
    if key == (None, None, 0):
        return model
    known = _copies.setdefault(model, {})
    # Versions and addresses would miss what is written through .data or numpy.
    state = [bits.digest(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())]
    if key not in known or known[key][0] != state:
        twin = copy.deepcopy(model)
        if dtype is not None:
            _cast(twin, getattr(torch, dtype))
        if device is not None:
            twin = twin.to(device)
        if condition.alignment:
            for parameter in twin.parameters():
                parameter.data = _moved(parameter.data, condition.alignment)
        known[key] = (state, twin)
    return known[key][1]


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters and saved buffers, as loading in that dtype does.

    Buffers that are not saved (rotary inverse frequencies) stay as they are: ``model.to(dtype)`` would round them, and
    the copy would be another model than the one that users load.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _moved(tensor: Tensor, offset: int) -> Tensor:
    size = tensor.element_size()
    if offset % size:
        raise UsageError(f"alignment={offset} does not fit {size}-byte elements; give a multiple of {size}.")
    return bits.placed(tensor, offset)


def new_cache(model: nn.Module, condition: Condition, length: int) -> Any:
    """The KV cache that a condition starts with; None leaves it to the model."""
    if condition.cache != "static":
        return None
    from transformers import StaticCache

    return StaticCache(config=config_of(model), max_cache_len=length)


class Draw(Protocol):
    """Draws a token for each row, int64 [batch]."""

    def __call__(self, scores: Tensor, prompts: list[list[int]], position: int) -> Tensor:
        """Draws from scores [batch, vocab], of these prompts' token ids, the token at that generated position."""


#: What puts a model under a tier, as "module:name" of a context manager (model, tier, seed) that yields a `Draw` or None. It is
#: looked up by name when a condition asks for a tier, since this room knows no engine; a fresh process finds it the same way.
TIER_HOOK = "detlab.deterministic:serving_under"


@contextmanager
def under_tier(model: nn.Module, condition: Condition) -> Iterator[Draw | None]:
    """The model under the condition's tier; yields what draws tokens there (None: torch's global stream)."""
    if condition.tier == "stock":
        if "_detlab_session" in vars(model):
            raise UsageError(
                'the model is inside detlab.deterministic, and the condition says tier="stock": name the tier in the '
                "condition, or leave the block."
            )
        yield None
        return
    module, _, name = TIER_HOOK.partition(":")
    with getattr(importlib.import_module(module), name)(model, condition.tier, condition.seed) as draw:
        yield draw


def choose(logits: Tensor, condition: Condition, draw: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The next token of each row, int64 [batch]: the likeliest, or drawn from torch's global stream as ``generate`` does.

    Args:
        logits: [batch, vocab].
        condition: its temperature and ``top_k``.
        draw: draws from scores [batch, vocab] instead of torch's stream.
    """
    if not condition.temperature:
        return logits.argmax(-1)
    scores = logits.float() / condition.temperature
    if condition.top_k:
        least = scores.topk(min(condition.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    return torch.multinomial(scores.softmax(-1), 1)[:, 0] if draw is None else draw(scores)
