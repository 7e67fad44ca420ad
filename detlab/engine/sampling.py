"""Sampling that belongs to the request: the token is drawn from (seed, request, position), not from a batch's generator.

A token is drawn by adding a Gumbel number to each score and taking the largest sum; that draws from ``softmax(scores)``
without computing it. The Gumbel numbers come from `detlab.engine.streams`, so given equal scores the token is the same in any
slot, with any mates and padding, on any machine. Equal scores are the model's business, not this module's.

How `owned_sampling` reaches inside an unmodified ``generate``: the scores leave the last logits processor as a tensor subclass
that remembers its request rows, and ``softmax`` and ``multinomial`` of such a tensor are answered here. Nothing global is
replaced. Replacing ``torch.multinomial`` would reach other threads and would see probabilities only, whose exponentials
depend on the instruction set; a processor that leaves a single finite score would spoil ``output_scores`` and could not serve
beams, which are drawn from sums over several steps.

**Ties.** The lowest token id wins. For drawn tokens this is done here; for greedy decoding ``torch.argmax`` is left to it,
as its documentation promises the first of equal maxima. Beam search uses ``topk`` and ``sort``, which promise nothing: inside
the block both are answered by a stable sort (the lower beam first, then the lower token id).
"""

from __future__ import annotations

import contextvars
import hashlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

from detlab.engine.scores import Call, HandOver, plain, sample_token
from detlab.engine.streams import check_request, check_seed, is_whole
from detlab.errors import UsageError

__all__ = ["owned_sampling", "request_id", "sample_token"]


# ----------------------------------------------------------------------------------------------------------- the request
def request_id(token_ids: Sequence[int] | Tensor, sample_number: int = 0) -> str:
    """Names a request by its prompt: SHA-256 of the real token ids, without padding, and the sample's number.

    The same prompt has the same id wherever it is served, so it gets the same text. Two requests with one prompt that are
    to differ need other sample numbers, or ids of your own.

    Args:
        token_ids: the prompt's token ids, ints or an integer tensor [seq]; no padding.
        sample_number: from 0; which of several texts for one prompt.

    Returns:
        64 hexadecimal digits.

    Raises:
        UsageError: no tokens, a token that is not a whole number of 0 to 2**63 - 1, or such a sample number.

    >>> request_id([72, 105, 33])[:16], request_id([72, 105, 33], 1)[:16]
    ('c64e0a433f46ca8f', '73e82720c58ceb64')
    """
    if isinstance(token_ids, Tensor):
        if token_ids.ndim != 1 or token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
            raise UsageError(
                f"request_id takes the token ids of one prompt, integers [seq]; got {token_ids.dtype} "
                f"{list(token_ids.shape)}. Name each row alone."
            )
        token_ids = token_ids.tolist()
    tokens = list(token_ids)
    if not tokens:
        raise UsageError("request_id got no tokens; give the prompt's token ids.")
    for name, number in [("token id", token) for token in tokens] + [("sample_number", sample_number)]:
        if not is_whole(number, 1 << 63):
            raise UsageError(f"{name} {number!r} is not possible; give a whole number of 0 or more.")
    said = np.array([sample_number, *tokens], dtype="<i8").tobytes()
    return hashlib.sha256(b"detlab request 1" + said).hexdigest()


# ------------------------------------------------------------------------------------------------------ inside generate
@dataclass(eq=False)
class _Block:
    """One ``with owned_sampling(...)``."""

    seed: int
    requests: list[str] | None


_lock = threading.Lock()
_open: weakref.WeakKeyDictionary[GenerationMixin, list[_Block]] = weakref.WeakKeyDictionary()
# The blocks this thread (or asynchronous task) has entered, and the calls of generate it is in.
_entered: contextvars.ContextVar[tuple[_Block, ...]] = contextvars.ContextVar("detlab_entered", default=())
_calls: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar("detlab_calls", default=None)

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


@contextmanager
def owned_sampling(model: GenerationMixin, seed: int, request_ids: Sequence[str] | None = None) -> Iterator[None]:
    """Makes ``model.generate`` draw each row's tokens from (seed, request, position) instead of torch's generator.

    ```python
    with owned_sampling(model, seed=7):
        model.generate(**inputs, do_sample=True, temperature=0.8, num_return_sequences=4)
    ```

    Served are sampling with any temperature, top-k, top-p, min-p, typical, ... and custom logits processors (all of them come
    before the draw), several returned sequences, and beams with and without sampling; greedy decoding is left as it is.
    ``output_scores`` returns the scores that were drawn from. Assisted and speculative decoding, custom generation
    loops and continuous batching are refused. torch's generators are neither read nor moved.

    Without ``request_ids`` a row is the request ``request_id(its real tokens, sample number)``: tokens under a 0 of the
    attention mask do not count, and the samples of one prompt are numbered 0, 1, ... That is all it knows: two rows with
    one prompt get one text, images shown beside the prompt do not count, and a text continued in a second call is another
    request. The position is the number of tokens that this call has generated for the row, whatever the cache or the
    chunks of the prefill. With sampled beams the stream belongs to the prompt, and position and (beam, token) index it.

    A block counts for its model, and for the thread or task that entered it; inside another block of the same model the
    inner one counts. A thread that entered none (a streamer's) uses the model's only open block; where there are several, it
    is refused. The model is restored on leaving, whatever happened.

    Args:
        model: a transformers model that generates.
        seed: 0 to 2**64 - 1.
        request_ids: ids of your own, one for each returned text (prompt by prompt; with beams one for each prompt), for
            every call in the block. Needed with ``inputs_embeds``, with encoder-decoder models, and where a cache holds the
            beginning of the prompt.

    Raises:
        UsageError: a seed or ids that are not possible, another number of ids than texts, or a way to generate that is
            not covered (the last two when ``generate`` is called).
    """
    if not isinstance(model, GenerationMixin):
        raise UsageError(
            f"owned_sampling needs a transformers model that generates; got {type(model).__name__}. "
            "Of a wrapped model (compiled, PEFT) give the model inside."
        )
    if type(model).generate is not GenerationMixin.generate:
        raise UsageError(f"{type(model).__name__} has a generate of its own, which owned_sampling does not cover.")
    if isinstance(request_ids, str):
        raise UsageError(f"request_ids={request_ids!r} is one text; give a list with one id for each returned text.")
    ids = None if request_ids is None else [check_request(request) for request in request_ids]
    block = _Block(check_seed(seed), ids)
    hooks = {function.__name__.strip("_"): MethodType(function, model) for function in (_generate, _init_continuous_batching)}
    hooks["_get_logits_processor"] = MethodType(_get_logits_processor, model)
    state: dict[str, Any] = vars(model)
    with _lock:
        if model not in _open:
            taken = sorted(set(hooks) & set(state))
            if taken:
                raise UsageError(f"the model's {', '.join(taken)} was replaced already; undo that before owned_sampling.")
            # Bound methods: a deep copy of the model made in the block is bound to the copy, for which no block is open.
            state.update(hooks)
        _open.setdefault(model, []).append(block)
    _entered.set((*_entered.get(), block))
    try:
        yield
    finally:
        _entered.set(tuple(other for other in _entered.get() if other is not block))
        with _lock:
            blocks = _open.get(model, [block])  # none: the interpreter is going down
            blocks.remove(block)
            if not blocks:
                _open.pop(model, None)
                for name, hook in hooks.items():
                    if state.get(name) == hook:  # what was put in its place since is not ours to remove
                        del state[name]


def _block_of(model: GenerationMixin) -> _Block | None:
    """The block that counts for a call of the model made here; None where the model has none open."""
    with _lock:
        blocks = list(_open.get(model, ()))
    mine = [block for block in _entered.get() if block in blocks]
    if mine:
        return mine[-1]
    if len(blocks) > 1:
        raise UsageError(
            f"{len(blocks)} blocks of owned_sampling are open on this model and this thread entered none of them; "
            "enter one in the thread that calls generate."
        )
    return blocks[0] if blocks else None


def _generate(self: GenerationMixin, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``model.generate`` inside a block: refuses what is not covered, and takes the marks off the result."""
    stock: Callable[..., Any] = type(self).generate
    if _block_of(self) is None:
        return stock(self, *args, **kwargs)
    _refuse_uncovered(self, inspect.signature(stock).bind(self, *args, **kwargs).arguments)
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        result = stock(self, *args, **kwargs)
    finally:
        _calls.reset(token)
    for call in calls:
        call.check_drawn()
    return plain(result)


def _refuse_uncovered(model: Any, arguments: dict[str, Any]) -> None:
    more = arguments.get("kwargs", {})
    for name in ("assistant_model", "custom_generate"):
        if arguments.get(name) is not None:
            raise UsageError(f"{name} is not covered by owned_sampling; leave it out, or call generate outside the block.")
    config, _ = model._prepare_generation_config(arguments.get("generation_config"), **more)
    if config.cache_implementation == "paged":
        raise UsageError('cache_implementation="paged" batches continuously, which owned_sampling does not cover.')
    _check_mode(config)


def _check_mode(config: GenerationConfig) -> GenerationMode:
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise UsageError(
            f"generation mode {mode.value!r} is not covered by owned_sampling; "
            f"it covers {', '.join(m.value for m in _MODES)}. Call generate outside the block."
        )
    if config.token_healing:
        raise UsageError("token_healing generates parts of the prompt anew; owned_sampling does not cover it.")
    return mode


def _init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for continuous batching, which draws in a thread of its own."""
    if _block_of(self) is not None:
        raise UsageError("continuous batching is not covered by owned_sampling; call it outside the block.")
    return type(self).init_continuous_batching(self, *args, **kwargs)


def _get_logits_processor(self: GenerationMixin, *args: Any, **kwargs: Any) -> LogitsProcessorList:
    """Stands in for the method by which ``generate`` collects its processors: ours comes last."""
    stock: Callable[..., LogitsProcessorList] = type(self)._get_logits_processor
    processors = stock(self, *args, **kwargs)
    block = _block_of(self)
    if block is None:
        return processors
    arguments = inspect.signature(stock).bind(self, *args, **kwargs).arguments
    config: GenerationConfig = arguments["generation_config"]
    mode = _check_mode(config)
    if mode is GenerationMode.GREEDY_SEARCH:
        return processors
    draws = bool(config.do_sample)
    requests = _requests_of(self, block, config, arguments) if draws else []
    call = Call(block.seed, requests, arguments["input_ids_seq_length"], draws)
    calls = _calls.get()
    if calls is not None:
        calls.append(call)
    processors.append(HandOver(call))
    return processors


def _requests_of(model: Any, block: _Block, config: GenerationConfig, arguments: dict[str, Any]) -> list[str]:
    """One id for each row that is drawn from: each returned text, or with beams each prompt."""
    inputs: Tensor = arguments["encoder_input_ids"]  # what generate was given, before rows are repeated
    samples, beams = config.num_return_sequences or 1, config.num_beams or 1
    repeats = max(samples, beams)  # generate repeats each row so often, for samples or for beams
    texts = 1 if beams > 1 else samples
    if block.requests is not None:
        if len(block.requests) != len(inputs) * texts:
            raise UsageError(
                f"owned_sampling got {len(block.requests)} request_ids; this call of generate has {len(inputs)} prompts and "
                f"draws {len(inputs) * texts} {'times' if beams > 1 else 'texts'}. Give one id for each, prompt by prompt."
            )
        return block.requests
    advice = "Give owned_sampling request_ids, one for each returned text."
    if model.config.is_encoder_decoder:
        raise UsageError(f"the requests of an encoder-decoder model cannot be told from its inputs. {advice}")
    if inputs.ndim != 2 or inputs.is_floating_point():
        raise UsageError(f"the prompts came as inputs_embeds, so their token ids are not known. {advice}")
    mask = (arguments.get("model_kwargs") or {}).get("attention_mask")
    if mask is None:  # generate drops a mask of ones, and keeps its width
        mask = inputs.new_ones((len(inputs), getattr(config, "_mask_length", inputs.shape[1])))
    else:
        mask = mask[::repeats]
    if mask.shape != inputs.shape:
        raise UsageError(
            f"the attention mask is {list(mask.shape)} and the token ids are {list(inputs.shape)}: the beginning of the "
            f"prompts is in a cache, so their token ids are not known. {advice}"
        )
    rows = [row[kept != 0].tolist() for row, kept in zip(inputs.cpu(), mask.cpu(), strict=True)]
    return [request_id(row, sample) for row in rows for sample in range(texts)]
