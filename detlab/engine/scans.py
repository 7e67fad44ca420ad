"""Recurrences over tokens whose bits depend on the tokens alone: one step for each token, whatever the call holds.

A stock model computes a prompt in chunks, as matrix products, and a single token as one step of the recurrence: two orders
of additions. Here every token is a step: ``state = decay * state + fed``, two elementwise operations, each rounded once. So
prefill, pieces of it and decoding agree by construction. What the state does not enter is computed for many tokens at once,
elementwise too. Sums over the state go down a fixed tree. All is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from detlab.engine.elementwise import canonical_elementwise

__all__ = [
    "Rows",
    "causal_convolution",
    "exp",
    "gated_delta_rule",
    "reference_causal_convolution",
    "reference_gated_delta_rule",
    "reference_selective_scan",
    "reference_tree_sum",
    "reference_wkv",
    "run_recurrence",
    "select_ends",
    "selective_scan",
    "sigmoid",
    "silu",
    "softplus",
    "tree_sum",
    "wkv",
]

exp, sigmoid = canonical_elementwise(torch.exp), canonical_elementwise(torch.sigmoid)
silu, softplus = canonical_elementwise(F.silu), canonical_elementwise(F.softplus)

_ELEMENTS = 1 << 20  # of the states that are kept at once: few enough for a processor's cache, and no bit follows it


class Rows:
    """Which tokens of a call are real, where some are padding: the recurrence runs over the real ones alone.

    Attributes:
        counts: int64 [batch], real tokens of each row.
    """

    def __init__(self, real: Tensor) -> None:
        """Looks for the real tokens.

        Args:
            real: bool [batch, tokens].
        """
        self.counts = real.sum(1)
        most = max(1, int(self.counts.max()))
        self._order = (~real).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        self._places = (real.cumsum(1) - 1).clamp_min(0)  # a padding token is given another's result, and read by no one

    def pack(self, x: Tensor) -> Tensor:
        """Moves each row's real tokens to its front: [batch, tokens, size] -> [batch, most real tokens, size]."""
        return x.gather(1, self._order.unsqueeze(-1).expand(-1, -1, x.shape[2]))

    def unpack(self, x: Tensor) -> Tensor:
        """Moves them back to where they were."""
        return x.gather(1, self._places.unsqueeze(-1).expand(-1, -1, x.shape[2]))


# ------------------------------------------------------------------------------------------------------------- sums
def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Adds over one dimension: the upper half is added to the lower one until one term is left. Writes over x.

    Each addition is an elementwise operation, so the order follows the number of terms alone. NaN and infinities spread as
    they do in any sum.
    """
    x = x.movedim(dim, 0)
    while (terms := x.shape[0]) > 1:
        half = (terms + 1) // 2
        x[: terms - half] += x[half:]
        x = x[:half]
    return x[0]


def reference_tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """What `tree_sum` means, slowly: term k and term k + half are added, the middle one of an odd number waits."""
    if len(terms) == 1:
        return terms[0]
    half = (len(terms) + 1) // 2
    return reference_tree_sum([terms[k] + terms[k + half] if k + half < len(terms) else terms[k] for k in range(half)])


# ------------------------------------------------------------------------------------------------------ convolutions
def causal_convolution(window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
                       rows: Rows | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolves each channel over time; the products are added from the oldest token to the newest, then the bias.

    Args:
        window: [batch, kernel - 1, channels], the tokens before these; zeros before the first.
        x: [batch, tokens, channels], real tokens in front.
        weight: [channels, kernel].
        bias: [channels], or None.
        rows: how many tokens of each row are real; None where all are.

    Returns:
        float32 [batch, tokens, channels], and the window after each row's last real token, in x's dtype.
    """
    tokens, kernel = x.shape[1], weight.shape[1]
    whole = torch.cat([window, x], 1)
    wide, taps = whole.float(), weight.float()
    out = wide[:, :tokens] * taps[:, 0]
    for k in range(1, kernel):
        out += wide[:, k : k + tokens] * taps[:, k]
    if bias is not None:
        out += bias.float()
    if rows is None:
        return out, whole[:, tokens:].clone()
    places = rows.counts[:, None] + torch.arange(kernel - 1, device=x.device)
    return out, whole.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def reference_causal_convolution(window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `causal_convolution` means, slowly: one row's tokens, [tokens, channels], one at a time."""
    seen, results = list(window.float()), []
    for token in x.float():
        seen.append(token)
        total = seen[-weight.shape[1]] * weight[:, 0].float()
        for k in range(1, weight.shape[1]):
            total = total + seen[k - weight.shape[1]] * weight[:, k].float()
        results.append(total if bias is None else total + bias.float())
    return torch.stack(results)


# ------------------------------------------------------------------------------------------------------- recurrences
def run_recurrence(decay: Tensor, fed: Tensor, state: Tensor) -> None:
    """``fed[t] += decay[t] * fed[t - 1]``, in place, with the state in the place of ``fed[-1]``.

    Args:
        decay: float32 [tokens, ...], broadcast to fed's.
        fed: float32 [tokens, ...]; afterwards the states after each token.
        state: float32 [...], before the first.
    """
    product = torch.empty_like(state)
    for decay_now, now in zip(decay.unbind(0), fed.unbind(0), strict=True):
        torch.mul(state, decay_now, out=product)
        state = now.add_(product)


def select_ends(states: Tensor, before: Tensor, rows: Rows | None, start: int, batch_dim: int) -> Tensor:
    """The state after each row's last real token, where these states hold it; the state before them elsewhere.

    Args:
        states: [tokens, ...], after each token.
        before: [...], before the first of them.
        rows: how many tokens of each row are real; None where all are.
        start: tokens of the call before these.
        batch_dim: the dimension of `before` that holds the rows.
    """
    if rows is None:
        return states[-1].clone()
    count = (rows.counts - start).clamp(0, len(states))
    by_row = states.movedim(batch_dim + 1, 1)[(count - 1).clamp_min(0), torch.arange(len(count), device=count.device)]
    held = (count > 0).view([-1] + [1] * (before.ndim - 1))
    return torch.where(held, by_row, before.movedim(batch_dim, 0)).movedim(0, batch_dim).contiguous()


def _buffer(tokens: int, state: Tensor) -> Tensor:
    """Room for the states of some tokens, [at most tokens, *state]; one for all of a call, as new pages are slow to come by."""
    return state.new_empty(max(1, min(tokens, _ELEMENTS // state.numel())), *state.shape)


def selective_scan(drive: Tensor, steps: Tensor, rates: Tensor, keys: Tensor, queries: Tensor, state: Tensor,
                   rows: Rows | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state space recurrence of Mamba: ``state = exp(step * rate) * state + key * drive``, read out by queries.

    Dimensions in brackets may be 1, to be broadcast; a state has a term for each (n, channel).

    Args:
        drive: float32 [tokens, 1, batch, *channels].
        steps: float32 [tokens, 1, batch, *(channels)].
        rates: float32 [(n), 1, *(channels)].
        keys, queries: float32 [tokens, n, batch, *(channels)].
        state: float32 [n, batch, *channels].
        rows: how many tokens of each row are real; None where all are.

    Returns:
        [tokens, batch, *channels], for each token the sum over n of state times query, and the state after each row's last
        real token.
    """
    buffer = _buffer(len(drive), state)
    results = state.new_empty(len(drive), *state.shape[1:])
    for start in range(0, len(drive), len(buffer)):
        part = slice(start, start + len(buffer))
        decay = exp(steps[part] * rates)
        states = buffer[: len(decay)]
        torch.mul(keys[part], drive[part], out=states)
        run_recurrence(decay, states, state)
        state = select_ends(states, state, rows, start, 1)
        results[part] = tree_sum(states.mul_(queries[part]), 1)
    return results, state


def reference_selective_scan(drive: Tensor, steps: Tensor, rates: Tensor, keys: Tensor, queries: Tensor,
                             state: Tensor) -> Tensor:  # fmt: skip
    """What `selective_scan` means, slowly: one row, one token and one of the n after the other.

    Args:
        drive, steps: [tokens, *channels].
        rates: [n, *channels].
        keys, queries: [tokens, n, *(channels)].
        state: [n, *channels].
    """
    state = state.clone()
    results = []
    for t in range(len(drive)):
        for n in range(len(state)):
            state[n] = exp(steps[t] * rates[n]) * state[n] + keys[t, n] * drive[t]
        results.append(reference_tree_sum([state[n] * queries[t, n] for n in range(len(state))]))
    return torch.stack(results)


def gated_delta_rule(decay: Tensor, rate: Tensor, keys: Tensor, values: Tensor, queries: Tensor, state: Tensor,
                     rows: Rows | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule: the state decays, and what it says of the key is moved towards the value.

    ``state *= decay; state += key * (value - sum(state * key)) * rate``, read out by queries; sums are over the key's terms.
    Source: Yang et al., "Gated Delta Networks" (2024), equation 10, one token at a time.

    Args:
        decay, rate: float32 [tokens, batch, heads].
        keys, queries: float32 [tokens, n, batch, heads].
        values: float32 [tokens, batch, heads, size].
        state: float32 [n, batch, heads, size].
        rows: how many tokens of each row are real; None where all are.

    Returns:
        [tokens, batch, heads, size], and the state after each row's last real token.
    """
    buffer = _buffer(len(decay), state)
    results = torch.empty_like(values)
    for start in range(0, len(decay), len(buffer)):
        part = slice(start, start + len(buffer))
        states, now = buffer[: len(decay[part])], state
        for t, (shrink, key) in enumerate(zip(decay[part].unsqueeze(-1), keys[part].unsqueeze(-1), strict=True), start):
            now = torch.mul(now, shrink, out=states[t - start])
            change = (values[t] - tree_sum(now * key, 0)) * rate[t].unsqueeze(-1)
            now.add_(key * change)
        state = select_ends(states, state, rows, start, 1)
        results[part] = tree_sum(states.mul_(queries[part].unsqueeze(-1)), 1)
    return results, state


def reference_gated_delta_rule(decay: Tensor, rate: Tensor, keys: Tensor, values: Tensor, queries: Tensor,
                               state: Tensor) -> Tensor:  # fmt: skip
    """What `gated_delta_rule` means, slowly: one row and one head, one token and one of the key's terms after the other.

    Args:
        decay, rate: [tokens].
        keys, queries: [tokens, n].
        values: [tokens, size].
        state: [n, size].
    """
    terms = list(state)
    results = []
    for t in range(len(decay)):
        terms = [term * decay[t] for term in terms]
        said = reference_tree_sum([term * key for term, key in zip(terms, keys[t], strict=True)])
        change = (values[t] - said) * rate[t]
        terms = [term + key * change for term, key in zip(terms, keys[t], strict=True)]
        results.append(reference_tree_sum([term * query for term, query in zip(terms, queries[t], strict=True)]))
    return torch.stack(results)


def wkv(decay: Tensor, first: Tensor, keys: Tensor, values: Tensor, state: Tensor,
        rows: Rows | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RWKV's average of values, weighted by exp(key), older tokens less; exponents are kept below a running maximum.

    Source: Peng et al., "RWKV" (2023), equations 16 to 19 and appendix D.

    Args:
        decay, first: float32 [channels]; what a weight's exponent loses with each token (below 0), and what the newest
            token's gains.
        keys, values: float32 [tokens, batch, channels].
        state: float32 [3, batch, channels]: the weighted sum, the sum of weights, and the maximum that both are scaled by.
        rows: how many tokens of each row are real; None where all are.

    Returns:
        [tokens, batch, channels], and the state after each row's last real token.
    """
    states = state.new_empty(len(keys), *state.shape)
    now = state
    for t, (key, value) in enumerate(zip(keys, values, strict=True)):
        faded = now[2] + decay
        most = torch.maximum(faded, key)
        old, new = exp(torch.stack([faded - most, key - most]))
        torch.mul(now[:2], old, out=states[t, :2])
        states[t, 0] += new * value
        states[t, 1] += new
        states[t, 2] = most
        now = states[t]
    before = torch.cat([state[None], states[:-1]])
    boosted = keys + first
    most = torch.maximum(before[:, 2], boosted)
    old, new = exp(before[:, 2] - most), exp(boosted - most)
    out = (old * before[:, 0] + new * values) / (old * before[:, 1] + new)
    return out, select_ends(states, state, rows, 0, 1)


def reference_wkv(decay: Tensor, first: Tensor, keys: Tensor, values: Tensor, state: Tensor) -> Tensor:
    """What `wkv` means, slowly: one row, one token after the other.

    Args:
        decay, first: [channels].
        keys, values: [tokens, channels].
        state: [3, channels].
    """
    total, weight, most = state
    results = []
    for key, value in zip(keys, values, strict=True):
        high = torch.maximum(most, key + first)
        old, new = exp(most - high), exp(key + first - high)
        results.append((old * total + new * value) / (old * weight + new))
        high = torch.maximum(most + decay, key)
        old, new = exp(most + decay - high), exp(key - high)
        total, weight, most = old * total + new * value, old * weight + new, high
    return torch.stack(results)
