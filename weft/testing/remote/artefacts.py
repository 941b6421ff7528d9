"""Files that come back from a run elsewhere: read there, written here, and nowhere but in their own folders."""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path, PurePosixPath

from weft.errors import RemoteError

FOLDER_NAMES = ("baselines", "__snapshots__")
_MOST_BYTES = 16 << 20


def artefact_folders(test_files: Iterable[str]) -> tuple[str, ...]:
    """The folders that may be written for these tests, relative to the root: those of snapshots, beside each file.

    >>> artefact_folders(["tests/perf/test_a.py", "tests/perf/test_b.py"])
    ('tests/perf/__snapshots__', 'tests/perf/baselines')
    """
    parents = {PurePosixPath(file).parent for file in test_files}
    return tuple(sorted(str(parent / name) for parent in parents for name in FOLDER_NAMES))


def fingerprints(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Of each file in the folders, by its path relative to the root."""
    return {path: sha256((root / path).read_bytes()).hexdigest() for path in _files(root, folders)}


def changed(root: Path, folders: Iterable[str], before: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Path and content in base64 of each file that is new or another one since `before`; what is gone is not told."""
    for path, digest in fingerprints(root, folders).items():
        if before.get(path) != digest:
            yield path, b64encode((root / path).read_bytes()).decode("ascii")


def write_artefact(root: Path, folders: Iterable[str], path: str, content: str) -> bool:
    """Write what came back; False if the file was so already. Raises: RemoteError for a path outside of the folders."""
    pure = PurePosixPath(path)
    owners = [folder for folder in folders if PurePosixPath(folder) in pure.parents]
    if not owners or "\\" in path or "\0" in path:
        raise RemoteError(f"an artefact outside of its folders: {path!r}", hint="they are " + ", ".join(folders))
    target = root / pure
    # `..` leads out of a folder, and so may links in the tree.
    inside = target.resolve().is_relative_to(root.resolve().joinpath(owners[0]))
    if not inside or target.is_symlink() or target.is_dir():
        raise RemoteError(f"an artefact that is a link, a folder, or leaves the tree: {path!r}")
    try:
        data = b64decode(content, validate=True)
    except ValueError as error:
        raise RemoteError(f"an artefact whose content is no base64: {path!r}") from error
    if len(data) > _MOST_BYTES:
        raise RemoteError(f"an artefact of {len(data)} bytes, over {_MOST_BYTES}: {path!r}")
    if target.exists() and target.read_bytes() == data:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return True


def _files(root: Path, folders: Iterable[str]) -> list[str]:
    return sorted(
        file.relative_to(root).as_posix()
        for folder in folders
        for file in (root / folder).rglob("*")
        if file.is_file() and not file.is_symlink()
    )
