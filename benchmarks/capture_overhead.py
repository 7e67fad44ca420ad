"""What capture costs, beside module hooks, torch's DebugMode and TorchLens, in one run.

All are asked for the same: a fingerprint of what the model computes. detlab digests every row of every op's output and
resolves every input; DebugMode hashes every op's output as a whole; module hooks hash every module's output as a whole;
TorchLens keeps every op's output. A process's first capture of a model also finds out what its ops do to rows: that is the
row "first capture". Two rows do nothing at all with what they see: they are what hooks and a dispatch mode cost in Python.
TorchLens is not among detlab's dependencies: ``pip install torchlens`` to include it.

    python benchmarks/capture_overhead.py [ROUNDS]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _harness import interleaved, save
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import detlab
from detlab.trace import plans


def small_model() -> tuple[nn.Module, Tensor]:
    """6 layers, 256 wide, 128 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=4096, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), torch.randint(0, 4096, (1, 128))


def smollm2() -> tuple[nn.Module, Tensor]:
    """SmolLM2-135M in float32, a prefill of 256 tokens."""
    model, _ = detlab.load_model("smollm2-135m")
    return model, torch.randint(5, 40_000, (1, 256), generator=torch.Generator().manual_seed(0))


class IdleMode(TorchDispatchMode):
    """Runs every op and does nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op."""
        return func(*args, **(kwargs or {}))


def methods(model: nn.Module, ids: Tensor) -> dict[str, Callable[[], Any]]:
    """The ways to observe one forward pass."""

    def raw() -> Any:
        return model(input_ids=ids, use_cache=False)

    def hooks() -> list[Tensor]:
        hashes = []

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                hashes.append(torch.hash_tensor(first))

        handles = [module.register_forward_hook(hook) for module in model.modules()]
        try:
            raw()
        finally:
            for handle in handles:
                handle.remove()
        return hashes

    def idle_hooks() -> None:
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True))
            handles.append(module.register_forward_hook(lambda module, args, output: None))
        try:
            raw()
        finally:
            for handle in handles:
                handle.remove()

    def idle_mode() -> None:
        with IdleMode():
            raw()

    def debug_mode() -> DebugMode:
        with DebugMode() as mode, DebugMode.log_tensor_hashes(hash_inputs=False):
            raw()
        return mode

    def ops() -> Any:
        with detlab.capture(model) as trace:
            raw()
        return trace

    def first() -> Any:
        plans._shared = plans.Plans()
        return ops()

    def modules() -> Any:
        with detlab.capture(model, level="modules") as trace:
            raw()
        return trace

    chosen: dict[str, Callable[[], Any]] = {
        "raw forward": raw,
        "idle module hooks": idle_hooks,
        "idle dispatch mode": idle_mode,
        "module hooks + torch.hash_tensor": hooks,
        "detlab, modules": modules,
        "detlab, every op by row": ops,
        "detlab, every op, first capture": first,
        "DebugMode with hashes": debug_mode,
    }
    try:
        import torchlens
    except ImportError:
        print("torchlens is not installed: left out")
    else:
        chosen["TorchLens"] = lambda: torchlens.trace(model, [], {"input_ids": ids, "use_cache": False})
    return chosen


def main(rounds: int) -> None:
    """Prints the table and keeps it."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    tables = {}
    subjects = (
        ("llama, 6 layers, 256 wide, 128 tokens", small_model, rounds),
        ("SmolLM2-135M, float32, prefill of 256 tokens", smollm2, max(3, rounds // 3)),
    )
    for title, build, times in subjects:
        model, ids = build()
        with torch.no_grad():
            tables[title] = interleaved(methods(model, ids), "raw forward", times)
        print(f"\n{title}: CPU time over the raw forward pass, median (quartiles) of {times} rounds, 1 thread")
        for name, row in tables[title].items():
            print(f"  {name:34} {row['ratio']:6.2f}  ({row['low']:.2f}-{row['high']:.2f})  {row['ms']:8.1f} ms")
    save("capture_overhead", {"rounds": rounds, "tables": tables})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
