"""`main.py --collect`: what can run leaves its rows, what fails takes none of them away, and the status says so."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import main
from tests.unit.benchmark.test_experiments import SMALL
from weft.benchmark.collection import Desk, Ending, chosen, collect, results_file
from weft.benchmark.experiments import known_experiments
from weft.benchmark.progress import show_nothing
from weft.cli import main as weft
from weft.errors import ConfigError

MEASURED = ("plan", "scheduler")  # by default; the others at night


def desk(folder: Path, launch: Callable[[Sequence[str]], int] = weft, **options: Any) -> Desk:
    """Of all experiments in small, so far as a CPU has them, each run in this process."""
    experiments = {
        name: replace(experiment, collected={"cpu": SMALL[name] | options})
        if "cpu" in experiment.collected
        else experiment
        for name, experiment in known_experiments().items()
    }
    return Desk(experiments, device="cpu", folder=folder, launch=launch)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("*") for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_collected_are_options_that_the_experiment_has(kind: str) -> None:
    experiments = known_experiments()
    assert {name for name, experiment in experiments.items() if "cpu" not in experiment.collected} == {
        *("kernels", "ladder", "prefill", "steps"),
    }
    for name, experiment in experiments.items():
        assert "cuda" in experiment.collected, "a GPU's machine measures everything"
        if name != "kernels" and kind in experiment.collected:
            options = experiment.options(**experiment.collected[kind])
            assert getattr(options, "device", kind) == kind, "rows go to the file of that device"


@pytest.mark.parametrize("name", MEASURED)
def test_an_experiment_leaves_rows_with_their_provenance(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.benchmark.provenance.calibrate", lambda device: {"copy_gb_per_s": 1.0})
    assert collect([name], desk(tmp_path).measure, show_nothing) == 0
    found = rows(tmp_path)
    assert {row["experiment"] for row in found} == {name}
    assert all(row["calibration"] and row["date"] and row["python"] for row in found)
    assert [file.name for file in tmp_path.iterdir()] == ["cpu.jsonl"]
    assert f"{name}: measured, {len(found)} rows" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted({*SMALL} - {*MEASURED, "ladder", "prefill", "steps"}))
def test_every_experiment_of_a_cpu_can_be_collected(
    name: str, tmp_path: Path, tiny_model: str, text_model: str
) -> None:
    models = {"text": text_model, "gates": None, "nights": None}
    model = models.get(name, tiny_model)
    options = {} if model is None else {"model": model}
    assert collect([name], desk(tmp_path, **options).measure, show_nothing) == 0
    assert {row["experiment"] for row in rows(tmp_path)} == {name}


@pytest.mark.nightly
def test_each_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    at_work = Desk(chosen("plan"), device="cpu", folder=tmp_path)
    assert collect(["plan"], at_work.measure, show_nothing) == 0
    assert rows(tmp_path)


def fake(arguments: Sequence[str]) -> int:
    """Leaves two rows; of `offline` and `text` one, then it fails; of `gates` none."""
    name, file = arguments[1], Path(arguments[-1].removeprefix("--json="))
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(['{"row": 1}\n'] * {"offline": 1, "text": 1, "gates": 0}.get(name, 2))
    return {"offline": 1, "text": -9}.get(name, 0)


def test_one_that_fails_takes_no_rows_away_and_the_next_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(["memory", "offline", "text", "plan"], desk(tmp_path, fake).measure, show_nothing) == 1
    assert len(rows(tmp_path)) == 2 + 1 + 1 + 2
    told = capsys.readouterr().out
    assert "offline: failed, 1 rows: exit status 1" in told
    assert "text: failed, 1 rows: ended by signal 9" in told
    assert told.endswith("2 of 4 experiments measured, 6 rows; failed: offline, text\n")


def test_one_that_leaves_no_row_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cpu.jsonl").write_text('{"row": 0}\n')  # of another day
    assert collect(["gates"], desk(tmp_path, fake).measure, show_nothing) == 1
    assert "gates: failed, 0 rows: it left no row" in capsys.readouterr().out


def test_what_cannot_run_here_is_skipped_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect(["kernels", "plan"], desk(tmp_path, fake).measure, show_nothing) == 0
    assert "kernels: skipped: it measures a GPU, and this is a CPU" in capsys.readouterr().out
    assert collect(["kernels"], desk(tmp_path, fake).measure, show_nothing) == 1, "nothing measured is no success"


def test_a_bar_goes_over_all_that_was_asked_for(tmp_path: Path) -> None:
    stages, steps = [], []

    def progress(stage: str, total: int) -> Callable[[], None]:
        stages.append((stage, total))
        return lambda: steps.append(stage)

    collect(["kernels", "offline", "plan"], desk(tmp_path, fake).measure, progress)
    assert (stages, len(steps)) == ([("experiments", 3)], 3)


def test_settings_and_file_reach_the_command_line(tmp_path: Path) -> None:
    told: list[Sequence[str]] = []
    experiments = {"plan": replace(known_experiments()["plan"], collected={"cpu": {"max_num_seqs": 4}})}
    file = tmp_path / "rows.jsonl"
    ending = Desk(
        experiments, device="cpu", folder=tmp_path, file=file, launch=lambda arguments: told.append(arguments) or 0
    ).measure("plan")
    assert told == [["bench", "plan", "--max-num-seqs=4", f"--json={file}"]]
    assert ending == Ending(name="plan", outcome="failed", reason="it left no row")


def test_names_are_told_to_who_knows_none() -> None:
    assert list(chosen("all")) == list(known_experiments())
    assert list(chosen("plan")) == ["plan"]
    for asked in ("", "nothing of that kind", "plans"):
        with pytest.raises(ConfigError) as raised:
            chosen(asked)
        assert raised.value.hint is not None
        assert all(name in raised.value.hint for name in (*known_experiments(), "all"))


def test_a_device_is_a_kind_and_no_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--collect on device='cuda:1'"):
        Desk({}, device="cuda:1", folder=tmp_path)


def test_gpus_have_files_of_their_own() -> None:
    assert [results_file(name) for name in ("cpu", "NVIDIA H200", "Tesla T4")] == [
        *("cpu.jsonl", "h200.jsonl", "tesla-t4.jsonl"),
    ]


def test_main_collects_into_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.benchmark.collection._in_a_process", fake)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "main.py"))
    monkeypatch.setattr(sys, "argv", ["main.py", "--collect", "all", "--device", "cpu"])
    assert main.main() == 1, "some of the fake ones fail"
    assert "5 of 12 experiments measured, 12 rows; failed: gates, offline, text" in capsys.readouterr().out
    assert len(rows(tmp_path / "results")) == 12
    file = tmp_path / "own.jsonl"
    monkeypatch.setattr(sys, "argv", ["main.py", "--collect", "plan", "--device", "cpu", "--json", str(file)])
    assert main.main() == 0
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize("option", ["--model=other", "--dtype=bf16", "--seed=1", "--max-new-tokens=3", "--prompts=a"])
def test_what_belongs_to_the_check_is_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", "--collect", "plan", option])
    with pytest.raises(SystemExit, match="2"):
        main.main()
