"""`weft bench changes`: what of the rows of many nights is told, once, and what of them is refused."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmark.test_history import AFTER, BEFORE, row
from weft.benchmark.history import news
from weft.cli import main

VALUES = [*BEFORE, *AFTER]
SHOWN = news(VALUES)[0][0].shown  # the place of the row with which it shows
TOLD = "- a CPU, offline, 16 requests, weft, llama-1b, bfloat16, over HF: "


def write(file: Path, values: list[float], **other: Any) -> Path:
    with file.open("a", encoding="utf-8") as lines:
        for night, value in enumerate(values):
            print(json.dumps(row(f"{night:04}", value, **other), ensure_ascii=False), file=lines)
    return file


def look(rows: Path, looks: Path | None = None) -> int:
    return main(["bench", "changes", str(rows), *([] if looks is None else ["--looks", str(looks)])])


def test_a_file_that_is_looked_at_once_tells_all_that_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", [*VALUES, *BEFORE])
    for _ in range(2):
        assert look(rows) == 1
        first, second, last = capsys.readouterr().out.splitlines()
        assert first.startswith(TOLD)
        assert first.endswith(f"since 0040, seen on {SHOWN:04}")
        assert " since 0080, seen on " in second
        assert last == "1 of 1 ratios have shifted; 120 nights at most"
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("looks_at", [range(40, 61), [40, 60], [SHOWN, SHOWN + 1, SHOWN + 2], [60, 60, 61]], ids=str)
def test_a_shift_is_told_at_the_first_look_at_which_it_shows_and_not_again(
    looks_at: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, looks = tmp_path / "rows.jsonl", tmp_path / "looks.jsonl"
    first = next(night for night in looks_at if night > SHOWN)
    told_at = []
    for place, night in enumerate(looks_at):
        rows.unlink(missing_ok=True)
        if look(write(rows, VALUES[:night]), looks):
            told_at.append(place)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == f"{len(lines) - 1} of 1 ratios have shifted; {night} nights at most"
    assert told_at == [list(looks_at).index(first)]


def test_a_case_that_gets_no_more_rows_is_not_told_again_beside_one_that_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, looks = tmp_path / "rows.jsonl", tmp_path / "looks.jsonl"
    assert look(write(rows, VALUES[: SHOWN + 1], case="stale"), looks) == 1
    for value in BEFORE[:5]:
        assert look(write(rows, [value], case="alive"), looks) == 0
    assert "- " not in capsys.readouterr().out.partition("\n")[2]


class Gone(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


def test_what_could_not_be_told_is_told_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, looks = write(tmp_path / "rows.jsonl", VALUES), tmp_path / "looks.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Gone())
        assert look(rows, looks) == 141
    assert [look(rows, looks), look(rows, looks)] == [1, 0]


@pytest.mark.parametrize("content", ["no JSON", "{}\n", json.dumps(row("1", 1.0)), None])
def test_a_file_that_holds_no_looks_is_refused_and_left(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, looks = write(tmp_path / "rows.jsonl", VALUES), tmp_path / "looks.jsonl"
    if content is None:
        content, looks = rows.read_text(), rows
    looks.write_text(content)
    assert look(rows, looks) == 2
    assert "line 1 is no look" in capsys.readouterr().err
    assert looks.read_text() == content


@pytest.mark.parametrize(("rows", "since"), [(-1, 0), (3, 4), (3, -1), (True, 0), (1.0, 0), ("1", 0), (None, None)])
def test_a_look_that_cannot_have_been_is_refused(rows: Any, since: Any, tmp_path: Path) -> None:
    file, looks = write(tmp_path / "rows.jsonl", BEFORE[:3]), tmp_path / "looks.jsonl"
    looks.write_text(json.dumps(row("1", 1.0) | {"rows": rows, "since": since}))
    assert look(file, looks) == 2
    looks.write_text(json.dumps(row("1", 1.0) | {"rows": 3, "since": 3}))
    assert look(file, looks) == 0


def test_looks_that_cannot_be_kept_are_refused_before_anything_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", VALUES)
    for looks in (tmp_path, tmp_path / "no folder" / "looks.jsonl", Path(os.devnull)):
        assert look(rows, looks) == 2
        assert capsys.readouterr().out == ""


def test_a_text_may_hold_what_ends_lines_elsewhere(tmp_path: Path) -> None:
    rows, looks = tmp_path / "rows.jsonl", tmp_path / "looks.jsonl"
    assert look(write(rows, VALUES, notes="a\u2028b\x85c", case="d\u2028e"), looks) == 1
    assert look(rows, looks) == 0


@pytest.mark.parametrize("content", [None, "no JSON", "[]\n", "{}\n"])
def test_what_holds_no_rows_is_an_error(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    assert look(file) == 2
    assert ("line 1 is no row" if content else "holds no row") in capsys.readouterr().err


@pytest.mark.parametrize(
    "value", ["abc", [1], {}, None, True, float("nan"), float("inf"), 10**400], ids=lambda value: str(value)[:9]
)
def test_a_value_that_is_no_number_is_an_error_that_names_its_line(
    value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", BEFORE[:3])
    lines = file.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"value": value})
    file.write_text("\n".join(lines))
    assert look(file) == 2
    assert "line 2 is no row" in capsys.readouterr().err


def test_a_name_that_is_no_text_of_utf_8_is_remembered_all_the_same(tmp_path: Path) -> None:
    """JSON has a way to write half a pair of surrogates, and a file has none."""
    rows, looks = tmp_path / "rows.jsonl", tmp_path / "looks.jsonl"
    rows.write_text(json.dumps(row("0001", 1.0, case="\ud800x")) + "\n")
    assert look(rows, looks) == look(rows, looks) == 0
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["looks.jsonl", "rows.jsonl"]
