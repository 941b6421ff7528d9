"""What was told of each history, kept from one look to the next in a file; not what a look finds."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copymode
from typing import Any
from uuid import uuid4

from weft.benchmark.history import Case, Look, Night, instant
from weft.benchmark.json_lines import is_finite, read_lines, reason_against_texts
from weft.errors import shown


def read_looks(file: Path) -> dict[Case, Look]:
    """The last look of every case of which something was told; none where there is no file yet.

    Raises: ConfigError for a file of another kind.
    """
    if not file.exists():
        return {}
    records = read_lines(
        file, _reason_against, what="look", hint="a file that `--looks FILE` has written, or a new one"
    )
    return {
        Case(*(record[name] for name in Case._fields)): Look(*(_night(*record[name]) for name in Look._fields))
        for record in records
    }


def write_looks(looks: Mapping[Case, Look], file: Path) -> None:
    """Put these in place of what is in the file, whole or not at all. file: itself, and no link to it."""
    lines = [json.dumps(case._asdict() | look._asdict()) + "\n" for case, look in looks.items()]
    written = beside(file)
    try:
        with written.open("x", encoding="utf-8") as new:
            new.write("".join(lines))
        if file.exists():
            copymode(file, written)
        written.replace(file)
    finally:
        written.unlink(missing_ok=True)


def beside(file: Path) -> Path:
    """Where what is to replace a file is written first: in its folder, by a name that nobody else's file has."""
    return file.with_name(f"{file.name}.{uuid4().hex}")


def _night(date: str, value: float) -> Night:
    return Night(date, float(value))


def _reason_against(record: Any) -> str | None:
    reason = reason_against_texts(record, Case._fields)
    if reason is not None:
        return reason
    for name in Look._fields:
        if not _is_night(record.get(name)):
            return f"{name} must be a date and a value, got {shown(record.get(name))}"
    if instant(record["since"][0]) > instant(record["shown"][0]):
        return f"since={record['since'][0]!r} is after shown={record['shown'][0]!r}"
    return None


def _is_night(night: Any) -> bool:
    if not isinstance(night, list) or len(night) != len(Night._fields) or not is_finite(night[1]):
        return False
    try:
        instant(night[0])
    except (TypeError, ValueError):
        return False
    return True
