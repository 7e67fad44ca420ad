"""Every causal language model of transformers, tiny and random, from one generic table of small sizes."""

from __future__ import annotations

import importlib
import zlib
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["build", "families"]

#: Sizes by the names under which configs keep them; a config takes those it has.
SMALL: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"], 64),
    **dict.fromkeys(["emb_dim", "model_dim", "attention_hidden_size", "dim_model", "lru_width"], 64),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"], 128),
    **dict.fromkeys(["dim_ff", "dff", "shared_expert_intermediate_size", "shared_intermediate_size", "block_ff_dim"], 128),
    **dict.fromkeys(["intermediate_size_mlp", "expert_ffn_hidden_size", "dense_intermediate_size", "mlp_dim"], 128),
    **dict.fromkeys(["moe_intermediate_size", "expert_dim", "moe_shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"], 4),
    **dict.fromkeys(["swa_num_attention_heads", "index_n_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "multi_query_group_num", "swa_num_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "dim_head", "kv_channels", "global_head_dim", "swa_head_dim", "index_head_dim"], 16),
    **dict.fromkeys(["q_lora_rank", "o_lora_rank"], 32),
    **dict.fromkeys(["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "swa_v_head_dim"], 16),
    **dict.fromkeys(["rotary_dim"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"], 512),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "moe_top_k"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["sliding_window", "window_size", "attention_window_size", "local_attention"], 32),
    **dict.fromkeys(["first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"], 1),
    **dict.fromkeys(["attention_chunk_size"], 32),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads"], 8),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim", "mamba_d_state", "state_size", "ssm_state_size"], 16),
    **dict.fromkeys(["mamba_d_ssm"], 128),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2),
    **dict.fromkeys(["mamba_chunk_size", "chunk_size"], 16),
    "vocab_size": 260,
    "vocab_size_per_layer_input": 260,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: What a family needs besides, or instead; None takes a name of SMALL out.
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_assistant": {"hidden_size_per_layer_input": 0},
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4}},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "layer_types": None},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 16},
    "mamba2": {"num_heads": 8},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": None},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "xlnet": {"max_position_embeddings": None},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_hidden_layers": 3,
               "n_mamba_heads": 8, "mamba_d_state": 16, "num_key_value_heads": 4, "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def families() -> dict[str, str]:
    """Model type -> class: of several types of one class, the one that the class's own config names."""
    found: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        own = getattr(getattr(transformers, name, None), "config_class", None)
        if own is not None and (name not in found.values() or own.model_type == kind):
            found = {other: cls for other, cls in found.items() if cls != name} | {kind: name}
    return dict(sorted(found.items()))


def shrink(kind: str) -> Any:
    """The family's config, small."""
    if kind == "blt":  # three models in one, each with sizes of its own
        raise ValueError("a model of bytes, with two more models around it")
    cls = CONFIG_MAPPING[kind]
    default = cls()
    if default.get_text_config() is not default:
        raise ValueError("a model of text and something else")
    have = default.to_dict()
    settable = {name for name in have if not isinstance(getattr(cls, name, None), property)}
    wanted = {name: value for name, value in SMALL.items() if name in settable}
    types = have.get("layer_types")
    if types and len(set(types)) > 1:  # one layer of each kind, the last one twice
        kinds = list(dict.fromkeys(types))
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            if name in wanted:
                wanted[name] = len(kinds)
        wanted["layer_types"] = kinds
    more = OVERRIDES.get(kind, {})
    wanted = {name: value for name, value in (wanted | more).items() if value is not None}
    if "qk_rope_head_dim" in wanted:  # there it is the size of what turns
        wanted.pop("head_dim", None)
        if "num_key_value_heads" in wanted:
            wanted["num_key_value_heads"] = 4
    for name in default.attribute_map:  # two names of one thing: the config's own
        if name not in more:
            wanted.pop(name, None)
    return cls(**wanted)


def build(kind: str) -> Any:
    """A family's model in float32, with weights whose bits are the same on every machine."""
    config = shrink(kind)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    name = families()[kind]
    model = getattr(transformers, name)(config)
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    redraw(model)
    return model.eval().requires_grad_(False)


def redraw(model: Any) -> None:
    """Draws all matrices anew, and moves each vector a little from where it starts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = draw(*parameter.shape, seed=zlib.crc32(name.encode()))
            if parameter.ndim >= 2:
                parameter.copy_(noise * scale(parameter))
            else:
                parameter.copy_(parameter.nan_to_num() + 0.1 * noise)


def draw(*shape: int, seed: int) -> Tensor:
    """Uniform numbers in (-1, 1): whole numbers first, since the bits of ``randn`` follow the instruction set."""
    integers = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return (2 * integers + 1).float() / 2**16


def scale(parameter: Tensor) -> float:
    """Products of such weights keep the size of what they are applied to."""
    return float((3 / max(parameter.shape[-2:])) ** 0.5)


def module_of(kind: str) -> Any:
    """The module that a family's model is written in."""
    return importlib.import_module(getattr(transformers, families()[kind]).__module__)
