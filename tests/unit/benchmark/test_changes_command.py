"""`weft bench changes`: what of the rows of many nights is told, once, and what of them is refused."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmark.test_history import AFTER, BEFORE, day, row
from weft.benchmark.history import shifts_in
from weft.benchmark.row import append_line
from weft.cli import main

VALUES = [*BEFORE, *AFTER]
SHOWN = shifts_in(VALUES)[0].shown  # the place of the row with which it shows
TOLD = "- a CPU, offline, 16 requests, weft, llama-1b, bfloat16, over HF: "


def write(file: Path, values: list[float], **other: Any) -> Path:
    with file.open("a", encoding="utf-8") as lines:
        for night, value in enumerate(values):
            print(json.dumps(row(day(night), value, **other), ensure_ascii=False), file=lines)
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
        assert first.endswith(f"since {day(40)}, seen on {day(SHOWN)}")
        assert f" since {day(80)}, seen on " in second
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


@pytest.mark.parametrize("content", ["no JSON", "{}\n", json.dumps(row(day(1), 1.0)), None])
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


@pytest.mark.parametrize(
    ("since", "said"),
    [
        (None, "since must be a date and a value, got None"),
        (day(1), "since must be a date and a value"),
        ([day(1)], "since must be a date and a value"),
        ([1, 1.0], "since must be a date and a value"),
        (["yesterday", 1.0], "since must be a date and a value, got ['yesterday', 1.0]"),
        ([day(1), True], "since must be a date and a value"),
        ([day(1), float("nan")], "since must be a date and a value"),
        ([day(3), 1.0], f"since='{day(3)}' is after shown='{day(2)}'"),
    ],
)
def test_a_look_that_cannot_have_been_is_refused(
    since: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, looks = write(tmp_path / "rows.jsonl", BEFORE[:3]), tmp_path / "looks.jsonl"
    looks.write_text(json.dumps(row("1", 1.0) | {"since": since, "shown": [day(2), 1.0]}))
    assert look(file, looks) == 2
    assert said in capsys.readouterr().err
    looks.write_text(json.dumps(row("1", 1.0) | {"since": [day(1), 1.0], "shown": [day(2), 1.0]}))
    assert look(file, looks) == 0


def test_looks_that_cannot_be_kept_are_refused_before_anything_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", VALUES)
    for looks in (tmp_path, tmp_path / "no folder" / "looks.jsonl", Path(os.devnull)):
        assert look(rows, looks) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert "\nhint: " in told.err


def test_looks_in_a_folder_that_takes_no_new_file_are_refused_before_anything_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are written beside the old ones, which may be replaced and not lost half-way."""
    rows, looks = write(tmp_path / "rows.jsonl", VALUES), tmp_path / "looks.jsonl"
    looks.touch()
    opened = Path.open

    def guarded(path: Path, *args: Any, **options: Any) -> Any:
        if not path.exists():
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", guarded)
    assert look(rows, looks) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "--looks" in told.err
    assert "cannot be written" in told.err


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
    err = capsys.readouterr().err
    assert f"{file}, line 2 is no row: value must be a finite number, got " in err
    assert "hint: " in err


@pytest.mark.parametrize("date", ["yesterday", "", "2026-13-01", "0001", "2026-01-01 or so"])
def test_a_date_that_is_none_is_an_error_that_names_file_line_and_value(
    date: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", BEFORE[:3])
    with file.open("a") as rows:
        print(json.dumps(row(date, 1.0)), file=rows)
    assert look(file) == 2
    assert f"{file}, line 4 is no row: date must be one of ISO 8601, got {date!r}" in capsys.readouterr().err


def lines(count: int) -> list[str]:
    return [json.dumps(row(day(night), value), ensure_ascii=False) for night, value in enumerate(VALUES[:count])]


@pytest.mark.parametrize("kept", [1, 17, -1, b"of a letter"], ids=str)
def test_a_line_that_was_cut_off_is_passed_over_with_a_warning(
    kept: int | bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end, and where the next row has been appended behind it."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines(40)))
    whole = json.dumps(row(day(40), 1.0, case="µ{[\\"), ensure_ascii=False).encode()
    torn = whole[:kept] if isinstance(kept, int) else whole[: whole.index("µ".encode()) + 1]
    with file.open("ab") as rows:
        rows.write(torn)
    assert look(file) == 0
    assert f"{file}, line 41 is cut off" in caplog.text
    caplog.clear()
    append_line(row(day(41), 1.0), file)
    assert look(file) == 0
    assert f"{file}, line 41 is cut off" in caplog.text
    assert capsys.readouterr().out.splitlines()[-1].endswith("41 nights at most")


@pytest.mark.parametrize("broken", ["no JSON", '{"a": nonsense}', '["a"', '{"a": 1}}', "", '{"a": "}"} {'])
def test_a_line_that_is_broken_in_another_way_is_an_error_wherever_it_stands(
    broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    first, second = lines(2)
    for content in (f"{first}\n{broken}\n{second}\n", f"{first}\n{broken}\n", f"{first}\n{broken}x"):
        file.write_text(content)
        assert look(file) == 2
        assert f"{file}, line 2 is no row" in capsys.readouterr().err


def test_a_last_line_without_its_end_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines(3)))
    assert look(file) == 0
    assert "3 nights at most" in capsys.readouterr().out


def test_of_looks_nothing_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, looks = write(tmp_path / "rows.jsonl", VALUES), tmp_path / "looks.jsonl"
    assert look(rows, looks) == 1
    looks.write_text(looks.read_text()[:-9])
    assert look(rows, looks) == 2
    assert "line 1 is no look" in capsys.readouterr().err


def test_no_file_of_another_name_is_touched(tmp_path: Path) -> None:
    rows, looks = write(tmp_path / "rows.jsonl", VALUES), tmp_path / "looks.jsonl"
    mine = tmp_path / "looks.jsonl.new"
    mine.write_text("mine")
    assert look(rows, looks) == 1
    assert mine.read_text() == "mine"
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "looks.jsonl", "looks.jsonl.new"}


@pytest.mark.parametrize("exists", [True, False])
def test_looks_are_written_through_links(exists: bool, tmp_path: Path) -> None:
    rows, link = write(tmp_path / "rows.jsonl", VALUES), tmp_path / "looks.jsonl"
    (tmp_path / "kept").mkdir()
    target = tmp_path / "kept" / "looks"
    if exists:
        target.touch(mode=0o640)
    link.symlink_to("kept/looks")
    assert [look(rows, link), look(rows, link)] == [1, 0]
    assert link.is_symlink()
    assert [file.name for file in target.parent.iterdir()] == ["looks"]
    assert not exists or target.stat().st_mode & 0o777 == 0o640


def test_links_in_a_circle_lead_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, link = write(tmp_path / "rows.jsonl", VALUES), tmp_path / "looks.jsonl"
    link.symlink_to(link)
    assert look(rows, link) == 2
    assert "--looks" in capsys.readouterr().err


def test_a_name_of_several_lines_is_told_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", VALUES, case="a\n- b\x1b[2J")
    assert look(file) == 1
    first, _ = capsys.readouterr().out.splitlines()
    assert first.startswith(r"- a CPU, offline, a\n- b\x1b[2J, weft,")


def test_a_name_that_is_no_text_of_utf_8_is_remembered_all_the_same(tmp_path: Path) -> None:
    """JSON has a way to write half a pair of surrogates, and a file has none."""
    rows, looks = tmp_path / "rows.jsonl", tmp_path / "looks.jsonl"
    rows.write_text("".join(json.dumps(row(day(n), x, case="\ud800x")) + "\n" for n, x in enumerate(VALUES)))
    assert [look(rows, looks), look(rows, looks)] == [1, 0]
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["looks.jsonl", "rows.jsonl"]
