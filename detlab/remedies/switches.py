"""Remedies that are put in around the runs, each undone on leaving, whatever happens."""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from detlab import bits
from detlab.errors import MachineError
from detlab.prompts import Prompt
from detlab.remedies.remedy import Setup
from detlab.runner import execute

__all__ = [
    "SEED", "aligned", "cudnn_benchmark_off", "cudnn_deterministic", "full_float32", "full_reductions", "half_storage",
    "locked_memory", "seeds", "warm_up",
]  # fmt: skip

SEED = 0


@contextmanager
def seeds(setup: Setup) -> Iterator[nn.Module]:
    """Seeds the generators of Python, NumPy and torch; gives the caller's states back."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            random.seed(SEED)
            np.random.seed(SEED)
            torch.manual_seed(SEED)
            yield setup.model
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _switched(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


# (backend, op) of torch's table of float32 precisions. The public setter writes several of them, and setting it back
# does not bring an entry that was "none" back: each is remembered.
_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul"), ("mkldnn", "all"))


@contextmanager
def full_float32(setup: Setup) -> Iterator[nn.Module]:
    """Float32 products are computed in float32: neither TF32 (CUDA) nor bfloat16 (oneDNN) may stand in."""
    get: Any = torch._C._get_fp32_precision_getter
    put: Any = torch._C._set_fp32_precision_setter
    before, precision = {where: get(*where) for where in _PRECISIONS}, torch.get_float32_matmul_precision()
    cudnn = torch._C._get_cudnn_allow_tf32()
    try:
        torch.set_float32_matmul_precision("highest")
        if cudnn:
            torch._C._set_cudnn_allow_tf32(False)
        yield setup.model
    finally:
        torch.set_float32_matmul_precision(precision)
        if cudnn:
            torch._C._set_cudnn_allow_tf32(True)
        for where, value in before.items():
            if get(*where) != value:
                put(*where, value)


@contextmanager
def full_reductions(setup: Setup) -> Iterator[nn.Module]:
    """Sums of 16-bit products may not be kept in 16 bits, on the CPU or on CUDA."""
    names = ("_get_cpu_allow_fp16_reduced_precision_reduction", "_set_cpu_allow_fp16_reduced_precision_reduction")
    get, put = (getattr(torch._C, name) for name in names)
    matmul: Any = torch.backends.cuda.matmul
    # Pairs: whether sums may be reduced, and whether a product may be split along k; the public getter gives the first alone.
    before: dict[str, Any] = {
        "allow_fp16_reduced_precision_reduction": torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        "allow_bf16_reduced_precision_reduction": torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    }
    with _switched(get, put, False):
        try:
            for name in before:
                setattr(matmul, name, False)
            yield setup.model
        finally:
            for name, value in before.items():
                setattr(matmul, name, value)


@contextmanager
def cudnn_deterministic(setup: Setup) -> Iterator[nn.Module]:
    """Lets cuDNN choose among its deterministic algorithms only."""
    with _switched(torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic, True):
        yield setup.model


@contextmanager
def cudnn_benchmark_off(setup: Setup) -> Iterator[nn.Module]:
    """Keeps cuDNN from timing its algorithms to choose one."""
    with _switched(torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark, False):
        yield setup.model


@contextmanager
def warm_up(setup: Setup) -> Iterator[nn.Module]:
    """Runs each condition twice before it counts."""
    prompts = [Prompt(id=str(i), tokens=tuple(tokens)) for i, tokens in enumerate(setup.inputs)]
    for condition in 2 * setup.conditions:
        execute(
            setup.model, prompts, setup.inputs, condition, setup.new_tokens, None,
            save="digest", with_trace=False, force=None, progress=None, keep=None, here=True,
        )  # fmt: skip
    yield setup.model


@contextmanager
def locked_memory(setup: Setup) -> Iterator[nn.Module]:
    """Locks the weights into memory (``mlock``), so that no page of them is swapped out.

    Raises:
        MachineError: the system refuses; all pages are then unlocked again.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        lock, unlock = libc.mlock, libc.munlock
    except (OSError, AttributeError, TypeError):
        raise MachineError("this system's C library has no mlock, so no memory can be locked.") from None
    spans = {p.data_ptr(): p.numel() * p.element_size() for p in setup.model.parameters() if p.numel()}
    locked: list[tuple[int, int]] = []
    try:
        for address, size in spans.items():
            if lock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
                total = sum(spans.values()) / 2**20
                raise MachineError(
                    f"the system refuses to lock {total:.0f} MiB of weights (errno {ctypes.get_errno()}); "
                    "raise the limit of locked memory (ulimit -l)."
                )
            locked.append((address, size))
        yield setup.model
    finally:
        for address, size in locked:
            unlock(ctypes.c_void_p(address), ctypes.c_size_t(size))


@contextmanager
def aligned(setup: Setup) -> Iterator[nn.Module]:
    """A copy of the model whose weights all begin at a multiple of 64 bytes."""
    twin = copy.deepcopy(setup.model)
    for parameter in twin.parameters():
        parameter.data = bits.placed(parameter.data, 0)
    yield twin


@contextmanager
def half_storage(setup: Setup) -> Iterator[nn.Module]:
    """A copy of the model with weights rounded to bfloat16, computing in float32."""
    twin = copy.deepcopy(setup.model)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            stored = parameter.data if parameter.element_size() == 2 else parameter.data.to(torch.bfloat16)
            parameter.data = stored.float()
    yield twin


