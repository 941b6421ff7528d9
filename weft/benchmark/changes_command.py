"""`weft bench changes FILE`: what has shifted for good in the rows of many nights, as Markdown; no torch."""

import argparse
from pathlib import Path
from typing import Any

from weft.benchmark.json_lines import is_finite, read_lines, reason_against_texts
from weft.benchmark.one_line import one_line
from weft.errors import ConfigError, shown
from weft.options import writable

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
        "--looks", type=Path, metavar="FILE", help="what has been told: read, and written when all is told"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from weft.benchmark.history import news, series
    from weft.benchmark.looks import beside, read_looks, write_looks

    file = _behind_links(arguments.looks)
    writable("--looks", file)
    looks = {}
    if file is not None:
        if file.exists() and not file.is_file():
            raise ConfigError(f"--looks {file} is no file that could be replaced", hint="name a file, or a new one")
        writable("--looks", beside(file))
        looks = read_looks(file)
    cases = series(_rows(arguments.file))
    num_shifted = 0
    for case, nights in cases.items():
        shifts, look = news(nights, looks.pop(case, None))
        if look is not None:
            looks[case] = look
        for shift in shifts:
            name = one_line(", ".join(filter(None, case)))
            print(f"- {name}: {shift} since {nights[shift.first].date}, seen on {nights[shift.shown].date}")
        num_shifted += bool(shifts)
    longest = max(map(len, cases.values()), default=0)
    print(f"{num_shifted} of {len(cases)} ratios have shifted; {longest} nights at most", flush=True)
    if file is not None:  # what could not be told is told at the next look
        write_looks(looks, file)
    return 1 if num_shifted else 0


def _rows(file: Path) -> list[dict[str, Any]]:
    hint = "a file that `--json FILE` has written"
    return read_lines(file, _reason_against, what="row", hint=hint, may_be_torn=True)


def _reason_against(record: Any) -> str | None:
    from weft.benchmark.history import Case, instant

    reason = reason_against_texts(record, (*Case._fields, "unit", "date"))
    if reason is not None:
        return reason
    if not is_finite(record.get("value")):
        return f"value must be a finite number, got {shown(record.get('value'))}"
    try:
        instant(record["date"])
    except ValueError:
        return f"date must be one of ISO 8601, got {shown(record['date'])}"
    return None


def _behind_links(file: Path | None) -> Path | None:
    """Where it leads to: what stands in its place would be no link any more."""
    try:
        return file and file.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name that no file has
        raise ConfigError(f"--looks {shown(str(file))} leads nowhere: {error}") from error
