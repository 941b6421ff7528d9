"""Rows as a table that people read: one line a number, its target and whether it was met beside it."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.benchmark.one_line import one_line
from weft.benchmark.provenance import Provenance
from weft.benchmark.row import Row

_STYLES = {"met": "green", "missed": "yellow", "": None}


def show_table(title: str, rows: Sequence[Row], provenance: Provenance, console: Console) -> None:
    """A table a case, a line a row; each note once below, and what it was measured on."""
    for case in dict.fromkeys(row.case for row in rows):
        console.print(Text(one_line(f"{title}: {case}")), soft_wrap=True)
        console.print(_table([row for row in rows if row.case == case]))
    for note in dict.fromkeys(row.notes for row in rows if row.notes):
        console.print(Text(one_line(f"note: {note}")), soft_wrap=True)
    for line in _provenance_lines(rows, provenance):
        console.print(Text(one_line(line)), soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    table = Table()
    for column in ("system", "metric"):
        table.add_column(column, overflow="fold")
    for column in ("value", "unit", "spread", "target", "verdict"):
        table.add_column(column, justify="left" if column in ("unit", "target", "verdict") else "right", no_wrap=True)
    before = rows[0].system
    for row in rows:
        if row.system != before:
            table.add_section()
        table.add_row(
            Text(one_line(row.system)),
            Text(one_line(row.metric)),
            format_value(row.value),
            Text(one_line(row.unit)),
            "" if row.spread is None else f"{row.spread:.1%}",
            "" if row.target is None else str(row.target),
            row.verdict,
            style=_STYLES[row.verdict],
        )
        before = row.system
    return table


def format_value(value: int | float) -> str:
    """Three significant digits or more, no exponents: 0.0123, 8.31, 104, 1,234,567.

    >>> [format_value(value) for value in (0.012345, 8.3149, 104.2, 1234567.0, 16, 0)]
    ['0.0123', '8.31', '104', '1,234,567', '16', '0']
    """
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 0
    while abs(value) * 10**digits < 100:
        digits += 1
    return f"{value:.{digits}f}"


def _provenance_lines(rows: Sequence[Row], provenance: Provenance) -> list[str]:
    models = dict.fromkeys(f"{row.model} in {row.dtype}" for row in rows if row.model)
    versions = dict.fromkeys(f"{row.system} {row.system_version}" for row in rows if row.system_version)
    rates = ", ".join(
        f"{name.replace('_per_', '/').replace('_', ' ')} {rate:g}" for name, rate in provenance.calibration.items()
    )
    state = {True: " with changes", False: "", None: ""}[provenance.dirty]
    commit = "no commit" if provenance.commit is None else f"commit {provenance.commit[:12]}{state}"
    return [
        "; ".join((*models, *versions)),
        f"{provenance.device}; {rates}; torch {provenance.torch}, python {provenance.python}; {commit}",
    ]
