"""Puts a tier's parts into an unmodified model, and takes them out again.

Nothing of a model is replaced but the ``forward`` of single modules, as attributes of the instances, the name of its attention
implementation, the layers of the caches that it is given, and the memory in which its weights lie while packed copies of
them compute. Taking the parts out leaves no trace.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from detlab.engine.cache import adopt
from detlab.engine.padding import Padding
from detlab.engine.pending import inside
from detlab.engine.shelf import Shelf
from detlab.engine.step import Step
from detlab.engine.watch import NoCopy, Watch, token_count
from detlab.errors import UsageError

__all__ = ["TIERS", "Options", "Session", "applied", "apply", "restore", "session_of"]

#: The tiers, and the module whose ``install(session, model)`` puts each in.
TIERS = {"invariant": "detlab.engine.invariant", "exact": "detlab.engine.exact.install"}
_MARK = "_detlab_session"
_CACHES = ("cache", "past_key_values")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """How a tier is put in.

    Attributes:
        only: picks parts by (module name, kind); None takes all. Without some, the bits may depend on the batch again:
            for finding the parts that a model needs, and what each costs.
        is_padded: False leaves the calls' shapes as they are, with the tier's kernels: the price of invariance alone.
        block: in float32, linear layers add in two or more equal chains of at most so many terms, whose sums are added one
            after the other: SmolLM2's error stays below the stock library's, whose chains have 192 terms here. None adds one
            chain: faster by up to a fifth, with about 1.5 times the error. Sums of up to half as many terms, and those of
            experts, are one chain always.
        release: weights of which a packed copy computes are moved to a temporary file, mapped into memory, for the time.
    """

    only: Callable[[str, str], bool] | None = None
    is_padded: bool = True
    block: int | None = 768
    release: bool = True


class Refreshable(Protocol):
    """A part that was made from a module's parameters or buffers."""

    def refresh(self) -> None:
        """Makes it anew."""


class Part(Refreshable, Protocol):
    """A part made from the weights of some modules, with rules that depend on the number of threads."""

    owners: list[nn.Module]

    def tune(self) -> None:
        """Looks up the rules for the number of threads now set."""


class Session:
    """A model under a tier.

    Attributes:
        tier: its name.
        options: how it was put in.
        parts: what was replaced: module name -> "linear", "activation", "rotary", "experts", "router", "own", "model"; the
            attention is under "attention" where it was.
    """

    def __init__(self, model: PreTrainedModel, tier: str, options: Options) -> None:
        self.model = weakref.ref(model)
        self.tier, self.options = tier, options
        self.parts: dict[str, str] = {}
        self.tunables: list[Part] = []
        self.parts_of: dict[nn.Module, Refreshable] = {}
        self.watch: Watch | None = None
        self.calls = threading.local()
        self._made_once: dict[str, nn.Module] = {}
        self.forgetters: list[Callable[[], None]] = []
        self.wrappers: list[Callable[[Callable[..., Callable[..., Any]]], Callable[[], None]]] = []
        self.shelf = Shelf() if options.release else None
        self.threads = torch.get_num_threads()
        self.depth = 0
        self._undo: list[Callable[[], Any]] = []

    def __repr__(self) -> str:
        counts = Counter(self.parts.values())
        return f"Session({self.tier}: {', '.join(f'{count} {kind}' for kind, count in counts.items())})"

    @property
    def is_whole(self) -> bool:
        """Whether all parts are in, as they vouch for the bits."""
        return self.options.only is None and self.options.is_padded

    def wants(self, name: str, kind: str) -> bool:
        """Whether a part was asked for."""
        return self.options.only is None or self.options.only(name, kind)

    def replace(self, module: nn.Module, name: str, kind: str, forward: Callable[..., Any]) -> None:
        """Gives one module another forward."""
        if "forward" in vars(module):
            raise UsageError(
                f"the forward of {name or 'the model'} was replaced already (compiled, or wrapped by another tool?); "
                "undo that before detlab.deterministic."
            )
        module.forward = forward
        self.on_undo(lambda: vars(module).pop("forward", None) and None)
        self.parts[name] = kind
        if kind in ("experts", "router", "rotary"):  # other parts read their parameters, or see that they changed
            self._made_once[name] = module

    def take(self, part: Part) -> None:
        """Keeps a part, to tune it when the number of threads changes and to refresh it when its modules do."""
        self.tunables.append(part)
        self.parts_of |= {module: part for module in part.owners}

    def keep_up(self, is_thorough: bool) -> None:
        """Sees to it that the parts are those of the model as it is now.

        Raises:
            UsageError: the model was changed in a way that parts cannot follow.
        """
        model = self.model()
        if self.watch is None or model is None:
            return
        changed = self.watch.changed(model, is_thorough)
        lost = [name for name, module in self._made_once.items() if module in changed and module not in self.parts_of]
        if lost:
            raise UsageError(f"{lost[0]} was changed inside detlab.deterministic. Leave the block, then enter it again.")
        for part in {id(part): part for module, part in self.parts_of.items() if module in changed}.values():
            part.refresh()

    def tidy(self) -> None:
        """Returns to the system what installing and testing the parts freed, where memory is to be kept low."""
        if self.shelf is not None:
            self.shelf.tidy()

    def on_undo(self, action: Callable[[], Any]) -> None:
        """Remembers what takes a part out again."""
        self._undo.append(action)

    def tune(self) -> None:
        """Sees to it that the rules are those of the number of threads now set: which shapes are stable depends on it."""
        threads = torch.get_num_threads()
        if threads != self.threads:
            for part in self.tunables:
                part.tune()
            self.threads = threads

    def forget(self) -> None:
        """Drops what calls left behind (rotary tables), so that the next call computes what the first one did."""
        for forget in self.forgetters:
            forget()

    @contextmanager
    def wrapped(self, wrap: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> Iterator[None]:
        """Puts a wrapper, made by ``wrap(forward, kind)``, around each of the tier's parts for the length of a block."""
        model = self.model()
        assert model is not None
        modules = [(model.get_submodule(name), kind) for name, kind in self.parts.items() if kind not in ("model", "attention")]
        modules = [(module, kind) for module, kind in modules if not getattr(module.forward, "is_open", False)]
        before = [module.forward for module, _ in modules]
        undo: list[Callable[[], None]] = []
        try:
            for module, kind in modules:
                module.forward = wrap(module.forward, kind)
            undo += [wrapper(functools.partial(_named, wrap)) for wrapper in self.wrappers]
            yield
        finally:
            for action in undo:
                action()
            for (module, _), forward in zip(modules, before, strict=True):
                module.forward = forward

    def undo(self) -> None:
        """Takes everything out again, the last first."""
        while self._undo:
            self._undo.pop()()
        if self.shelf is not None:
            self.shelf.give_back()


def _named(wrap: Callable[[Callable[..., Any], str], Callable[..., Any]], call: Callable[..., Any],
           kind: str = "attention") -> Callable[..., Any]:  # fmt: skip
    return wrap(call, kind)


_sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def session_of(model: object) -> Session | None:
    """The session a model is in; None outside of any."""
    return _sessions.get(model) if isinstance(model, nn.Module) else None  # what is none cannot be a key


def apply(model: nn.Module, tier: str = "invariant", options: Options | None = None) -> Session:
    """Puts a tier into a model. Applied again, it counts: as many `restore` calls take it out.

    Raises:
        UsageError: the model, or its state, is not one that the tier covers; the model is then as before.
        MachineError: this machine has no stable shape for one of its products.
    """
    if tier not in TIERS:
        raise UsageError(f"tier={tier!r} is not known; choose from {', '.join(TIERS)}.")
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise UsageError(f"options must be detlab.engine.session.Options; got {options!r}.")
    with _lock:
        session = session_of(model)
        if session is not None:
            if (session.tier, session.options) != (tier, options):
                raise UsageError(
                    f"the model is under tier {session.tier!r} already; leave that context before entering {tier!r}"
                    f"{' with other options' if session.tier == tier else ''}."
                )
            session.depth += 1
            return session
        _check(model)
        assert isinstance(model, PreTrainedModel)
        session = Session(model, tier, options)
        try:
            with torch.no_grad():
                for name, module in model.named_modules():
                    if isinstance(module, PreTrainedModel):
                        session.replace(module, name, "model", _guarded(session, module))
                importlib.import_module(TIERS[tier]).install(session, model)
                session.watch = Watch(model)
            vars(model)[_MARK] = NoCopy()
            session.on_undo(functools.partial(vars(model).pop, _MARK, None))
        except BaseException:
            session.undo()
            raise
        session.depth = 1
        _sessions[model] = session
        return session


def restore(model: nn.Module) -> None:
    """Takes the tier out of a model, once it was called as often as `apply`."""
    with _lock:
        session = _sessions.get(model)
        if session is None:
            raise UsageError("this model is under no tier.")
        session.depth -= 1
        if not session.depth:
            del _sessions[model]
            session.undo()


@contextmanager
def applied(model: nn.Module, tier: str = "invariant", options: Options | None = None) -> Iterator[Session]:
    """`apply` for the length of a block."""
    session = apply(model, tier, options)
    try:
        yield session
    finally:
        if session_of(model) is session:  # gone with its model, or with the interpreter
            restore(model)


def _check(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"a tier needs a transformers model; got {type(model).__name__}. Of a wrapped model (compiled, PEFT) give the one "
            "inside (model._orig_mod, model.get_base_model())."
        )
    if model.training:
        raise UsageError("the model is in training mode, where dropout makes every call another one. Call model.eval().")
    parameters = list(model.parameters())
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    if not dtypes <= set(_DTYPES):
        raise UsageError(
            f"the invariant tier covers float32, bfloat16 and float16; the model has {', '.join(sorted(map(str, dtypes)))}."
        )
    devices = {p.device for p in parameters}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UsageError(f"the tier covers a model on one CPU or CUDA device; this one is on {', '.join(map(str, devices))}.")
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None or not model.can_generate():
        raise UsageError(f"{type(model).__name__} makes no tokens; the tier covers causal language models, with their heads.")
    if model.config.is_encoder_decoder:
        raise UsageError(f"{type(model).__name__} is an encoder-decoder; the tier covers decoder-only language models.")


def _guarded(session: Session, module: Any) -> Callable[..., Any]:
    """The forward of a whole model: refuses a call that the tier does not cover, sees to its cache, computes no gradients."""
    original = module.forward
    names = [p.name for p in inspect.signature(original).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        is_outermost = not getattr(session.calls, "depth", 0)
        if is_outermost:
            _check_call(module)
            with _lock:
                session.tune()
                session.keep_up(is_thorough=token_count(args, kwargs) > 1)
        session.calls.depth = getattr(session.calls, "depth", 0) + 1
        try:
            with torch.no_grad(), inside():
                kwargs |= dict(zip(names, args, strict=False))
                args = args[len(names) :]
                if is_outermost:
                    session.calls.padding = Padding(_mask_of(kwargs))
                if "attention" in session.parts:
                    kwargs = _with_cache(module, _with_plain_mask(kwargs))
                return original(*args, **kwargs)
        finally:
            session.calls.depth -= 1

    return forward


def _check_call(module: Any) -> None:
    if module.training:
        raise UsageError("the model was put in training mode inside detlab.deterministic. Call model.eval().")
    if torch.is_autocast_enabled(next(module.parameters()).device.type):
        raise UsageError("autocast is on: inside detlab.deterministic the model computes in its own dtype. Leave autocast.")


def _with_plain_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments with a 2D mask: with a static cache ``generate`` lays the call out before the model has seen it."""
    mask = kwargs.get("attention_mask")
    laid_out = next(iter(mask.values()), None) if isinstance(mask, dict) else mask
    return kwargs | {"attention_mask": laid_out.given} if isinstance(laid_out, Step) else kwargs


def _mask_of(kwargs: dict[str, Any]) -> Any:
    """The call's 2D mask, which layers with a recurrence need too; models keep it from them where a call has one token."""
    mask = kwargs.get("attention_mask")
    laid_out: list[Any] = list(mask.values()) if isinstance(mask, dict) else [mask]
    steps = [value.given for value in laid_out if isinstance(value, Step)]
    return steps[0] if steps else next((value for value in laid_out if value is not None), None)


def _with_cache(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments with a canonical cache: the caller's, or a new one where the model would make one."""
    for name in _CACHES:
        if kwargs.get(name) is not None:
            adopt(kwargs[name])
            return kwargs
    use_cache = kwargs.get("use_cache")
    if not set(_CACHES) & inspect.signature(type(module).forward).parameters.keys():
        return kwargs
    if not (getattr(module.config, "use_cache", False) if use_cache is None else use_cache):
        return kwargs
    cache = DynamicCache(config=module.config)
    adopt(cache)
    return kwargs | {"cache": cache}
