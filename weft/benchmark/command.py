"""`weft bench EXPERIMENT`: options from the command line, rows to the screen and to a file. No torch until it runs."""

import argparse
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from weft.benchmark.ab.command import add_ab
from weft.benchmark.changes_command import add_changes
from weft.benchmark.experiments import Experiment, known_experiments
from weft.config import ModelConfig
from weft.options import writable

_EXIT = "exit status: 0 measured, 1 something failed or could not be measured at all (its row says why), 2 an error"


def add_bench(commands: Any) -> None:
    """Add the command `bench`, with one command of its own an experiment, to an argparse object of sub-commands."""
    experiments = known_experiments()
    bench = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="measure speed and memory",
        description="Run one experiment and print what it measured beside its targets. A missed target is no error.",
        epilog=_epilog(
            [*(experiment.examples[0] for experiment in experiments.values()), "ab main", "changes history.jsonl"]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chosen = bench.add_subparsers(required=True, metavar="EXPERIMENT")
    for name, experiment in experiments.items():
        parser = chosen.add_parser(
            name,
            allow_abbrev=False,
            help=experiment.summary,
            description=f"Measure {experiment.summary}.",
            epilog=_epilog(experiment.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for field in fields(experiment.options):
            assert field.default is not MISSING, f"option {name}.{field.name} has no default"
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=str if field.default is None else type(field.default),
                default=field.default,
                help=field.metadata["help"] + ("" if field.default in (None, "") else " (%(default)s)"),
            )
        parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to FILE, one JSON object a line")
        parser.set_defaults(run=_run, experiment=experiment, experiment_name=name)
    add_ab(chosen)
    add_changes(chosen)


def _run(arguments: argparse.Namespace) -> int:
    experiment: Experiment = arguments.experiment
    path: Path | None = arguments.json
    options = experiment.options(**{field.name: getattr(arguments, field.name) for field in fields(experiment.options)})
    writable("--json", path)

    # Seconds to import: --help and a wrong argument should not wait for them.
    from rich.console import Console

    from weft.benchmark.progress import show_bars, show_nothing
    from weft.benchmark.provenance import Provenance
    from weft.benchmark.row import Row, append_json
    from weft.benchmark.table import show_table
    from weft.inference.placement import place

    # What cannot be is told here, before anything is measured.
    measured = experiment.run(options, show_bars if sys.stderr.isatty() else show_nothing)
    device = place(ModelConfig(model="-", device=getattr(options, "device", "cpu")), None).device
    provenance = Provenance.here(device)
    rows: list[Row] = []
    try:
        for row in measured:
            rows.append(row)
            if path is not None:
                append_json([row], provenance, path)  # at once: who is stopped half-way keeps what there is
    finally:
        if rows:
            show_table(experiment.summary, rows, provenance, Console(width=None if sys.stdout.isatty() else 140))
    is_whole = any(row.is_measured for row in rows) and not any(row.failed for row in rows)
    return 0 if is_whole else 1


def _epilog(examples: "list[str] | tuple[str, ...]") -> str:
    return "\n".join([_EXIT, "", "examples:", *(f"  weft bench {example}" for example in examples)])
