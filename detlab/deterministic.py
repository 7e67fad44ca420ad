"""Runs an unmodified transformers model so that a token's bits depend on its own context alone.

```python
with detlab.deterministic(model):
    model.generate(**inputs)          # the same bits in any batch, slot, padding, chunk, cache and number of threads
```
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin

from detlab.coverage import require_coverage
from detlab.engine import session as engine
from detlab.engine.sampling import owned_sampling, request_id, sample_token
from detlab.engine.session import Options, Session
from detlab.errors import CoverageError, DetlabError, UsageError

__all__ = ["apply", "deterministic", "restore"]

_vouched: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
_applied: weakref.WeakKeyDictionary[nn.Module, list[ExitStack]] = weakref.WeakKeyDictionary()


@contextmanager
def deterministic(model: nn.Module, tier: str = "invariant", *, strict: bool = True, seed: int = 0,
                  request_ids: Sequence[str] | None = None, options: Options | None = None) -> Iterator[Session]:  # fmt: skip
    """Puts a model under a tier for the length of a block; restores it on leaving, whatever happens.

    Covered are ``generate`` (greedy, sampling, beams), prefill in any chunks, dynamic and static caches, and direct calls of
    the model with a 2D attention mask (with padding on the left, give ``position_ids`` too, as ``generate`` does: the stock
    model would count the padding as positions, and so does this one). Gradients are not computed.

    Sampling draws from (seed, request, position), so a
    sampled text does not depend on the batch either. Inside another block of the same model and tier this one changes
    nothing but the sampling; another tier is refused. The block counts for the model, in all threads.

    Args:
        model: a transformers causal language model in eval mode, in float32, bfloat16 or float16, on one device.
        tier: "invariant": the machine's own kernels in canonical shapes.
        strict: refuses a model with an op that is not covered (see `coverage`); False runs it all the same.
        seed: of sampling, 0 to 2**64 - 1.
        request_ids: names of the requests, for sampling; see `detlab.engine.sampling.owned_sampling`.
        options: which of the tier's parts are put in, and how; None for all. With other options nothing is vouched for.

    Yields:
        The `Session`: tier and parts.

    Raises:
        UsageError: the model, or its state, is none that the tier covers. CoverageError: one of its ops is not covered.
        MachineError: this machine has no stable shape for one of its products.
    """
    with engine.applied(model, tier, options) as session, ExitStack() as stack:
        if strict and session.is_whole:
            _vouch(model, tier)
            session.tidy()
        if isinstance(model, GenerationMixin):
            stack.enter_context(owned_sampling(model, seed, request_ids))
        yield session


_options_of_runs: ContextVar[Options | None] = ContextVar("detlab_options_of_runs", default=None)


@contextmanager
def options_of_runs(options: Options) -> Iterator[None]:
    """Runs whose condition names a tier get it with these options, for the length of a block and in this thread."""
    token = _options_of_runs.set(options)
    try:
        yield
    finally:
        _options_of_runs.reset(token)


@contextmanager
def serving_under(model: nn.Module, tier: str, seed: int) -> Iterator[Callable[..., Tensor] | None]:
    """`deterministic` for the runner's own loop: yields what draws tokens from (seed, prompt, position)."""
    options = _options_of_runs.get()
    with deterministic(model, tier, seed=seed, strict=options is None, options=options):
        yield partial(_draw, seed) if options is None else None  # single parts leave the drawing to torch


def _draw(seed: int, scores: Tensor, prompts: list[list[int]], position: int) -> Tensor:
    return sample_token(scores, seed, [request_id(tokens) for tokens in prompts], [position] * len(prompts))


def _vouch(model: nn.Module, tier: str) -> None:
    """Requires coverage, once for a model as it stands: its modules, their forwards and their hooks.

    Raises:
        CoverageError: an op is not covered, or the model cannot be run with the tier's parts.
    """
    state = tuple(
        (id(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
        if not type(module).__module__.startswith("detlab.")  # the tier's own, made anew each time
    )
    if _vouched.setdefault(model, {}).get(tier) == state:
        return
    try:
        require_coverage(model, tier)
    except DetlabError:
        raise
    except Exception as error:  # whatever a model of another make does with parts that it does not expect
        raise CoverageError(
            f"{type(model).__name__} cannot be run with the parts of tier {tier!r} ({type(error).__name__}: {error}), "
            "so the tier does not cover it."
        ) from error
    _vouched[model][tier] = state


def apply(model: nn.Module, tier: str = "invariant", *, strict: bool = True, seed: int = 0,
          request_ids: Sequence[str] | None = None, options: Options | None = None) -> Session:  # fmt: skip
    """`deterministic` without a block: puts a model under a tier until `restore` takes it out.

    Args and errors are those of `deterministic`.
    """
    stack = ExitStack()
    session = stack.enter_context(
        deterministic(model, tier, strict=strict, seed=seed, request_ids=request_ids, options=options)
    )
    _applied.setdefault(model, []).append(stack)
    return session


def restore(model: nn.Module) -> None:
    """Takes a model out of the tier that the last `apply` put it under.

    Raises:
        UsageError: it is under none.
    """
    stacks = _applied.get(model)
    if not stacks:
        raise UsageError("this model is under no tier that apply() put it under; a with block restores it by itself.")
    stacks.pop().close()
