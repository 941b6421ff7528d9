"""What a model's authors set in `generation_config.json`, as sampling parameters. Knows no model.

Refused stays what SamplingParams cannot say as HuggingFace does it, since dropping it would change the output:
`min_length` and `max_length` count the prompt, which differs from request to request (`min_new_tokens` takes the first
one's place there too, and a `max_length` that the context keeps anyway says nothing); beams and contrastive search are
another way to generate; `typical_p`, `eta_cutoff` and their kin cut otherwise than top_k, top_p and min_p;
`no_repeat_ngram_size`, `begin_suppress_tokens`, `forced_eos_token_id` and the like are processors that weft has not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.errors import ConfigError, SamplingParamsError, shown
from weft.inference.sampling_params import SamplingParams

# Taken over under their own names, and of them those that change sampling only, so nothing where `do_sample` is false.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_TAKEN = (*_SAMPLING, "repetition_penalty")
# Taken over under the names of SamplingParams.
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
# Fields that say nothing about the tokens, or that weft reads elsewhere.
_INERT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("do_sample", "transformers_version", "_from_model_config"),
    *("use_cache", "cache_implementation", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
}
_RULED_OUT = {"suppress_tokens", "bad_words_ids"}
_OTHER_SAMPLING = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
# Fields that do nothing at 1; all others do nothing at None, False, 0 or empty.
_NEUTRAL_AT_ONE = {
    *("typical_p", "encoder_repetition_penalty", "length_penalty", "min_length"),
    *("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"),
}


def default_params(options: Mapping[str, Any], max_model_len: int, vocab_size: int) -> SamplingParams:
    """Temperature, truncation, repetition penalty, length, stop strings and tokens that are ruled out as the file sets
    them; the rest is weft's.

    As in vLLM, HuggingFace's own default of top_k=50 is no setting of the authors: it counts where the file names it.
    `do_sample: false` is temperature 0, and all that changes sampling only is nothing then. Tokens end where
    HuggingFace's do, with the one that completes a stop string; as ever in weft the text leaves the string out, and
    one that begins in the prompt ends nothing. A file that asks for more tokens than weft's default gets as many.
    `suppress_tokens` and `bad_words_ids` are bad words, but for an EOS alone among the latter, which HuggingFace lets
    pass, and for ids that no token has among the former. A word whose beginning is the whole prompt is kept out too.

    Raises: ConfigError if the file sets a field that weft does not take, since dropping it would change the output, or
        one to a value that is out of range.
    """
    hint = "pass SamplingParams, for instance SamplingParams(temperature=0)"
    options = {name: value for name, value in options.items() if value is not None}
    if not isinstance(options.get("do_sample", False), bool):
        raise ConfigError(
            f"the model's generation_config sets do_sample={options['do_sample']!r}, neither true nor false", hint=hint
        )
    is_greedy = options.get("do_sample") is False
    for name, value in options.items():
        if name in _TAKEN or name in _RENAMED or name in _INERT or name in _RULED_OUT:
            continue
        if is_greedy and name in _OTHER_SAMPLING:
            continue
        # HuggingFace reads it where there is no `max_new_tokens` alone.
        if name == "max_length" and ("max_new_tokens" in options or _reaches(value, max_model_len)):
            continue
        if name == "min_length" and "min_new_tokens" in options:
            continue
        if value and not (value == 1 and name in _NEUTRAL_AT_ONE):
            raise ConfigError(
                f"the model's generation_config sets {name}={value!r}, which weft does not take", hint=hint
            )
    if options.get("min_new_tokens") and options.get("stop_strings"):
        raise ConfigError(
            f"the model's generation_config sets min_new_tokens={options['min_new_tokens']!r} and "
            f"stop_strings={options['stop_strings']!r}: there strings stop before so many tokens, here they do not",
            hint=hint,
        )
    taken = {name: options[name] for name in _TAKEN if name in options and not (is_greedy and name in _SAMPLING)}
    if is_greedy:
        taken["temperature"] = 0.0
    taken |= {_RENAMED[name]: value for name, value in options.items() if name in _RENAMED}
    try:
        params = SamplingParams(**({"max_tokens": None} | taken), bad_words=_ruled_out(options, vocab_size))
    except SamplingParamsError as error:
        raise ConfigError(f"the model's generation_config: {error.message}", hint=hint) from error
    if params.max_tokens is None:
        params = replace(params, max_tokens=max(SamplingParams().max_tokens or 0, params.min_tokens))
    return params


def _reaches(length: Any, max_model_len: int) -> bool:
    return isinstance(length, int) and length >= max_model_len


def _ruled_out(options: Mapping[str, Any], vocab_size: int) -> list[list[int]]:
    """Words of token ids. Raises: SamplingParamsError for what is none."""
    eos = options.get("eos_token_id") or ()
    ends = [[token] for token in (eos if isinstance(eos, list) else [eos])]
    tokens, words = options.get("suppress_tokens") or [], options.get("bad_words_ids") or []
    for name, listed, kind in (("suppress_tokens", tokens, int), ("bad_words_ids", words, list)):
        if not isinstance(listed, list) or not all(type(each) is kind for each in listed):
            what = "token ids" if kind is int else "lists of token ids"
            raise SamplingParamsError(f"{name} must be a list of {what}, got {shown(listed)}")
    return [[token] for token in tokens if 0 <= token < vocab_size] + [word for word in words if word not in ends]
