"""Layers that mix tokens by a recurrence or a short convolution, in place of attention: Mamba, Mamba 2 and LFM2.

Each part is the forward of the model's own module: it calls the module's projections, activations and norms, and computes
what lies between with `scans`, in float32. Modules are called in the layout that the model has; in between, each row's real
tokens are moved to the front, so that padding takes part in nothing and leaves no state, on whichever side it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from detlab.engine.cache import StateLayer
from detlab.engine.elementwise import is_activation
from detlab.engine.linear import CanonicalLinear
from detlab.engine.padding import Padding
from detlab.engine.scans import Rows, causal_convolution, exp, selective_scan, silu, softplus, tree_sum
from detlab.engine.session import Session
from detlab.engine.watch import NoCopy
from detlab.errors import UsageError

__all__ = [
    "GatedNorm",
    "Mamba2Part",
    "MambaPart",
    "MixerPart",
    "ShortConvolutionPart",
    "ZambaPart",
    "is_gated_norm",
    "pack",
    "split_heads",
    "unpack",
]


class MixerPart(NoCopy):
    """The forward of a module that keeps a state."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        self.module, self.name, self.session = module, name, session
        self.owners: list[nn.Module] = [module]
        activation = getattr(module, "act", None) or getattr(module, "act_fn", None)
        if activation is not None and not is_activation(activation):
            raise UsageError(f"{name}: the activation {type(activation).__name__} is not known to work element by element.")

    def refresh(self) -> None:
        """Makes anew what was made from the module's parameters."""

    def tune(self) -> None:
        """Looks up the rules for the number of threads now set."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward."""
        raise NotImplementedError

    def _begin(self, x: Tensor, cache: Any, kwargs: dict[str, Any]) -> tuple[StateLayer, Rows | None]:
        """Where the state is kept, and which tokens are real, for a call with [batch, tokens, size]."""
        for packed in ("seq_idx", "cu_seq_lens_q", "cu_seqlens"):
            if kwargs.get(packed) is not None:
                raise UsageError(f"{self.name}: packed sequences ({packed}) are not covered by the invariant tier.")
        layer = StateLayer()
        if cache is not None:
            index = self._index()
            found: Any = cache.layers[index] if index < len(cache.layers) else None
            layer = found
            if not isinstance(found, StateLayer):
                raise UsageError(
                    f"{self.name} keeps a state, and this cache has no place for one. Make it with "
                    "DynamicCache(config=model.config)."
                )
        padding: Padding = getattr(self.session.calls, "padding", None) or Padding(None)
        rows = padding.rows(x.shape[0], layer.stepped, x.shape[1])
        layer.stepped += x.shape[1]
        return layer, rows

    def _index(self) -> int:
        """The layer's number in the cache."""
        return int(self.module.layer_idx)

    def _convolve(self, conv: Any, x: Tensor, layer: StateLayer, rows: Rows | None) -> Tensor:
        """The module's convolution over time of [batch, tokens, channels], real tokens in front; float32."""
        weight = conv.weight[:, 0]
        window = layer.get("window", x.shape[0])
        if window is None:
            window = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
        out, window = causal_convolution(window, x, weight, conv.bias, rows)
        layer.keep("window", window)
        return out


def pack(rows: Rows | None, x: Tensor) -> Tensor:
    """Each row's real tokens, moved to its front: [batch, tokens, size]."""
    return x if rows is None else rows.pack(x)


def unpack(rows: Rows | None, x: Tensor) -> Tensor:
    """The real tokens, moved back to where they were."""
    return x if rows is None else rows.unpack(x)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., channels] -> [..., heads, channels of a head]."""
    return x.reshape(*x.shape[:-1], heads, -1)


class Mamba2Part(MixerPart):
    """A Mamba 2 mixer: heads of channels with one rate each, keys and queries shared by groups of heads."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        super().__init__(module, name, session)
        self.refresh()

    def refresh(self) -> None:
        """Computes the rates as the parameters are now."""
        self.rates = -exp(self.module.A_log.detach().float())

    def __call__(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """As the module's forward: [batch, tokens, hidden]; which tokens are padding is known from the model's call."""
        m = self.module
        layer, rows = self._begin(hidden_states, cache, kwargs)
        if hasattr(m, "mup_vector"):  # Falcon-H1 scales what goes in and what comes out of the projection
            projected = m.in_proj(hidden_states * m.ssm_in_multiplier) * m.mup_vector
        else:
            projected = m.in_proj(hidden_states)
        gate, x, steps = torch.split(projected, [m.intermediate_size, m.conv_dim, m.num_heads], -1)
        x = m.act(self._convolve(m.conv1d, pack(rows, x), layer, rows))
        scanned = self._scan(x, pack(rows, steps), layer, rows)
        y = unpack(rows, scanned)
        # The gated norm rounds as the model's does when it is given float32.
        y = m.norm(y, gate) if getattr(m, "mamba_rms_norm", True) else y * silu(gate.float())
        result: Tensor = m.out_proj(y.to(hidden_states.dtype))
        return result

    def _scan(self, x: Tensor, steps: Tensor, layer: StateLayer, rows: Rows | None) -> Tensor:
        """The recurrence over [batch, tokens, channels, keys and queries] float32 and steps [batch, tokens, heads]."""
        m = self.module
        batch, tokens, heads, groups = x.shape[0], x.shape[1], m.num_heads, m.n_groups
        x, keys, queries = torch.split(x.transpose(0, 1), [m.intermediate_size, *[groups * m.ssm_state_size] * 2], -1)
        x = x.reshape(tokens, batch, heads, -1)
        steps = softplus(steps.transpose(0, 1).float() + m.dt_bias.float()).clamp(*m.time_step_limit).unsqueeze(-1)
        by_head = [
            t.reshape(tokens, batch, groups, -1).repeat_interleave(heads // groups, 2).movedim(-1, 1).unsqueeze(-1)
            for t in (keys, queries)
        ]
        state = layer.get("state", batch)
        if state is None:
            state = x.new_zeros(m.ssm_state_size, batch, heads, x.shape[-1])
        y, state = selective_scan(
            (x * steps).unsqueeze(1), steps.unsqueeze(1), self.rates.view(1, 1, -1, 1), by_head[0], by_head[1], state, rows
        )
        layer.keep("state", state, 1)
        y += x * m.D.float().unsqueeze(-1)
        return y.view(tokens, batch, -1).transpose(0, 1).contiguous()


class MambaPart(MixerPart):
    """A Mamba mixer: every channel has rates of its own, keys and queries are shared by all channels."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        super().__init__(module, name, session)
        self.owners = [module, module.dt_proj]
        for norm in ("dt_layernorm", "b_layernorm", "c_layernorm"):  # of Falcon Mamba and Jamba
            if hasattr(module, norm) and session.wants(f"{name}.{norm}", "norm"):
                session.replace(getattr(module, norm), f"{name}.{norm}", "norm", GatedNorm(getattr(module, norm)))
                self.owners.append(getattr(module, norm))  # so that it is given no other part
        self.refresh()

    def refresh(self) -> None:
        """Computes the rates, and packs the projection of the steps, as the parameters are now."""
        self.rates = -exp(self.module.A_log.detach().float())
        # Without its bias: the sum of both, rounded to 16 bits, would lose what the product adds.
        self.steps = CanonicalLinear(self.module.dt_proj.weight.detach(), None, f"{self.name}.dt_proj",
                                     self.session.options.is_padded)  # fmt: skip

    def tune(self) -> None:
        """Looks up the rule for the number of threads now set."""
        self.steps.tune()

    def __call__(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """As the module's forward: [batch, tokens, hidden]; which tokens are padding is known from the model's call."""
        m, dtype = self.module, hidden_states.dtype
        layer, rows = self._begin(hidden_states, cache, kwargs)
        x, gate = m.in_proj(hidden_states).chunk(2, -1)
        packed = m.act(self._convolve(m.conv1d, pack(rows, x), layer, rows))
        x = unpack(rows, packed)
        steps, keys, queries = (
            part.contiguous()
            for part in m.x_proj(x.to(dtype)).split([m.time_step_rank, m.ssm_state_size, m.ssm_state_size], -1)
        )
        if hasattr(m, "dt_layernorm"):
            steps, keys, queries = m.dt_layernorm(steps), m.b_layernorm(keys), m.c_layernorm(queries)
        steps = self.steps(steps).float()
        if m.dt_proj.bias is not None:
            steps = steps + m.dt_proj.bias.float()
        steps, keys, queries = (pack(rows, t) for t in (softplus(steps), keys.float(), queries.float()))
        y = self._scan(packed, steps, keys, queries, layer, rows)
        result: Tensor = m.out_proj((unpack(rows, y) * silu(gate.float())).to(dtype))
        return result

    def _scan(self, x: Tensor, steps: Tensor, keys: Tensor, queries: Tensor, layer: StateLayer, rows: Rows | None) -> Tensor:
        """The recurrence over [batch, tokens, ...], all float32."""
        batch = x.shape[0]
        x, steps, keys, queries = (t.transpose(0, 1) for t in (x, steps, keys, queries))
        state = layer.get("state", batch)
        if state is None:
            state = x.new_zeros(keys.shape[-1], batch, x.shape[-1])
        by_state = [t.movedim(-1, 1).unsqueeze(-1) for t in (keys, queries)]
        y, state = selective_scan(
            (x * steps).unsqueeze(1), steps.unsqueeze(1), self.rates.t().unsqueeze(1), by_state[0], by_state[1], state, rows
        )
        layer.keep("state", state, 1)
        y += x * self.module.D.float()
        return y.transpose(0, 1).contiguous()


class ZambaPart(MixerPart):
    """Zamba's mixer: a Mamba mixer for each head, the heads' projections stacked."""

    def __init__(self, module: Any, name: str, session: Session) -> None:
        super().__init__(module, name, session)
        self.refresh()

    def refresh(self) -> None:
        """Computes the rates, and packs the heads' projections, as the parameters are now."""
        m, is_padded = self.module, self.session.options.is_padded
        self.rates = -exp(m.A_log.detach().float())
        self.mixed = [CanonicalLinear(w.detach(), None, f"{self.name}.x_proj_weight", is_padded) for w in m.x_proj_weight]
        self.steps = [CanonicalLinear(w.detach(), None, f"{self.name}.dt_proj_weight", is_padded) for w in m.dt_proj_weight]

    def tune(self) -> None:
        """Looks up the rules for the number of threads now set."""
        for layer in (*self.mixed, *self.steps):
            layer.tune()

    def __call__(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """As the module's forward: [batch, tokens, hidden]; which tokens are padding is known from the model's call."""
        m, dtype = self.module, hidden_states.dtype
        layer, rows = self._begin(hidden_states, cache, kwargs)
        x, gate = split_heads(m.in_proj(hidden_states), m.intermediate_size).unbind(-1)  # the two take turns
        x = m.act(self._convolve(m.conv1d, pack(rows, x), layer, rows))
        heads = split_heads(x.to(dtype), m.n_mamba_heads).unbind(-2)
        sizes = [m.time_step_rank, m.ssm_state_size, m.ssm_state_size]
        mixed = [torch.split(mix(head.contiguous()), sizes, -1) for mix, head in zip(self.mixed, heads, strict=True)]
        steps = torch.stack([step(part[0].contiguous()) for step, part in zip(self.steps, mixed, strict=True)], -2)
        steps = softplus(steps.float() + m.dt_proj_bias.float()).transpose(0, 1)
        # [tokens, n, batch, heads, 1]
        keys, queries = (
            torch.stack([part[k].float() for part in mixed], -1).movedim(0, 1).movedim(2, 1).unsqueeze(-1) for k in (1, 2)
        )
        drive = split_heads(x, m.n_mamba_heads).transpose(0, 1)
        state = layer.get("state", x.shape[0])
        if state is None:
            state = x.new_zeros(m.ssm_state_size, *drive.shape[1:])
        y, state = selective_scan((drive * steps).unsqueeze(1), steps.unsqueeze(1), self.rates.movedim(-1, 0).unsqueeze(1),
                                  keys, queries, state, rows)  # fmt: skip
        layer.keep("state", state, 1)
        y += drive * m.D.float()
        y = unpack(rows, y.transpose(0, 1).flatten(2)) * silu(gate.float())
        result: Tensor = m.out_proj(y.to(dtype))
        return result


class ShortConvolutionPart(MixerPart):
    """LFM2's block: a gated convolution over the last few tokens."""

    def __call__(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        """As the module's forward: [batch, tokens, hidden]; which tokens are padding is known from the model's call."""
        m = self.module
        layer, rows = self._begin(hidden_states, cache, kwargs)
        before, after, x = m.in_proj(hidden_states).chunk(3, -1)
        x = self._convolve(m.conv, pack(rows, before * x), layer, rows)
        result: Tensor = m.out_proj(after * unpack(rows, x).to(hidden_states.dtype))
        return result


# ------------------------------------------------------------------------------------------------------------- norms
#: Those whose gate comes after the norm, and that say so in no attribute.
_AFTER = (
    "Qwen3NextRMSNormGated",
    "Qwen3_5RMSNormGated",
    "Qwen3_5MoeRMSNormGated",
    "OlmoHybridRMSNormGated",
    "LaraMiniRMSNormGated",
)


def is_gated_norm(module: nn.Module) -> bool:
    """Whether a module is an RMS norm over groups of channels, with a gate, of a kind that is known here."""
    if not type(module).__name__.endswith("RMSNormGated") or not type(module).__module__.startswith("transformers.models."):
        return False
    if getattr(module, "activation", "silu") != "silu":
        return False
    return type(module).__name__ in _AFTER or hasattr(module, "group_size") or hasattr(module, "norm_before_gate")


class GatedNorm(NoCopy):
    """The forward of an RMS norm that may have a gate: squares are added down a fixed tree, all in float32, rounded once."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        self.has_weight = "Weightless" not in type(module).__name__  # there is one nevertheless, which the model does not use

    def __call__(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """As the module's forward: [..., channels] and its gate."""
        m, shape = self.module, hidden_states.shape
        is_after = getattr(m, "norm_before_gate", type(m).__name__ in _AFTER)
        x = hidden_states.float()
        if gate is not None and not is_after:
            x = x * silu(gate.float())
        size = getattr(m, "group_size", None) or shape[-1] // getattr(m, "n_groups", 1)
        groups = x.reshape(*shape[:-1], -1, size)
        mean = tree_sum(groups * groups, -1).unsqueeze(-1) / size
        x = (groups / torch.sqrt(mean + self.epsilon)).reshape(shape)
        if self.has_weight:
            x = x * m.weight.float()
        if gate is not None and is_after:
            x = x * silu(gate.float())
        result: Tensor = x.to(hidden_states.dtype)
        return result
