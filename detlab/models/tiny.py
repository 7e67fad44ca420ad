"""Tiny models with random weights, one of each family, and their tokenizer. No file is read.

Their weights have the same bits on every machine: integers from a generator, times one float32 constant.
(`torch.randn` would not do: its bits depend on the ISA.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from detlab.errors import MachineError, UsageError
from detlab.models.messages import first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["FAMILIES", "build_tiny", "tiny_tokenizer"]

_VOCAB = 1024
_PAD, _BOS, _EOS = 256, 257, 258  # after the 256 bytes
_TOKENS = {"pad_token_id": _PAD, "bos_token_id": _BOS, "eos_token_id": _EOS}


def _sizes(**more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": _VOCAB,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    return sizes | _TOKENS | more


def _gpt2_config() -> PretrainedConfig:
    sizes: dict[str, Any] = {"n_embd": 576, "n_inner": 1536, "n_layer": 2, "n_head": 9, "n_positions": 4096}
    # Untied, unlike the real one: a random tied model of this size repeats one token for ever.
    sizes |= {"vocab_size": _VOCAB, "tie_word_embeddings": False, **_TOKENS}
    return transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)


def _gemma3_config() -> PretrainedConfig:
    layers = [
        "sliding_attention",
        "full_attention",
    ]  # the usual pattern would leave two sliding layers
    sizes = _sizes(sliding_window=64, layer_types=layers, query_pre_attn_scalar=64, tie_word_embeddings=True)
    return transformers.Gemma3TextConfig(**sizes)


def _qwen3_moe_config() -> PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        **_sizes(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=192)
    )


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "tiny-llama": lambda: transformers.LlamaConfig(**_sizes()),
    "tiny-gpt2": _gpt2_config,
    "tiny-qwen3": lambda: transformers.Qwen3Config(**_sizes()),
    "tiny-gemma3": _gemma3_config,
    "tiny-qwen3-moe": _qwen3_moe_config,
    "tiny-mixtral": lambda: transformers.MixtralConfig(**_sizes(num_local_experts=8, num_experts_per_tok=2)),
}


def build_tiny(name: str, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """Builds the model of that name: parameters drawn in float32 and rounded to the dtype, norms the identity."""
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            FAMILIES[name](), dtype=dtype, **options
        )
    except ImportError as error:
        raise MachineError(f"attention {attention!r} cannot run here: {first_line(error)}") from error
    except ValueError as error:
        raise UsageError(f"{name} does not know attention {attention!r}: {first_line(error)}") from error
    is_tied = bool(model.config.tie_word_embeddings)
    # The first owner counts: a tied head has the embedding's weight.
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(id(weight), module)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            std = _std(weight, owners[id(weight)], is_tied)
            if std is not None:
                weight.copy_(_random_weight(f"{name}/{weight_name}", weight.shape, std))
    return model


def _std(parameter: nn.Parameter, owner: nn.Module, is_tied: bool) -> float | None:
    """Gives a parameter's standard deviation; None leaves a norm as the identity it is initialised to."""
    if isinstance(owner, nn.Embedding):
        # A tied embedding is the head too: as large as usual, it would make a random model repeat its last
        # token for ever. (Its logits are small for that: 1/32 of the other families'.)
        return 1 / (32 * math.sqrt(owner.embedding_dim)) if is_tied else 1.0
    weight = getattr(owner, "weight", parameter)  # a bias is drawn like the matrix it belongs to
    if weight.ndim < 2:
        return None
    is_conv1d = isinstance(
        owner, transformers.pytorch_utils.Conv1D
    )  # stores (in, out); all others (..., out, in)
    return 1 / math.sqrt(
        weight.shape[0 if is_conv1d else -1]
    )  # not ** -0.5: sqrt and / round alike everywhere


def _random_weight(name: str, shape: torch.Size, std: float) -> torch.Tensor:
    """Draws uniform weights, float32, whose bits depend on the name, the shape and the std alone.

    The seed is a hash of the name, so that adding a parameter leaves the others as they are. The integers are
    odd and below 2^17 in magnitude: exact in float32, symmetric, never zero. One multiplication rounds once,
    alike everywhere.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**16), 2**16, shape, generator=generator, dtype=torch.int32)
    scale = torch.tensor(
        std * math.sqrt(3.0) / 2**17, dtype=torch.float32
    )  # uniform on [-a, a]: std a/sqrt(3)
    return (2 * integers + 1).to(torch.float32) * scale


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Builds the tiny models' tokenizer: one token a byte, its id the byte's value. No file is read.

    Ids 256, 257 and 258 are padding, begin and end; those above, which only a model emits, print as `<259>`.

    >>> tiny_tokenizer()("Hi!")["input_ids"]
    [72, 105, 33]
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel spells each byte as one character: itself where it has a glyph, else one from 256 upwards.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    vocab |= dict(zip(special.values(), (_PAD, _BOS, _EOS), strict=True))
    vocab |= {f"<{token}>": token for token in range(_EOS + 1, _VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )
    fast.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return fast
