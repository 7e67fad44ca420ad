"""Which kernels an op runs: what torch's profiler names, what MKL and oneDNN log, and what other instruction sets give."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from detlab.divergence.kernels_alone import pack
from detlab.divergence.replay_op import Operation
from detlab.process import child

#: What makes the libraries say which of their kernels runs.
VERBOSE = {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
#: The libraries' caps on the instruction set, each read when a process starts.
CAPS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}
#: What computes nothing.
_MOVES = {
    "t", "transpose", "permute", "as_strided", "view", "reshape", "expand", "select", "slice", "unsqueeze", "squeeze", "narrow",
    "detach", "empty", "empty_like", "empty_strided", "resolve_conj", "resolve_neg", "resize_", "set_", "lift_fresh", "alias",
}  # fmt: skip
_MKL = re.compile(r"^MKL_VERBOSE (\w+)\(([^)]*)\)")


@dataclass(frozen=True)
class Kernel:
    """What ran.

    Attributes:
        library: "ATen" (torch's own kernels), "MKL" or "oneDNN".
        name: the function, or the implementation that the library chose.
        shape: sizes it was called with, as the library writes them.
        times: how often it ran.
    """

    library: str
    name: str
    shape: str = ""
    times: int = 1

    def __str__(self) -> str:
        return f"{self.library} {self.name}" + (f" {self.shape}" if self.shape else "") + f" x{self.times}" * (self.times > 1)


def in_fresh_process(ops: Sequence[Operation], threads: Sequence[int], variables: dict[str, str], *,
                     profile: bool = False) -> tuple[list[Tensor], list[list[Kernel]]]:  # fmt: skip
    """Executes ops alone in a process with variables set.

    Args:
        ops: the calls.
        threads: intra-op threads of each.
        variables: environment variables of the process, such as `VERBOSE`.
        profile: also name the ATen ops inside each, by torch's profiler (which writes lines of its own to the console).

    Returns:
        Their first outputs, and the kernels of each, as far as they were profiled and logged.

    Raises:
        TypeError: an argument cannot be sent.
        MachineError: the process failed.
    """
    tensors: dict[str, Tensor] = {}
    calls = []
    for op, count in zip(ops, threads, strict=True):
        namespace, name = op.func._schema.name.split("::")
        calls.append(
            {
                "op": [namespace, name, op.func._overloadname],
                "args": pack(op.args, tensors),
                "kwargs": {key: pack(value, tensors) for key, value in op.kwargs.items()},
                "threads": count,
            }
        )
    with tempfile.TemporaryDirectory(prefix="detlab-op-") as folder:
        path = Path(folder) / "inputs.safetensors"
        save_file(tensors, path)
        request = {"tensors": str(path), "calls": calls, "profile": profile}
        with child(request, variables, None, module="detlab.divergence.kernels_alone") as results:
            made = load_file(results / "outputs.safetensors")
            log = (results / "log.txt").read_text(encoding="utf-8", errors="replace")
            names = json.loads((results / "names.json").read_text(encoding="utf-8"))
    kernels = logged(log, len(calls))
    for number, found in enumerate(names):
        computing = [name for name in found if name not in _MOVES and not name.startswith(("[", "Profiler"))]
        kernels[number][:0] = [Kernel("ATen", name, times=computing.count(name)) for name in dict.fromkeys(computing)]
    return [made[str(number)] for number in range(len(calls))], kernels


def logged(log: str, num_calls: int) -> list[list[Kernel]]:
    """What MKL and oneDNN logged, call by call."""
    calls: list[dict[tuple[str, str, str], int]] = [{} for _ in range(num_calls)]
    now = -1
    for line in log.splitlines():
        if line.startswith("detlab call "):
            now = int(line.rsplit(" ", 1)[1])
            continue
        found = _kernel(line)
        if found is not None and 0 <= now < num_calls:
            calls[now][found] = calls[now].get(found, 0) + 1
    return [[Kernel(*key, times=times) for key, times in call.items()] for call in calls]


def _kernel(line: str) -> tuple[str, str, str] | None:
    match = _MKL.match(line)
    if match:
        sizes = [part for part in match[2].split(",") if part.isdigit()]  # transposes, then sizes; addresses begin with 0x
        return "MKL", match[1], "x".join(sizes[:3])
    parts = line.split(",")
    if line.startswith("onednn_verbose") and "exec" in parts and len(parts) > 10:
        at = parts.index("exec")
        return "oneDNN", f"{parts[at + 2]} {parts[at + 3]}", parts[-2]
    return None
