"""Executes a condition: tokens in, tokens, logits and a trace out.

The loop is greedy decoding as ``generate`` does it, written out so that every call is known: which prompt each row
serves, which step it is, and, under teacher forcing, which token is fed. It runs a fixed number of steps and does not
stop at an end token, so that two runs have the same rows; texts are cut at the end token where they are shown.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from detlab import bits
from detlab.condition import Condition
from detlab.environment import Environment, environment
from detlab.errors import ModelError, TraceError, UsageError
from detlab.models import tokenizer_for
from detlab.process import child, send_model
from detlab.prompts import Prompt, as_prompts, encode
from detlab.serving import (
    Batch,
    Draw,
    accepted,
    cache_argument,
    check_inputs,
    check_model,
    choose,
    config_of,
    device_of,
    make_batches,
    new_cache,
    pad_token,
    padded,
    seeded,
    served_model,
    settings,
    under_tier,
    vocabulary_of,
)
from detlab.trace.calls import CallContext
from detlab.trace.capture import Save, capture
from detlab.trace.hashing import forget_stored
from detlab.trace.keep import RowKeeper
from detlab.trace.records import Trace
from detlab.trace.store import pack_trace, read_folder, unpack_trace, write_folder

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Nan:
    """Where logits were not numbers: prompt, step, and how many of them."""

    prompt: int
    step: int
    count: int


@dataclass
class Run:
    """One model, prompts and condition, executed.

    Attributes:
        condition: how the prompts were served.
        prompt_ids, inputs: names and token ids of the prompts.
        tokens: greedy tokens of each prompt, one a step (what the model chose, also where another token was fed).
        texts: these decoded, cut at the end token; None without a tokenizer.
        logits: per prompt [num_steps, vocab], the logits that chose each token; the last position's where no token was asked.
        forced: the tokens that were fed instead of the model's own, per prompt; None in a free run.
        trace: ops, module calls and row digests; None where none was asked for.
        environment: the machine's record.
        seconds: wall-clock duration, capture included.
    """

    condition: Condition
    prompt_ids: list[str]
    inputs: list[list[int]]
    tokens: list[list[int]]
    texts: list[str] | None
    logits: list[Tensor]
    forced: list[list[int]] | None
    trace: Trace | None
    environment: Environment
    seconds: float
    _source: _Source | None = field(default=None, repr=False)

    @property
    def num_steps(self) -> int:
        """Tokens generated per prompt."""
        return len(self.tokens[0]) if self.tokens else 0

    @property
    def md5(self) -> list[str]:
        """MD5 of each prompt's logits, dtype and shape included."""
        return [bits.md5(logits) for logits in self.logits]

    @property
    def nans(self) -> list[Nan]:
        """Where logits were NaN; greedy decoding picks the first NaN, so its tokens mean nothing from there on."""
        counts = [(p, s, int(row.isnan().sum())) for p, logits in enumerate(self.logits) for s, row in enumerate(logits)]
        return [Nan(p, s, n) for p, s, n in counts if n]

    @property
    def is_live(self) -> bool:
        """Whether the model is still at hand, so that the run can be repeated."""
        return self._source is not None and self._source.model() is not None

    def replay(self, *, force: list[list[int]] | None = None, keep: RowKeeper | None = None,
               progress: Progress | None = None) -> Run:  # fmt: skip
        """Executes the same condition again, with the same model object.

        Args:
            force: tokens to feed instead of the model's own (teacher forcing); None repeats what this run did.
            keep: keeps the values of some rows.
            progress: as for `run`.

        Raises:
            ModelError: the model is gone (a loaded run has none).
        """
        model = self._source.model() if self._source is not None else None
        if self._source is None or model is None:
            raise ModelError("this run has no model at hand (it was loaded from disk, or the model was deleted); run it again.")
        return execute(
            model, self._source.prompts, self.inputs, self.condition, self.num_steps, self._source.tokenizer,
            save="digest", with_trace=True, force=self.forced if force is None else force, progress=progress, keep=keep,
        )  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Saves the run in a folder that `load_trace` reads: outputs, trace, condition, environment, checksums.

        Raises:
            TraceError: the path is taken by something else, or cannot be written; nothing is left behind then.
        """
        content: dict[str, Any] = {
            "run": {
                "condition": self.condition.to_json(),
                "prompt_ids": self.prompt_ids,
                "inputs": self.inputs,
                "tokens": self.tokens,
                "texts": self.texts,
                "forced": self.forced,
                "md5": self.md5,
                "environment": self.environment.to_json(),
                "seconds": self.seconds,
            }
        }
        files = {"logits": {str(i): logits for i, logits in enumerate(self.logits)}}
        shards: list[Path] = []
        if self.trace is not None:
            content["trace"], files["trace"], shards = pack_trace(self.trace)
        return write_folder(path, content, files, shards)

    def __repr__(self) -> str:
        what = f"{len(self.tokens)} prompts x {self.num_steps} tokens"
        return f"Run({self.condition}: {what}, {self.seconds:.1f} s, {self.trace or 'no trace'})"


@dataclass
class _Source:
    """What a replay needs. The model is held weakly: a run must not keep gigabytes alive."""

    model: weakref.ref[nn.Module]
    prompts: list[Prompt]
    tokenizer: Any


def load_trace(path: str | Path) -> Run | Trace:
    """Loads what `Run.save` (a `Run` without a model) or ``capture(path=...)`` (a bare `Trace`) wrote.

    Raises:
        TraceError: no saved trace is there; TraceCorrupt or TraceSchema: it cannot be trusted or read.
    """
    content, files, shards = read_folder(path)
    trace = None
    if "trace" in content:
        trace = unpack_trace(content["trace"], files["trace"], shards)
    if "run" not in content:
        if trace is None:
            raise TraceError(f"{path} holds neither a run nor a trace.")
        return trace
    data = content["run"]
    logits = files["logits"]
    return Run(
        condition=Condition.from_json(data["condition"]),
        prompt_ids=data["prompt_ids"],
        inputs=data["inputs"],
        tokens=data["tokens"],
        texts=data["texts"],
        logits=[logits[str(i)] for i in range(len(data["tokens"]))],
        forced=data["forced"],
        trace=trace,
        environment=Environment.from_json(data["environment"]),
        seconds=data["seconds"],
    )


def run(model: nn.Module, prompts: Any, condition: Condition | None = None, *, new_tokens: int = 8, tokenizer: Any = None,
        save: Save = "digest", trace: bool = True, force: list[list[int]] | None = None,
        progress: Progress | None = None) -> Run:  # fmt: skip
    """Serves prompts under a condition and records what happened.

    Args:
        model: a transformers causal language model in eval mode.
        prompts: what `load_prompts` returns, or strings, or lists of token ids.
        condition: how to serve them; None is ``Condition()``, one prompt at a time.
        new_tokens: tokens to decode greedily after prefill; 0 runs prefill alone.
        tokenizer: turns text into tokens; None asks for the one that `load_model` loaded with the model.
        save: which full tensors the trace keeps: "digest" (none), "full", or a function of an `OpRecord`.
        trace: False runs without capture (the same bits; a test says so).
        force: per prompt, the tokens to feed instead of the model's own choice (teacher forcing).
        progress: called with (calls done, calls in all, what).

    Returns:
        A `Run`.

    Raises:
        UsageError: a prompt does not fit into the model's positions, ``new_tokens`` is negative, the model is in training
            mode, ``force`` does not match.
    """
    condition = Condition() if condition is None else condition
    if not isinstance(condition, Condition):
        raise UsageError(f"run needs a Condition, such as Condition(batch_size=8); got {condition!r}.")
    if new_tokens < 0:
        raise UsageError(f"run needs new_tokens of at least 0; got {new_tokens!r}.")
    check_model(model)
    if model.training:
        raise UsageError("run needs a model in eval mode: dropout would make every run another one. Call model.eval().")
    chosen = as_prompts(prompts)
    if tokenizer is None and any(p.tokens is None for p in chosen):
        tokenizer = tokenizer_for(model)
    inputs = encode(chosen, tokenizer)
    return execute(
        model, chosen, inputs, condition, new_tokens, tokenizer,
        save=save, with_trace=trace, force=force, progress=progress, keep=None,
    )  # fmt: skip


def execute(model: nn.Module, prompts: list[Prompt], inputs: list[list[int]], condition: Condition, new_tokens: int,
             tokenizer: Any, *, save: Save, with_trace: bool, force: list[list[int]] | None,
             progress: Progress | None, keep: RowKeeper | None, here: bool = False) -> Run:  # fmt: skip
    """Executes a condition; ``here``: in this process, whose environment variables are set already."""
    check_inputs(model, prompts, inputs, new_tokens)
    if force is not None and [len(f) for f in force] != [new_tokens] * len(inputs):
        raise UsageError(f"force needs {new_tokens} tokens for each of {len(inputs)} prompts; got {[len(f) for f in force]}.")
    source = _Source(weakref.ref(model), prompts, tokenizer)
    if condition.variables and not here:
        made = _in_fresh_process(
            model, inputs, condition, new_tokens, save=save, with_trace=with_trace, force=force, progress=progress, keep=keep
        )
        made.prompt_ids, made.texts, made._source = [p.id for p in prompts], _texts(made.tokens, tokenizer, model), source
        return made
    batches = make_batches(inputs, condition, vocabulary_of(model))
    calls = _Progress(progress, len(batches) * max(1, new_tokens), str(condition))
    tokens: list[list[int]] = [[] for _ in inputs]
    logits: list[list[Tensor]] = [[] for _ in inputs]
    context = CallContext(prompts=[])
    trace: Trace | None = None
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(seeded(condition.seed))
        served = stack.enter_context(served_model(model, condition))
        stack.enter_context(settings(condition, device_of(served)))
        draw = stack.enter_context(under_tier(served, condition))
        record = environment()
        if with_trace:
            forget_stored(served)
            trace = stack.enter_context(capture(served, save, observer=keep, context=context))
        for batch in batches:
            _serve(served, batch, condition, new_tokens, force, context, tokens, logits, calls, draw)
    return Run(
        condition=condition,
        prompt_ids=[p.id for p in prompts],
        inputs=inputs,
        tokens=tokens,
        texts=_texts(tokens, tokenizer, model),
        logits=[torch.stack(rows) for rows in logits],
        forced=force,
        trace=trace,
        environment=record,
        seconds=time.perf_counter() - started,
        _source=source,
    )


# --------------------------------------------------------------------------------------------------- fresh processes
def _in_fresh_process(model: nn.Module, inputs: list[list[int]], condition: Condition, new_tokens: int, *, save: Save,
                      with_trace: bool, force: list[list[int]] | None, progress: Progress | None,
                      keep: RowKeeper | None) -> Run:  # fmt: skip
    """Executes a condition that needs its own process, with no difference for the caller."""
    if callable(save):
        raise UsageError(
            f"save is a function, which cannot be sent to the fresh process that {condition} needs; "
            'use save="digest" or save="full".'
        )
    started = time.perf_counter()
    request = {
        "model": str(send_model(model)),
        "inputs": inputs,
        "condition": condition.to_json() | {"threads": condition.threads or torch.get_num_threads()},
        "new_tokens": new_tokens,
        "save": save,
        "trace": with_trace,
        "force": force,
        "keep": keep.request() if keep is not None else None,
    }

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total, str(condition))

    with child(request, condition.variables, report) as folder:
        made = load_trace(folder / "run")
        assert isinstance(made, Run)
        if made.trace is not None:
            made.trace.saved = made.trace.saved.moved()
        if keep is not None:
            kept = load_file(folder / "kept.safetensors")
            keep.is_full = bool(kept.pop("is_full"))
            for name in sorted({name.partition(".")[0] for name in kept}, key=int):
                keep.kept[int(name)] = (kept[f"{name}.keys"].numpy(), kept[f"{name}.values"])
    made.condition, made.seconds = condition, time.perf_counter() - started
    return made


class _Progress:
    def __init__(self, report: Progress | None, total: int, what: str) -> None:
        self.report, self.total, self.what, self.done = report, total, what, 0

    def step(self) -> None:
        self.done += 1
        if self.report is not None:
            self.report(self.done, self.total, self.what)


def _serve(model: nn.Module, batch: Batch, condition: Condition, new_tokens: int, force: list[list[int]] | None,
           context: CallContext, tokens: list[list[int]], logits: list[list[Tensor]], progress: _Progress,
           draw: Draw | None) -> None:  # fmt: skip
    """Prefills a batch and decodes it, greedily or drawing."""
    ids, mask = padded(batch, condition, pad_token(model))
    ids, mask = ids.to(device_of(model)), mask.to(device_of(model))
    num_rows, width = ids.shape
    last = torch.tensor([int(row.nonzero()[-1]) for row in mask.cpu()], device=ids.device)
    context.prompts = batch.prompts
    cache: Any = new_cache(model, condition, width + new_tokens)
    uses_cache = condition.cache != "none"
    cache_name = cache_argument(model)
    chunk = condition.prefill_chunk or width
    step_logits: Tensor | None = None
    for step in range(max(1, new_tokens)):
        context.step = step
        if step == 0 or not uses_cache:
            size = chunk if step == 0 else ids.shape[1]
            pieces = [(a, min(a + size, ids.shape[1])) for a in range(0, ids.shape[1], size)]
        else:
            pieces = [(ids.shape[1] - 1, ids.shape[1])]
        for start, end in pieces:
            arguments: dict[str, Any] = {
                "input_ids": ids[:, start:end],
                "attention_mask": mask[:, :end],
                "position_ids": (mask[:, :end].cumsum(1) - 1).clamp_min(0)[:, start:end],
                "use_cache": uses_cache,
            }
            if cache is not None:
                arguments[cache_name] = cache
            output = model(**accepted(model, arguments))
            cache = output[cache_name] if uses_cache else None
            out: Tensor = output["logits"]
        progress.step()
        # The newest real token of each row: with right padding, prompts end in front of the padding.
        at = last - start if step == 0 else torch.full_like(last, out.shape[1] - 1)
        step_logits = out[torch.arange(num_rows, device=out.device), at]
        own = None if draw is None else partial(draw, prompts=batch.rows, position=step)
        chosen = choose(step_logits, condition, own)
        fed = chosen.clone()
        for row, prompt in enumerate(batch.prompts):
            if prompt < 0:
                continue
            logits[prompt].append(step_logits[row].detach().cpu().clone())
            if new_tokens:
                tokens[prompt].append(int(chosen[row]))
                if force is not None:
                    fed[row] = force[prompt][step]
        ids = torch.cat([ids, fed[:, None]], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)


def _texts(tokens: list[list[int]], tokenizer: Any, model: nn.Module) -> list[str] | None:
    if tokenizer is None:
        return None
    eos = getattr(config_of(model), "eos_token_id", None)
    ends = set(eos if isinstance(eos, Sequence) else [eos])
    texts = []
    for ids in tokens:
        cut = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        texts.append(str(tokenizer.decode(ids[:cut])))
    return texts
