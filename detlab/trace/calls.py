"""Reads a model call: which prompt each batch row serves, which position each token slot holds, and the inputs' layouts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor, nn

from detlab.trace.layout import Atom, Dim, Layout, plain
from detlab.trace.records import Call

Input = tuple[str, Tensor, Layout | None]
#: What transformers calls the KV cache: since 5.24, and before.
CACHE_NAMES = ("cache", "past_key_values")


@dataclass
class CallContext:
    """What the caller knows about the calls that follow: the prompt behind each batch row, and the step."""

    prompts: list[int] | None = None
    step: int | None = None


def begin_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], index: int,
               context: CallContext | None) -> tuple[Call, list[Input], str]:  # fmt: skip
    """Lays out a call of a transformers-style decoder.

    A token's position is its ordinal among the tokens that the attention mask admits, counting those already in the
    cache. It names the row; the position ids that the model was given are an input like any other, so that wrong ones
    show up as an input that differs.

    Args:
        model, args, kwargs: the model and what it was called with.
        index: number of this call in its trace.
        context: what the runner knows; None in a bare capture, where batch row i serves prompt i and each call is a step.

    Returns:
        The `Call`, its input tensors with their layouts, and a note ("" if all was understood).
    """
    bound = _bind(model, args, kwargs)
    ids, embeds = bound.get("input_ids"), bound.get("inputs_embeds")
    lead = ids if isinstance(ids, Tensor) else embeds
    if not isinstance(lead, Tensor) or lead.ndim < 2:
        empty = np.zeros((0, 0), np.int64)
        call = Call(index, index, np.zeros(0, np.int64), empty, range(0), empty)
        inputs: list[Input] = [(n, v, None) for n, v in bound.items() if isinstance(v, Tensor)]
        return call, inputs, "a call without input_ids or inputs_embeds has no token rows: its tensors are unlaid"
    batch, length = lead.shape[:2]
    past = _past_length(_cache_of(bound))
    total = past + length
    mask = bound.get("attention_mask")
    note = ""
    if isinstance(mask, Tensor) and mask.ndim == 2:
        admitted = mask.detach().cpu().numpy().astype(bool)
        if admitted.shape[1] < total:  # a mask of the new tokens only: what is cached counts as admitted
            admitted = np.pad(admitted, ((0, 0), (total - admitted.shape[1], 0)), constant_values=True)
        positions = np.where(admitted, np.cumsum(admitted, 1) - 1, -1)
    else:
        positions = np.broadcast_to(np.arange(total), (batch, total)).copy()
        if isinstance(mask, Tensor):
            note = "a mask that is not [batch, slots] does not name padding: token slots were taken as positions"
    prompts = np.arange(batch) if context is None or context.prompts is None else np.asarray(context.prompts)
    if len(prompts) != batch:  # beams, or rows that generate added
        prompts = np.arange(batch)
        note = f"a call of {batch} rows for {len(context.prompts or []) if context else 0} prompts: rows were taken as prompts"
    step = index if context is None or context.step is None else context.step
    tokens = ids.detach().cpu().numpy().astype(np.int64) if isinstance(ids, Tensor) else np.full((batch, length), -1)
    call = Call(index, step, prompts.astype(np.int64), positions.astype(np.int64), range(past, total), tokens)
    inputs = []
    for name, value in bound.items():
        if isinstance(value, Tensor):
            inputs.append((name, value, input_layout(name, value, call)))
    inputs += list(_cache_layouts(_cache_of(bound), batch, past, past))
    return call, inputs, note


def _bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = _signature_of(model.forward).bind_partial(*args, **kwargs)
    except TypeError:  # the model itself will say what is wrong with the call
        return dict(kwargs)
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if isinstance(value, dict) and name not in kwargs:
            values.update(value)
        else:
            values[name] = value
    return values


def _signature_of(forward: Any) -> inspect.Signature:
    """The signature of a model's forward; reading it anew for every step of a decode loop would be felt."""
    function = getattr(forward, "__func__", None)
    return inspect.signature(forward) if function is None else _method_signature(function)


@lru_cache(maxsize=32)
def _method_signature(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _cache_of(values: Any) -> Any:
    """The KV cache among a call's arguments or outputs, under the name that this version of transformers uses."""
    for name in CACHE_NAMES:
        found = values.get(name)
        if found is not None:
            return found
    return None


def _past_length(cache: Any) -> int:
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    try:
        return int(cache[0][0].shape[-2])
    except (TypeError, IndexError, AttributeError, KeyError):
        return 0


#: Arguments whose rows are known by their names, also where the model made them itself.
NAMED_BY_ROWS = ("position_ids", "attention_mask", "cache_position")


def input_layout(name: str, value: Tensor, call: Call) -> Layout | None:
    """The layout of a call's argument by its name; None where the name and shape do not tell."""
    shape = tuple(value.shape)
    batch, total = call.positions.shape
    length = len(call.query)
    rows: Dim = (Atom("batch", range(batch)),)
    query: Dim = (Atom("token", range(length)),)
    start = call.query.start
    lead = rows if shape and shape[0] == batch else ()
    if name in ("input_ids", "position_ids", "token_type_ids", "labels") and len(shape) == 2 and shape[1] == length:
        return (lead, query)
    if name == "inputs_embeds" and len(shape) == 3:
        return (rows, query, *plain(shape[2:]))
    if name == "cache_position" and shape == (length,):
        return (query,)
    if name == "attention_mask":
        slots: Dim = (Atom("token", range(-start, shape[-1] - start)),) if shape else ()
        if len(shape) == 2 and shape[0] == batch:
            return (rows, slots)
        if len(shape) == 4 and shape[-1] >= call.query.stop and shape[-2] == length and shape[0] in (1, batch):
            return (lead, *plain(shape[1:2]), query, slots)
    return plain(shape) if not shape else None


def _cache_layouts(cache: Any, batch: int, total: int, start: int) -> Iterator[Input]:
    for i, layer in enumerate(getattr(cache, "layers", None) or []):
        for part in ("keys", "values"):
            tensor = getattr(layer, part, None)
            if isinstance(tensor, Tensor) and tensor.ndim == 4 and tensor.shape[0] == batch and tensor.numel():
                held = tensor.shape[2]  # a sliding window holds the last slots only, a static cache more than there are
                first = max(0, total - held) - start
                slots: Dim = (Atom("token", range(first, first + held)),)
                layout = ((Atom("batch", range(batch)),), *plain(tensor.shape[1:2]), slots, *plain(tensor.shape[3:]))
                yield f"cache.layers.{i}.{part}", tensor, layout


def cache_tensors(output: Any, call: Call | None) -> Iterator[Input]:
    """The cache that a call leaves behind, with layouts: keys and values of every layer."""
    cache = _cache_of(output) if isinstance(output, dict) else None
    if cache is not None and call is not None and len(call.prompts):
        yield from _cache_layouts(cache, len(call.prompts), call.query.stop, call.query.start)
