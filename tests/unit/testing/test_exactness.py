from dataclasses import replace

import pytest
import torch

from weft.testing.continuation import Continuation
from weft.testing.exactness import SAFE_MARGIN, Verdict, allowed_ties, assert_safe_margins, compare_exact


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
