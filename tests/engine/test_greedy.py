"""Which settings of a generation config are not greedy."""

import logging

import pytest
import torch
from transformers import GenerationConfig

import detlab
from detlab.engine.greedy import RULES, check_generation_config
from detlab.errors import UsageError

# A value of each setting that is not greedy.
VALUES = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_h": 0.5,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "num_beams": 4,
    "early_stopping": True,
    "length_penalty": 0.5,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "num_return_sequences": 2,
    "constraints": ["x"],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "repetition_penalty": 1.2,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[5]],
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "sequence_bias": {(5,): 1.0},
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "exponential_decay_length_penalty": (5, 1.1),
    "min_length": 5,
    "min_new_tokens": 5,
    "guidance_scale": 1.5,
    "watermarking_config": object(),
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "token_healing": True,
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "use_cache": False,
    "cache_implementation": "static",
    "prefill_chunk_size": 16,
    "compile_config": object(),
    "continuous_batching_config": object(),
    "low_memory": True,
    "max_time": 1.0,
    "max_length": 50,
}

# Settings that leave a greedy run as it is: where it stops by count or by text, names of tokens, what is returned, sizes,
# and details of modes that have a rule of their own.
HARMLESS = {
    "max_new_tokens",
    "stop_strings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "cache_config",
    "max_cache_len",
    "disable_compile",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "max_matching_ngram_size",
    "_from_model_config",
    "transformers_version",
}


def config_with(**settings) -> GenerationConfig:
    """Set past transformers' own checks, which refuse some values that stand alone."""
    config = GenerationConfig()
    vars(config).update(settings)
    return config


def test_every_setting_of_transformers_is_judged():
    assert set(vars(GenerationConfig())) == set(RULES) | HARMLESS
    assert list(VALUES) == list(RULES)


@pytest.mark.parametrize("setting", VALUES)
def test_a_setting_that_is_not_greedy_is_named(setting):
    (warning,) = check_generation_config(config_with(**{setting: VALUES[setting]}))
    assert (warning.setting, warning.value) == (setting, VALUES[setting])
    assert warning.breaks in ("draws", "searches", "edits", "computes", "stops")
    assert warning.why.endswith(".") and warning.why.count(". ") == 0
    assert str(warning) == f"{setting}={VALUES[setting]!r}: {warning.why} Set {setting}={warning.set_to!r}."
    assert check_generation_config(config_with(**{setting: warning.set_to})) == []


def test_what_is_unset_or_at_transformers_default_is_greedy():
    assert check_generation_config(GenerationConfig()) == []
    defaults = {k: v for k, v in GenerationConfig._get_default_generation_params().items() if k != "max_length"}
    assert check_generation_config(config_with(**defaults)) == []
    neutral = {"top_k": 0, "guidance_scale": 1.0, "renormalize_logits": False, "bad_words_ids": [], "token_healing": False}
    assert check_generation_config(config_with(**neutral)) == []


def test_all_warnings_come_in_the_order_of_the_rules_and_undo_them_all():
    config = config_with(**VALUES)
    warnings = check_generation_config(config)
    assert [warning.setting for warning in warnings] == list(RULES)
    for warning in warnings:
        setattr(config, warning.setting, warning.set_to)
    assert check_generation_config(config) == []


def test_what_the_check_passes_takes_the_largest_logit_at_each_position(caplog):
    model, _ = detlab.load_model("tiny-llama")
    ids = torch.tensor([[72, 105, 33]])
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, num_beams=2, repetition_penalty=1.3, top_k=5)
    assert len(check_generation_config(config)) == 6
    for warning in check_generation_config(config):
        setattr(config, warning.setting, warning.set_to)
    config.max_new_tokens = 6
    with caplog.at_level(logging.WARNING, logger="transformers"):
        config.validate()
    assert not caplog.records
    found = model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], -1)
    assert found.tolist() == ids.tolist()


def test_something_else_is_refused():
    with pytest.raises(UsageError, match=r"takes a transformers GenerationConfig; got dict\. Of a model give model\.gen"):
        check_generation_config({"do_sample": True})
