"""Is a generation config greedy? Each setting that brings randomness back, or makes a greedy run not greedy.

Greedy means: one text, and at each position the token with the largest logit, computed in one way, until the length asked for
or an end token. A setting can break that in five ways:

- *draws*: tokens are drawn, or would be as soon as ``do_sample`` is on;
- *searches*: another search than the largest logit of one text;
- *edits*: the logits are changed before the largest is taken;
- *computes*: the same logits are computed by other operations, so their bits may differ and a near tie may flip;
- *stops*: where the text ends depends on the clock or on the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from detlab.errors import UsageError

__all__ = ["RULES", "ConfigWarning", "Rule", "check_generation_config"]


@dataclass(frozen=True)
class ConfigWarning:
    """One setting that is not greedy.

    Attributes:
        setting: its name in the generation config.
        value: what it is.
        breaks: "draws", "searches", "edits", "computes" or "stops"; the module's docstring says what these mean.
        why: what it does, one sentence.
        set_to: the value that is greedy.
    """

    setting: str
    value: Any
    breaks: str
    why: str
    set_to: Any

    def __str__(self) -> str:
        return f"{self.setting}={self.value!r}: {self.why} Set {self.setting}={self.set_to!r}."


@dataclass(frozen=True)
class Rule:
    """A setting's greedy value. None (unset) is greedy too, and so is transformers' default, given here as ``set_to``."""

    breaks: str
    set_to: Any
    why: str


_WARPS = "has no effect while do_sample is off, and shapes the draw as soon as it is on"

RULES: dict[str, Rule] = {
    # draws
    "do_sample": Rule("draws", False, "draws each token from a generator that the whole batch shares."),
    "temperature": Rule("draws", 1.0, f"{_WARPS}; a temperature near 0 is not greedy decoding."),
    "top_k": Rule("draws", 50, f"{_WARPS}; together with penalty_alpha it switches to contrastive search."),
    "top_p": Rule("draws", 1.0, f"{_WARPS}."),
    "min_p": Rule("draws", None, f"{_WARPS}."),
    "top_h": Rule("draws", None, f"{_WARPS}."),
    "typical_p": Rule("draws", 1.0, f"{_WARPS}."),
    "epsilon_cutoff": Rule("draws", 0.0, f"{_WARPS}."),
    "eta_cutoff": Rule("draws", 0.0, f"{_WARPS}."),
    # searches
    "num_beams": Rule("searches", 1, "searches several texts at once, for the best sum; topk leaves ties between them open."),
    "early_stopping": Rule("searches", False, "decides when a beam search ends; one beam needs none of it."),
    "length_penalty": Rule("searches", 1.0, "weighs finished beams by their length; one beam needs none of it."),
    "num_beam_groups": Rule("searches", 1, "searches groups of beams that must differ."),
    "diversity_penalty": Rule("searches", 0.0, "makes groups of beams differ."),
    "num_return_sequences": Rule("searches", 1, "asks for several texts; greedy decoding has one."),
    "constraints": Rule("searches", None, "searches texts that meet constraints."),
    "force_words_ids": Rule("searches", None, "searches texts that hold given words."),
    "penalty_alpha": Rule("searches", None, "switches to contrastive search where top_k is above 1."),
    "dola_layers": Rule("searches", None, "takes the largest difference between two layers' logits."),
    # edits
    "repetition_penalty": Rule("edits", 1.0, "changes the logits of tokens that occurred, the prompt's and the padding's too."),
    "encoder_repetition_penalty": Rule("edits", 1.0, "changes the logits of the encoder's tokens."),
    "no_repeat_ngram_size": Rule("edits", 0, "forbids tokens that would repeat a group of tokens."),
    "encoder_no_repeat_ngram_size": Rule("edits", 0, "forbids tokens that would repeat a group of the encoder's tokens."),
    "bad_words_ids": Rule("edits", None, "forbids tokens."),
    "suppress_tokens": Rule("edits", None, "forbids tokens."),
    "begin_suppress_tokens": Rule("edits", None, "forbids tokens at the first position."),
    "sequence_bias": Rule("edits", None, "adds to the logits of chosen tokens."),
    "forced_bos_token_id": Rule("edits", None, "forces the first token."),
    "forced_eos_token_id": Rule("edits", None, "forces the last token."),
    "exponential_decay_length_penalty": Rule("edits", None, "raises the end token's logit with the length."),
    "min_length": Rule("edits", 0, "forbids the end token up to a length in which the row's padding counts."),
    "min_new_tokens": Rule("edits", None, "forbids the end token in the first new tokens."),
    "guidance_scale": Rule("edits", None, "mixes the logits with those of another run of the model."),
    "watermarking_config": Rule("edits", None, "changes the logits to leave a mark in the text."),
    "remove_invalid_values": Rule("edits", False, "replaces NaN and infinite logits, so that a broken run looks whole."),
    "renormalize_logits": Rule("edits", None, "passes the scores through log_softmax, where near ties can round to equal."),
    "token_healing": Rule("edits", None, "generates the end of the prompt anew before it goes on."),
    # computes
    "use_mtp": Rule("computes", None, "checks guessed tokens several at a time, in calls of other shapes."),
    "prompt_lookup_num_tokens": Rule("computes", None, "checks guessed tokens several at a time, in calls of other shapes."),
    "assistant_early_exit": Rule("computes", None, "lets the model's first layers guess, and checks several tokens at a time."),
    "assistant_ensemble_weight": Rule("computes", None, "mixes the assistant's probabilities into the model's."),
    "speculation_type": Rule("computes", None, "checks guessed tokens several at a time, in calls of other shapes."),
    "use_cache": Rule("computes", True, "computes the whole text anew for each token, in calls of other shapes."),
    "cache_implementation": Rule(
        "computes", None, "keeps keys and values in another layout; on a GPU a static one also compiles the model."
    ),
    "prefill_chunk_size": Rule("computes", None, "computes the prompt in pieces, in calls of other shapes."),
    "compile_config": Rule("computes", None, "compiles the model's forward, which fuses and reorders operations."),
    "continuous_batching_config": Rule("computes", None, "packs tokens of several requests into calls of changing shapes."),
    "low_memory": Rule("computes", None, "is for a search that runs beams one after another."),
    # stops
    "max_time": Rule("stops", None, "ends the text by the clock."),
    "max_length": Rule("stops", None, "counts the row's padding: mates move the text's end; give max_new_tokens instead."),
}


def check_generation_config(config: GenerationConfig) -> list[ConfigWarning]:
    """Finds every setting of a generation config that is not greedy (row B2 of the requirements).

    What is not in the config cannot be seen: an ``assistant_model``, custom logits processors, a model's own ``generate``.
    ``generate`` fills what is unset from ``model.generation_config``: check that one as well.

    Args:
        config: a transformers GenerationConfig, such as ``model.generation_config``.

    Returns:
        Warnings in the order of `RULES`; none where each setting is unset or has its greedy value.

    Raises:
        UsageError: it is not a GenerationConfig.

    >>> for warning in check_generation_config(GenerationConfig(do_sample=True, num_beams=4)):
    ...     print(warning.setting, "->", warning.set_to)
    do_sample -> False
    num_beams -> 1
    """
    if not isinstance(config, GenerationConfig):
        raise UsageError(
            f"check_generation_config takes a transformers GenerationConfig; got {type(config).__name__}. "
            "Of a model give model.generation_config."
        )
    found = []
    for setting, rule in RULES.items():
        value = getattr(config, setting, None)
        if value is None or value == rule.set_to or _is_neutral(setting, value):
            continue
        found.append(ConfigWarning(setting, value, rule.breaks, rule.why, rule.set_to))
    return found


def _is_neutral(setting: str, value: Any) -> bool:
    """Other values that do nothing: switches set to False, and lists of nothing."""
    if setting == "top_k":
        return bool(value == 0)
    if setting == "guidance_scale":
        return bool(value == 1)
    return value is False and setting not in ("use_cache",) or isinstance(value, (list, dict)) and not value
