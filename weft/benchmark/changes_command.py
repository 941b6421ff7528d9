"""`weft bench changes FILE`: what has shifted for good in the rows of many nights, as Markdown; no torch."""

import argparse
import sys
from pathlib import Path
from typing import Any

from weft.benchmark.json_lines import read_lines
from weft.config import writable
from weft.errors import ConfigError

_EXIT = "exit status: 0 nothing has shifted, 1 something has since the last look, 2 an error"


def add_changes(commands: Any) -> None:
    """Add the command `changes` to an argparse object of sub-commands."""
    parser = commands.add_parser(
        "changes",
        allow_abbrev=False,
        help="what has shifted for good over many nights",
        description="Look through the ratios of many nights for those that have shifted and stayed. With --looks a "
        "shift is told once, at the first look at which it can be seen; without, all that the file holds is.",
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="rows as `--json FILE` appends them")
    parser.add_argument(
        "--looks", type=Path, metavar="FILE", help="how far this has been looked at: read, and written when all is told"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from weft.benchmark.history import UNSEEN, news, series
    from weft.benchmark.looks import read_looks, write_looks

    file = arguments.looks
    writable("--looks", file)
    if file is not None and file.exists() and not file.is_file():
        raise ConfigError(f"--looks {file} is no file that could be replaced")
    looks = {} if file is None else read_looks(file)
    cases = series(_rows(arguments.file))
    num_shifted = 0
    for case, nights in cases.items():
        dates, values = zip(*nights, strict=True)
        shifts, looks[case] = news(values, looks.get(case, UNSEEN))
        for shift in shifts:
            name = ", ".join(filter(None, case))
            print(f"- {name}: {shift} since {dates[shift.first]}, seen on {dates[shift.shown]}")
        num_shifted += bool(shifts)
    longest = max(map(len, cases.values()), default=0)
    print(f"{num_shifted} of {len(cases)} ratios have shifted; {longest} nights at most", flush=True)
    if file is not None:  # what could not be told is told at the next look
        write_looks(looks, file)
    return 1 if num_shifted else 0


def _rows(file: Path) -> list[dict[str, Any]]:
    return read_lines(file, _is_row, what="row", hint="a file that `--json FILE` has written")


def _is_row(record: Any) -> bool:
    from weft.benchmark.history import Case

    texts = (*Case._fields, "unit", "date")
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in texts):
        return False
    value = record.get("value")
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
