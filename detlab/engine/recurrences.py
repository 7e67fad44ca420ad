"""More layers with a recurrence: RecurrentGemma's gated one, RWKV's, and the gated delta rule of Qwen3-Next and OLMo Hybrid.

Parts as in `mixers`. What RecurrentGemma keeps in its modules, and computes of one batch at a time, is kept in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from detlab.engine.linear import CanonicalLinear
from detlab.engine.mixers import MixerPart, pack, split_heads, unpack
from detlab.engine.padding import Padding
from detlab.engine.scans import (
    Rows,
    exp,
    gated_delta_rule,
    run_recurrence,
    select_ends,
    sigmoid,
    silu,
    softplus,
    tree_sum,
    wkv,
)
from detlab.engine.session import Session
from detlab.errors import UsageError

__all__ = ["DeltaRulePart", "GatedRecurrencePart", "RwkvFeedForwardPart", "RwkvPart"]


class GatedRecurrencePart(MixerPart):
    """RecurrentGemma's recurrent block, with the real-gated linear recurrent unit inside it."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        super().__init__(module, name, session)
        self.owners = [module, module.rg_lru]
        self.refresh()

    def refresh(self) -> None:
        """Packs the gates' weights as they are now."""
        unit, is_padded = self.module.rg_lru, self.session.options.is_padded
        self.decay = softplus(unit.recurrent_param.detach().float())
        self.gates = []
        for what in ("input", "recurrent"):
            weights, biases = (getattr(unit, f"{what}_gate_{kind}").detach() for kind in ("weight", "bias"))
            self.gates.append(
                [
                    CanonicalLinear(weight.t().contiguous(), bias, f"{self.name}.rg_lru.{what}_gate", is_padded)
                    for weight, bias in zip(weights, biases, strict=True)
                ]
            )

    def tune(self) -> None:
        """Looks up the rules for the number of threads now set."""
        for layers in self.gates:
            for layer in layers:
                layer.tune()

    def _index(self) -> int:
        """The layer's number in the cache, which the block does not know."""
        return next(int(part) for part in self.name.split(".") if part.isdigit())

    def _gate(self, which: int, x: Tensor) -> Tensor:
        heads = split_heads(x, len(self.gates[which])).unbind(-2)
        return torch.cat([layer(head.contiguous()) for layer, head in zip(self.gates[which], heads, strict=True)], -1)

    def __call__(self, input_states: Tensor, position_ids: Tensor, attention_mask: Any = None, use_cache: bool = True,
                 cache: Any = None, **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
        """As the module's forward: [batch, tokens, hidden]; which tokens are padding is known from the model's call."""
        m, dtype = self.module, input_states.dtype
        layer, rows = self._begin(input_states, cache if use_cache else None, kwargs)
        y_branch = m.act_fn(m.linear_y(input_states))
        x = self._convolve(m.conv_1d, pack(rows, m.linear_x(input_states)), layer, rows).to(dtype)
        is_first = pack(rows, position_ids.expand(x.shape[0], -1).unsqueeze(-1)) == 0
        let_in, kept = sigmoid(self._gate(0, x).float()), sigmoid(self._gate(1, x).float())
        log_kept = -8.0 * kept * self.decay
        scale = torch.sqrt(1 - exp(2 * log_kept))
        fed = x.float() * let_in * torch.where(is_first, 1.0, scale)
        # A text that starts anew forgets what was before.
        kept = torch.where(is_first, 0.0, exp(log_kept)).transpose(0, 1)
        states = fed.transpose(0, 1).contiguous()
        state = layer.get("state", x.shape[0])
        if state is None:
            state = torch.zeros_like(states[0])
        run_recurrence(kept, states, state)
        layer.keep("state", select_ends(states, state, rows, 0, 0))
        result: Tensor = m.linear_out(unpack(rows, states.transpose(0, 1).to(dtype)) * y_branch)
        return result, None


# -------------------------------------------------------------------------------------------------------------- RWKV
_MARK = "_detlab_state"


class RwkvPart(MixerPart):
    """RWKV's time mixing."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        super().__init__(module, name, session)
        model = session.model()
        for inside in [] if model is None else model.modules():
            rescale: Any = getattr(inside, "_rescale_layers", None)
            if rescale is not None:  # else the model's first call would change weights that are packed by then
                rescale()
        self.refresh()

    def refresh(self) -> None:
        """Computes the decay as it is now."""
        self.decay = -exp(self.module.time_decay.detach().float())

    def rows(self, hidden: Tensor, state: Any) -> Rows | None:
        """Which tokens of a call are real."""
        if state is not None and not getattr(state[4], _MARK, False):
            if bool((state[4] != state[4].flatten()[0]).any()):
                raise UsageError(
                    "this state was filled by the stock model, or is not the one that a call inside detlab.deterministic "
                    "returned. Start without a state, and pass on what the call returns."
                )
            setattr(state[4], _MARK, True)
        padding: Padding = getattr(self.session.calls, "padding", None) or Padding(None)
        return padding.rows(hidden.shape[0], None, hidden.shape[1])

    def shift(self, hidden: Tensor, kept: Tensor | None, rows: Rows | None) -> Tensor:
        """Each token's predecessor, as the layer saw it; writes the last real one to ``kept``, [batch, hidden]."""
        x = pack(rows, hidden)
        first = torch.zeros_like(x[:, 0]) if kept is None else kept.clone()
        whole = torch.cat([first.unsqueeze(1), x], 1)
        if kept is not None:
            last = whole[:, -1] if rows is None else whole[torch.arange(len(x), device=x.device), rows.counts]
            kept.copy_(last)
        return unpack(rows, whole[:, :-1])

    def __call__(self, hidden: Tensor, state: Any = None, use_cache: bool = False) -> tuple[Tensor, Any]:
        """As the module's forward: [batch, tokens, hidden]; which tokens are padding is known from the model's call."""
        m = self.module
        rows = self.rows(hidden, state)
        shifted = self.shift(hidden, None if state is None else state[1][:, :, m.layer_id], rows)
        mixed = [hidden * mix + shifted * (1 - mix) for mix in (m.time_mix_key, m.time_mix_value, m.time_mix_receptance)]
        keys, values = (pack(rows, t).float().transpose(0, 1) for t in (m.key(mixed[0]), m.value(mixed[1])))
        receptance = sigmoid(m.receptance(mixed[2]).float())
        if state is None:
            before = keys.new_zeros(3, *keys.shape[1:])
            before[2] = -1e30
        else:
            before = torch.stack([part[:, :, m.layer_id] for part in state[2:]])
        out, after = wkv(self.decay, m.time_first.float(), keys, values, before, rows)
        if state is not None:
            for part, value in zip(state[2:], after, strict=True):
                part[:, :, m.layer_id] = value
        out = unpack(rows, out.transpose(0, 1)) * receptance
        return m.output(out.to(hidden.dtype)), state


class RwkvFeedForwardPart(RwkvPart):
    """RWKV's channel mixing, which sees the token before, too."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        MixerPart.__init__(self, module, name, session)

    def refresh(self) -> None:
        """Nothing is made of its parameters."""

    def __call__(self, hidden: Tensor, state: Any = None, use_cache: bool = False) -> tuple[Tensor, Any]:
        """As the module's forward."""
        m = self.module
        rows = self.rows(hidden, state)
        shifted = self.shift(hidden, None if state is None else state[0][:, :, m.layer_id], rows)
        key, receptance = (hidden * mix + shifted * (1 - mix) for mix in (m.time_mix_key, m.time_mix_receptance))
        value = m.value(torch.square(torch.relu(m.key(key))))
        return sigmoid(m.receptance(receptance).float()).to(hidden.dtype) * value, state


# ------------------------------------------------------------------------------------------------------- delta rule
class DeltaRulePart(MixerPart):
    """The gated delta rule: each head's state is a matrix from keys to values."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        super().__init__(module, name, session)
        self.refresh()

    def refresh(self) -> None:
        """Computes the rates as they are now."""
        self.rates = -exp(self.module.A_log.detach().float())

    def __call__(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """As the module's forward: [batch, tokens, hidden]; which tokens are padding is known from the model's call."""
        m = self.module
        layer, rows = self._begin(hidden_states, cache, kwargs)
        x, gate, rate, step = _projected(m, hidden_states)
        x = _activated(m, self._convolve(m.conv1d, pack(rows, x), layer, rows)).transpose(0, 1)
        queries, keys, values = torch.split(x, [m.key_dim, m.key_dim, m.value_dim], -1)
        values = split_heads(values, m.num_v_heads)
        # [tokens, n, batch, heads]
        shared = m.num_v_heads // m.num_k_heads
        queries, keys = (
            _normed(split_heads(t, m.num_k_heads)).repeat_interleave(shared, 2).movedim(-1, 1).contiguous()
            for t in (queries, keys)
        )
        rate, step = (pack(rows, t).float().transpose(0, 1) for t in (rate, step))
        rate = sigmoid(rate) * (2.0 if getattr(m, "allow_neg_eigval", False) else 1.0)
        decay = exp(self.rates * softplus(step + m.dt_bias.float()))
        state = layer.get("state", hidden_states.shape[0])
        if state is None:
            state = values.new_zeros(m.head_k_dim, *values.shape[1:])
        y, state = gated_delta_rule(decay, rate, keys, values, queries * m.head_k_dim**-0.5, state, rows)
        layer.keep("state", state, 1)
        y = split_heads(unpack(rows, y.transpose(0, 1).flatten(2)), m.num_v_heads)
        norm, out = (m.norm, m.out_proj) if hasattr(m, "norm") else (m.o_norm, m.o_proj)
        y = norm(y, gate.reshape(y.shape)).flatten(2)
        result: Tensor = out(y.to(hidden_states.dtype))
        return result


def _normed(x: Tensor) -> Tensor:
    """Divided by its length, over the last dimension."""
    return x / torch.sqrt(tree_sum(x * x, -1).unsqueeze(-1) + 1e-6)


def _activated(module: nn.Module, x: Tensor) -> Tensor:
    if module.activation not in ("silu", "swish"):
        raise UsageError(f"{type(module).__name__} with activation {module.activation!r} is not covered by the invariant tier.")
    return silu(x)


def _projected(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values in one, the gate, the rate and the step: [batch, tokens, ...] each."""
    if hasattr(m, "in_proj_qkvz"):
        queries, keys, values, gate, rate, step = m.fix_query_key_value_ordering(m.in_proj_qkvz(x), m.in_proj_ba(x))
        return torch.cat([t.flatten(2) for t in (queries, keys, values)], -1), gate, rate, step
    if hasattr(m, "in_proj_qkv"):
        return m.in_proj_qkv(x), m.in_proj_z(x), m.in_proj_b(x), m.in_proj_a(x)
    return torch.cat([m.q_proj(x), m.k_proj(x), m.v_proj(x)], -1), m.g_proj(x), m.b_proj(x), m.a_proj(x)
