"""Executes ops alone in a fresh process: ``python -m detlab.divergence.kernels_alone FOLDER``.

It imports little, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: Plain values that stand for what JSON cannot hold.
_DTYPES = {str(kind): kind for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)}


def pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """An argument as plain values; its tensors go to ``tensors``, with the memory between their elements."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        flat = torch.as_strided(value.detach(), (extent,), (1,), value.storage_offset())
        tensors[name] = flat.clone()
        past = value.data_ptr() % 64
        return {"tensor": name, "shape": list(value.shape), "stride": list(value.stride()), "address": past}
    if isinstance(value, (list, tuple)):
        return [pack(item, tensors) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument of type {type(value).__name__} cannot be sent to another process")


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, dict) and "tensor" in value:
        # Kernels may look at addresses: the copy lies as far past a multiple of 64 as the original did.
        flat = tensors[value["tensor"]]
        size = flat.element_size()
        room = torch.empty(flat.numel() + 128 // size, dtype=flat.dtype)
        start = (value["address"] - room.data_ptr()) % 64 // size
        room[start : start + flat.numel()].copy_(flat)
        return torch.as_strided(room, value["shape"], value["stride"], start)
    if isinstance(value, dict):
        return _DTYPES[value["dtype"]]
    return [unpack(item, tensors) for item in value] if isinstance(value, list) else value


def main(folder: Path) -> None:
    """Executes the calls that ``request.json`` lists and saves their first outputs; libraries' logs go to ``log.txt``."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    tensors = load_file(request["tensors"])
    made = {}
    names = []
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)  # MKL and oneDNN write to the process's output, not to Python's
        for number, call in enumerate(request["calls"]):
            torch.set_num_threads(call["threads"])
            namespace, name, overload = call["op"]
            func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
            args = unpack(call["args"], tensors)
            kwargs = {key: unpack(value, tensors) for key, value in call["kwargs"].items()}
            os.write(1, f"detlab call {number}\n".encode())
            with torch.no_grad():
                result = func(*args, **kwargs)
            first = result if isinstance(result, Tensor) else result[0]
            made[str(number)] = first.detach().contiguous().clone()
            if request["profile"]:
                os.write(1, b"detlab call -1\n")
                names.append(_profiled(func, args, kwargs))
    save_file(made, folder / "outputs.safetensors")
    (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")


def _profiled(func: Any, args: Any, kwargs: Any) -> list[str]:
    """The ATen ops that run inside an op, by torch's profiler, in order."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities) as profile:
        func(*args, **kwargs)
    return [str(event.name).removeprefix("aten::") for event in profile.events() or ()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
