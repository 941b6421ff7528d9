"""What SamplingParams accepts, and that everything else is refused with its name and value."""

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from weft import SamplingParams
from weft.errors import ConfigError, SamplingParamsError, UnknownArgumentError

REFUSED: dict[str, list[Any]] = {
    "temperature": [True, "1", None, math.nan, math.inf, -math.inf, -0.1, -1, 1e38, 1e39, 1e300, 10**400, 1j],
    "seed": [True, "1", 1.0, -1, 2**64, math.nan],
    "max_tokens": [True, "16", 16.0, 0, -1, math.inf],
    "stop_token_ids": ["12", b"12", 5, None, {5}, iter([5]), [True], ["5"], [1.0], [-1], [2, None]],
    "ignore_eos": [0, 1, "yes", None],
}
ACCEPTED: dict[str, list[Any]] = {
    "temperature": [0, 0.0, -0.0, 1, 2.5, 5e-324, 1e37],
    "seed": [None, 0, 2**63, 2**64 - 1],
    "max_tokens": [None, 1, 10**12],
    "stop_token_ids": [(), [], (0, 5), [5], range(3)],
    "ignore_eos": [True, False],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.12}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=f"^{name} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_a_value_in_range_is_kept(name: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == (tuple(value) if name == "stop_token_ids" else value)


@pytest.mark.parametrize(
    ("name", "hint"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("ignore_eso", "ignore_eos")]
)
def test_an_unknown_keyword_hints_at_the_nearest_known_one(name: str, hint: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"SamplingParams got an unknown argument '{name}'") as caught:
        SamplingParams(**{name: 1})
    assert caught.value.hint == f"did you mean {hint!r}?"
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("name", ["n", "top_k", "best_of"])
def test_a_field_that_weft_does_not_have_is_an_error_not_dropped(name: str) -> None:
    with pytest.raises(UnknownArgumentError, match=name):
        SamplingParams(**{name: 1})


def test_params_are_frozen_and_do_not_share_a_list_with_the_caller() -> None:
    ids = [5]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(6)
    assert params.stop_token_ids == (5,)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(5,)))
    with pytest.raises(FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def test_defaults_are_those_that_people_know() -> None:
    assert SamplingParams() == SamplingParams(
        temperature=1.0, seed=None, max_tokens=16, stop_token_ids=(), ignore_eos=False
    )
