"""How a measured call is made: on one thread, at an aligned address, unseen by a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["aligned", "not_observed", "one_thread", "unobserved"]

P = ParamSpec("P")
R = TypeVar("R")
_ALIGNMENT = 64  # bytes: where torch puts what it allocates on a CPU


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs the block on one intra-op thread: what a kernel cuts among threads, it does not cut here."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def aligned(x: Tensor) -> Tensor:
    """A tensor as kernels were measured: contiguous, and at an address that is a multiple of 64 bytes."""
    if not x.is_contiguous():
        return x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


@contextmanager
def not_observed() -> Iterator[None]:
    """Measuring is no part of what a model computes: a trace or a function mode around it does not see it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def unobserved(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose ops a trace does not see: what it makes is kept, so that only its first call would show any."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with not_observed():
            return function(*args, **kwargs)

    return call
