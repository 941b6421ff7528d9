"""What SamplingParams accepts, and that everything else is refused with its name and value."""

import math
import pickle
from copy import deepcopy
from dataclasses import FrozenInstanceError, asdict, fields, replace
from typing import Any

import numpy as np
import pytest

from weft import SamplingParams
from weft.errors import ConfigError, SamplingParamsError, UnknownArgumentError

REFUSED: dict[str, list[Any]] = {
    "n": [True, "1", 1.0, None, 0, -1, 16385],
    "temperature": [True, "1", None, math.nan, math.inf, -math.inf, -0.1, -1, 1e38, 1e39, 1e300, 10**400, 1j],
    "top_p": [True, "1", None, math.nan, 0, 0.0, -0.1, 1.0001, 2, math.inf],
    "top_k": [True, "1", 1.0, None, -2, math.nan],
    "min_p": [True, "1", None, math.nan, -1e-9, 1.0001],
    "seed": [True, "1", 1.0, -1, 2**64, math.nan],
    "max_tokens": [True, "16", 16.0, 0, -1, math.inf],
    "min_tokens": [True, "1", 1.0, None, -1],
    "stop": ["", b"a", bytearray(b"a"), 5, {"a"}, [""], ["a", ""], [b"a"], [5], [None], ["\ud800"]],
    "stop_token_ids": ["12", b"12", bytearray(b"12"), 5, {5}, iter([5]), [True], ["5"], [1.0], [-1], [2, None]],
    "include_stop_str_in_output": [0, 1, "yes", None],
    "ignore_eos": [0, 1, "yes", None],
    "presence_penalty": [True, "1", None, math.nan, -2.1, 2.1, math.inf],
    "frequency_penalty": [True, "1", None, math.nan, -2.1, 2.1, -math.inf],
    "repetition_penalty": [True, "1", None, math.nan, 0, -1.0, 1e-7, 1e7, math.inf],
    "logit_bias": [
        5,
        "a",
        [5],
        {"5": 1},
        {True: 1},
        {-1: 1},
        {1.0: 1},
        {5: "1"},
        {5: True},
        {5: math.nan},
        {5: 101},
        ((1, 2.0), (1, 3.0)),
    ],
    "bad_words": ["word", b"word", 5, {"a"}, [""], [[]], [5], [bytearray(b"a")], [["a"]], [[-1]], [[True]], [[1.0]]],
    "allowed_token_ids": ["12", 5, {5}, [], (), [True], ["5"], [-1], [1.0]],
    "logprobs": [True, "1", 1.0, -2, 21],
    "prompt_logprobs": [True, "1", 1.0, -2, 21],
    "detokenize": [0, 1, "yes", None],
    "skip_special_tokens": [0, 1, "yes", None],
    "spaces_between_special_tokens": [0, 1, "yes", None],
}
ACCEPTED: dict[str, list[Any]] = {
    "n": [1, 2, 16384],
    "temperature": [0, 0.0, -0.0, 1, 2.5, 5e-324, 1e37],
    "top_p": [1, 1.0, 0.5, 5e-324],
    "top_k": [-1, 0, 1, 10**12],
    "min_p": [0, 0.0, 5e-324, 1, 1.0],
    "seed": [None, 0, 2**63, 2**64 - 1],
    "max_tokens": [None, 16, 10**12],
    "min_tokens": [0, 1, 16],
    "stop": [(), [], ("a",), ["a", "bc"]],
    "stop_token_ids": [(), [], (0, 5), [5], range(3)],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "presence_penalty": [-2, 0, 2, 0.5],
    "frequency_penalty": [-2, 0, 2, 0.5],
    "repetition_penalty": [1e-6, 0.5, 1, 1e6],
    "logit_bias": [None],
    "bad_words": [(), [], ["a", "b c"]],
    "allowed_token_ids": [None, [0], (5, 3, 5), range(4)],
    "logprobs": [None, -1, 0, 20],
    "prompt_logprobs": [None, -1, 0, 20],
    "detokenize": [True, False],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 17}, "min_tokens=17 is more than max_tokens=16"),
    ({"min_tokens": 2, "max_tokens": 1}, "min_tokens=2 is more than max_tokens=1"),
    ({"n": 2, "temperature": 0}, "n=2 answers at temperature=0"),
    ({"stop": "a", "detokenize": False}, "stop=.* detokenize=False"),
]
# Names of other engines and of the OpenAI API, each with what its hint says of weft's own way.
ELSEWHERE = {
    "best_of": "beam search",
    "use_beam_search": "beam search",
    "num_beams": "beam search",
    "beam_width": "beam search",
    "length_penalty": "beam search",
    "num_return_sequences": "beam search",
    "structured_outputs": "structured output",
    "guided_json": "structured output",
    "response_format": "structured output",
    "guided_regex": "structured output",
    "grammar": "structured output",
    "speculative_config": "speculative decoding",
    "logits_processors": "logit_bias",
    "typical_p": "top_p",
    "do_sample": "temperature=0",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "no_repeat_ngram_size": "repetition_penalty",
    "bad_words_ids": "bad_words",
    "sampling_seed": "seed",
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.12}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=rf"^{name}(\[\d+\])? "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_a_value_in_range_is_kept(name: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == (tuple(value) if isinstance(value, list | range) else value)


def test_defaults_are_in_both_tables() -> None:
    names = {item.name for item in fields(SamplingParams)}
    assert names == REFUSED.keys() == ACCEPTED.keys()


@pytest.mark.parametrize(("given", "message"), CONTRADICTIONS, ids=lambda given: str(given)[:30])
def test_a_contradiction_is_refused_with_both_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**given)
    for name, value in given.items():
        SamplingParams(**{name: min(value, 16) if name == "min_tokens" else value})  # each alone is none


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words"])
def test_none_is_an_empty_list_as_in_the_openai_api(name: str) -> None:
    assert SamplingParams(**{name: None}) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"top_k", "max_tokens"}))
def test_a_number_too_long_to_be_written_out_is_refused_like_any_other(name: str) -> None:
    huge = 10**9999
    value = {"logit_bias": {5: huge}, "bad_words": [huge], "stop": [huge]}.get(name, huge)
    with pytest.raises(SamplingParamsError, match=rf"^{name}.*a number of 33216 bits"):
        SamplingParams(**{name: value})


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_biases_are_kept_in_order_of_their_tokens_and_can_be_given_again() -> None:
    params = SamplingParams(logit_bias={7: -100, 3: 0.5})
    assert params.logit_bias == ((3, 0.5), (7, -100.0))
    assert replace(params, seed=5).logit_bias == params.logit_bias
    assert SamplingParams(logit_bias={}).logit_bias == ()


def test_bad_words_are_words_or_lists_of_token_ids() -> None:
    assert SamplingParams(bad_words=["a", [5, 3], range(2)]).bad_words == ("a", (5, 3), (0, 1))


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        top_k=np.int32(4),
        seed=np.uint64(2**64 - 1),
        min_tokens=np.int64(1),
        logit_bias={np.int64(3): np.float32(1.5)},
        stop_token_ids=[np.int16(5)],
        allowed_token_ids=[np.int64(6)],
        bad_words=[[np.uint8(7)]],
    )
    plain = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        seed=2**64 - 1,
        min_tokens=1,
        logit_bias={3: 1.5},
        stop_token_ids=[5],
        allowed_token_ids=[6],
        bad_words=[[7]],
    )
    assert repr(params) == repr(plain)


def test_params_survive_being_sent_elsewhere() -> None:
    params = SamplingParams(stop="a", stop_token_ids=[1, 2], logit_bias={1: 2}, bad_words=[[3, 4]], min_tokens=4)
    for copy in (pickle.loads(pickle.dumps(params)), deepcopy(params), SamplingParams(**asdict(params))):
        assert copy == params
        assert hash(copy) == hash(params)


@pytest.mark.parametrize(
    ("name", "hint"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("ignore_eso", "ignore_eos")]
)
def test_an_unknown_keyword_hints_at_the_nearest_known_one(name: str, hint: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"SamplingParams got an unknown argument '{name}'") as caught:
        SamplingParams(**{name: 1})
    assert caught.value.hint == f"did you mean {hint!r}?"
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(("name", "instead"), ELSEWHERE.items())
def test_a_name_known_from_elsewhere_is_refused_with_what_is_there_instead(name: str, instead: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"SamplingParams got an unknown argument '{name}'") as caught:
        SamplingParams(**{name: 1})
    assert instead in (caught.value.hint or "")


def test_params_are_frozen_and_do_not_share_a_list_with_the_caller() -> None:
    ids = [5]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(6)
    assert params.stop_token_ids == (5,)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(5,)))
    with pytest.raises(FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def test_defaults_are_those_that_people_know() -> None:
    assert asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "bad_words": (),
        "allowed_token_ids": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }
