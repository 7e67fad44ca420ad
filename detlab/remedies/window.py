"""A fixed attention window: every token sees the last few tokens alone, so that sums stop growing with the text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from detlab.errors import UsageError
from detlab.remedies.remedy import Setup

__all__ = ["WINDOW", "attention_window", "windowed_attention"]

WINDOW = 64  # tokens that a token sees, itself among them
_NAME = "detlab_window"


@contextmanager
def attention_window(setup: Setup) -> Iterator[nn.Module]:
    """Lets each token see the last `WINDOW` tokens alone. Longer texts are answered by another function than before.

    Raises:
        UsageError: the model's attention cannot be replaced.
    """
    model: Any = setup.model
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before is None or not hasattr(model, "set_attn_implementation"):
        raise UsageError(f"the attention of {type(model).__name__} cannot be replaced: it is not a transformers model.")
    AttentionInterface.register(_NAME, windowed_attention)
    AttentionMaskInterface.register(_NAME, eager_mask)
    try:
        model.set_attn_implementation(_NAME)
        yield model
    finally:
        model.set_attn_implementation(before)


def windowed_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor,
                       scaling: float | None = None, **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Attention over the last `WINDOW` keys of each query.

    Args:
        module: the attention module; not read.
        query: [batch, heads, queries, head_dim].
        key, value: [batch, kv_heads, keys, head_dim].
        attention_mask: additive, [batch, 1, queries, keys]; the last key that a query may see is its own.
        scaling: of the scores.

    Returns:
        [batch, queries, heads, head_dim], and None for the weights.
    """
    mask = attention_mask[..., : key.shape[2]]
    keys = mask.shape[-1]
    own = keys - 1 - (mask == 0).flip(-1).int().argmax(-1, keepdim=True)  # [batch, 1, queries, 1]
    at = torch.arange(keys, device=mask.device)
    mask = mask.masked_fill(at <= own - WINDOW, torch.finfo(mask.dtype).min)
    # What no query sees is cut off: a decode step is over WINDOW keys, however long the text.
    first, last = max(0, int(own.min()) - WINDOW + 1), int(own.max()) + 1
    key, value, mask = key[:, :, first:last], value[:, :, first:last], mask[..., first:last]
    made = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return made.transpose(1, 2).contiguous(), None
