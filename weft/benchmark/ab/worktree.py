"""Commits as folders: a git worktree each, gone when the comparison is over."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import IO, NamedTuple

from weft.errors import ConfigError
from weft.testing.signals import endings_raise, undisturbed

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

AS_IT_IS = "."  # in place of a commit: the working tree with its uncommitted changes
_PREFIX, _OWNER = "weft-ab-", "owner"  # of the folder of a run; the file in it that its process holds locked


class Tree(NamedTuple):
    """path: of the folder.   commit: what lies there, in full, and `+` where the working tree has changes."""

    path: Path
    commit: str


@contextmanager
def trees(repository: Path, *references: str) -> Iterator[list[Tree]]:
    """A folder for each reference; two of one commit share theirs. Raises: ConfigError.

    They are gone at the end whatever ends it, SIGTERM and a second Ctrl-C included. Those of a run that was killed with
    no time to tidy up go when the next one begins.
    """
    root = _root(repository)
    commits = [_commit(root, reference) for reference in references]
    _sweep(root)
    with endings_raise():
        scratch = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        made: dict[str, Tree] = {}
        given = []
        try:
            with (scratch / _OWNER).open("w") as owner:
                _lock(owner)
                for reference, commit in zip(references, commits, strict=True):
                    if reference == AS_IT_IS:
                        given.append(Tree(root, commit))
                        continue
                    if commit not in made:
                        made[commit] = Tree(scratch / commit, commit)  # first: whoever is stopped half-way finds it
                        _git(root, "worktree", "add", "--quiet", "--detach", str(made[commit].path), commit)
                    given.append(made[commit])
                yield given
        finally:
            with undisturbed():
                for tree in made.values():
                    _remove(root, tree.path)
                rmtree(scratch, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what a run has left that was killed: its folder says that its owner is no more."""
    for line in _git(root, "worktree", "list", "--porcelain").splitlines():
        path = Path(line.removeprefix("worktree "))
        if line.startswith("worktree ") and path.parent.name.startswith(_PREFIX) and not _is_owned(path.parent):
            with undisturbed():
                _remove(root, path)
                rmtree(path.parent, ignore_errors=True)


def _remove(root: Path, path: Path) -> None:
    """The folder and what git knows of it, even if git was stopped while it made it and holds it locked."""
    rmtree(path, ignore_errors=True)
    with suppress(ConfigError):  # of one that it never came to know
        _git(root, "worktree", "remove", "--force", "--force", str(path))


def _is_owned(scratch: Path) -> bool:
    """Whether whoever made this folder still lives. The lock ends with its process, however that ends."""
    try:
        with (scratch / _OWNER).open("r+") as owner:
            return not _lock(owner)
    except FileNotFoundError:
        return False


def _lock(file: IO[str]) -> bool:
    """Whether nobody else holds it, who lives. Where the system has no such locks nothing is ever free."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} is no folder, or git is not installed") from error
    except ValueError as error:  # a NUL
        raise ConfigError(f"git {arguments[0]} in {str(folder)!r}: {arguments[-1]!r}: {error}") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or f"{arguments[-1].removesuffix('^{commit}')!r} is no commit"
        raise ConfigError(f"git {arguments[0]} in {folder}: {said}") from error
    return run.stdout.strip()
