"""Which tokens of a model call are padding, as layers with a recurrence need to know it: they leave padding out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from detlab.engine.scans import Rows
from detlab.errors import UsageError

__all__ = ["Padding"]


class Padding:
    """The attention mask of one model call, laid out once for all layers."""

    def __init__(self, mask: Any) -> None:
        """Takes the mask.

        Args:
            mask: [batch, tokens], true or 1 for real tokens; it may cover tokens of earlier calls, in front. None where all
                tokens are real. Of another form, it is refused as soon as a layer asks for it.
        """
        self._mask = mask
        self._known: dict[tuple[int, int | None, int], Rows | None] = {}

    def rows(self, batch: int, before: int | None, tokens: int) -> Rows | None:
        """Which of a call's tokens are real; None where all are.

        Args:
            batch, tokens: rows, and tokens a row.
            before: tokens of earlier calls, padding counted; None where that is not known, and the mask ends with the call.

        Raises:
            UsageError: the mask does not say of each token whether it is real.
        """
        if self._mask is None:
            return None
        key = (batch, before, tokens)
        if key not in self._known:
            self._known[key] = self._lay_out(batch, before, tokens)
        return self._known[key]

    def _lay_out(self, batch: int, before: int | None, tokens: int) -> Rows | None:
        mask = self._mask
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < tokens:
            found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise UsageError(
                "inside detlab.deterministic layers with a recurrence take a 2D attention_mask of ones and zeros, of "
                f"{batch} rows and at least {tokens} tokens; got {found}. Masks of another form are not covered."
            )
        last = mask.shape[1] if before is None else min(before + tokens, mask.shape[1])
        real = mask[:, last - tokens : last].to(torch.bool)
        return None if bool(real.all()) else Rows(real)
