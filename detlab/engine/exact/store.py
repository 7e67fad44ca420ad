"""Prepared weights on disk: safetensors beside a JSON file that names their format, spec and checksums.

What is stored is a weight's digits and exponents. They belong to the weight they were made of: its digest is stored with them
and asked for when they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from detlab import bits
from detlab.engine.exact.constants import DIGITS
from detlab.engine.exact.linear import SPEC, Prepared, prepare
from detlab.engine.experts import is_experts, is_router
from detlab.engine.linear import weight_of
from detlab.errors import MachineError, UsageError

__all__ = ["FORMAT", "load_prepared", "prepare_model", "save_prepared"]

FORMAT = 1  # raise it when the layout of the files, or the digits of a weight, change
_JSON, _TENSORS = "prepared.json", "prepared.safetensors"


def digest_of(weight: Tensor) -> str:
    """Names a weight's bits, 16 hexadecimal digits."""
    return f"{bits.digest(weight.detach()) & (1 << 64) - 1:016x}"


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What the tier cuts into digits, [N, K], by name: a layer's, a router's, an expert's by parameter and number."""
    for name, module in model.named_modules():
        owner: Any = module
        if isinstance(module, (nn.Linear, Conv1D)):
            yield name, weight_of(module)
        elif is_router(module):
            yield name, owner.weight
        elif is_experts(module):
            for kind in ("gate_up_proj", "down_proj"):
                yield from ((f"{name}.{kind}.{number}", weight) for number, weight in enumerate(getattr(owner, kind).detach()))


def prepare_model(model: nn.Module) -> dict[str, Prepared]:
    """Prepares all weights of a model, by name; layers that share a weight share what is prepared.

    Names are those of linear layers and routers; of stacked experts the parameter's and the expert's number:
    "model.layers.0.mlp.experts.down_proj.3".
    """
    made: dict[tuple[int, torch.Size], Prepared] = {}
    found = {}
    for name, weight in _weights(model):
        key = weight.data_ptr(), weight.shape
        if key not in made:
            made[key] = prepare(weight, name)
        found[name] = made[key]
    return found


def save_prepared(folder: str | Path, prepared: Mapping[str, Prepared], model: nn.Module) -> Path:
    """Writes prepared weights; a folder that holds some is overwritten.

    Args:
        folder: made where it does not exist.
        prepared: by name, as `prepare_model` gives them.
        model: the model they were made of.

    Returns:
        The folder.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    layers: dict[str, dict[str, str]] = {}
    known: dict[int, str] = {}
    weights = dict(_weights(model))
    for name, weight in prepared.items():
        first = known.setdefault(weight.digits.data_ptr(), name)
        if first == name:
            tensors[f"{name}/digits"], tensors[f"{name}/exponents"] = weight.digits.contiguous(), weight.exponents.contiguous()
        layers[name] = {"at": first, "weight": digest_of(weights[name])}
    waiting = path / f".{_TENSORS}.{os.getpid()}"
    try:
        save_file(tensors, waiting)
        about = {"format": FORMAT, "spec": SPEC, "layers": layers, "sha256": _sha256(waiting)}
        os.replace(waiting, path / _TENSORS)
        description = path / f".{_JSON}.{os.getpid()}"
        description.write_text(json.dumps(about, indent=1), encoding="utf-8")
        os.replace(description, path / _JSON)
    except OSError as error:
        waiting.unlink(missing_ok=True)
        raise MachineError(f"prepared weights could not be written to {path}: {error}") from error
    return path


def load_prepared(folder: str | Path, model: nn.Module | None = None) -> dict[str, Prepared]:
    """Reads prepared weights, by name.

    Args:
        folder: as `save_prepared` left it.
        model: where given, each layer's weight must be the one that was prepared.

    Raises:
        UsageError: the folder holds none, another format or spec, damaged files, or weights of another model.
    """
    path = Path(folder)
    try:
        about = json.loads((path / _JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} holds no prepared weights ({error}); write them with save_prepared.") from error
    if not isinstance(about, dict) or (about.get("format"), about.get("spec")) != (FORMAT, SPEC):
        found = f"format {about.get('format')}, spec {about.get('spec')!r}" if isinstance(about, dict) else "another layout"
        raise UsageError(f"{path} has {found}; this version reads format {FORMAT}, spec {SPEC!r}. Prepare the weights again.")
    tensors_at = path / _TENSORS
    try:
        if _sha256(tensors_at) != about["sha256"]:
            raise UsageError(f"{tensors_at} is not the file that was written: its checksum differs. Prepare the weights again.")
        tensors = load_file(tensors_at)
        made = {at: _read(tensors, at) for at in {layer["at"] for layer in about["layers"].values()}}
        prepared = {name: made[layer["at"]] for name, layer in about["layers"].items()}
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged ({error}). Prepare the weights again.") from error
    weights = {} if model is None else dict(_weights(model))
    for name, layer in about["layers"].items() if model is not None else ():
        if name not in weights or digest_of(weights[name]) != layer["weight"]:
            raise UsageError(f"the prepared weights are of another model: {name} is not the layer that was prepared.")
    return prepared


def _read(tensors: Mapping[str, Tensor], name: str) -> Prepared:
    digits, exponents = tensors[f"{name}/digits"], tensors[f"{name}/exponents"]
    whole = digits.dtype == torch.int8 and exponents.dtype == torch.int32 and digits.ndim == 3 and len(digits) == DIGITS
    if not whole or exponents.shape != digits.shape[1:2] or int(digits.abs().max()) > 64 or int(digits.min()) < -64:
        raise KeyError(f"{name} is no weight in digits")
    return Prepared(digits, exponents)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
