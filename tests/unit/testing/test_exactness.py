from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.testing.continuation import Continuation
from weft.testing.exactness import (
    SAFE_MARGIN,
    Verdict,
    allowed_ties,
    assert_safe_margins,
    assert_token_exact,
    compare_exact,
    compare_tokens,
)


def said(*tokens: int, margin: float = 1.0, reason: str = "length") -> Continuation:
    logits = torch.zeros(len(tokens), 8)
    for step, token in enumerate(tokens):
        logits[step, token] = margin
    return Continuation(prompt_token_ids=(0,), token_ids=tokens, logits=logits, finish_reason=reason)


def no_noise() -> float:
    return 0.0


def test_equal_answers_are_equal() -> None:
    comparison = compare_exact(said(1, 2, 3), said(1, 2, 3), noise=no_noise)
    assert (comparison.verdict, comparison.first_difference, comparison.reason) == (Verdict.EQUAL, None, None)
    assert comparison.min_margin == 1.0


@pytest.mark.parametrize(("margin", "noise", "verdict"), [(1e-5, 6e-6, Verdict.TIE), (1e-5, 4e-6, Verdict.DIFFERENT)])
def test_a_difference_is_a_tie_only_under_twice_the_reference_noise(
    margin: float, noise: float, verdict: Verdict
) -> None:
    reference = said(1, 2, 3, margin=margin)
    answer = replace(reference, token_ids=(1, 4, 3))
    comparison = compare_exact(reference, answer, noise=lambda: noise)
    assert (comparison.verdict, comparison.first_difference) == (verdict, 1)


def test_noise_is_measured_only_where_tokens_differ() -> None:
    def unexpected() -> float:
        raise AssertionError("no token differs")

    assert compare_exact(said(1, 2), said(1, 2), noise=unexpected).verdict is Verdict.EQUAL


def test_a_tie_never_excuses_logits_beyond_tolerance() -> None:
    reference = said(1, 2, margin=1e-5)
    answer = replace(reference, token_ids=(1, 4), logits=reference.logits + torch.eye(2, 8) * 0.1)
    assert compare_exact(reference, answer, noise=lambda: 1.0).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (5e-4, Verdict.EQUAL),
        (2e-3, Verdict.DIFFERENT),
        (float("inf"), Verdict.DIFFERENT),
        (float("nan"), Verdict.DIFFERENT),
    ],
)
def test_logits_are_compared_though_no_token_differs(error: float, verdict: Verdict) -> None:
    """HuggingFace differs from itself by 1e-4 at most, and the faults planted in models move logits by 3e-3 or more."""
    reference = said(1, 2, 3)
    logits = reference.logits.clone()
    logits[1, 5] += error
    assert compare_exact(reference, replace(reference, logits=logits), noise=no_noise).verdict is verdict


def test_logits_after_the_first_different_token_are_not_compared() -> None:
    reference = said(1, 2, 3, margin=1e-5)
    answer = replace(reference, token_ids=(1, 4, 5), logits=reference.logits + torch.tensor([[0.0], [0.0], [9.0]]))
    assert compare_exact(reference, answer, noise=lambda: 1.0).verdict is Verdict.TIE


def test_an_answer_that_ends_early_is_never_a_tie() -> None:
    comparison = compare_exact(said(1, 2, 3), said(1, 2), noise=lambda: 100.0)
    assert (comparison.verdict, comparison.first_difference) == (Verdict.DIFFERENT, 2)


def test_the_cap_on_ties_grows_by_one_in_a_hundred_thousand_positions() -> None:
    assert [allowed_ties(count) for count in (0, 99_999, 100_000, 1_000_000)] == [1, 1, 2, 11]


def test_a_reference_near_a_tie_is_no_fixed_prompt() -> None:
    assert_safe_margins([said(1, margin=SAFE_MARGIN * 2)])
    with pytest.raises(AssertionError, match="margin"):
        assert_safe_margins([said(1), said(1, margin=SAFE_MARGIN / 2)])


def test_a_failure_shows_the_first_difference_the_text_around_it_margins_and_units() -> None:
    reference = said(1, 2, 3, 4, margin=2.0)
    answer = replace(said(1, 2, 6, 4), logits=reference.logits + torch.eye(4, 8) * 2**-10)
    with pytest.raises(AssertionError) as failure:
        assert_token_exact([reference, reference], [reference, answer], decode=lambda ids: "".join(map(str, ids)))
    assert str(failure.value).splitlines()[:9] == [
        "not token-exact, 1 of 2 prompts:",
        "prompt 1: token 6, the reference has 3; its margin is 2, its own noise 0",
        "  first difference: step 2 of 4",
        "  reference  1 2 [3] 4",
        "  engine     1 2 [6] 4",
        "  reference  '12' then '34'",
        "  engine     '12' then '64'",
        "  margin of the reference there: 2",
        "  smallest margin of the reference: 2",
    ]
    assert "ULPs of float32" in str(failure.value)


def test_ties_are_counted_excused_and_capped() -> None:
    reference = said(1, 2, 3, margin=1e-5)
    tie = replace(reference, token_ids=(1, 4, 3))
    counted: dict[str, int] = {}
    options: dict[str, Any] = {"noise": lambda of: 1e-5, "record": counted.__setitem__}
    assert_token_exact([reference, reference], [reference, tie], **options)
    assert counted == {"positions": 6, "ties": 1}
    with pytest.raises(AssertionError, match="2 ties in 6 positions, at most 1"):
        assert_token_exact([reference, reference], [tie, tie], **options)
    with pytest.raises(AssertionError, match="not token-exact"):
        assert_token_exact([reference], [tie])


@pytest.mark.parametrize(
    ("tokens", "reason", "verdict"),
    [
        ((1, 2, 3), "length", Verdict.EQUAL),
        ((1, 2, 3), None, Verdict.EQUAL),
        ((1, 2, 3), "stop", Verdict.DIFFERENT),
        ((1, 2), "length", Verdict.DIFFERENT),
        ((1, 2, 4), "length", Verdict.DIFFERENT),
    ],
)
def test_tokens_are_judged_without_logits(tokens: tuple[int, ...], reason: str | None, verdict: Verdict) -> None:
    assert compare_tokens(said(1, 2, 3), tokens, reason, noise=no_noise)[0] is verdict
