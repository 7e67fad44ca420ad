"""One draw, and scores that know their requests: what `detlab.engine.sampling` hands to ``generate``.

`sample_token` draws a token from scores. `HandOver` is a logits processor that returns the scores, unchanged, as
`OwnedScores`: a tensor subclass that answers ``softmax`` followed by ``multinomial`` with such draws, and ``topk`` and ``sort``
with a stable order. Nothing global is replaced, so other threads and models see nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from detlab.engine.streams import check_seed, gumbels_of_rows
from detlab.errors import UsageError

__all__ = ["Call", "HandOver", "OwnedScores", "draw_rows", "plain", "sample_token"]


# -------------------------------------------------------------------------------------------------------------- the draw
def draw_rows(scores: Tensor, count: int, seed: int, requests: Sequence[str], positions: Sequence[int]) -> Tensor:
    """Draws tokens without replacement from each row of scores.

    Args:
        scores: [rows, vocab], any float dtype, any device.
        count: tokens for each row.
        seed, requests, positions: as for `sample_token`, one request and position for each row.

    Returns:
        int64 [rows, count] on the scores' device, in the order of the draw. Where fewer tokens than ``count`` are possible,
        impossible ones follow, lowest first.
    """
    host = scores.detach().cpu().contiguous()
    vocab = host.shape[1]
    possible = np.flatnonzero((host > -torch.inf).numpy())  # NumPy is 30 times as fast as torch here
    rows, tokens = np.divmod(possible, vocab)
    counts = np.bincount(rows, minlength=len(host))
    _check_scores(host, counts, requests, positions)
    values = host.view(-1)[torch.from_numpy(possible)].double().numpy()  # exact from every smaller float format
    # A Gumbel number is computed for possible tokens only: with top-k these are few.
    sums = values + gumbels_of_rows(seed, requests, positions, rows, tokens)
    ends = np.cumsum(counts)
    drawn = [_largest(sums[end - n : end], tokens[end - n : end], count, vocab) for n, end in zip(counts, ends, strict=True)]
    return torch.from_numpy(np.stack(drawn) if drawn else np.empty((0, count), np.int64)).to(scores.device)


def _largest(sums: np.ndarray, tokens: np.ndarray, count: int, vocab: int) -> np.ndarray:
    """The tokens of the largest sums, int64 [count]; of equal sums the lowest token, since tokens ascend."""
    if count == 1:
        return tokens[[sums.argmax()]]  # NumPy's argmax promises the first of equal maxima
    order = tokens[np.argsort(-sums, kind="stable")]
    if len(order) < count:
        order = np.concatenate([order, np.setdiff1d(np.arange(vocab), tokens)])
    return order[:count]


def _check_scores(scores: Tensor, counts: np.ndarray, requests: Sequence[str], positions: Sequence[int]) -> None:
    for row, largest in enumerate(scores.amax(-1).tolist()):  # NaN where there is one
        where = f"the scores of request {requests[row]!r} at position {positions[row]}"
        if largest != largest or largest == float("inf"):
            raise UsageError(
                f"{where} hold NaN or +inf, so no token can be drawn; "
                "look for the first one in the logits and in the logits processors."
            )
        if not counts[row]:
            raise UsageError(f"{where} are all -inf, so no token can be drawn; some logits processor forbids every token.")


def sample_token(scores: Tensor, seed: int, request: str | Sequence[str], position: int | Sequence[int]) -> Tensor:
    """Draws the next token of each row from ``softmax(scores)`` with the row's own random numbers.

    Args:
        scores: [vocab] or [rows, vocab], any float dtype, after temperature, top-k and the like; -inf forbids a token.
        seed: 0 to 2**64 - 1.
        request: the request's id; one for each row where there are rows.
        position: tokens generated before this one; one number, or one for each row.

    Returns:
        int64 [] or [rows], on the scores' device. Of equal sums the lowest token id wins. The sums are taken in float64
        on the host: the token depends on the bits of its row's scores and on seed, request and position, on nothing else.

    Raises:
        UsageError: NaN or +inf among the scores, all of a row -inf, or an argument that does not fit.
    """
    if scores.ndim not in (1, 2) or not scores.is_floating_point() or scores.shape[-1] == 0:
        raise UsageError(f"sample_token takes float scores [vocab] or [rows, vocab]; got {scores.dtype} {list(scores.shape)}.")
    check_seed(seed)
    if scores.ndim == 1:
        if not isinstance(request, str) or isinstance(position, Sequence):
            raise UsageError("sample_token got one row of scores; give one request id and one position.")
        return draw_rows(scores[None], 1, seed, [request], [position])[0, 0]
    rows = len(scores)
    requests = [request] if isinstance(request, str) else list(request)
    positions = list(position) if isinstance(position, Sequence) else [position] * rows
    if len(requests) != rows or len(positions) != rows:
        raise UsageError(
            f"sample_token got {rows} rows of scores, {len(requests)} request ids and {len(positions)} positions; "
            "give one of each for every row (one position may serve all)."
        )
    return draw_rows(scores, 1, seed, requests, positions)[:, 0]


# ---------------------------------------------------------------------------------------- scores that know their requests
@dataclass(eq=False)
class Call:
    """One call of ``generate``: which requests its rows serve, and how far it is.

    Attributes:
        requests: one id for each row that is drawn from; with beams one for each prompt.
        is_pending: a step's scores were handed out and nothing was drawn from them yet.
    """

    seed: int
    requests: list[str]
    prompt_length: int
    draws: bool
    position: int = -1
    is_pending: bool = False

    def begin_step(self, length: int) -> None:
        """Notes that scores are handed out for texts of ``length`` tokens, prompts included."""
        self.check_drawn()
        self.position = length - self.prompt_length
        self.is_pending = self.draws

    def check_drawn(self) -> None:
        """Refuses to go on where the last step's tokens were not drawn here."""
        if self.is_pending:
            raise UsageError(
                f"the token of position {self.position} was chosen, but not from its request's random numbers: this "
                "decoding loop does not draw as transformers' own does. Call it outside owned_sampling."
            )

    def draw(self, scores: Tensor, count: int) -> Tensor:
        """Draws ``count`` tokens for each request at the current position, int64 [rows, count]."""
        if scores.ndim != 2 or len(scores) != len(self.requests):
            raise UsageError(
                f"tokens are drawn from scores of shape {list(scores.shape)}, but the call serves {len(self.requests)} "
                "requests; this decoding loop rearranges its rows. Call it outside owned_sampling."
            )
        self.is_pending = False
        return draw_rows(scores, count, self.seed, self.requests, [self.position] * len(self.requests))


class OwnedScores(Tensor):
    """Scores, or what was computed from them; drawing from them uses their requests' random numbers.

    Attributes:
        call: the call they belong to.
        source: for probabilities, the scores they are the softmax of.
    """

    call: Call
    source: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owned = next(owned_in((args, kwargs)))
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.multinomial, Tensor.multinomial):
                return _multinomial(*args, **kwargs)
            if func in (torch.topk, Tensor.topk):
                return _marked(_stable_topk(*args, **kwargs), owned.call)
            if func in (torch.sort, Tensor.sort):
                return _marked(_stable_sort(*args, **kwargs), owned.call)
            result = func(*args, **kwargs)
        if func in torch.overrides.get_default_nowrap_functions():
            return result
        is_softmax = func in (torch.nn.functional.softmax, torch.softmax, Tensor.softmax)
        return _marked(result, owned.call, source=plain(owned) if is_softmax else None)


def owned_in(value: Any) -> Iterator[OwnedScores]:
    if isinstance(value, OwnedScores):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from owned_in(item)
    elif isinstance(value, dict):
        yield from owned_in(list(value.values()))


def _marked(value: Any, call: Call, source: Tensor | None = None) -> Any:
    """Marks float tensors as the call's; indices and truth values stay plain, since they end up in the model's inputs."""
    if isinstance(value, Tensor) and value.is_floating_point():
        owned = value if isinstance(value, OwnedScores) else value.as_subclass(OwnedScores)
        owned.call, owned.source = call, source
        return owned
    if isinstance(value, (tuple, list)):
        items = [_marked(item, call) for item in value]
        return type(value)(items)
    return value


def plain(value: Any) -> Any:
    """Takes the mark off again: tensors, tuples of them, and what ``generate`` returns."""
    if isinstance(value, OwnedScores):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):  # transformers' ModelOutput
        for key, item in value.items():
            if next(owned_in(item), None) is not None:
                value[key] = plain(item)
    return value


def _multinomial(input: Tensor, num_samples: int, replacement: bool = False, **others: Any) -> Tensor:
    source = getattr(input, "source", None)
    if not isinstance(input, OwnedScores) or source is None or replacement:
        raise UsageError(
            "multinomial is asked of something other than a softmax of the scores, without replacement; "
            "this decoding loop is not covered. Call it outside owned_sampling."
        )
    return input.call.draw(source, num_samples)


def _stable_sort(input: Tensor, dim: int = -1, descending: bool = False, **others: Any) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(input, dim=dim, descending=descending, stable=True)
    return values, indices


def _stable_topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = _stable_sort(input, dim=dim, descending=largest)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


class HandOver(LogitsProcessor):
    """The last processor: gives the scores, unchanged, as scores that know their requests."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Marks the scores of a step as the call's; their values stay."""
        self.call.begin_step(input_ids.shape[1])
        owned: Tensor = _marked(scores, self.call)
        return owned
