"""`weft bench changes FILE`: what has shifted for good in the rows of many nights, as Markdown; no torch."""

import argparse
import json
from math import isfinite
from pathlib import Path
from typing import Any

from weft.errors import ConfigError

_EXIT = "exit status: 0 nothing has shifted, 1 something has since the last night, 2 an error"


def add_changes(commands: Any) -> None:
    """Add the command `changes` to an argparse object of sub-commands."""
    parser = commands.add_parser(
        "changes",
        allow_abbrev=False,
        help="what has shifted for good over many nights",
        description="Look through the ratios of many nights for those that have shifted and stayed. A shift is told on "
        "the first night on which it can be seen, and not again.",
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="rows as `--json FILE` appends them")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from weft.benchmark.history import news, series

    cases = series(_records(arguments.file))
    shifts = {case: shift for case, values in cases.items() if (shift := news(values)) is not None}
    for case, shift in shifts.items():
        print(f"- {', '.join(filter(None, case))}: {shift}")
    longest = max(map(len, cases.values()), default=0)
    print(f"{len(shifts)} of {len(cases)} ratios have shifted; {longest} nights at most")
    return 1 if shifts else 0


def _records(file: Path) -> list[dict[str, Any]]:
    hint = "a file that `--json FILE` has written"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} holds no rows: {error}", hint=hint) from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number} is no row: {error}", hint=hint) from error
        if not _is_row(records[-1]):
            raise ConfigError(f"{file}, line {number} is no row: {line[:80]}", hint=hint)
    return records


def _is_row(record: Any) -> bool:
    texts = ("device", "experiment", "case", "system", "metric", "unit", "date")
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in texts):
        return False
    value = record.get("value")
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
