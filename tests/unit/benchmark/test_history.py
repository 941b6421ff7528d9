"""The watch over nights: quiet on noise and wild nights, sure of what has shifted for good, and it tells that once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.benchmark.test_experiments import run
from weft.benchmark.experiments.nights import NightsOptions
from weft.benchmark.history import ERRORS, LASTING, WINDOW, news, series, shift_of
from weft.benchmark.history_simulation import Nights, told
from weft.cli import main
from weft.errors import ConfigError


def nights(count: int, *, level: float = 4.0, seed: int = 0, noise: float = 0.02) -> list[float]:
    return (level * np.exp(np.random.default_rng(seed).normal(0, noise, count))).tolist()


BEFORE, AFTER = nights(40), nights(40, level=3.6, seed=1)


@pytest.mark.parametrize("level", [3.6, 4.4])
def test_a_shift_is_told_with_both_sides_and_how_long_it_has_lasted(level: float) -> None:
    shift = shift_of([*BEFORE, *nights(9, level=level, seed=1)])
    assert shift is not None
    assert shift.nights in (9, 10), "a night before it may look like those after"
    assert (shift.before, shift.after) == (pytest.approx(4.0, rel=0.02), pytest.approx(level, rel=0.02))
    assert str(shift).endswith(f"({shift.after / shift.before - 1:+.1%}) since {shift.nights} nights")


def test_nothing_is_told_of_noise_of_wild_nights_or_of_too_few() -> None:
    assert shift_of(BEFORE) is None
    assert shift_of([*BEFORE, *AFTER[: LASTING - 1]]) is None, "it may be gone tomorrow"
    assert shift_of([*BEFORE[:-1], 1.0]) is None, "one night is one night, however wild"
    assert shift_of([*BEFORE[:20], 9.0, 9.0, *BEFORE[20:35], 0.1, 9.0]) is None
    assert shift_of([]) is shift_of(BEFORE[: 2 * LASTING - 1]) is None
    assert shift_of([4.0] * 40) is None
    assert shift_of([0.0, *BEFORE[:25], *AFTER[:9]]) is not None, "the window has left it behind"
    assert shift_of([*BEFORE, *AFTER[:9], 0.0]) is None, "what is no ratio is not judged"


def test_what_is_sure_and_small_is_not_told() -> None:
    exact = [1.0] * 20
    assert shift_of([*exact, *[0.99] * 15]) is None
    assert shift_of([*exact, *[0.97] * 15]) is not None


def test_a_shift_is_told_once_and_another_one_later_anew() -> None:
    values = [*BEFORE, *AFTER, *nights(40, seed=2)]
    said = [night for night in range(1, len(values) + 1) if news(values[:night])]
    assert len(said) == 2
    assert [(night > 40, night > 80) for night in said] == [(True, False), (True, True)]
    assert shift_of(values[: said[0] + 3]) is not None, "it is seen for longer than it is told"
    assert shift_of(values[:70]) is None, "what lies behind the window is how it has always been"


def test_the_part_of_shuffled_nights_that_seems_to_shift_is_the_error() -> None:
    random = np.random.default_rng(5)
    found = sum(shift_of(random.permutation(np.linspace(1, 2, WINDOW)).tolist()) is not None for _ in range(4000))
    assert found <= 4000 * ERRORS + 5  # 2 are expected


def row(date: str, value: float, **other: Any) -> dict[str, Any]:
    names = {"device": "a CPU", "experiment": "offline", "case": "16 requests", "system": "weft", "metric": "over HF"}
    return names | {"unit": "x", "date": date, "value": value} | other


def test_series_are_ratios_by_device_and_case_in_the_order_of_their_dates() -> None:
    records = [row("2", 2.0), row("1", 1.0), row("1", 7.0, device="b CPU"), row("3", 9.0, unit="s"), row("3", 3.0)]
    assert list(series(records).values()) == [[1.0, 2.0, 3.0], [7.0]]
    assert {case.device for case in series(records)} == {"a CPU", "b CPU"}


def write(file: Path, values: list[float]) -> Path:
    file.write_text("".join(json.dumps(row(f"{night:04}", value)) + "\n" for night, value in enumerate(values)))
    return file


def test_the_command_says_what_has_shifted_and_its_status_whether(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_on = next(night for night in range(41, 60) if news([*BEFORE, *AFTER][:night]))
    for night, status in ((40, 0), (told_on, 1), (told_on + 1, 0)):
        assert main(["bench", "changes", str(write(tmp_path / "rows.jsonl", [*BEFORE, *AFTER][:night]))]) == status
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + status
        assert lines[-1] == f"{status} of 1 ratios have shifted; {night} nights at most"
    assert main(["bench", "changes", str(write(tmp_path / "rows.jsonl", [*BEFORE, *AFTER][:told_on]))]) == 1
    assert capsys.readouterr().out.startswith("- a CPU, offline, 16 requests, weft, over HF: ")


@pytest.mark.parametrize("content", [None, "no JSON", "[]\n", "{}\n"])
def test_what_holds_no_rows_is_an_error(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["bench", "changes", str(file)]) == 2
    assert ("line 1 is no row" if content else "holds no rows") in capsys.readouterr().err


@pytest.mark.parametrize("value", ["abc", [1], {}, None, True, float("nan"), float("inf")], ids=str)
def test_a_value_that_is_no_number_is_an_error_that_names_its_line(
    value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", BEFORE[:3])
    lines = file.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"value": value})
    file.write_text("\n".join(lines))
    assert main(["bench", "changes", str(file)]) == 2
    assert "line 2 is no row" in capsys.readouterr().err


def test_rows_of_the_simulation() -> None:
    rows = run("nights")
    assert [(row.case[:1], row.metric, row.verdict) for row in rows] == [
        ("0", "false alarms", "met"),
        ("3", "false alarms", "met"),
        ("3", "found within 14 nights", ""),
        ("3", "nights until found, median", ""),
    ]


@pytest.mark.parametrize("options", [{"lower": "a"}, {"lower": "100"}, {"noise": -1.0}, {"histories": 0}])
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
