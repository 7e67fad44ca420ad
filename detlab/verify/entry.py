"""`verify`: checks what is asked, runs the matrix, and writes down the circumstances."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from detlab.coverage import coverage
from detlab.engine import session as engine
from detlab.engine.kernels import KernelCheck, check_again, watching
from detlab.engine.ledger import ledger, name_of
from detlab.environment import environment
from detlab.errors import CaptureError, UsageError
from detlab.models import tokenizer_for
from detlab.process import digests_of, send_model
from detlab.prompts import as_prompts, encode
from detlab.serving import check_inputs, config_of, device_of
from detlab.verify.apart import settings_of
from detlab.verify.axes import AXES, axes_of
from detlab.verify.certificate import Certificate
from detlab.verify.matrix import Matrix, Progress

__all__ = ["IN_MEMORY", "verify", "weights_digests"]

IN_MEMORY = "in memory"  # a model that names no place it is from


def verify(model: nn.Module, prompts: Any, tier: str = "invariant", axes: Sequence[str] | None = None, *, trials: int = 6,
           seed: int = 0, new_tokens: int = 4, threads: Sequence[int] | None = None, tokenizer: Any = None,
           progress: Progress | None = None) -> Certificate:  # fmt: skip
    """Serves prompts in many ways under a tier and compares the logits bit by bit; then again with the tier off, as a control.

    Every prompt is continued greedily for ``new_tokens`` tokens. The text of both is served alone in one call, which is the
    reference, and on each axis in other ways; all the logits of a token position must have the same bits, wherever it is
    computed. Of texts longer than 64 tokens about 60 positions are compared, the ends and tile edges among them.

    Then every kernel that was probed is probed again, in each shape that it ran in meanwhile, with data of the same kind, drawn
    anew: rounding hides most changes of an order of additions from a text, and few from these data (`engine.probes` says how
    few). A shape that does not hold refutes the certificate, as a text would.

    Args:
        model: a transformers causal language model in eval mode; it is left as it was, also when interrupted.
        prompts: what `load_prompts` returns, or strings, or lists of token ids.
        tier: the tier to try.
        axes: some of "batch", "position", "neighbours", "padding", "chunk", "decode", "cache", "threads", "sampling", "run",
            "isa", "split", "alignment"; None for all that the tier promises: the last three are the exact tier's.
        trials: comparisons for each axis, at least; 0 mismatches of n bound their rate at 3/n.
        seed: of the ways that are drawn, of sampling, and of the data that kernels are probed with.
        new_tokens: tokens that are decoded after each prompt.
        threads: numbers of threads for fresh processes; None tries two that this process does not have.
        tokenizer: turns text into tokens; None asks for the one that `load_model` loaded with the model.
        progress: called with (comparisons done, comparisons in all, axis).

    Returns:
        A `Certificate`.

    Raises:
        UsageError: an axis, a prompt or a number that cannot be; or the tier does not cover the model at all.
        MachineError: this machine has no stable shape for one of the model's products.
    """
    chosen = _check(model, tier, axes, trials, new_tokens, threads)
    asked = as_prompts(prompts)
    if not asked:
        raise UsageError("verify needs at least one prompt; got none.")
    if tokenizer is None and any(p.tokens is None for p in asked):
        tokenizer = tokenizer_for(model)
    inputs = encode(asked, tokenizer)
    check_inputs(model, asked, inputs, new_tokens)
    work = Matrix(model, asked, inputs, trials, seed, new_tokens, chosen, progress)
    counts = list(threads) if threads is not None else [n for n in (1, 3, 2) if n != torch.get_num_threads()][:2]
    apart = {name: settings_of(name, counts) for name in chosen if AXES[name].is_apart}
    # Before the tier is applied: a model with replaced forwards is not one that another process can rebuild.
    folder, why = _sent(model) if apart else (None, "")
    shares = {name: -(-trials // len(settings)) for name, settings in apart.items()} if folder is not None else {}
    kernels: list[KernelCheck] = []
    with _class_map(model) as rules, watching() as running:
        with engine.applied(model, tier):
            covered = coverage(model, tier)
            work.phase(True, shares)
            md5 = work.reference_md5()
        kernels += check_again(running(), work.probe_seed)
    work.phase(False, shares)
    for name, settings in apart.items():
        if folder is not None:
            kernels += work.apart(name, folder, tier, settings)
        else:
            work.results[name].note = why
    machine = environment()
    return Certificate(
        tier=tier, spec=_spec(tier), model=_about(model), axes=work.results, md5=md5, coverage=covered, kernels=kernels,
        class_map=rules, environment=machine, limits=_limits(model, tier, work.results),
        prompts={prompt.id: list(tokens) for prompt, tokens in zip(asked, inputs, strict=True)},
        settings={
            "trials": trials, "seed": seed, "new_tokens": new_tokens, "threads": torch.get_num_threads(),
            "prompt_lengths": [len(tokens) for tokens in inputs],
        },
        version=machine.versions["detlab"], date=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def check_axes(axes: Sequence[str] | None, tier: str) -> list[str]:
    """The axes asked for, by name; None is all that the tier promises.

    Raises:
        UsageError: none, one that is not known, or one twice.
    """
    names = ", ".join(AXES)
    if isinstance(axes, str):
        raise UsageError(f"axes={axes!r} is one text; give a list, such as axes=[{axes.split(',')[0].strip()!r}].")
    chosen = axes_of(tier) if axes is None else list(axes)
    if not chosen:
        raise UsageError(f"verify needs at least one axis; got axes=[]. Choose from {names}.")
    for axis in chosen:
        if axis not in AXES:
            raise UsageError(f"verify knows no axis {axis!r}; choose from {names}.")
        needed = AXES[axis].needs_tier
        if needed not in (None, tier):
            raise UsageError(f"axis {axis!r} needs tier={needed!r}: under {tier!r} a sum in parts is another sum.")
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"an axis is named twice in axes={chosen}; name each once.")
    return chosen


def _check(model: Any, tier: str, axes: Any, trials: Any, new_tokens: Any, threads: Any) -> list[str]:
    chosen = check_axes(axes, tier)
    for name, value in (("trials", trials), ("new_tokens", new_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}={value!r} is not possible; verify needs a whole number of at least 1.")
    if threads is not None and (not threads or any(not isinstance(n, int) or not 1 <= n <= 1024 for n in threads)):
        raise UsageError(f"threads={threads!r} is not possible; give numbers of threads from 1 to 1024, such as [1, 2, 3].")
    if not isinstance(model, nn.Module):
        raise UsageError(f"verify needs a transformers model; got {type(model).__name__}.")
    if model.training:
        raise UsageError("verify needs a model in eval mode: dropout would make every run another one. Call model.eval().")
    if engine.session_of(model) is not None:
        raise UsageError("the model is under a tier, and the control needs it without. Leave detlab.deterministic first.")
    if not isinstance(model, GenerationMixin):
        raise UsageError(f"verify needs a model that generates; {type(model).__name__} does not.")
    return chosen


def _sent(model: nn.Module) -> tuple[Path | None, str]:
    """The model's folder for fresh processes; where it cannot be sent, why."""
    try:
        return send_model(model), ""
    except CaptureError as error:
        return None, str(error)


# ---------------------------------------------------------------------------------------------------- the circumstances
@contextmanager
def _class_map(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The measured rules that the model's parts look up within the block, by name, and the ledger they are from."""
    rules: dict[str, Any] = {}
    known = ledger()
    others, known.asked = known.asked, set()
    try:
        yield rules
        config, first = config_of(model), next(model.parameters())
        heads = getattr(config, "num_attention_heads", None)
        size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
        if size:
            known.asked.add(name_of("attention", first.dtype, size, device=first.device))
        rules |= {name: known.measured.get(name) for name in sorted(known.asked)}
        rules["ledger"] = known.key
    finally:
        known.asked |= others


def _spec(tier: str) -> str:
    return str(getattr(importlib.import_module(engine.TIERS[tier]), "SPEC", ""))


def _about(model: Any) -> dict[str, Any]:
    first = next(model.parameters())
    return {
        "class": type(model).__name__,
        "name": str(getattr(model.config, "_name_or_path", "") or IN_MEMORY),
        "dtype": str(first.dtype).removeprefix("torch."),
        "device": first.device.type,
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "parameters": sum(p.numel() for p in model.parameters()),
    } | weights_digests(model)


def weights_digests(model: nn.Module) -> dict[str, str]:
    """Names a model's bits: SHA-256 over the digests of its parameters, and over those of its buffers."""
    digests, buffers = digests_of(model), {name for name, _ in model.named_buffers()}
    made = {}
    for what, is_buffer in (("parameters_digest", False), ("buffers_digest", True)):
        lines = sorted(f"{name} {digest}" for name, digest in digests.items() if (name in buffers) == is_buffer)
        made[what] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return made


def _limits(model: nn.Module, tier: str, results: dict[str, Any]) -> list[str]:
    """What this certificate does not speak of."""
    device = device_of(model).type
    limits = ["no GPU ran any of this" if device == "cpu" else f"a {device} device ran this, a CPU did not"]
    if _spec(tier):
        limits.append("one machine ran this: whether another gives the same bits, `detlab verify --certificate` tells there")
    else:
        limits.append("one machine ran this: another CPU, instruction set or version of torch may give other bits")
        limits.append("kernels whose order of additions depends on the data: shapes were probed, with data of one kind")
    missing = [name for name in axes_of(tier) if name not in results]
    if missing:
        limits.append(f"axes that were not asked for: {', '.join(missing)}")
    return limits
