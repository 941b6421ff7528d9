"""Commits as folders: the right content in each, and nothing left of them."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.unit.benchmark.ab.conftest import Repository
from weft.benchmark.ab import worktree
from weft.benchmark.ab.worktree import merge_base, trees
from weft.errors import ConfigError


def text(folder: Path) -> str:
    return (folder / "speed.py").read_text()


def test_each_commit_is_a_folder_until_the_end(repository: Repository) -> None:
    old, new = repository.commit(0.1), repository.commit(0.2)
    repository.write(0.3)
    with trees(repository.folder, old, "main", "main", ".") as given:
        first, second, third, fourth = given
        assert [tree.commit for tree in given] == [old, new, new, f"{new}+"]
        assert ["0.1" in text(first.path), "0.2" in text(second.path), "0.3" in text(fourth.path)] == [True] * 3
        assert third == second
    assert not first.path.exists()
    assert len(repository.git("worktree", "list").splitlines()) == 1
    assert "0.3" in text(repository.folder), "the working tree was touched"


def test_nothing_is_left_where_it_was_interrupted(repository: Repository) -> None:
    repository.commit()
    with pytest.raises(KeyboardInterrupt), trees(repository.folder, "main"):
        raise KeyboardInterrupt
    assert len(repository.git("worktree", "list").splitlines()) == 1


# A run with two commits that says it has its folders and then waits, in naps: of a signal that comes before a sleep
# begins Python tells nobody until the sleep has ended.
RUN = """
import sys, time
from pathlib import Path
from weft.benchmark.ab import worktree
def wait():
    print("ready", flush=True)
    for _ in range(600):
        time.sleep(0.1)
if sys.argv[4] == "while git works":
    plain = worktree._git
    def git(*given):
        if "add" in given and sys.argv[3] in given:
            wait()
        return plain(*given)
    worktree._git = git
with worktree.trees(Path(sys.argv[1]), sys.argv[2], sys.argv[3]):
    wait()
"""


def stopped(repository: Repository, scratch: Path, number: int, *, when: str = "") -> int:
    """The exit status of a run that gets this signal."""
    old, new = repository.commit(0.1), repository.commit(0.2)
    environment = os.environ | {"TMPDIR": str(scratch)}
    command = [sys.executable, "-c", RUN, str(repository.folder), old, new, when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        os.kill(run.pid, number)
        return run.wait(60)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends a process without asking it")
@pytest.mark.parametrize("when", ["", "while git works"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left_by_a_run_that_is_ended(number: int, when: str, repository: Repository, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    status = stopped(repository, scratch, number, when=when)
    assert status in (128 + number, -number)  # Python ends itself by SIGINT once more
    assert len(repository.git("worktree", "list").splitlines()) == 1
    assert list(scratch.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locks that end with a process")
def test_what_a_killed_run_has_left_goes_with_the_next_one_and_what_is_in_use_stays(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with trees(repository.folder, repository.commit()) as (used,):
        assert stopped(repository, scratch, signal.SIGKILL) == -signal.SIGKILL
        assert len(repository.git("worktree", "list").splitlines()) == 4
        with trees(repository.folder, "main"):
            assert len(repository.git("worktree", "list").splitlines()) == 3
            assert used.path.exists()
            assert len(list(scratch.iterdir())) == 2
    repository.git("worktree", "add", "--detach", str(tmp_path / "mine"))
    with trees(repository.folder, "main"):
        pass
    assert len(repository.git("worktree", "list").splitlines()) == 2
    assert list(scratch.iterdir()) == []


def test_a_second_interrupt_does_not_stop_the_tidying(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = worktree._remove

    def impatient(*given: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        plain(*given)

    repository.commit()
    monkeypatch.setattr(worktree, "_remove", impatient)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), trees(repository.folder, "main"):
        signal.raise_signal(signal.SIGINT)
    assert len(repository.git("worktree", "list").splitlines()) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_folder_that_is_gone_already_hides_no_other_error(repository: Repository) -> None:
    repository.commit()

    def fails() -> None:
        with trees(repository.folder, "main") as (tree,):
            repository.git("worktree", "remove", "--force", str(tree.path))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_what_the_base_gained_since_is_nobodys_slowdown(repository: Repository) -> None:
    common = repository.commit(0.1)
    repository.git("checkout", "--quiet", "-b", "feature")
    repository.commit(0.2)
    repository.git("checkout", "--quiet", "main")
    repository.commit(0.05)
    assert merge_base(repository.folder, "main", "feature") == common
    repository.git("checkout", "--quiet", "feature")
    assert merge_base(repository.folder, "main", ".") == common


@pytest.mark.parametrize("reference", ["nothing", "--force", ""])
def test_what_is_no_commit_is_refused(reference: str, repository: Repository) -> None:
    repository.commit()
    with pytest.raises(ConfigError, match="no commit"), trees(repository.folder, "main", reference):
        pytest.fail("a folder was made of nothing")


def test_what_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a git repository"), trees(tmp_path, "main"):
        pytest.fail("a folder was made of nothing")
