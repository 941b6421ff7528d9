"""When a request ends, and of what: stop tokens before the length, the length at the nearer of its two limits."""

import pytest

from weft import SamplingParams
from weft.inference.request import FinishReason, Request


def request_of(
    prompt: list[int], *, stops: frozenset[int] = frozenset(), max_len: int = 100, computed: int = 0
) -> Request:
    return Request(
        request_id="a",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        params=SamplingParams(),
        seed=0,
        stop_token_ids=stops,
        max_len=max_len,
        num_computed_tokens=computed,
    )


@pytest.mark.parametrize(
    ("token", "stops", "max_len", "ended"),
    [
        (7, frozenset(), 9, None),
        (7, frozenset({1, 5}), 9, None),
        (1, frozenset({1, 5}), 9, ("stop", 1)),
        (5, frozenset({1, 5}), 9, ("stop", 5)),
        (0, frozenset({0}), 9, ("stop", 0)),
        (7, frozenset({1, 5}), 4, ("length", None)),
        (7, frozenset({1, 5}), 5, None),
        (5, frozenset({1, 5}), 4, ("stop", 5)),
    ],
    ids=[
        "no rule",
        "no stop token",
        "first EOS",
        "second EOS",
        "token 0",
        "last allowed",
        "last but one",
        "stop wins over length",
    ],
)
def test_stop_rules(token: int, stops: frozenset[int], max_len: int, ended: tuple[FinishReason, int | None]) -> None:
    request = request_of([2, 3, 4], stops=stops, max_len=max_len)
    request.token_ids.append(token)
    assert request.stop_after(token) == ended


def test_a_stop_token_in_the_prompt_does_not_end_a_request() -> None:
    request = request_of([5, 5], stops=frozenset({5}))
    request.token_ids.append(6)
    assert request.stop_after(6) is None


@pytest.mark.parametrize(("computed", "uncomputed"), [(0, 4), (3, 1), (4, 0)])
def test_uncomputed_tokens_are_what_the_cache_lacks(computed: int, uncomputed: int) -> None:
    request = request_of([2, 3, 4, 5], computed=computed)
    assert (request.num_tokens, request.num_uncomputed_tokens) == (4, uncomputed)
