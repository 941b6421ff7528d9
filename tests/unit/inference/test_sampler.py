"""Sampling draws from the softmax, row by row: no row can tell which rows are beside it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from weft.batch import SamplingRows
from weft.inference.sampler import GumbelSampler, Sampler

FALSE_ALARM_RATE = 1e-4  # of one chi-squared test, over the choice of its seeds, which are fixed
VOCAB = 8
DRAWS = 4096

Row = tuple[float, int, int]  # temperature, seed, position

sample = GumbelSampler()
sampling = st.tuples(st.sampled_from([0.0, 0.3, 1.0, 5.0]), st.integers(0, 2**32), st.integers(0, 4096))


def rows_of(rows: list[Row]) -> SamplingRows:
    temperatures, seeds, positions = zip(*rows, strict=True)
    return SamplingRows(
        temperatures=torch.tensor(temperatures, dtype=torch.float32),
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
        any_noise=any(temperature > 0 for temperature in temperatures),
    )


def drawn(logits: Tensor, temperature: float, seeds: range, positions: range) -> Tensor:
    rows = rows_of([(temperature, seed, position) for seed in seeds for position in positions])
    return sample(logits.expand(len(rows.seeds), -1), rows)


def p_value(observed: Tensor, probabilities: Tensor) -> float:
    counts = torch.bincount(observed, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(observed)
    assert expected.min() >= 5, "the chi-squared approximation needs five expected draws a cell"
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(probabilities) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_the_sampler_is_a_sampler() -> None:
    assert isinstance(sample, Sampler)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize(("seeds", "positions"), [(range(1), range(DRAWS)), (range(DRAWS), range(5, 6))])
def test_sampled_tokens_follow_the_softmax_over_positions_and_over_seeds(
    temperature: float, seeds: range, positions: range
) -> None:
    logits = logits_of(3)[0]
    tokens = drawn(logits, temperature, seeds, positions)
    assert p_value(tokens, torch.softmax(logits / temperature, dim=0)) > FALSE_ALARM_RATE
    assert p_value(tokens, torch.softmax(logits / (1.4 * temperature), dim=0)) < FALSE_ALARM_RATE  # it can see


def test_tokens_of_successive_positions_are_independent() -> None:
    logits = logits_of(4)[0] / 3
    probabilities = torch.softmax(logits, dim=0)
    tokens = drawn(logits, 1.0, range(1), range(DRAWS)).view(-1, 2)
    pairs = torch.outer(probabilities, probabilities).flatten()
    assert p_value(tokens[:, 0] * VOCAB + tokens[:, 1], pairs) > FALSE_ALARM_RATE


@pytest.mark.parametrize("neighbour", [[], [(1.0, 5, 9)]], ids=["alone", "beside a noisy row"])
def test_temperature_zero_is_argmax(neighbour: list[Row]) -> None:
    logits = logits_of(0, rows=32 + len(neighbour), vocab=97)
    tokens = sample(logits, rows_of([(0.0, seed, 1) for seed in range(32)] + neighbour))
    assert torch.equal(tokens[:32], logits[:32].argmax(dim=-1))


@pytest.mark.parametrize("temperature", [1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-40, 0])
@pytest.mark.parametrize("size", [1.0, 1e4, 3e38], ids=["logits of 1", "of 1e4", "of 3e38"])
def test_tiny_temperatures_are_greedy_and_never_overflow(temperature: float, size: float) -> None:
    logits = torch.full((64, 97), size / 2)  # divided by a tiny temperature, these would be infinite too
    best = torch.arange(64)
    logits[torch.arange(64), best] = size
    tokens = sample(logits, rows_of([(temperature, seed, seed) for seed in range(64)]))
    assert ((tokens >= 0) & (tokens < 97)).all()
    if temperature <= 1e-3:
        assert torch.equal(tokens, best)


@given(neighbours=st.lists(sampling, max_size=5), row=sampling, data=st.data())
def test_seeded_row_draws_the_same_token_beside_any_neighbour(
    neighbours: list[Row], row: Row, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(neighbours)))
    logits = logits_of(row[1], rows=len(neighbours) + 1, vocab=97)
    beside = sample(logits, rows_of([*neighbours[:place], row, *neighbours[place:]]))
    assert beside[place] == sample(logits[place : place + 1], rows_of([row]))[0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_minus_one_and_leaves_the_others(poison: float, temperature: float) -> None:
    rows = rows_of([(temperature, seed, 3) for seed in range(5)])
    logits = logits_of(1, rows=5)
    clean = sample(logits, rows)
    logits[2, 6] = poison
    assert sample(logits, rows).tolist() == [*clean[:2].tolist(), -1, *clean[3:].tolist()]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e37])
@pytest.mark.parametrize(
    "logits",
    [torch.eye(VOCAB) * 3e38, torch.zeros(VOCAB, VOCAB), torch.eye(VOCAB) * 3e38 - 3e38, torch.full((VOCAB, 1), 5.0)],
    ids=["one hot", "all equal", "all but one impossible", "one token"],
)
def test_sampled_ids_are_in_range_for_degenerate_rows(logits: Tensor, temperature: float) -> None:
    tokens = sample(logits, rows_of([(temperature, seed, 0) for seed in range(VOCAB)]))
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()


def test_the_hottest_temperature_is_uniform() -> None:
    tokens = drawn(logits_of(5)[0], 1e37, range(1), range(DRAWS))
    assert p_value(tokens, torch.full((VOCAB,), 1 / VOCAB)) > FALSE_ALARM_RATE


def test_a_step_without_logit_rows_samples_nothing() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    rows = SamplingRows(temperatures=torch.empty(0), seeds=empty, positions=empty, any_noise=False)
    assert sample(torch.empty(0, VOCAB), rows).tolist() == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_reads_nothing_back_from_the_device(temperature: float) -> None:
    with FakeTensorMode():
        tokens = sample(torch.zeros(3, VOCAB), rows_of([(temperature, seed, 0) for seed in range(3)]))
    assert tokens.shape == (3,)
