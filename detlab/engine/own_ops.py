"""Products and elementwise functions that a module calls by name, as ``F.linear`` and ``torch.sigmoid``, without a layer.

They are computed as the layers are: while the module's own forward runs, its calls of such functions go to canonical ones.
Which modules call any is read from their source. What is missed so is not covered, and coverage finds it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from detlab.engine.canonical import unobserved
from detlab.engine.elementwise import canonical_elementwise
from detlab.engine.linear import CanonicalLinear
from detlab.engine.session import Session
from detlab.engine.watch import NoCopy

__all__ = ["ELEMENTWISE", "OwnOps", "calls_by_name"]

#: Elementwise functions of one tensor that kernels approximate, one way in a vector and another behind the last one.
ELEMENTWISE = frozenset(
    "sigmoid silu softplus tanh gelu exp exp2 expm1 log log2 log10 log1p erf erfc sin cos tan logsigmoid log_sigmoid elu selu "
    "celu mish".split()
)
_OTHERS = (r"functional\.linear\(", r"\bF\.linear\(", r"view_as_complex\(", r"\.index_add\(")
_CALLS = re.compile("|".join([rf"(?:\b|_)(?:{'|'.join(sorted(ELEMENTWISE))})_?\(", *_OTHERS]))
_BY_A_CHILD = {"JetMoeAttention"}  # call a method of a child, which is not its forward
_NOT_RUN = {"__init__", "_init_weights", "reset_parameters", "extra_repr"}


@lru_cache(maxsize=4096)
def calls_by_name(cls: type[nn.Module]) -> bool:
    """Whether a module's own code, or a plain function beside it that the code calls, has calls that `OwnOps` covers."""
    if cls.__module__.startswith("torch.") or issubclass(cls, PreTrainedModel):
        return False
    if cls.__name__ in _BY_A_CHILD:
        return True
    for base in cls.__mro__:
        if base is nn.Module or base.__module__.startswith(("torch.", "builtins", "transformers.modeling_layers")):
            continue
        for name, function in vars(base).items():
            code = inspect.unwrap(function) if inspect.isfunction(function) else None
            if code is None or name in _NOT_RUN:
                continue
            if _CALLS.search(_source(code)) or any(_CALLS.search(_source(other)) for other in _called(code)):
                return True
    return False


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # made at run time
        return ""


def _called(function: Any) -> list[Any]:
    """Functions of the same module that a function's code names, but for stock attention, which is never called."""
    home = sys.modules.get(function.__module__)
    named = [getattr(home, name, None) for name in function.__code__.co_names if not name.endswith("attention_forward")]
    return [inspect.unwrap(f) for f in named if inspect.isfunction(f) and f.__module__ == function.__module__]


class OwnOps(NoCopy):
    """The forward of a module: its own, with its calls of known functions computed canonically."""

    is_open = True  # what else the forward computes, is not the tier's

    def __init__(self, module: nn.Module, name: str, session: Session, function: Callable[..., Any] | None = None) -> None:
        """Wraps a module's forward, or another function of it."""
        self.owners: list[nn.Module] = [module]
        self.module, self.name, self.options = module, name, session.options
        self.original = module.forward if function is None else function
        self.layers: dict[tuple[int, torch.dtype, int | None], CanonicalLinear] = {}
        self.refresh()
        self.functions: dict[Any, Callable[[Tensor], Tensor]] = {}
        self.run: Callable[..., Tensor] = _run
        session.wrappers.append(self._register)

    def _register(self, wrap: Callable[..., Callable[..., Any]]) -> Callable[[], None]:
        """Wraps what is computed canonically; returns what unwraps it."""
        self.run = wrap(_run, "operation")

        def undo() -> None:
            self.run = _run

        return undo

    def refresh(self) -> None:
        """Packs the weights anew, when they are used next."""
        self.weights = {id(p): p for p in self.module.parameters(recurse=False) if p.ndim == 2}
        self.layers.clear()

    def tune(self) -> None:
        """Looks up the rules for the number of threads now set."""
        for layer in self.layers.values():
            layer.tune()

    def layer(self, key: tuple[int, torch.dtype, int | None], weight: Tensor, bias: Tensor | None) -> CanonicalLinear:
        """The canonical product with a weight of the module, in the dtype that it is used in."""
        found = self.layers.get(key)
        if found is None:
            found = self.layers[key] = _made(weight, bias, self.name, self.options.is_padded)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward."""
        with _Named(self):
            return self.original(*args, **kwargs)


@unobserved
def _made(weight: Tensor, bias: Tensor | None, name: str, is_padded: bool) -> CanonicalLinear:
    """Packs a weight when it is first used: a trace sees what every call computes."""
    return CanonicalLinear(weight.detach(), bias, name, is_padded)


def _run(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


def _complex_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of complex numbers, each of its steps rounded once: kernels contract some of them."""
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def _added_in_order(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``x.index_add(0, index, source)``, where each row is added to as often as any: one addition after the other."""
    order = index.argsort(stable=True)
    counts = torch.bincount(index, minlength=len(x))
    if dim or not len(index) or bool((counts != counts[0]).any()):
        return x.index_add(dim, index, source)
    for part in source[order].view(len(x), -1, *source.shape[1:]).unbind(1):
        x = x + part
    return x


class _Named(TorchFunctionMode):
    """Sends calls of known functions to canonical ones."""

    def __init__(self, ops: OwnOps) -> None:
        super().__init__()
        self.ops = ops
        self.converted: dict[int, tuple[Tensor, int]] = {}  # a weight in another dtype -> its parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ELEMENTWISE or (name.endswith("_") and name[:-1] in ELEMENTWISE):
            return self._elementwise(func, name, args, kwargs)
        if name in ("mul", "__mul__") and any(isinstance(x, Tensor) and x.is_complex() for x in args):
            return self.ops.run(_complex_product, *args)
        if name == "index_add" and len(args) == 4 and not kwargs:
            return self.ops.run(_added_in_order, *args)
        if func is F.linear:
            return self._linear(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in ("type", "float", "to") and args and id(args[0]) in self.ops.weights and isinstance(result, Tensor):
            self.converted[id(result)] = (result, id(args[0]))
        return result

    def _elementwise(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        others = [*args[1:], *(value for key, value in kwargs.items() if key != "input")]
        if not isinstance(x, Tensor) or not x.is_floating_point() or any(isinstance(other, Tensor) for other in others):
            return func(*args, **kwargs)
        is_inplace = name.endswith("_") or kwargs.pop("inplace", False)
        plain = getattr(torch.Tensor, name[:-1]) if name.endswith("_") else func
        options = {key: value for key, value in kwargs.items() if key != "input"}
        key = (plain, args[1:], tuple(sorted(options.items())))
        canonical = self.ops.functions.get(key)
        if canonical is None:
            canonical = canonical_elementwise(lambda t: plain(t, *args[1:], **options))
            self.ops.functions[key] = canonical
        result = self.ops.run(canonical, x)
        return x.copy_(result) if is_inplace else result

    def _linear(self, x: Any = None, weight: Any = None, bias: Any = None, **kwargs: Any) -> Any:
        x = kwargs.pop("input", x)
        kept, origin = self.converted.get(id(weight), (weight, id(weight)))
        if kept is not weight or origin not in self.ops.weights or weight.shape[1] != x.shape[-1]:
            return F.linear(x, weight, bias)
        layer = self.ops.layer((origin, weight.dtype, None if bias is None else id(bias)), weight, bias)
        return self.ops.run(layer, x)

