"""Verdicts for people and for programs: a line each as they come, a table at the end, JSON."""

import json
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weft.testing.planted.fault import Catalogue
from weft.testing.planted.runner import Run
from weft.testing.planted.verdict import Verdict


def progress_line(verdict: Verdict, place: int, count: int) -> str:
    """A line for one verdict, the `place`-th of `count`."""
    mark = "" if verdict.is_expected else "   <-- not as expected"
    return (
        f"[{place:>{len(str(count))}}/{count}] {verdict.seconds:6.1f} s  {verdict.kind:<12}  {verdict.fault.name}{mark}"
    )


def show(run: Run, catalogue: Catalogue, console: Console) -> None:
    """The table by parts, then whatever is not as expected, with what the tests said."""
    if run.baseline is not None:
        console.print(run.baseline, markup=False, highlight=False)
        return
    table = Table(title="planted faults", title_justify="left")
    for column in ("part", "planted", "killed", "survive, as they must", "not as expected", "seconds"):
        table.add_column(column, justify="left" if column == "part" else "right")
    by_part: dict[str, list[Verdict]] = {}
    for verdict in run.verdicts:
        by_part.setdefault(catalogue.part_of(verdict.fault), []).append(verdict)
    for part, verdicts in [*by_part.items(), ("all", list(run.verdicts))]:
        table.add_row(part, *_row(verdicts))
    console.print(table)
    for verdict in run.verdicts:
        if not verdict.is_expected:
            fault = verdict.fault
            console.print(
                f"\n{verdict.kind}: {fault.name} ({fault.file})\n  {fault.why}\n  expected: {fault.expect} by "
                f"{', '.join(fault.killers)}\n  {verdict.detail}",
                markup=False,
                highlight=False,
            )


def summary(run: Run) -> str:
    """The last line: how many of how many, and how long it took."""
    if run.baseline is not None:
        return "no verdict: the tests do not pass without a fault"
    counts = Counter(verdict.fault.expect for verdict in run.verdicts)
    killed = sum(verdict.kind == "killed" for verdict in run.verdicts if verdict.fault.expect == "killed")
    alive = sum(verdict.kind == "survived" for verdict in run.verdicts if verdict.fault.expect == "survives")
    return (
        f"{killed} of {counts['killed']} planted faults killed, "
        f"{alive} of {counts['survives']} equivalent ones survive: "
        f"{run.seconds:.0f} s, {run.baseline_seconds:.0f} of them without a fault"
    )


def write_json(run: Run, catalogue: Catalogue, path: Path, *, seed: int) -> None:
    """Every verdict, and what was asked."""
    rows = [
        {
            "name": verdict.fault.name,
            "part": catalogue.part_of(verdict.fault),
            "file": verdict.fault.file,
            "tier": verdict.fault.tier,
            "expect": verdict.fault.expect,
            "verdict": verdict.kind,
            "as_expected": verdict.is_expected,
            "seconds": round(verdict.seconds, 2),
            "failed": list(verdict.failed),
            "detail": verdict.detail,
        }
        for verdict in run.verdicts
    ]
    whole = {
        "seed": seed,
        "catalogue": len(catalogue.faults),
        "baseline": run.baseline,
        "seconds": round(run.seconds, 1),
        "baseline_seconds": round(run.baseline_seconds, 1),
        "exit_status": run.exit_status,
        "faults": rows,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _row(verdicts: list[Verdict]) -> list[str]:
    killed = sum(verdict.kind == "killed" and verdict.is_expected for verdict in verdicts)
    alive = sum(verdict.kind == "survived" and verdict.is_expected for verdict in verdicts)
    wrong = sum(not verdict.is_expected for verdict in verdicts)
    return [str(number) for number in (len(verdicts), killed, alive, wrong)] + [
        f"{sum(verdict.seconds for verdict in verdicts):.0f}"
    ]
