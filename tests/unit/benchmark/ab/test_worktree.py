"""Commits as folders: the right content in each, and nothing left of them."""

from pathlib import Path

import pytest

from tests.unit.benchmark.ab.conftest import Repository
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
