"""Commits as folders: a git worktree each, gone when the comparison is over."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from weft.errors import ConfigError

AS_IT_IS = "."  # in place of a commit: the working tree with its uncommitted changes


class Tree(NamedTuple):
    """path: of the folder.   commit: what lies there, in full, and `+` where the working tree has changes."""

    path: Path
    commit: str


@contextmanager
def trees(repository: Path, *references: str) -> Iterator[list[Tree]]:
    """A folder for each reference; two of one commit share theirs. Raises: ConfigError."""
    root = _root(repository)
    commits = [_commit(root, reference) for reference in references]
    with tempfile.TemporaryDirectory(prefix="weft-ab-") as scratch:
        made: dict[str, Tree] = {}
        given = []
        try:
            for reference, commit in zip(references, commits, strict=True):
                if reference == AS_IT_IS:
                    given.append(Tree(root, commit))
                    continue
                if commit not in made:
                    path = Path(scratch).resolve() / commit
                    _git(root, "worktree", "add", "--quiet", "--detach", str(path), commit)
                    made[commit] = Tree(path, commit)
                given.append(made[commit])
            yield given
        finally:
            for tree in made.values():
                _git(root, "worktree", "remove", "--force", str(tree.path))


def merge_base(repository: Path, base: str, head: str) -> str:
    """The commit at which the two part: what the base has gained since is nobody's slowdown. Raises: ConfigError."""
    root = _root(repository)
    other = "HEAD" if head == AS_IT_IS else head
    _commit(root, base), _commit(root, other)
    return _git(root, "merge-base", base, other)


def _root(repository: Path) -> Path:
    return Path(_git(repository, "rev-parse", "--show-toplevel")).resolve()


def _commit(root: Path, reference: str) -> str:
    if reference == AS_IT_IS:
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
        return _git(root, "rev-parse", "HEAD") + ("+" if changed else "")
    return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", reference + "^{commit}")


def _git(folder: Path, *arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is no folder, or git is not installed") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or f"{arguments[-1].removesuffix('^{commit}')!r} is no commit"
        raise ConfigError(f"git {arguments[0]} in {folder}: {said}") from error
    return run.stdout.strip()
