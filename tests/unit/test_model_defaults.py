"""What a model's authors set becomes sampling parameters; what weft does not take from there is never dropped."""

from typing import Any

import pytest

from weft import SamplingParams
from weft.errors import ConfigError
from weft.model_defaults import default_params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"do_sample": True, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
            SamplingParams(top_k=50, top_p=0.9, min_p=0.1, repetition_penalty=1.1),
        ),
        ({"top_k": 20, "temperature": 0.6}, SamplingParams(top_k=20, temperature=0.6)),
        (
            {"do_sample": False, "top_k": 50, "typical_p": 0.5, "repetition_penalty": 1.1},
            SamplingParams(temperature=0, repetition_penalty=1.1),
        ),
        ({"do_sample": False, "top_p": "any", "max_new_tokens": 9}, SamplingParams(temperature=0, max_tokens=9)),
        ({"min_new_tokens": 3, "min_length": 9}, SamplingParams(min_tokens=3)),
        ({"min_new_tokens": 0, "min_length": 9, "stop_strings": ["a", "b"]}, SamplingParams(stop=["a", "b"])),
        ({"min_length": 1, "stop_strings": "a"}, SamplingParams(stop="a")),
        ({"min_new_tokens": 40}, SamplingParams(min_tokens=40, max_tokens=40)),
        ({"max_length": 64}, SamplingParams()),
        ({"max_length": 20, "max_new_tokens": 9}, SamplingParams(max_tokens=9)),
        (
            {"suppress_tokens": [4, -1, 97, 96], "bad_words_ids": [[1], [5, 6], [2]], "eos_token_id": [1, 2]},
            SamplingParams(bad_words=[[4], [96], [5, 6]]),
        ),
        ({"suppress_tokens": [1], "bad_words_ids": [[1]], "eos_token_id": 1}, SamplingParams(bad_words=[[1]])),
        ({"suppress_tokens": [], "bad_words_ids": [], "begin_suppress_tokens": []}, SamplingParams()),
    ],
    ids=[
        *("sampling", "no word of sampling", "greedy", "greedy with nonsense"),
        *(
            "least",
            "no least in spite of a length",
            "every prompt has one token",
            "more than the default",
            "as long as the context",
            "a length that HuggingFace does not read",
            *("ruled out", "an EOS is suppressed, and no bad word", "nothing ruled out"),
        ),
    ],
)
def test_fields_are_taken_by_name(fields: dict[str, Any], expected: SamplingParams) -> None:
    assert default_params(fields, 64, 97) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_length": 9}, "sets min_length=9, which weft does not take"),
        ({"do_sample": True, "typical_p": 0.5}, "sets typical_p=0.5, which weft does not take"),
        ({"max_length": 9}, "sets max_length=9, which weft does not take"),
        ({"min_new_tokens": 2, "stop_strings": "a"}, r"sets min_new_tokens=2 and stop_strings='a'"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_tokens=9 is more than max_tokens=8"),
        ({"min_new_tokens": "two"}, "min_tokens must be an integer from 0 on, got 'two'"),
        ({"max_length": "long"}, "sets max_length='long', which weft does not take"),
        ({"max_length": [64]}, r"sets max_length=\[64\], which weft does not take"),
        ({"do_sample": "no"}, "sets do_sample='no', neither true nor false"),
        ({"do_sample": 0}, "sets do_sample=0, neither true nor false"),
        ({"begin_suppress_tokens": [1]}, r"sets begin_suppress_tokens=\[1\], which weft does not take"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a list of token ids, got 5"),
        ({"suppress_tokens": [True]}, r"suppress_tokens must be a list of token ids, got \[True\]"),
        ({"bad_words_ids": [5]}, r"bad_words_ids must be a list of lists of token ids, got \[5\]"),
        ({"bad_words_ids": [[]]}, r"bad_words must hold words or lists of token ids, got \[\]"),
        ({"bad_words_ids": [[1.5]]}, "bad_words must hold token ids, got 1.5"),
        ({"stop_strings": [""]}, "stop must hold strings of at least one character, got ''"),
    ],
    ids=repr,
)
def test_what_cannot_be_said_as_huggingface_does_it_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        default_params(fields, 64, 97)
    assert "SamplingParams" in str(caught.value.hint)
