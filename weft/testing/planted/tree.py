"""Copies of a source tree, and the replacement of text in one. The original is only ever read."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from weft.errors import ConfigError
from weft.testing.planted.fault import Fault

_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".hypothesis", "*.so")


class StaleFaultError(ConfigError):
    """The text that a fault replaces is not in its file, or more than once."""


def copy_sources(root: Path, sources: Iterable[str], target: Path) -> None:
    """Copy these files and folders of `root` into a new folder. Raises: ConfigError for one that is not there."""
    target.mkdir(parents=True)
    for name in sources:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=_LEFT_OUT)
        elif source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
        else:
            raise ConfigError(f"{source} is not there to be copied", hint="run in a checkout of the sources")


def clone(folder: Path, target: Path) -> None:
    """A copy with what was compiled in it: times are kept, so that Python still takes it for up to date."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(".hypothesis", ".pytest_cache"))


def check(folder: Path, fault: Fault) -> str:
    """The text of the fault's file. Raises: StaleFaultError unless what the fault replaces is in it exactly once."""
    path = folder / fault.file
    if not path.is_file():
        raise StaleFaultError(f"{fault.name!r}: {fault.file} is not in the tree")
    text = path.read_text(encoding="utf-8")
    count = text.count(fault.old)
    if count != 1:
        raise StaleFaultError(f"{fault.name!r}: its text occurs {count} times in {fault.file}, not once")
    return text


def plant(folder: Path, fault: Fault) -> None:
    """Replace the fault's text in this copy. Raises: StaleFaultError unless it occurs exactly once."""
    text, path = check(folder, fault), folder / fault.file
    # Python takes a compiled file for the source's if time and size agree: replaced text of the same length would not
    # be seen within a second of the copy.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
