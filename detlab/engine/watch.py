"""Sees whether a model is still the one that a tier was put into: packed copies must not outlive what they were made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from detlab import bits
from detlab.errors import UsageError

__all__ = ["NoCopy", "Watch", "version_of"]

_SAMPLES = 16  # elements of each tensor that are looked at, side by side: more would bring back pages that were put aside


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for one made under ``torch.inference_mode``, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


class NoCopy:
    """Stands in a model's attributes while it is under a tier, and refuses to be copied with it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a model cannot be copied or pickled inside detlab.deterministic: the copy would compute with this model's parts. "
            "Copy it outside; save_pretrained and state_dict work inside, too."
        )


class _Seen:
    """One parameter or buffer as it was."""

    __slots__ = ("is_tail", "kind", "module", "name", "ptr", "sample", "store", "tensor", "version")

    def __init__(self, module: nn.Module, store: dict[str, Any], name: str, is_tail: bool) -> None:
        self.module, self.store, self.name, self.is_tail = module, store, name, is_tail
        self.note()

    def note(self) -> None:
        """Remembers the tensor as it is now."""
        tensor: Tensor = self.store[self.name]
        self.tensor, self.ptr, self.version = tensor, tensor.data_ptr(), version_of(tensor)
        self.kind = (tensor.dtype, tensor.shape, tensor.device)
        self.sample = self.look(tensor)

    def look(self, tensor: Tensor) -> Tensor:
        """The first or the last elements, [at most 16]."""
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
        return (flat[-_SAMPLES:] if self.is_tail else flat[:_SAMPLES]).clone()


class Watch:
    """The parameters, buffers and modules of a model, as they were when a tier was put in."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(map(id, model.modules()))
        tensors: list[tuple[int, nn.Module, dict[str, Any], str]] = [
            (tensor.data_ptr(), module, store, name)
            for module in model.modules()
            for store in (module._parameters, module._buffers)
            for name, tensor in store.items()
            if tensor is not None
        ]
        # In the order of addresses, the end of one and the start of the next: two samples come from one page.
        tensors.sort(key=lambda found: found[0])
        self._seen = [
            _Seen(module, store, name, is_tail=index % 2 == 0) for index, (_, module, store, name) in enumerate(tensors)
        ]

    def changed(self, model: nn.Module, is_thorough: bool) -> set[nn.Module]:
        """Modules of which a parameter or buffer was replaced or written to; it is noted as it is now.

        Args:
            model: the model.
            is_thorough: also compares the modules, and a sample of each tensor: what is written through ``.data`` shows there
                alone.

        Raises:
            UsageError: modules were added or replaced, or a tensor has another dtype, shape or device.
        """
        if is_thorough and tuple(map(id, model.modules())) != self._modules:
            raise UsageError(
                "modules were added or replaced inside detlab.deterministic. Leave the block, then enter it again."
            )
        found = set()
        for seen in self._seen:
            tensor = seen.store.get(seen.name)
            if tensor is seen.tensor and tensor.data_ptr() == seen.ptr and version_of(tensor) == seen.version:
                if not is_thorough or bits.equal(seen.look(tensor), seen.sample):
                    continue
            if tensor is None or (tensor.dtype, tensor.shape, tensor.device) != seen.kind:
                now = "gone" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                dtype, shape, device = seen.kind
                raise UsageError(
                    f"{type(seen.module).__name__}.{seen.name} was {dtype} {list(shape)} on {device} when detlab.deterministic "
                    f"was entered, and is {now}. Leave the block, change the model, then enter it again."
                )
            found.add(seen.module)
            seen.note()
        return found


def token_count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens a row of a model call; 2 where it cannot be told."""
    for value in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            return int(value.shape[1])
    return 2
