"""Numbers from times, by hand."""

import pytest

from weft.benchmark.measure import Answer, Outcome, quantile, rows_of, spread
from weft.benchmark.row import Row
from weft.benchmark.workload import Job, Workload

OUTCOME = Outcome(
    answers=(
        Answer(token_ids=(1, 2, 3), times=(1.0, 1.5, 3.0)),
        Answer(token_ids=(4,), times=(2.0,)),
    ),
    elapsed_s=4.0,
)
ROW = Row(experiment="e", system="s")


def test_a_run_is_measured_by_hand() -> None:
    assert OUTCOME.tokens_per_second == 1.0
    assert OUTCOME.first_token_s == [1.0, 2.0]
    assert OUTCOME.between_tokens_s == [0.5, 1.5]


def test_rows_hold_medians_over_the_repetitions() -> None:
    faster = Outcome(answers=OUTCOME.answers, elapsed_s=2.0)
    rows = {row.metric: row for row in rows_of([OUTCOME, faster], ROW)}
    assert rows["output tokens"].value == 1.5
    assert rows["output tokens"].spread == pytest.approx(1 / 1.5)
    assert rows["output tokens"].repetitions == 2
    assert rows["time to first token p50"].value == 1000
    assert rows["time to first token p99"].value == 2000
    assert rows["time between tokens p50"].value == 500
    assert {row.unit for row in rows.values()} == {"tokens/s", "ms"}


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    single = Outcome(answers=(OUTCOME.answers[1],), elapsed_s=2.0)
    assert not any("between" in row.metric for row in rows_of([single], ROW))


@pytest.mark.parametrize(("part", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_one_of_the_values(part: float, expected: int) -> None:
    assert quantile([float(value) for value in range(100, 0, -1)], part) == expected


def test_one_value_has_no_spread() -> None:
    assert spread([3.0]) is None
    assert spread([2.0, 4.0, 3.0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("asked", "complete"), [((3, 1), True), ((3, 2), False)])
def test_a_short_answer_is_not_complete(asked: tuple[int, int], complete: bool) -> None:
    jobs = tuple(Job(prompt_token_ids=(1,), num_output_tokens=count) for count in asked)
    assert OUTCOME.is_complete(Workload(jobs=jobs, in_flight=2)) is complete
