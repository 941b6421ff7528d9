"""Sampling draws from the softmax, row by row: no row can tell which rows are beside it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from weft.batch import SamplingRows, Truncation
from weft.inference import sampler
from weft.inference.sampler import GumbelSampler, KernelSampler, Sampler
from weft.kernels import truncate
from weft.kernels._jit import HAS_TRITON

FALSE_ALARM_RATE = 1e-4  # of one chi-squared test, over the choice of its seeds, which are fixed
VOCAB = 8
DRAWS = 4096
CUT_DRAWS = 1024  # a row that is cut is looked at by itself each time, half a millisecond each

Row = tuple[float, int, int]  # temperature, seed, position
Cut = tuple[int, float, float]  # top_k, top_p, min_p

sample = GumbelSampler()
NO_CUT: Cut = (0, 1.0, 0.0)
cuts = st.sampled_from([NO_CUT, (1, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1), (50, 0.9, 0.01)])
sampling = st.tuples(st.sampled_from([0.0, 0.3, 1.0, 5.0]), st.integers(0, 2**32), st.integers(0, 4096))


def rows_of(rows: list[Row], cuts: list[Cut] | None = None) -> SamplingRows:
    temperatures, seeds, positions = zip(*rows, strict=True)
    truncation = None
    if cuts is not None:
        top_k, top_p, min_p = (torch.tensor(column) for column in zip(*cuts, strict=True))
        truncation = Truncation(top_k=top_k, top_p=top_p, min_p=min_p)
    return SamplingRows(
        temperatures=torch.tensor(temperatures, dtype=torch.float32),
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
        any_noise=any(temperature > 0 for temperature in temperatures),
        truncation=truncation,
    )


def drawn(logits: Tensor, temperature: float, seeds: range, positions: range, cut: Cut | None = None) -> Tensor:
    each = [(temperature, seed, position) for seed in seeds for position in positions]
    rows = rows_of(each, None if cut is None else [cut] * len(each))
    return sample(logits.expand(len(rows.seeds), -1), rows)


def p_value(observed: Tensor, probabilities: Tensor) -> float:
    """Of a chi-squared test; 0 where a token was drawn that has no probability."""
    possible = probabilities > 0
    if not possible[observed].all():
        return 0.0
    observed, probabilities = (possible.cumsum(0) - 1)[observed], probabilities[possible]
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


CUTS: dict[str, tuple[Cut, list[Any]]] = {
    "top_k": ((3, 1.0, 0.0), [TopKLogitsWarper(3)]),
    "top_p": ((0, 0.7, 0.0), [TopPLogitsWarper(0.7)]),
    "min_p": ((0, 1.0, 0.4), [MinPLogitsWarper(0.4)]),
    "top_k and top_p": ((5, 0.8, 0.0), [TopKLogitsWarper(5), TopPLogitsWarper(0.8)]),
    "min_p and top_k": ((4, 1.0, 0.05), [MinPLogitsWarper(0.05), TopKLogitsWarper(4)]),
    "all": ((6, 0.9, 0.04), [MinPLogitsWarper(0.04), TopKLogitsWarper(6), TopPLogitsWarper(0.9)]),
}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("kind", CUTS)
def test_truncated_rows_follow_the_softmax_of_what_huggingface_leaves(kind: str, temperature: float) -> None:
    cut, warpers = CUTS[kind]
    logits = logits_of(3)[0]
    left = TemperatureLogitsWarper(temperature)(torch.empty(0), logits[None])
    for warper in warpers:
        left = warper(torch.empty(0), left)
    expected = torch.softmax(left[0], dim=0)
    assert 1 < (expected > 0).sum() < VOCAB, "this shows nothing"
    tokens = drawn(logits, temperature, range(1), range(CUT_DRAWS), cut)
    assert p_value(tokens, expected) > FALSE_ALARM_RATE
    assert p_value(drawn(logits, temperature, range(1), range(CUT_DRAWS)), expected) < FALSE_ALARM_RATE  # it can see
    likeliest_gone = left[0].masked_fill(left[0] == left[0].max(), -torch.inf)
    assert p_value(tokens, torch.softmax(likeliest_gone, dim=0)) == 0


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ((2, 1.0, 0.0), {0, 1, 2}),
        ((1, 1.0, 0.0), {0}),
        ((0, 0.4, 0.0), {0}),
        ((0, 0.41, 0.0), {0, 1, 2}),
        ((0, 1.0, 0.75), {0, 1, 2}),
        ((0, 1.0, 0.76), {0}),
        ((0, 1.0, 1.0), {0}),
        ((4, 1.0, 0.0), {0, 1, 2}),
        ((2**31 - 1, 1.0, 0.0), {0, 1, 2}),
        ((2, 0.5, 0.1), {0, 1, 2}),
    ],
)
def test_ties_at_the_cut_are_kept(cut: Cut, kept: set[int]) -> None:
    """Probabilities 0.4, 0.3, 0.3 and 0. (Reported as K06-6: paths that keep other ones of equals.)"""
    logits = torch.tensor([0.4, 0.3, 0.3, 0.0]).log()
    assert set(drawn(logits, 1.0, range(1), range(512), cut).tolist()) == kept


@pytest.mark.parametrize("cut", [(1, 1.0, 0.0), (5, 0.5, 0.1), (2**31 - 1, 1.0, 0.0), (0, 1e-45, 0.0), (0, 1.0, 1.0)])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 1.0, 1e37])
@pytest.mark.parametrize(
    ("logits", "possible"),
    [
        (torch.tensor([0.0, 3e38, 0.0, -3e38]), {1}),
        (torch.full((5,), 2.5), {0, 1, 2, 3, 4}),
        (torch.full((5,), -torch.inf).index_fill(0, torch.tensor(3), -7.0), {3}),
        (torch.tensor([4.0]), {0}),
    ],
    ids=["one hot", "all equal", "all but one impossible", "one token"],
)
def test_truncation_of_degenerate_rows_leaves_what_is_possible(
    logits: Tensor, possible: set[int], temperature: float, cut: Cut
) -> None:
    """(Reported as K06-10: ids out of range for one-hot rows with a top_k of 2**30.)"""
    said = set(drawn(logits, temperature, range(1), range(64), cut).tolist())
    if temperature == 1e37 and len(possible) == 1 and logits.isfinite().all():
        assert said <= set(range(len(logits)))  # so hot that even 3e38 is within reach of the noise
    elif temperature < 1e-6:  # noise so small is lost beside the logits, and the first of equals is said
        assert said == {min(possible)}
    else:
        assert said == possible


@given(neighbours=st.lists(st.tuples(sampling, cuts), max_size=5), row=sampling, cut=cuts, data=st.data())
def test_a_truncated_row_draws_the_same_token_beside_any_neighbour(
    neighbours: list[tuple[Row, Cut]], row: Row, cut: Cut, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(neighbours)))
    logits = logits_of(row[1], rows=len(neighbours) + 1, vocab=97)
    rows, all_cuts = map(list, zip(*[*neighbours[:place], (row, cut), *neighbours[place:]], strict=True))
    beside = sample(logits, rows_of(rows, all_cuts))
    assert beside[place] == sample(logits[place : place + 1], rows_of([row], [cut]))[0]


@given(neighbours=st.lists(sampling, max_size=5), row=sampling, data=st.data())
def test_seeded_row_draws_the_same_token_beside_any_neighbour(
    neighbours: list[Row], row: Row, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(neighbours)))
    logits = logits_of(row[1], rows=len(neighbours) + 1, vocab=97)
    beside = sample(logits, rows_of([*neighbours[:place], row, *neighbours[place:]]))
    assert beside[place] == sample(logits[place : place + 1], rows_of([row]))[0]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [None, NO_CUT, (3, 0.5, 0.1)])
def test_a_row_that_is_not_finite_gives_minus_one_and_leaves_the_others(
    poison: float, temperature: float, cut: Cut | None
) -> None:
    rows = rows_of([(temperature, seed, 3) for seed in range(5)], None if cut is None else [cut] * 5)
    logits = logits_of(1, rows=5)
    clean = sample(logits, rows)
    logits[2, 6] = poison
    assert sample(logits, rows).tolist() == [*clean[:2].tolist(), -1, *clean[3:].tolist()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [None, NO_CUT, (3, 0.5, 0.1)])
def test_a_row_with_nothing_to_draw_gives_minus_one(temperature: float, cut: Cut | None) -> None:
    logits = logits_of(1, rows=3)
    logits[1] = -math.inf
    rows = rows_of([(temperature, seed, 3) for seed in range(3)], None if cut is None else [cut] * 3)
    assert [token < 0 for token in sample(logits, rows).tolist()] == [False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1e37])
def test_a_token_at_minus_infinity_is_never_drawn(temperature: float) -> None:
    logits = logits_of(3)[0]
    logits[int(logits.argmax())] = -math.inf
    tokens = drawn(logits, temperature, range(1), range(DRAWS))
    if temperature == 0.5:
        assert p_value(tokens, torch.softmax(logits / temperature, dim=0)) > FALSE_ALARM_RATE
    assert not logits[tokens].isinf().any()


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


MIXED: list[tuple[Row, Cut]] = [((0.0, 1, 3), (2, 1.0, 0.0)), ((0.7, 2, 5), (0, 0.6, 0.0)), ((1.5, 2**40, 9), NO_CUT)]


def on(device: torch.device, rows: SamplingRows) -> SamplingRows:
    truncation = rows.truncation
    if truncation is not None:
        truncation = Truncation(
            top_k=truncation.top_k.to(device), top_p=truncation.top_p.to(device), min_p=truncation.min_p.to(device)
        )
    return SamplingRows(
        temperatures=rows.temperatures.to(device),
        seeds=rows.seeds.to(device),
        positions=rows.positions.to(device),
        any_noise=rows.any_noise,
        truncation=truncation,
    )


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_sampler_of_kernels_draws_the_tokens_of_the_plain_one(is_cut: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, all_cuts = map(list, zip(*(MIXED * 5), strict=True))
    logits = logits_of(2, rows=15, vocab=31).to(device)
    chosen = on(device, rows_of(rows, all_cuts if is_cut else None))
    expected = sample(logits, chosen)
    assert torch.equal(KernelSampler()(logits, chosen), expected)
    assert torch.equal(sample(logits, on(device, rows_of(rows))), expected) != is_cut, "this shows nothing"


def test_cuts_are_those_of_plain_torch_on_a_cpu_and_none_where_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, all_cuts = map(list, zip(*MIXED, strict=True))
    logits, chosen = logits_of(2, rows=3, vocab=31), rows_of(rows, all_cuts)
    assert sampler.cuts(logits, rows_of(rows)) is None
    monkeypatch.setattr(truncate, "thresholds", None)  # though the interpreter could run it here
    cut = chosen.truncation
    assert cut is not None
    expected = truncate.reference(logits, chosen.temperatures, cut.top_k, cut.top_p, cut.min_p)
    found = sampler.cuts(logits, chosen)
    assert found is not None
    assert torch.equal(found, expected)


def test_cuts_are_made_by_a_kernel_on_a_gpu_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def thresholds(logits: Tensor, *_: Tensor) -> Tensor:
        asked.append(logits)
        return logits[:, 0]

    monkeypatch.setattr(truncate, "thresholds", thresholds)
    monkeypatch.setattr(sampler, "runs_on", lambda device: device.type == "cuda")
    rows, all_cuts = map(list, zip(*MIXED, strict=True))
    with FakeTensorMode():
        logits = torch.empty(3, 31, device="cuda")
        sampler.cuts(logits, on(logits.device, rows_of(rows, all_cuts)))
    assert asked == [logits]
