import math

import pytest
import torch
from torch import Tensor

from weft.testing.near_ties import Audit, audit_near_ties

BFLOAT16 = torch.bfloat16


def logits(seed: int = 0, positions: int = 400, vocab: int = 64) -> Tensor:
    """Logits with the spread of a real model's: a few units, most margins wide, some narrow."""
    return torch.randn(positions, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def rounding(seed: int, of: Tensor, size: float) -> Tensor:
    return of + torch.randn(of.shape, generator=torch.Generator().manual_seed(seed)) * size


def audit(actual: Tensor, *, own: float = 0.03) -> Audit:
    base = logits()
    return audit_near_ties([base], [rounding(1, base, own)], [actual], dtype=BFLOAT16)


def test_an_engine_as_noisy_as_the_reference_passes() -> None:
    result = audit(rounding(2, logits(), 0.03))
    assert result.passed
    assert result.num_positions == 400
    assert result.num_flips > 0, "an audit that never sees a flip shows nothing"


def test_an_engine_five_times_as_noisy_fails() -> None:
    assert not audit(rounding(2, logits(), 0.15)).passed


def test_one_position_that_loses_a_clear_winner_fails() -> None:
    actual = logits()
    actual[7] = actual[7].roll(1)
    result = audit(actual)
    assert (result.num_unexcused, result.passed) == (1, False)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_fails_even_where_the_best_token_agrees(poison: float) -> None:
    actual = logits()
    actual[3, actual[3].argmin()] = -poison
    assert audit(actual).num_unexcused == 1


def test_many_flips_fail_though_each_lies_within_noise() -> None:
    base = torch.zeros(200, 8)
    base[:, 0], base[:, 1] = 1.0, 0.99
    again = base.clone()
    again[:4, 1] = 1.02
    actual = base.clone()
    actual[:20, 1] = 1.005
    result = audit_near_ties([base], [again], [actual], dtype=BFLOAT16)
    assert result.num_unexcused == 0
    assert (result.num_flips, result.max_flips, result.passed) == (20, 8, False)


def test_a_drift_that_flips_nothing_fails_by_its_divergence() -> None:
    result = audit(logits() * 1.1)
    assert (result.num_flips, result.passed) == (0, False)


def test_the_divergence_is_taken_from_the_reference() -> None:
    """Not from the engine: what it never says would count for nothing."""
    sure, doubtful = torch.tensor([[0.99, 0.01]]).log(), torch.tensor([[0.5, 0.5]]).log()
    result = audit_near_ties([sure], [sure], [doubtful], dtype=BFLOAT16)
    assert result.mean_kl == pytest.approx(0.99 * math.log(1.98) + 0.01 * math.log(0.02), rel=1e-4)


def test_a_finer_dtype_is_allowed_fewer_flips() -> None:
    base = logits()
    allowed = [audit_near_ties([base], [base], [base], dtype=dtype).max_flips for dtype in (BFLOAT16, torch.float16)]
    assert allowed == [16, 2]


def test_the_engines_own_error_is_never_its_tolerance() -> None:
    calm, noisy = audit(rounding(2, logits(), 0.03)), audit(rounding(2, logits(), 3.0))
    assert calm.tolerance == noisy.tolerance


def test_positions_of_all_prompts_are_judged_together() -> None:
    base = logits()
    parts = [base[:150], base[150:]]
    split = audit_near_ties(parts, parts, [part + 0.0 for part in parts], dtype=BFLOAT16)
    assert (split.num_positions, split.num_flips) == (400, 0)


@pytest.mark.parametrize(("outliers", "tolerance"), [(1, 0.25), (3, 4.0)])
def test_the_tolerance_is_the_99_9_percent_quantile_of_the_pair_noise(outliers: int, tolerance: float) -> None:
    base = torch.tensor([[8.0, 0.0, -8.0]]).repeat(2_000, 1)
    again = base.clone()
    again[:, 1] += 0.25
    again[:outliers, 1] = 4.0
    assert audit_near_ties([base], [again], [base], dtype=BFLOAT16).tolerance == tolerance


@pytest.mark.parametrize(("best", "unit"), [(31.5, 0.125), (20.0, 0.125), (16.0, 0.125), (15.5, 0.0625), (8.0, 0.0625)])
@pytest.mark.parametrize(("units", "unexcused"), [(0.5, 0), (0.75, 0), (1.25, 1), (1.5, 1)])
def test_a_flip_is_excused_up_to_one_unit_in_the_last_place_beyond_the_tolerance(
    best: float, unit: float, units: float, unexcused: int
) -> None:
    base = torch.tensor([[best, best - 0.25 - units * unit, 0.0]])
    again = base + torch.tensor([[0.25, 0.0, 0.0]])
    result = audit_near_ties([base], [again], [base[:, [1, 0, 2]]], dtype=BFLOAT16)
    assert (result.tolerance, result.num_flips, result.num_unexcused) == (0.25, 1, unexcused)


def test_the_report_names_what_nothing_excuses_and_every_excuse_is_counted() -> None:
    base = torch.zeros(200, 8)
    base[:, 0], base[:, 1] = 1.0, 0.99
    again = base.clone()
    again[:4, 1] = 1.02
    actual = base.clone()
    actual[:2, 1] = 1.005
    actual[7, 5] = 9.0
    actual[11, 3] = float("nan")
    counted: dict[str, int] = {}
    result = audit_near_ties([base], [again], [actual], dtype=BFLOAT16, record=counted.__setitem__)
    assert counted == {"positions": 200, "excused_flips": 2, "unexcused_flips": 2}
    assert (result.num_excused, result.num_unexcused) == (2, 2)
    assert [(flip.position, flip.token) for flip in result.unexcused] == [(7, 5), (11, 3)]
    assert "prompt 0, step 7: token 5, the reference has 0; margin 1," in result.report
