"""A row carries everything that its number depends on, under the names that results/*.jsonl is read by."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from weft.benchmark import calibration
from weft.benchmark.provenance import Provenance
from weft.benchmark.row import Row, Target, append_json
from weft.benchmark.table import show_table

SCHEMA = [
    *("experiment", "case", "system", "system_version", "model", "dtype", "metric", "value", "unit", "repetitions"),
    *("spread", "seed", "date", "commit", "dirty", "device", "driver", "python", "torch", "triton", "calibration"),
    "notes",
]
PROVENANCE = Provenance(
    date="2026-01-02T03:04:05+00:00",
    commit="0123456789abcdef",
    dirty=True,
    device="a [cpu]",
    driver=None,
    python="3",
    torch="2",
    triton=None,
    calibration={"copy_gb_per_s": 10.0},
)
ROW = Row(experiment="e", case="c", system="s", system_version="1", model="m", dtype="float32", seed=0, notes="why")


def test_a_line_has_the_fields_of_the_schema_in_order(json_file: Path) -> None:
    row = ROW.of("speed", [3.0, 1.0, 2.0], "x", spread=1.0, target=Target(relation=">=", value=2), notes="more")
    append_json([row], PROVENANCE, json_file)
    append_json([row, row], PROVENANCE, json_file)
    lines = [json.loads(line) for line in json_file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 3
    assert list(lines[0]) == SCHEMA
    assert (lines[0]["value"], lines[0]["repetitions"], lines[0]["notes"]) == (2.0, 3, "why; more")


def test_a_number_that_is_none_is_not_written(json_file: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        append_json([ROW.of("speed", [float("nan")], "x")], PROVENANCE, json_file)


@pytest.mark.parametrize(
    ("relation", "value", "verdict"),
    [(">=", 2.0, "met"), (">=", 2.1, "missed"), ("<", 2.0, "missed"), ("<=", 2.0, "met"), ("==", 3.0, "missed")],
)
def test_a_target_is_met_or_missed(relation: str, value: float, verdict: str) -> None:
    assert ROW.of("speed", [2.0], "x", target=Target(relation=relation, value=value)).verdict == verdict
    assert ROW.of("speed", [2.0], "x").verdict == ""


def test_a_table_shows_values_targets_verdicts_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ROW.of("speed", [8.25], "x", spread=0.031, target=Target(relation=">=", value=8)),
        ROW.of("loss [red]", [0.5], "x", target=Target(relation=">=", value=1)),
    ]
    show_table("a title", rows, PROVENANCE, Console(width=140))
    out = capsys.readouterr().out
    for shown in (
        "a title: c",
        "8.25",
        "3.1%",
        ">= 8",
        "met",
        "missed",
        "loss [red]",
        "why",
        "a [cpu]",
        "with changes",
    ):
        assert shown in out
    assert "0123456789ab" in out
    assert out.count("note:") == 1


def test_a_name_of_several_lines_stands_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(experiment="e", case="a\nb", system="c\nd", notes="e\n\x1b[2Jf", model="g\nh").of("i\nj", [1.0], "k\nl")
    show_table("a title", [row], PROVENANCE, Console(width=140))
    out = capsys.readouterr().out
    for name in (r"a\nb", r"c\nd", r"e\n\x1b[2Jf", r"g\nh", r"i\nj", r"k\nl"):
        assert name in out


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    small = calibration.calibrate(torch.device("cpu"), copied_bytes=1 << 16, width=32)
    assert set(small) == {"copy_gb_per_s", "read_gb_per_s", "gemm_gflop_per_s"}
    assert all(rate > 0 for rate in small.values())
    monkeypatch.setattr("weft.benchmark.provenance.calibrate", lambda device: small)
    here = Provenance.here(torch.device("cpu"))
    assert here.calibration == small
    assert here.torch == torch.__version__
    assert "thread" in here.device
    assert here.driver is None


def test_a_row_is_not_lost_behind_a_line_that_somebody_was_kept_from_ending(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"experiment": "ker')
    for value in (1.0, 2.0):
        append_json([ROW.of("speed", [value], "x")], PROVENANCE, file)
    torn, *rows = file.read_text().splitlines()
    assert torn == '{"experiment": "ker'
    assert [json.loads(row)["value"] for row in rows] == [1.0, 2.0]
