"""Errors are typed, name what was wrong, and say what would work."""

import inspect

import pytest

from weft import errors
from weft.errors import (
    ConfigError,
    EmptyPromptError,
    InvalidPromptsError,
    RequestError,
    UnknownArgumentError,
    WeftError,
)

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_a_weft_error_and_is_drawn_in_the_tree(kind: type) -> None:
    assert issubclass(kind, WeftError)
    assert kind.__name__ in (errors.__doc__ or "")


def test_argument_errors_can_be_caught_as_the_builtin_ones() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RequestError, ValueError)
    assert issubclass(UnknownArgumentError, TypeError)


def test_a_hint_stands_on_its_own_line() -> None:
    assert str(WeftError("no such thing", hint="try another")) == "no such thing\nhint: try another"
    assert str(WeftError("no such thing")) == "no such thing"


def test_an_unknown_argument_gets_the_nearest_known_one() -> None:
    error = UnknownArgumentError("LLM", "max_num_seq", ["max_num_seqs", "dtype"])
    assert (error.name, error.hint) == ("max_num_seq", "did you mean 'max_num_seqs'?")


def test_a_name_like_no_other_gets_all_known_ones_in_order() -> None:
    assert errors.nearest("zzz", ["seed", "dtype"]) == "known names: dtype, seed"


def test_a_request_error_can_name_its_place_among_the_prompts() -> None:
    error = EmptyPromptError("the prompt is empty", hint="give one token").at(3)
    assert isinstance(error, EmptyPromptError)
    assert error.index == 3
    assert str(error) == "prompts[3]: the prompt is empty\nhint: give one token"


def test_several_bad_prompts_are_all_told() -> None:
    first, second = EmptyPromptError("it is empty").at(0), EmptyPromptError("it is empty").at(4)
    error = InvalidPromptsError({0: first, 4: second})
    assert error.errors == {0: first, 4: second}
    assert str(error).splitlines() == [
        "2 prompts cannot be served:",
        "  prompts[0]: it is empty",
        "  prompts[4]: it is empty",
    ]
