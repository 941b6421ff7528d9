"""Rows that come back from another machine are added to those here, and whatever happens there loses none of these."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.testing.test_remote_modal import Told
from weft.benchmark.collection import collect
from weft.benchmark.progress import show_nothing
from weft.benchmark.remote_collection import RemoteDesk
from weft.testing.remote.interface import Job
from weft.testing.remote.subprocess_runner import SubprocessRunner

ROW = {
    "experiment": "steps",
    "metric": "speed",
    "device": "NVIDIA H200",
    "driver": "580",
    "commit": None,
    "dirty": None,
}
# A main.py that leaves the rows of `rows.json`, then ends as `code` says.
PROGRAM = """
import sys
from pathlib import Path
(name,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--json=")]
print("collecting", *sys.argv[1:3])
Path(name).parent.mkdir(exist_ok=True)
Path(name).write_text(Path("rows").read_text())
Path("results/other.jsonl").write_text("not asked for")
sys.exit(int(Path("code").read_text()))
"""


def there(folder: Path, rows: str, *, code: int = 0) -> SubprocessRunner:
    folder.mkdir()
    for name, text in {"main.py": PROGRAM, "rows": rows, "code": str(code)}.items():
        (folder / name).write_text(text)
    return SubprocessRunner(folder)


def kept(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in folder.glob("*")}


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_rows_are_added_to_those_of_their_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "h200.jsonl").write_text(lines(ROW | {"metric": "old"}))
    host = ROW | {"device": "AMD EPYC, 2 threads", "driver": None, "commit": "abc"}
    monkeypatch.setattr("weft.benchmark.remote_collection.commit_of_tree", lambda: ("def", True))
    desk = RemoteDesk(there(tmp_path / "there", lines(ROW, host, ROW)), device="auto", folder=here)
    assert collect(["steps"], desk.measure, show_nothing) == 0
    found = kept(here)
    assert [row["metric"] for row in found["h200.jsonl"]] == ["old", "speed", "speed"]
    assert found["cpu.jsonl"] == [host], "a commit that was known there stands"
    assert set(found) == {"h200.jsonl", "cpu.jsonl"}, "nothing else of that folder is taken over"
    assert [(row["commit"], row["dirty"]) for row in found["h200.jsonl"][1:]] == [("def", True)] * 2
    told = capsys.readouterr().out
    assert "collecting --collect=steps --device=auto" in told
    assert "steps: measured, 3 rows" in told


def test_what_was_measured_before_it_failed_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.jsonl"
    runner = there(tmp_path / "there", lines(ROW), code=1)
    desk = RemoteDesk(runner, device="auto", folder=tmp_path / "here", file=file)
    assert collect(["steps"], desk.measure, show_nothing) == 1
    assert len(file.read_text().splitlines()) == 1
    assert "steps: failed, 1 rows: exit status 1" in capsys.readouterr().out
    assert not (tmp_path / "here").exists()


def test_no_row_is_a_failure(tmp_path: Path) -> None:
    desk = RemoteDesk(there(tmp_path / "there", ""), device="auto", folder=tmp_path / "here")
    assert desk.measure("steps").reason == "it left no row"


@pytest.mark.parametrize("line", ["no JSON", "[]", "{}", '{"experiment": 3}', lines(ROW | {"device": 1})])
def test_what_is_no_row_is_not_kept(line: str, tmp_path: Path) -> None:
    desk = RemoteDesk(there(tmp_path / "there", lines(ROW) + line), device="auto", folder=tmp_path / "here")
    assert "a line that is no row" in desk.measure("steps").reason
    assert not (tmp_path / "here").exists()


def test_a_row_that_was_cut_off_takes_none_with_it(tmp_path: Path) -> None:
    """A text may hold other ends of lines than its file's."""
    here = tmp_path / "here"
    sound = json.dumps(ROW | {"notes": "a\u2028b"}, ensure_ascii=False) + "\n"
    desk = RemoteDesk(there(tmp_path / "there", sound + lines(ROW)[:-9], code=1), device="auto", folder=here)
    assert desk.measure("steps").num_rows == 1
    assert [row["notes"] for row in map(json.loads, (here / "h200.jsonl").read_text().rstrip("\n").split("\n"))] == [
        "a\u2028b"
    ]


class Broken(Told):
    """Whatever it is asked, its machine is lost."""

    def run(self, job: Job) -> Iterator[str]:
        raise OSError("the line is dead")
        yield


@pytest.mark.parametrize(("runner", "reason"), [(Told(), "RemoteError: the stream"), (Broken(), "OSError: the line")])
def test_a_lost_machine_is_a_failure_and_the_next_is_asked(
    runner: Told, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = RemoteDesk(runner, device="auto", folder=tmp_path)
    assert collect(["steps", "ladder"], desk.measure, show_nothing) == 1
    told = capsys.readouterr().out
    assert told.count(reason) == 2
    assert "failed: steps, ladder" in told
