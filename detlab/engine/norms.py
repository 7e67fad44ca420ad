"""Norms, computed by the model's own code in numbers of rows that were probed to give each row its own bits."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from detlab.engine.canonical import aligned
from detlab.engine.classes import Probe, RowClasses, row_classes
from detlab.engine.probes import draw, norm_rows
from detlab.engine.watch import NoCopy
from detlab.errors import MachineError

__all__ = ["CanonicalNorm", "is_norm"]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm over the last dimension of one tensor, by its class and its name."""
    name = type(module).__name__
    if isinstance(module, nn.LayerNorm):
        return len(module.normalized_shape) == 1
    is_named = name.endswith(("RMSNorm", "LayerNorm", "L2Norm", "Norm1D")) or name in ("RMSNorm",)
    return is_named and next(module.children(), None) is None and "Gated" not in name


class CanonicalNorm(NoCopy):
    """The forward of a norm: its own, called with [rows, size] in numbers of rows of one class."""

    def __init__(self, module: Any, what: str) -> None:
        """Keeps the module's forward, and a copy of the module for probes."""
        self.original, self.what = module.forward, what
        self.kind = f"norm {type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"
        self.eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        self.twin = copy.copy(module)
        self.twin._parameters = dict(module._parameters)
        self.known: dict[tuple[Any, ...], RowClasses] = {}

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward, which may be called with more than a tensor: then it is called as it is."""
        x = hidden_states
        if args or kwargs or x.ndim < 2 or not x.numel():
            return self.original(x, *args, **kwargs)
        size = x.shape[-1]
        key = (x.dtype, size, torch.get_num_threads())
        classes = self.known.get(key) or self._look_up(key, x)
        x = aligned(x)
        rows = x.numel() // size
        if classes.is_threaded and classes.plan(rows) == (rows,):
            return self.original(x)  # as it is: kernels see through the dimensions of a contiguous tensor, and so does a trace
        return classes.run(self.original, x.view(rows, size)).view(*x.shape[:-1], -1)

    def _look_up(self, key: tuple[Any, ...], x: Tensor) -> RowClasses:
        dtype, size = x.dtype, x.shape[-1]
        weights = [str(p.dtype).removeprefix("torch.") for p in self.twin._parameters.values() if p is not None]
        what = f"{self.kind} eps={self.eps} {'+'.join(weights) or 'no weight'}"
        found = row_classes(
            what, dtype, (size,), partial(_probe, self.twin, size, dtype, x.device), work=size,
            row_bytes=size * dtype.itemsize, device=x.device, has_grid=False,
        )  # fmt: skip
        if found is None:
            raise MachineError(
                f"{self.what}: no number of rows gives a {type(self.twin).__name__} over {size} numbers stable bits on this "
                "machine, so this norm cannot be made invariant here."
            )
        self.known[key] = found
        return found


def _probe(module: Any, size: int, dtype: torch.dtype, device: torch.device, seed: int) -> Probe:
    """The module with weights between 1 and 2, so that none hides what it multiplies, and rows that show a sum's order.

    In 16 bits rounding hides nearly all that another order changes. Norms written in Python sum in float32 whatever they are
    given, so they are called with the rows in float32, too; torch's layer norm has a kernel for each format.
    """
    twin = copy.copy(module)
    twin._parameters = {name: _drawn(p, seed + 20) for name, p in module._parameters.items()}
    rows = norm_rows(Probe.ROWS, size, torch.float32, seed=seed).to(device)
    if dtype == torch.float32 or isinstance(module, nn.LayerNorm):
        return Probe(twin.forward, rows.to(dtype))

    def both(x: Tensor) -> Tensor:
        return torch.cat([twin.forward(x.to(dtype)).float(), twin.forward(x).float()], -1)

    return Probe(both, rows)


def _drawn(parameter: nn.Parameter | None, seed: int) -> nn.Parameter | None:
    if parameter is None:
        return None
    made = draw(*parameter.shape, dtype=torch.float32, seed=seed) / 2 + 1.5
    return nn.Parameter(made.to(device=parameter.device, dtype=parameter.dtype), requires_grad=False)
