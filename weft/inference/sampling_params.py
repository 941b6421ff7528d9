"""What a request asks of its output. Names and defaults are vLLM's; a field that does nothing does not exist."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

from weft.errors import SamplingParamsError, shown
from weft.options import strict

MAX_TEMPERATURE = 1e37  # times the largest noise, 17.4, it is finite in float32
MAX_REPETITION_PENALTY = 1e6  # and its inverse the least: logits times or by it stay finite in float32
MAX_BIAS = 100.0
MAX_SAMPLES = 16384
MAX_LOGPROBS = 20

_BEAMS = "there is no beam search yet; n samples with their logprobs are there"
_STRUCTURE = "there is no structured output yet; allowed_token_ids restricts tokens"
_TRUNCATION = "truncate by top_k, top_p or min_p"
_UNSUPPORTED = {
    **dict.fromkeys(("best_of", "use_beam_search", "num_beams", "beam_width", "num_beam_groups"), _BEAMS),
    **dict.fromkeys(("length_penalty", "early_stopping", "diversity_penalty", "num_return_sequences"), _BEAMS),
    **dict.fromkeys(("structured_outputs", "guided_decoding", "guided_json", "guided_regex"), _STRUCTURE),
    **dict.fromkeys(("guided_choice", "guided_grammar", "response_format", "json_schema", "regex"), _STRUCTURE),
    **dict.fromkeys(("ebnf", "grammar", "structural_tag", "tools", "tool_choice"), _STRUCTURE),
    **dict.fromkeys(("typical_p", "top_a", "top_h", "epsilon_cutoff", "eta_cutoff", "mirostat"), _TRUNCATION),
    **dict.fromkeys(("no_repeat_ngram_size", "repetition_detection"), "repetition_penalty and bad_words are there"),
    **dict.fromkeys(("max_new_tokens", "max_length", "max_completion_tokens"), "max_tokens says how many"),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens says how many"),
    **dict.fromkeys(("sampling_seed", "random_seed"), "seed is the name"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_regex"), "stop takes strings"),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens"), "bad_words takes words and lists of token ids"),
    **dict.fromkeys(("logits_processors", "logits_processor", "sequence_bias"), "logit_bias and bad_words are there"),
    **dict.fromkeys(("top_logprobs", "prompt_logprob", "logprob_token_ids"), "logprobs takes a number"),
    **dict.fromkeys(("speculative_config", "num_speculative_tokens"), "there is no speculative decoding yet"),
    "do_sample": "temperature=0 is greedy",
    "output_kind": "LLM.stream gives pieces, LLM.generate the whole",
    "truncate_prompt_tokens": "shorten the prompt before it is given",
    "eos_token_id": "stop_token_ids adds ids, ignore_eos takes the model's away",
}


@partial(strict, unsupported=_UNSUPPORTED)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """SamplingParams(temperature=0)                              greedy, 16 tokens
    SamplingParams(temperature=0.8, seed=7, max_tokens=100)       the same tokens in any batch

    n: answers to the prompt; answer i has the seed `seed + i`.
    temperature: 0 is argmax; above, Gumbel-max noise scaled by it.
    top_p: the most probable tokens that together have this share of the probability.   top_k: the k most probable; 0 or
        -1 is all.   min_p: tokens at least this often as probable as the most probable.   Ties at a cut are kept.
    seed: of the noise, in [0, 2**64); None draws one from the engine's.
    max_tokens: new tokens at most; None is all that the context holds.
    min_tokens: until so many, neither EOS nor stop token ids nor stop strings end the output.
    stop: strings that end the output; None is none, here as in other lists.
    include_stop_str_in_output: whether the text shows the stop string, or token, that ended it.
    stop_token_ids: ids that end the output, beside the model's EOS ids; the id itself is part of the output.
    ignore_eos: do not stop at the model's EOS ids (stop_token_ids still stop).
    presence_penalty, frequency_penalty: taken from the logits of tokens in the output, once or per occurrence.
    repetition_penalty: divides positive logits, and multiplies others, of tokens in prompt or output.
    logit_bias: a mapping from token ids to what is added to their logits; kept as pairs in order of the ids.
    bad_words: words, or lists of token ids, that do not occur in the output.
    allowed_token_ids: the only tokens of the output; None is all.
    logprobs, prompt_logprobs: how many of the most probable tokens to give beside each one; -1 is all, as far
        as the engine's max_logprob_entries goes, None is none.
    detokenize: whether there is a text.   skip_special_tokens, spaces_between_special_tokens: how special tokens show.

    Raises: SamplingParamsError for a value out of range, UnknownArgumentError for a name that nothing reads.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Plain Python values, whatever NumPy gave; and a list given would stay mutable.
        for name, value in {**self._numbers(), **self._collections()}.items():
            object.__setattr__(self, name, value)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens={shown(self.min_tokens)} is more than max_tokens={shown(self.max_tokens)}"
            )
        if self.n > 1 and self.temperature == 0:
            raise SamplingParamsError(
                f"n={self.n} answers at temperature=0 are all the same", hint="n=1, or a temperature above 0"
            )
        if self.stop and not self.detokenize:
            raise SamplingParamsError(
                f"stop={self.stop!r} is looked for in the text, and detokenize=False makes none",
                hint="stop_token_ids stop without a text",
            )

    def _numbers(self) -> dict[str, object]:
        least_repetition = 1 / MAX_REPETITION_PENALTY
        return {
            "n": _integer("n", self.n, 1, MAX_SAMPLES),
            "temperature": _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, above=True),
            "top_k": _integer("top_k", self.top_k, -1, hint="0 or -1 is all tokens"),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "seed": _integer("seed", self.seed, 0, 2**64 - 1, none=True),
            "max_tokens": _integer(
                "max_tokens", self.max_tokens, 1, none=True, hint="None generates until the context is full"
            ),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, least_repetition, MAX_REPETITION_PENALTY
            ),
            **{
                name: _integer(name, getattr(self, name), -1, MAX_LOGPROBS, none=True, hint="-1 is all tokens")
                for name in ("logprobs", "prompt_logprobs")
            },
        }

    def _collections(self) -> dict[str, object]:
        return {
            "stop": () if self.stop is None else _stop_strings(self.stop),
            "stop_token_ids": () if self.stop_token_ids is None else _token_ids("stop_token_ids", self.stop_token_ids),
            "logit_bias": None if self.logit_bias is None else _biases(self.logit_bias),
            "bad_words": () if self.bad_words is None else _words(self.bad_words),
            "allowed_token_ids": None if self.allowed_token_ids is None else _allowed(self.allowed_token_ids),
        }


_SWITCHES = (
    *("include_stop_str_in_output", "ignore_eos"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
)


def _number(name: str, value: Any, least: float, most: float, *, above: bool = False) -> float:
    """above: `least` itself is out of range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SamplingParamsError(f"{name} must be a number, got {shown(value)}")
    if not least <= value <= most or (above and value == least):  # type: ignore[operator]  # a NaN is in no range
        raise SamplingParamsError(f"{name} must be in {'(' if above else '['}{least:g}, {most:g}], got {shown(value)}")
    return float(value)


def _integer(
    name: str, value: Any, least: int, most: int | None = None, *, none: bool = False, hint: str | None = None
) -> int | None:
    """none: None is a value, and stays."""
    if value is None and none:
        return None
    if not _is_integer(value) or value < least or (most is not None and value > most):
        bounds = f"from {least} on" if most is None else f"in [{least}, {most}]"
        raise SamplingParamsError(
            f"{name} must be an integer {bounds}{' or None' * none}, got {shown(value)}", hint=hint
        )
    return int(value)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    token_ids = _listed(name, values, "a list of token ids")
    for token in token_ids:
        if not _is_integer(token) or token < 0:
            raise SamplingParamsError(f"{name} must hold token ids, got {shown(token)}")
    return tuple(int(token) for token in token_ids)


def _allowed(values: Any) -> tuple[int, ...]:
    token_ids = _token_ids("allowed_token_ids", values)
    if not token_ids:
        raise SamplingParamsError(
            f"allowed_token_ids must hold a token id, got {shown(values)}", hint="None allows all"
        )
    return token_ids


def _stop_strings(values: Any) -> tuple[str, ...]:
    strings = (values,) if isinstance(values, str) else _listed("stop", values, "a string or a list of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise SamplingParamsError(f"stop must hold strings of at least one character, got {shown(string)}")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise SamplingParamsError(f"stop holds {string!r}, half of a surrogate pair, which no text has")
    return strings


def _words(values: Any) -> tuple[str | tuple[int, ...], ...]:
    words = _listed("bad_words", values, "a list of words or of lists of token ids")
    for word in words:
        if isinstance(word, bytes | bytearray | memoryview) or not isinstance(word, Sequence) or not len(word):
            raise SamplingParamsError(f"bad_words must hold words or lists of token ids, got {shown(word)}")
    return tuple(word if isinstance(word, str) else _token_ids("bad_words", word) for word in words)


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    pairs = tuple(values.items()) if isinstance(values, Mapping) else values
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise SamplingParamsError(f"logit_bias must be a mapping from token ids to numbers, got {shown(values)}")
    biases: dict[int, float] = {}
    for token, bias in pairs:
        if not _is_integer(token) or token < 0:
            raise SamplingParamsError(
                f"logit_bias must hold token ids, got {shown(token)}", hint="token ids are integers"
            )
        if int(token) in biases:
            raise SamplingParamsError(f"logit_bias holds token {int(token)} twice", hint="one number for each token")
        biases[int(token)] = _number(f"logit_bias[{shown(token)}]", bias, -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(biases.items()))


def _listed(name: str, values: Any, kind: str) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Sequence):
        raise SamplingParamsError(f"{name} must be {kind}, got {shown(values)}")
    return tuple(values)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
