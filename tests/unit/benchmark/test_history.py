"""The watch over nights: quiet on noise and wild nights, sure of what has shifted for good, and it tells that once."""

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

import numpy as np
import pytest

from tests.unit.benchmark.test_experiments import run
from weft.benchmark.experiments.nights import NightsOptions
from weft.benchmark.history import (
    ERRORS,
    LASTING,
    WINDOW,
    Look,
    Night,
    Shift,
    instant,
    news,
    series,
    shift_of,
)
from weft.benchmark.history_simulation import Nights, told
from weft.errors import ConfigError


def nights(count: int, *, level: float = 4.0, seed: int = 0, noise: float = 0.02) -> list[float]:
    return (level * np.exp(np.random.default_rng(seed).normal(0, noise, count))).tolist()


BEFORE, AFTER = nights(40), nights(40, level=3.6, seed=1)


@pytest.mark.parametrize("level", [3.6, 4.4])
def test_a_shift_is_told_with_both_sides_and_how_long_it_has_lasted(level: float) -> None:
    shift = shift_of([*BEFORE, *nights(9, level=level, seed=1)])
    assert shift is not None
    assert shift.first in (39, 40), "a night before it may look like those after"
    assert shift.shown == 48
    assert (shift.before, shift.after) == (pytest.approx(4.0, rel=0.02), pytest.approx(level, rel=0.02))
    assert str(shift).endswith(f"({shift.after / shift.before - 1:+.1%})")


def test_nothing_is_told_of_noise_of_wild_nights_or_of_too_few() -> None:
    assert shift_of(BEFORE) is None
    assert shift_of([*BEFORE, *AFTER[: LASTING - 1]]) is None, "it may be gone tomorrow"
    assert shift_of([*BEFORE[:-1], 1.0]) is None, "one night is one night, however wild"
    assert shift_of([*BEFORE[:20], 9.0, 9.0, *BEFORE[20:35], 0.1, 9.0]) is None
    assert shift_of([]) is shift_of(BEFORE[: 2 * LASTING - 1]) is None
    assert shift_of([4.0] * 40) is None


def test_what_is_sure_and_small_is_not_told() -> None:
    exact = [1.0] * 20
    assert shift_of([*exact, *[0.99] * 15]) is None
    assert shift_of([*exact, *[0.97] * 15]) is not None


@pytest.mark.parametrize("wild", [0.0, -1.0, 9.0])
def test_a_wild_night_is_one_night_though_it_be_0(wild: float) -> None:
    assert shift_of([*BEFORE, wild, *BEFORE[:10]]) is None
    assert shift_of([*BEFORE, wild, *AFTER[:14]]) is not None
    assert shift_of([*BEFORE, *AFTER[:14], wild]) is not None


def test_from_0_to_anything_is_a_shift_and_between_zeros_is_none() -> None:
    shift = shift_of([0.0] * 20 + [0.5] * 9)
    assert shift == Shift(before=0.0, after=0.5, first=20, shown=28)
    assert str(shift) == "0 -> 0.5", "there is no part of nothing"
    assert shift_of([0.0] * 20 + [0.0, 0.5] * 5) is None
    assert str(shift_of([-2.0] * 20 + [-1.0] * 9)) == "-2 -> -1 (+50.0%)"


def day(number: int) -> str:
    return (date(2026, 1, 1) + timedelta(days=number)).isoformat()


def dated(values: Sequence[float], first: int = 0) -> list[Night]:
    return [Night(day(first + place), value) for place, value in enumerate(values)]


def looked_at(values: Sequence[float], looks: Sequence[int]) -> list[Shift]:
    """All that is told by looks at so many of the values."""
    told: list[Shift] = []
    look: Look | None = None
    for rows in looks:
        shifts, look = news(dated(values)[:rows], look)
        told += shifts
    return told


def test_a_shift_is_told_once_and_another_one_later_anew() -> None:
    values = [*BEFORE, *AFTER, *nights(40, seed=2)]
    first, second = looked_at(values, range(1, len(values) + 1))
    assert [40 < first.shown < 54, 80 < second.shown < 94] == [True, True]
    assert shift_of(values[: first.shown + 4]) is not None, "it is seen for longer than it is told"
    assert shift_of(values[:70]) is None, "what lies behind the window is how it has always been"


@pytest.mark.parametrize("between", [8, 12])
def test_a_shift_soon_after_another_is_not_hidden_by_it(between: int) -> None:
    values = [*BEFORE, *AFTER[:between], *nights(20, level=3.2, seed=3)]
    first, second = looked_at(values, range(1, len(values) + 1))
    assert (first.after, second.before) == (pytest.approx(3.6, rel=0.02), pytest.approx(3.6, rel=0.02))
    assert second.after == pytest.approx(3.2, rel=0.02)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_looks_are_missed_the_same_is_told(seed: int) -> None:
    values = [*BEFORE, *AFTER, *nights(40, seed=2)]
    every = looked_at(values, range(len(values) + 1))
    some = np.random.default_rng(seed).choice(len(values), size=3 * seed, replace=False)
    assert looked_at(values, [*sorted(some.tolist()), len(values)]) == every


def test_a_case_without_new_rows_tells_nothing() -> None:
    for rows in range(40, 80):
        _, look = news(dated([*BEFORE, *AFTER])[:rows])
        assert news(dated([*BEFORE, *AFTER])[:rows], look) == ([], look)


def test_a_row_that_comes_late_and_belongs_before_is_looked_at_with_the_others() -> None:
    values = [*BEFORE, *AFTER][: looked_at([*BEFORE, *AFTER], [80])[0].shown + 1]
    whole = dated(values)
    told, look = news([*whole[:42], *whole[43:]])
    assert told == []
    assert [shift.shown for shift in news(whole, look)[0]] == [len(values) - 1]


TWICE = [*BEFORE, *AFTER, *nights(40, seed=2)]


@pytest.mark.parametrize("earlier", [1, 12, 40])
@pytest.mark.parametrize("first", [-40, 3])
def test_rows_merged_in_from_earlier_nights_are_neither_told_again_nor_hide_the_next(earlier: int, first: int) -> None:
    history = dated(TWICE)
    told, look = news(history[:80])
    assert len(told) == 1
    merged = series(
        row(f"{night.date}{hour}", night.value)
        for hour, more in (("", history), ("T12:00:00", dated(nights(earlier, seed=7), first)))
        for night in more
    )
    (together,) = merged.values()
    again, look = news(together[: 80 + earlier], look)
    assert again == []
    (second,) = news(together, look)[0]
    assert together[second.shown] == history[looked_at(TWICE, [120])[1].shown]


def test_rows_merged_in_after_the_last_shift_are_looked_at() -> None:
    """A machine was away: its nights of the other level come when those of today have been looked at."""
    now, away = dated([*BEFORE, *AFTER]), dated(nights(20, level=3.2, seed=3), 80)
    later = dated(nights(5, level=3.2, seed=4), 100)
    told, look = news([*now, *later[:4]])
    assert len(told) == 1
    (second,) = news([*now, *away, *later[:4]], look)[0]
    assert second.after == pytest.approx(3.2, rel=0.02)


@pytest.mark.parametrize("other", [nights(40, seed=8), nights(60, seed=8)], ids=len)
def test_another_history_of_the_same_case_is_looked_at_anew(other: list[float]) -> None:
    """With as many rows as the one before, or with more."""
    _, look = news(dated([*BEFORE, *AFTER]))
    another = dated([*other, *nights(80 - len(other) + 10, level=3.0, seed=9)])
    assert news(another, look) == news(another)
    assert len(news(another)[0]) == 1
    assert news(dated(BEFORE), look) == ([], None)


BIG = 1.7e308


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (BIG, BIG / 2, "1.7e+308 -> 8.5e+307 (-50.0%)"),
        (-BIG, BIG, "-1.7e+308 -> 1.7e+308 (+200.0%)"),
        (1e-300, BIG, "1e-300 -> 1.7e+308"),
        (5e-324, 1.0, "4.941e-324 -> 1"),
    ],
)
def test_what_is_told_of_the_largest_numbers_is_a_number(before: float, after: float, said: str) -> None:
    """An even number of nights on each side: their median is a sum, halved."""
    shift = shift_of([before] * 20 + [after] * 10)
    assert str(shift) == said
    assert shift_of([BIG] * 20 + [BIG * (1 - 1e-9)] * 10) is None, "sure and small"


def test_the_part_of_shuffled_nights_that_seems_to_shift_is_the_error() -> None:
    random = np.random.default_rng(5)
    found = sum(shift_of(random.permutation(np.linspace(1, 2, WINDOW)).tolist()) is not None for _ in range(4000))
    assert found <= 4000 * ERRORS + 5  # 2 are expected


def row(when: str, value: float, **other: Any) -> dict[str, Any]:
    what = {"device": "a CPU", "experiment": "offline", "case": "16 requests", "system": "weft", "metric": "over HF"}
    return what | {"model": "llama-1b", "dtype": "bfloat16", "unit": "x", "date": when, "value": value} | other


def test_series_are_ratios_by_device_and_case_in_the_order_of_their_dates() -> None:
    first, second, third = map(day, range(3))
    records = [row(second, 2.0), row(first, 1.0), row(first, 7.0, device="b CPU")]
    records += [row(third, 9.0, unit="s"), row(third, 3), row(first, 1.0)]
    assert list(series(records).values()) == [[(first, 1.0), (second, 2.0), (third, 3.0)], [(first, 7.0)]]
    assert {case.device for case in series(records)} == {"a CPU", "b CPU"}


def test_dates_are_moments_and_not_texts() -> None:
    dates = ["2026-03-01T01:00:00+02:00", "2026-02-28T23:30:00", "2026-03-01", "2026-03-01T02:30:00+02:00"]
    (ordered,) = series(row(when, 1.0) for when in reversed(dates)).values()
    assert [night.date for night in ordered] == [dates[0], dates[1], dates[2], dates[3]]
    assert instant("0001-01-01T00:00:00+14:00") < instant("9999-12-31T23:59:59-14:00")


def test_of_one_moment_the_order_of_rows_says_nothing() -> None:
    records = [row(day(1), value) for value in (2.0, 1.0, 3.0)]
    assert series(records) == series(reversed(records))


@pytest.mark.parametrize("name", ["device", "experiment", "case", "system", "model", "dtype", "metric"])
def test_rows_of_unlike_measurements_are_not_mixed(name: str) -> None:
    records = [row(day(1), 1.0), row(day(2), 2.0, **{name: "another"}), row(day(3), 3.0, commit="another")]
    assert sorted(map(len, series(records).values())) == [1, 2]


def test_rows_of_the_simulation() -> None:
    rows = run("nights")
    assert [(row.case[:1], row.metric, row.verdict) for row in rows] == [
        ("0", "false alarms", "met"),
        ("3", "false alarms", "met"),
        ("3", "found within 14 nights", ""),
        ("3", "told again", "met"),
        ("3", "nights until found, median", ""),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"lower": "a"},
        {"lower": "100"},
        {"noise": -1.0},
        {"noise": float("nan")},
        {"wander": float("inf")},
        {"histories": 0},
        {"seed": -1},
    ],
)
def test_what_cannot_be_simulated_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NightsOptions(**options)


@pytest.mark.nightly
def test_two_hundred_simulated_histories() -> None:
    """The figures of docs/speed_gates.md."""
    quiet = list(told(Nights(), shift=0.0, histories=200, seed=0))
    assert sum(map(bool, quiet)) <= 10
    for shift, least in ((0.05, 160), (0.10, 190)):
        found = [
            [night for night in telling if night >= 1][:1]
            for telling in told(Nights(), shift=shift, histories=200, seed=0)
        ]
        assert sum(bool(nights) and nights[0] <= 14 for nights in found) >= least
