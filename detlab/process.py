"""Runs a condition in a fresh process, for what must be set before torch starts.

The model travels through a temporary folder as safetensors with its configuration; the child rebuilds it, and the digests
of every parameter and buffer must agree on both sides before anything runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from detlab import bits
from detlab.errors import CaptureError, MachineError

_folders: weakref.WeakKeyDictionary[nn.Module, Path] = weakref.WeakKeyDictionary()
_sent: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def digests_of(model: nn.Module) -> dict[str, str]:
    """Digest of every parameter and buffer by name, as hexadecimal text."""
    return {name: f"{bits.digest(tensor.detach()) & (1 << 64) - 1:016x}" for name, tensor in _tensors(model)}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def send_model(model: nn.Module) -> Path:
    """Writes a model where a child can rebuild it; the folder lives as long as the model does, and is reused.

    Raises:
        CaptureError: the model would not be the same in another process: it is no plain transformers model, or carries
            hooks, patched forwards or adapters that a configuration does not describe.
        MachineError: the disk refuses.
    """
    import transformers

    name = type(model).__name__
    if getattr(transformers, name, None) is not type(model):
        raise CaptureError(
            f"{name} cannot be sent to a fresh process: it is not a class of transformers, so the child could not rebuild "
            "it. Use conditions that run in this process, or start Python with the variables set."
        )
    for where, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise CaptureError(
                f"{name} cannot be sent to a fresh process: {where or 'the model'} carries hooks or a replaced forward, "
                "which would be lost. Remove them, or start Python with the variables set."
            )
    config: Any = model.config
    meta = {
        "class": name,
        "config_class": type(config).__name__,
        "config": json.loads(config.to_json_string(use_diff=False)),
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "places": {where: tensor.data_ptr() % 64 for where, tensor in _tensors(model)},
        "digests": digests_of(model),  # versions and addresses would miss what is written through .data or numpy
    }
    if _sent.get(model) == meta:
        return _folders[model]
    path = Path(tempfile.mkdtemp(prefix="detlab-model-"))
    try:
        save_file({where: tensor.detach().cpu().contiguous() for where, tensor in _tensors(model)}, path / "state.safetensors")
        (path / "model.json").write_text(json.dumps(meta), encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(model)) / 2**20
        raise MachineError(
            f"{name} ({size:.0f} MiB) could not be written to {path.parent} for a fresh process: {error}. "
            "Free some space, or set TMPDIR to a larger disk."
        ) from error
    if model in _folders:
        shutil.rmtree(_folders[model], ignore_errors=True)
    weakref.finalize(model, shutil.rmtree, path, ignore_errors=True)
    _folders[model], _sent[model] = path, meta
    return path


def receive_model(path: Path) -> nn.Module:
    """Rebuilds what `send_model` wrote, and checks it bit by bit."""
    import transformers

    meta = json.loads((path / "model.json").read_text(encoding="utf-8"))
    config = getattr(transformers, meta["config_class"]).from_dict(meta["config"])
    config._attn_implementation = meta["attention"]
    if meta["experts"] is not None:
        config._experts_implementation = meta["experts"]
    model: nn.Module = getattr(transformers, meta["class"])(config)
    # A kernel may compute other bits where a weight lies at another address modulo the vector length.
    state = {
        name: bits.placed(tensor, meta["places"].get(name, 0)) for name, tensor in load_file(path / "state.safetensors").items()
    }
    for name, tensor in list(_tensors(model)):
        if name not in state:
            raise MachineError(f"the fresh process built {meta['class']} with {name}, which the model sent does not have.")
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(tensor, nn.Parameter):
            tensor.data = state[name]
            tensor.requires_grad_(False)
        else:
            module._buffers[leaf] = state[name]
    model.eval()
    found = digests_of(model)
    wrong = sorted(name for name in set(found) | set(meta["digests"]) if found.get(name) != meta["digests"].get(name))
    if wrong:
        raise MachineError(f"the model arrived changed in the fresh process: {', '.join(wrong[:3])}; the run was not made.")
    return model


@contextmanager
def child(request: dict[str, Any], variables: dict[str, str], report: Callable[[int, int], None] | None,
          module: str = "detlab.worker") -> Iterator[Path]:  # fmt: skip
    """Runs a request in a fresh process and yields the folder of its results, which is gone after the block.

    Args:
        request: plain values; the module executes it.
        variables: environment variables set in the child, on top of this process's.
        report: called with (calls done, calls in all).
        module: what the child runs; it takes the folder, which holds ``request.json``, and leaves its results there.

    Raises:
        MachineError: the child failed or was killed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="detlab-run-") as folder:
        path = Path(folder)
        (path / "request.json").write_text(json.dumps(request), encoding="utf-8")
        root = str(Path(__file__).resolve().parent.parent)
        search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = os.environ | variables | {"PYTHONPATH": search}
        errors = path / "errors.txt"
        with errors.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, folder], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    words = line.split()
                    if report is not None and len(words) == 3 and words[0] == "progress":
                        report(int(words[1]), int(words[2]))
                code = process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        if code:
            last = errors.read_text(errors="replace").strip().splitlines()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise MachineError(f"the fresh process with {_listed(variables)} {how}: {last[-1] if last else 'it said nothing'}")
        yield path


def _listed(variables: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items()) or "no variables"
