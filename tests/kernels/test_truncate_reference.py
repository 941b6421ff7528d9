"""The plain version of the cut, before HuggingFace's processors and a float64 oracle that sorts."""

import math
from collections.abc import Callable

import numpy
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from weft.kernels._truncate_reference import MASS_BITS, logarithm, mass, share
from weft.kernels.truncate import reference

Cut = Callable[..., torch.Tensor]


def cut(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    by: Cut = reference,
) -> torch.Tensor:
    """Thresholds, one setting for all rows or one each."""

    def column(value: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(value, device=logits.device).to(dtype).expand(len(logits)).contiguous()

    return by(
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
    )


def kept(logits: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    return logits.float() >= thresholds[:, None]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_each_alone_keeps_what_huggingface_keeps(temperature: float) -> None:
    logits = torch.randn(5, 4096, dtype=torch.float64).mul(3).float()
    ids = torch.zeros(5, 1, dtype=torch.int64)
    hot = logits / temperature
    for settings, warper in (
        ({"top_k": 1}, TopKLogitsWarper(1)),
        ({"top_k": 50}, TopKLogitsWarper(50)),
        ({"top_k": 5000}, TopKLogitsWarper(5000)),
        ({"top_p": 0.5}, TopPLogitsWarper(0.5)),
        ({"top_p": 0.95}, TopPLogitsWarper(0.95)),
        ({"min_p": 0.05}, MinPLogitsWarper(0.05)),
        ({"min_p": 1e-4}, MinPLogitsWarper(1e-4)),
    ):
        expected = torch.isfinite(warper(ids, hot))
        assert torch.equal(kept(logits, cut(logits, temperature=temperature, **settings)), expected), settings


def oracle(row: numpy.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """Ids that are kept, by a sort in float64, and how close to the cut the nearest sum of weights lies."""
    order = numpy.argsort(-row, kind="stable")
    weights = numpy.exp((row[order] - row.max()) / temperature)
    count = int((weights >= min_p).sum())
    if top_k > 0:
        count = min(count, top_k)
    total = numpy.cumsum(weights[:count])
    margins = total / total[-1] - top_p
    first = int((margins >= 0).argmax()) if top_p < 1 else count - 1
    margin = abs(margins).min() if top_p < 1 else 1.0
    if min_p:
        margin = min(margin, abs(weights / min_p - 1).min())
    return set(order[: first + 1].tolist()), margin


@pytest.mark.parametrize("vocab_size", [1, 2, 131, 9000])
def test_together_they_cut_as_a_sort_in_float64_does(vocab_size: int) -> None:
    """Masses are right to one unit each, so no sum of them is off by more than their number in units."""
    slack = vocab_size * 2.0**-MASS_BITS
    settings = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.05, 0.8, 3.0)
        for top_k in (0, 1, 7, 400)
        for top_p in (1.0, 0.999, 0.6, 1e-6)
        for min_p in (0.0, 1e-3, 0.4)
    ]
    temperatures, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    logits = torch.randn(len(settings), vocab_size) * 2
    thresholds = cut(logits, temperature=temperatures, top_k=top_k, top_p=top_p, min_p=min_p)
    judged = 0
    for row, (_, k, _, _) in enumerate(settings):
        numbers = float(temperatures[row]), k, float(top_p[row]), float(min_p[row])
        expected, margin = oracle(logits[row].double().numpy(), *numbers)
        if margin > slack + 1e-6 * bool(numbers[3]):  # a float32 threshold is off by half of its last bit
            judged += 1
            found = kept(logits[row : row + 1], thresholds[row : row + 1])[0]
            assert set(found.nonzero()[:, 0].tolist()) == expected, numbers
    assert judged > 0.9 * len(settings)


def test_what_cuts_nothing_gives_no_threshold() -> None:
    logits = torch.randn(6, 50)
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    top_k, top_p = torch.tensor([3, 0, 50, 51, -1, 0]), torch.tensor([0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert cut(logits, temperature=temperature, top_k=top_k, top_p=top_p).tolist() == [-torch.inf] * 6


def test_equals_at_the_cut_are_kept_by_all_three() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0, 2.0, 2.0, -1.0]])
    assert cut(logits, top_k=3).item() == 2.0
    assert cut(logits, min_p=math.exp(-1.0) * (1 + 1e-6)).item() > 2.0
    assert cut(logits, min_p=math.exp(-1.0) * (1 - 1e-6)).item() == pytest.approx(2.0, abs=1e-5)
    assert cut(logits, top_p=0.7).item() == 2.0
    assert cut(torch.zeros(1, 40), top_k=1, top_p=0.01).item() == 0.0


def test_min_p_comes_first_and_top_p_shares_what_is_left() -> None:
    """Weights 4, 3, 2, 1 of 10: of the whole, 0.65 needs two tokens; of the first two, it needs two; of one, one."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()
    assert kept(logits, cut(logits, top_p=0.55)).sum() == 2
    assert kept(logits, cut(logits, top_p=0.55, top_k=2)).sum() == 1
    assert kept(logits, cut(logits, top_p=0.55, min_p=0.6)).sum() == 1
    assert kept(logits, cut(logits, top_p=0.55, min_p=0.3)).sum() == 2


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-5, 1.0, 1e10, 3e38])
def test_no_temperature_and_no_logit_is_too_large(temperature: float) -> None:
    logits = torch.randn(1, 3000) * 11
    logits[0, :4] = torch.tensor([-3.4e38, 3.4e38, -torch.inf, 1e-40])
    for row in (logits, logits[:, 2:]):
        for settings in ({"top_p": 0.9}, {"top_p": 0.9, "top_k": 100}, {"min_p": 0.1}, {"min_p": 1e-44}, {"top_k": 9}):
            found = cut(row, temperature=temperature, **settings)
            assert not found.isnan().any()
            assert (found <= row.max()).all()
    assert cut(torch.randn(1, 3000), temperature=1e10, top_p=0.9).item() > -torch.inf


def test_broken_rows_end_in_no_error() -> None:
    logits = torch.zeros(4, 9)
    logits[0], logits[1, 3], logits[2, 0], logits[3, 1:] = -torch.inf, torch.nan, torch.inf, -torch.inf
    assert cut(logits, top_k=2, top_p=0.5, min_p=0.1).tolist() == [-torch.inf] * 3 + [0.0]


def test_a_mass_is_right_to_one_unit_and_a_logarithm_to_the_last_bits() -> None:
    values = -torch.linspace(0, 45, 300_001)
    found = mass(values, torch.tensor(0.0), torch.tensor(1.0))
    exact = values.double().exp() * 2.0**MASS_BITS
    assert (found - exact).abs().max() <= 1.0
    assert found[0] == 2**MASS_BITS
    assert (found.diff() <= 0).all()
    numbers = torch.rand(10_000).add(1e-7).double()
    assert torch.allclose(logarithm(numbers), numbers.log(), rtol=4e-16, atol=4e-16)
    assert logarithm(torch.tensor([1.0, 2.0**-149]).double()).tolist() == [0.0, -149 * math.log(2)]


def test_a_share_is_exact() -> None:
    for total in (2**MASS_BITS, 2**57 + 12345, 3):
        for top_p in (1e-12, 0.1, 0.5, 0.9, 0.99999994):
            units = int(float(torch.tensor(top_p)) * 2**30)
            found = share(torch.tensor(total), torch.tensor(top_p)).item()
            assert found == max(1, -(-total * units // 2**30))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_logits_are_cut_as_the_numbers_they_are(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 5000) * 4).to(dtype)
    for settings in ({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 300, "top_p": 0.7, "min_p": 1e-3}):
        assert torch.equal(cut(logits, **settings), cut(logits.float(), **settings))


def test_a_cut_among_many_that_are_nearly_alike_is_where_a_sort_finds_it() -> None:
    logits = torch.randn(1, 40_000) * 0.01
    expected, margin = oracle(logits[0].double().numpy(), 1.0, 0, float(torch.tensor(0.9)), 0.0)
    assert margin > 40_000 * 2.0**-MASS_BITS
    assert kept(logits, cut(logits, top_p=0.9)).sum() == len(expected) > 16 * 1024
