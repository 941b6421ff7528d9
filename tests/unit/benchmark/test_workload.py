"""A workload is the same for the same seed, and exactly what was asked for."""

from typing import Any

import pytest

from weft.benchmark.workload import Lengths, Workload, mixed_workload, num_equal, skewed_workload
from weft.errors import ConfigError


def mixed(**options: Any) -> Workload:
    defaults = {
        "requests": 40,
        "in_flight": 8,
        "prompts": Lengths.parse("8,32"),
        "outputs": Lengths.parse("3:5"),
        "vocab_size": 50,
        "seed": 0,
    }
    return mixed_workload(**(defaults | options))


def test_a_seed_names_one_workload() -> None:
    assert mixed(seed=1) == mixed(seed=1) != mixed(seed=2)


def test_lengths_and_tokens_stay_in_their_sets() -> None:
    jobs = mixed().jobs
    assert {len(job.prompt_token_ids) for job in jobs} == {8, 32}
    assert {job.num_output_tokens for job in jobs} == {3, 4, 5}
    tokens = {token for job in jobs for token in job.prompt_token_ids}
    assert tokens == set(range(50))


def test_more_requests_begin_with_the_same_ones() -> None:
    assert mixed(requests=50).jobs[:40] == mixed().jobs


def test_exactly_one_in_eight_is_long_wherever_it_falls() -> None:
    options: dict[str, Any] = {"requests": 48, "in_flight": 8, "prompts": Lengths.parse("8"), "vocab_size": 50}
    first, second = (skewed_workload(short=8, long=160, one_in=8, seed=seed, **options) for seed in (0, 1))
    for workload in (first, second):
        assert sorted(job.num_output_tokens for job in workload.jobs) == [8] * 42 + [160] * 6
    assert [job.num_output_tokens for job in first.jobs] != [job.num_output_tokens for job in second.jobs]


def test_a_warm_up_has_the_same_width_and_short_answers() -> None:
    warm_up = mixed().warm_up(2)
    assert [job.prompt_token_ids for job in warm_up.jobs] == [job.prompt_token_ids for job in mixed().jobs[:8]]
    assert {job.num_output_tokens for job in warm_up.jobs} == {2}
    assert warm_up.max_num_tokens <= mixed().max_num_tokens


@pytest.mark.parametrize("text", ["", "a", "0", "8,", "8:", "9:8", "1:2:3", "1,2:3", "-1"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Lengths.parse(text)


@pytest.mark.parametrize("name", ["requests", "in_flight"])
def test_an_empty_workload_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        mixed(**{name: 0})


def test_answers_are_equal_only_as_a_whole() -> None:
    assert num_equal([(1, 2), (3,), (4, 5)], [[1, 2], [3, 3], [4, 6]]) == 1
