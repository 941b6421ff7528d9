"""What a model's authors set in `generation_config.json`, as sampling parameters. Knows no model."""

from collections.abc import Mapping
from typing import Any

from weft.errors import ConfigError, SamplingParamsError
from weft.inference.sampling_params import SamplingParams

# Taken over under their own names, and of them those that change sampling only, so nothing where `do_sample` is false.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_TAKEN = (*_SAMPLING, "repetition_penalty")
# Fields that say nothing about the tokens, or that weft reads elsewhere.
_INERT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("do_sample", "max_new_tokens", "transformers_version", "_from_model_config"),
    *("use_cache", "cache_implementation", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
}
_OTHER_SAMPLING = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
# Fields that do nothing at 1; all others do nothing at None, False, 0 or empty.
_NEUTRAL_AT_ONE = {
    *("typical_p", "encoder_repetition_penalty", "length_penalty"),
    *("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"),
}


def default_params(options: Mapping[str, Any], max_model_len: int) -> SamplingParams:
    """Temperature, truncation, repetition penalty and length as the file sets them; what it does not name is weft's.

    As in vLLM, HuggingFace's own default of top_k=50 is no setting of the authors: it counts where the file names it.
    `do_sample: false` is temperature 0, and all that changes sampling only is nothing then.

    Raises: ConfigError if the file sets a field that weft does not take, since dropping it would change the output, or
        one to a value that is out of range.
    """
    hint = "pass SamplingParams, for instance SamplingParams(temperature=0)"
    options = {name: value for name, value in options.items() if value is not None}
    is_greedy = options.get("do_sample") is False
    for name, value in options.items():
        if name in _TAKEN or name in _INERT or (is_greedy and name in _OTHER_SAMPLING):
            continue
        if name == "max_length" and value >= max_model_len:
            continue
        if value and not (value == 1 and name in _NEUTRAL_AT_ONE):
            raise ConfigError(
                f"the model's generation_config sets {name}={value!r}, which weft does not take", hint=hint
            )
    taken = {name: options[name] for name in _TAKEN if name in options and not (is_greedy and name in _SAMPLING)}
    if is_greedy:
        taken["temperature"] = 0.0
    if "max_new_tokens" in options:
        taken["max_tokens"] = options["max_new_tokens"]
    try:
        return SamplingParams(**taken)
    except SamplingParamsError as error:
        raise ConfigError(f"the model's generation_config: {error.message}", hint=hint) from error
