"""How far each history has been looked at, kept from one look to the next in a file; not what a look finds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.benchmark.history import Case, Look
from weft.benchmark.json_lines import read_lines


def read_looks(file: Path) -> dict[Case, Look]:
    """Of every case the last look; none where there is no file yet. Raises: ConfigError for a file of another kind."""
    if not file.exists():
        return {}
    records = read_lines(file, _is_look, what="look", hint="a file that `--looks FILE` has written, or a new one")
    return {
        Case(*(record[name] for name in Case._fields)): Look(*(record[name] for name in Look._fields))
        for record in records
    }


def write_looks(looks: Mapping[Case, Look], file: Path) -> None:
    """Put these in place of what is in the file, whole or not at all."""
    lines = [json.dumps(case._asdict() | look._asdict()) + "\n" for case, look in looks.items()]
    beside = file.with_name(f"{file.name}.new")
    beside.write_text("".join(lines), encoding="utf-8")
    beside.replace(file)


def _is_look(record: Any) -> bool:
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in Case._fields):
        return False
    rows, since = record.get("rows"), record.get("since")
    return type(rows) is type(since) is int and 0 <= since <= rows
