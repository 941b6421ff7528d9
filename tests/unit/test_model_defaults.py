"""What a model's authors set becomes sampling parameters; what weft does not take from there is never dropped."""

from typing import Any

import pytest

from weft import SamplingParams
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
    ],
    ids=["sampling", "no word of sampling", "greedy", "greedy with nonsense"],
)
def test_fields_are_taken_by_name(fields: dict[str, Any], expected: SamplingParams) -> None:
    assert default_params(fields, 64) == expected
