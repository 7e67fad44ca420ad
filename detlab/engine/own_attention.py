"""Attention that models compute themselves: each part is the module's forward, with the tier's attention in its middle.

The module's projections are called as they are (they have parts of their own); what lies between, scores, masks, softmax and
weighted values, is the attention that all others have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from detlab.engine.session import Session
from detlab.engine.step import Step
from detlab.engine.watch import NoCopy
from detlab.errors import UsageError

__all__ = ["OwnAttention", "own_attention"]


class OwnAttention(NoCopy):
    """The forward of an attention module of a kind that does not ask transformers for its attention."""

    is_open = True  # its projections have parts of their own, and what else it computes is not the tier's

    def __init__(self, module: Any, name: str, session: Session) -> None:
        self.module, self.name = module, name
        self.implementation = "detlab_invariant" if session.options.is_padded else "detlab_unpadded"
        self.compute = _KINDS[_kind(module)]
        self.model = session.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward."""
        if kwargs.get("output_attentions"):
            raise UsageError("output_attentions is not available inside detlab.deterministic: no weights are kept.")
        return self.compute(self, self.module, *args, **kwargs)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: Any, cache: Any, index: int | None, scaling: float,
               **more: Any) -> Tensor:  # fmt: skip
        """Stores the new keys and values and attends.

        Args:
            query: [batch, heads, tokens, size].
            keys, values: [batch, KV heads, tokens, size], of the new tokens.
            step: what the model has in place of a mask.
            cache: the call's, or None.
            index: the layer's place in it.
            scaling: of the scores.
            more: what else the tier's attention takes.

        Returns:
            [batch, tokens, heads * size].
        """
        new_keys: Any = keys
        new_values: Any = values
        if cache is not None:
            new_keys, new_values = cache.update(keys, values, index)
        interface: Any = ALL_ATTENTION_FUNCTIONS
        attention = interface[self.implementation]  # as it is registered now: coverage marks it
        out, _ = attention(self.module, query, new_keys, new_values, step, scaling=scaling, **more)
        return out.reshape(*out.shape[:2], -1)  # type: ignore[no-any-return]

    def alone(self, *others: Any) -> None:
        """Refuses what comes from elsewhere than the text: an encoder, a prompt of keys."""
        if any(other is not None for other in others):
            raise UsageError(f"{self.name}: attention to another sequence is not covered by the invariant tier.")


def own_attention(module: nn.Module) -> bool:
    """Whether a module is of a kind with a part here."""
    return _kind(module) in _KINDS and type(module).__module__.startswith("transformers.models.")


def _kind(module: nn.Module) -> str:
    """The class's name, with the model's where it says too little."""
    name = type(module).__name__
    return name if name != "Attention" else f"{type(module).__module__.rpartition('.')[2]}.{name}"


def _heads(x: Tensor, size: int) -> Tensor:
    """[batch, tokens, heads * size] as [batch, heads, tokens, size]."""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def _bloom(part: OwnAttention, module: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any,
           layer_past: Any = None, use_cache: bool = False, **_: Any) -> Any:  # fmt: skip
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise UsageError(f"{part.name}: slow_but_exact cuts the output's product in parts, which the tier does not cover.")
    query, keys, values = module._reshape(module.query_key_value(hidden_states))
    slopes = _get_alibi_slopes(module.num_heads, hidden_states.device)
    out = part.attend(query, keys, values, attention_mask, layer_past, module.layer_idx, module.inv_norm_factor, slopes=slopes)
    return residual + module.dense(out), None


def _mpt(part: OwnAttention, module: Any, hidden_states: Tensor, position_bias: Tensor, cache: Any = None,
         attention_mask: Any = None, **_: Any) -> Any:  # fmt: skip
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, keys, values = (_heads(x, module.head_dim) for x in mixed.chunk(3, dim=2))
    # The bias grows by the slope with each key, up to 0 at the last: to a softmax, slope * position is the same.
    slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
    out = part.attend(query, keys, values, attention_mask, cache, module.layer_idx, module.softmax_scale, slopes=slopes)
    return module.out_proj(out), None


def _falcon(part: OwnAttention, module: Any, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any,
            position_ids: Any = None, layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False,
            position_embeddings: Any = None, **_: Any) -> Any:  # fmt: skip
    from transformers.models.falcon import modeling_falcon as home

    turn: Any = home.apply_rotary_pos_emb
    if alibi is not None:
        raise UsageError(
            f"{part.name}: Falcon's ALiBi rounds each slope * position to bfloat16 in every dtype, which the tier's does not; "
            "it covers Falcon with rotary embeddings."
        )
    query, keys, values = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
    query, keys = turn(query, keys, *position_embeddings)
    out = part.attend(query, keys, values, attention_mask, layer_past, module.layer_idx, module.head_dim**-0.5)
    return module.dense(out), None


def _gpt_neo(part: OwnAttention, module: Any, hidden_states: Tensor, attention_mask: Any = None, layer_past: Any = None,
             use_cache: bool = False, **_: Any) -> Any:  # fmt: skip
    x = hidden_states
    query, keys, values = (_heads(p(x), module.head_dim) for p in (module.q_proj, module.k_proj, module.v_proj))
    step = attention_mask
    if module.attention_type == "local":
        step = step.within(module.config.window_size)
    return module.out_proj(part.attend(query, keys, values, step, layer_past, module.layer_id, 1.0)), None


def _gpt_neox_japanese(part: OwnAttention, module: Any, hidden_states: Tensor, attention_mask: Any, position_ids: Any = None,
                       layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False,
                       position_embeddings: Any = None, **_: Any) -> Any:  # fmt: skip
    from transformers.models.gpt_neox_japanese import modeling_gpt_neox_japanese as home

    turn: Any = home.apply_rotary_pos_emb
    query, keys, values = _heads(module.query_key_value(hidden_states), 3 * module.head_size).chunk(3, -1)
    turned = module.rotary_ndims
    some, other = turn(query[..., :turned], keys[..., :turned], *position_embeddings)
    query, keys = torch.cat([some, query[..., turned:]], -1), torch.cat([other, keys[..., turned:]], -1)
    out = part.attend(query, keys, values, attention_mask, layer_past, module.layer_idx, 1 / module.norm_factor)
    return module.dense(out), None, module.dense_bias


def _bert(part: OwnAttention, module: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any,
          encoder_hidden_states: Any = None, cache: Any = None, output_attentions: bool = False, **_: Any) -> Any:  # fmt: skip
    """BERT's descendants with the old attention, which is given an encoder's states and a cache by place or by name."""
    found = dict(zip(("encoder_hidden_states", "cache", "output_attentions"), args, strict=False))
    part.alone(found.get("encoder_hidden_states", encoder_hidden_states))
    x, size = hidden_states, module.attention_head_size
    query, keys, values = (_heads(p(x), size) for p in (module.query, module.key, module.value))
    cache = found.get("cache", cache)
    return part.attend(query, keys, values, attention_mask, cache, module.layer_idx, 1 / math.sqrt(size)), None


def _roformer(part: OwnAttention, module: Any, hidden_states: Tensor, attention_mask: Any = None, sinusoidal_pos: Any = None,
              encoder_hidden_states: Any = None, cache: Any = None, output_attentions: bool = False,
              **_: Any) -> Any:  # fmt: skip
    part.alone(encoder_hidden_states)
    x, size = hidden_states, module.attention_head_size
    query, keys, values = (_heads(p(x), size) for p in (module.query, module.key, module.value))
    # The model counts padding on the left as positions: to a turn that is relative, other roundings of the same answer.
    kind = "RoFormerSinusoidalPositionalEmbedding"
    model: Any = part.model()
    table = next(m.weight for m in model.modules() if type(m).__name__ == kind)
    if not isinstance(attention_mask, Step):
        raise UsageError(f"{part.name}: the tier covers RoFormer as a causal language model: is_decoder=True.")
    turns = torch.nn.functional.embedding(attention_mask.positions(), table)[:, None]
    if module.rotary_value:
        query, keys, values = module.apply_rotary_position_embeddings(turns, query, keys, values)
    else:
        query, keys = module.apply_rotary_position_embeddings(turns, query, keys)
    return part.attend(query, keys, values, attention_mask, cache, module.layer_idx, 1 / math.sqrt(size)), None


def _bart(part: OwnAttention, module: Any, hidden_states: Tensor, key_value_states: Any = None, cache: Any = None,
          attention_mask: Any = None, attn_prompt: Any = None, **_: Any) -> Any:  # fmt: skip
    """BART's descendants with the old attention."""
    part.alone(key_value_states, None if isinstance(attn_prompt, bool) else attn_prompt)
    x = hidden_states
    query = module.q_proj(x) * module.scaling
    query, keys, values = (_heads(y, module.head_dim) for y in (query, module.k_proj(x), module.v_proj(x)))
    cache = getattr(cache, "self_attention_cache", cache)
    return module.out_proj(part.attend(query, keys, values, attention_mask, cache, module.layer_idx, 1.0)), None


def _diffllama(part: OwnAttention, module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None,
               cache: Any = None, **_: Any) -> Any:  # fmt: skip
    """Two softmaxes, of which one is taken from the other: both weigh the same values, so that they are heads side by side."""
    from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

    x = hidden_states
    query, keys, values = (_heads(p(x), module.head_dim) for p in (module.q_proj, module.k_proj, module.v_proj))
    query, keys = apply_rotary_pos_emb(query, keys, *position_embeddings)
    # Each half of the values' heads serves all heads; what stock computes in two calls is here one of twice the size.
    values = torch.cat([half.repeat(1, 2, 1, 1) for half in values.chunk(2, 1)], -1)
    out = part.attend(query, keys, values, attention_mask, cache, module.layer_idx, module.scaling)
    first, second = out.view(*out.shape[:2], -1, 2 * module.head_dim).chunk(2, 2)
    lambdas = [
        torch.exp(torch.sum(q * k, dim=-1, dtype=torch.float32)).to(x.dtype)
        for q, k in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    ]
    out = first - (lambdas[0] - lambdas[1] + module.lambda_init) * second
    out = (1 - module.lambda_init) * module.groupnorm(out)
    return module.o_proj(out.reshape(*out.shape[:2], -1)), None


def _openai_gpt(part: OwnAttention, module: Any, x: Tensor, attention_mask: Tensor | None = None,
                output_attentions: bool = False) -> Any:  # fmt: skip
    """The first GPT keeps no cache, and makes its masks itself: additive ones of padding, [batch, 1, 1, tokens]."""
    query, keys, values = (_heads(y, x.shape[-1] // module.n_head) for y in module.c_attn(x).split(module.split_size, 2))
    real = None if attention_mask is None else attention_mask[:, 0, 0] == 0
    step = Step(x.shape[0], x.shape[1], 0, real, None, x.dtype, x.device)
    scaling = query.shape[-1] ** -0.5 if module.scale else 1.0
    return [module.c_proj(part.attend(query, keys, values, step, None, None, scaling))]


#: Class of the module -> what computes its forward.
_KINDS: dict[str, Callable[..., Any]] = {
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
    "GPTNeoSelfAttention": _gpt_neo,
    "GPTNeoXJapaneseAttention": _gpt_neox_japanese,
    "MegatronBertSelfAttention": _bert,
    "RemBertSelfAttention": _bert,
    "RoFormerSelfAttention": _roformer,
    "XGLMAttention": _bart,
    "TrOCRAttention": _bart,
    "MvpAttention": _bart,
    "DiffLlamaAttention": _diffllama,
    "modeling_openai.Attention": _openai_gpt,
}
