"""Worker processes: they take turns, time their own tree and no other, and end in an error that says what happened."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmark.ab.conftest import Repository
from weft.benchmark.ab.worker import Worker
from weft.benchmark.ab.worker_program import turn
from weft.errors import WorkerError


def worker(tree: Path, workload: Path, *, package: str = "speed", timeout_s: float = 60.0) -> Any:
    return Worker.of("base", tree, workload=workload, package=package, options={}, timeout_s=timeout_s)


def test_a_worker_takes_turns_and_what_it_prints_is_no_answer(repository: Repository, workload: Path) -> None:
    repository.write(0.1)
    with worker(repository.folder, workload) as base:
        assert base.parts == ["work"]
        plain, again, planted = base.turn(), base.turn(), base.turn(planted=0.1)
    assert plain.seconds["work"] == pytest.approx(0.1, rel=0.02)
    assert planted.seconds["work"] == pytest.approx(0.11, rel=0.02)
    assert plain.digest == again.digest == planted.digest


def test_two_processes_compute_the_same_where_sets_are_shown(repository: Repository, workload: Path) -> None:
    repository.write(answer="x")
    repository.folder.joinpath("speed.py").write_text("SECONDS, SEED, ANSWER = 0.1, 0, set('abcdefgh')\n")
    digests = set()
    for _ in range(2):
        with worker(repository.folder, workload) as base:
            digests.add(base.turn().digest)
    assert len(digests) == 1


def test_planted_work_is_waited_out_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr("weft.benchmark.ab.worker_program.perf_counter", lambda: float(next(now)))

    def part() -> str:
        for _ in range(998):
            next(now)
        return "done"

    parts = {"prefill": part, "decode": part}
    plain, planted = turn(parts, planted=0.0), turn(parts, planted=0.1)
    assert plain["seconds"] == pytest.approx({"prefill": 1000, "decode": 1000}, abs=3)
    assert planted["seconds"] == pytest.approx({"prefill": 1100, "decode": 1100}, abs=3)
    assert plain["digest"] == planted["digest"]


@pytest.mark.parametrize(
    ("extra", "package", "timeout_s", "said"),
    [
        ("raise RuntimeError('cannot load')", "speed", 60.0, "cannot load"),
        ("import time; time.sleep(60)", "speed", 0.5, "0.5 s"),
        ("", "json", 60.0, "imports json from"),
        ("", "nowhere", 60.0, "imports nowhere from None"),
        ("", "worktree", 60.0, "imports worktree from None"),  # a file beside the program that runs
    ],
    ids=["it fails", "it hangs", "another tree", "not there", "beside the program"],
)
def test_a_worker_that_cannot_measure_says_why(
    extra: str, package: str, timeout_s: float, said: str, repository: Repository, workload: Path
) -> None:
    repository.write(extra=extra)
    failed = worker(repository.folder, workload, package=package, timeout_s=timeout_s)
    with pytest.raises(WorkerError, match=said), failed:
        pytest.fail("a worker that cannot measure started")


def test_a_worker_that_dies_between_turns_is_an_error(repository: Repository, workload: Path) -> None:
    repository.write()
    with worker(repository.folder, workload) as base:
        base.turn()
        base._process.kill()
        base._process.wait()
        with pytest.raises(WorkerError, match="base ended with status"):
            base.turn()
