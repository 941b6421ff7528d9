"""`weft bench ab` from end to end, over real commits and processes and a clock that is made up."""

import json
from pathlib import Path

import pytest

from tests.unit.benchmark.ab.conftest import Repository
from weft.cli import main


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.benchmark.provenance.calibrate", lambda device: {"copy_gb_per_s": 1.0})


def ab(repository: Repository, workload: Path, *arguments: str) -> int:
    standing = ["--repository", str(repository.folder), "--workload", str(workload), "--package", "speed"]
    return main(["bench", "ab", *arguments, *standing, "--blocks", "10"])


def test_a_slower_head_is_told_and_written_down(
    repository: Repository, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = repository.commit(0.1)
    head = repository.commit(0.106, seed=1, answer="no")
    path = tmp_path / "ab.jsonl"
    assert ab(repository, workload, base, "--json", str(path)) == 1
    out = capsys.readouterr().out
    assert f"**slower**: {head[:12]} against {base[:12]}" in out
    assert "unlike work" in out
    (line,) = path.read_text().splitlines()
    found = json.loads(line)
    assert (found["verdict"], found["base"], found["head"], found["equal"]) == ("slower", base, head, False)
    assert found["findings"]["work"]["head"]["estimate"] == pytest.approx(0.06, abs=0.01)
    assert len(found["measures"]["work"]) == 10
    assert found["provenance"]["torch"]


def test_a_head_that_is_not_slower_passes(
    repository: Repository, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.commit(0.1)
    repository.write(0.1, seed=1)
    assert ab(repository, workload, "main", ".") == 0
    assert "**not slower**" in (out := capsys.readouterr().out)
    assert "with uncommitted changes" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--blocks", "7"], "blocks"),
        (["--output-tokens", "1"], "output-tokens"),
        (["--threshold", "5"], "threshold"),
        (["--engine", "[]"], "engine"),
        (["--json", "no/such/folder/ab.jsonl"], "json"),
        (["--workload", "no_such_file.py"], "--workload no_such_file.py is no file\nhint: "),
        (["--workload", "tests"], "--workload tests is no file\nhint: "),
        (["--batch", "0"], "batch"),
        (["--timeout", "nan"], "--timeout nan is no time to wait"),
        (["--timeout", "inf"], "--timeout inf is no time to wait"),
        (["--timeout", "-1"], "--timeout -1 is no time to wait"),
        (["--engine", "[" * 100_000], "is no JSON object"),
        (["--repository", "pyproject.toml"], "pyproject.toml is no folder"),
        (["--repository", "a\0b"], "embedded null byte"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ab", "HEAD", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_weft_itself_is_not_slower_than_itself(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A noisy machine may say nothing; a false alarm is one."""
    status = main(["bench", "ab", "HEAD", "HEAD", "--model", tiny_model, "--blocks", "16"])
    assert status in (0, 3, 4), capsys.readouterr().out
