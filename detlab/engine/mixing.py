"""Which part replaces which layer that mixes tokens by a recurrence, and why some have none."""

from __future__ import annotations

from torch import nn

from detlab.engine.mixers import Mamba2Part, MambaPart, MixerPart, ShortConvolutionPart, ZambaPart
from detlab.engine.recurrences import DeltaRulePart, GatedRecurrencePart, RwkvFeedForwardPart, RwkvPart
from detlab.errors import UsageError

__all__ = ["mixer_part"]

#: Class name -> part, of transformers' modules.
_PARTS: dict[str, type[MixerPart]] = {
    **dict.fromkeys(("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer",
                     "Zamba2MambaMixer"), Mamba2Part),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), MambaPart),
    "ZambaMambaMixer": ZambaPart,
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), ShortConvolutionPart),
    "RecurrentGemmaRecurrentBlock": GatedRecurrencePart,
    "RwkvSelfAttention": RwkvPart,
    "RwkvFeedForward": RwkvFeedForwardPart,
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet",
                     "LaraMiniGatedDeltaNet"), DeltaRulePart),
}  # fmt: skip

#: Class name -> why the tier does not cover it.
_REFUSED = {
    "xLSTMBlock": "its matrix memory is computed in chunks of a call, and kept in a cache of its own kind",
    "MiniMaxLightningAttention": "its decaying state is computed in blocks of a call, and kept in a cache of its own kind",
    **dict.fromkeys(
        ("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"),
        "its delta rule, with a decay for each channel, is computed in chunks of a call",
    ),
}


def mixer_part(module: nn.Module, name: str) -> type[MixerPart] | None:
    """The kind of part that replaces a module's forward; None where it is no mixer that the tier knows.

    Raises:
        UsageError: it is one that the tier knows not to cover.
    """
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    if kind.__name__ in _REFUSED:
        raise UsageError(
            f"{name} is a {kind.__name__}: {_REFUSED[kind.__name__]}. The invariant tier has no part for it, so it does not "
            "cover this model."
        )
    return _PARTS.get(kind.__name__)
