"""`main.py --collect … --modal`: each experiment in a container of its own, whose rows are added to the files here.

The tree there is a copy without its history: the commit that stands in a row is that of the tree it was copied from.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from weft.benchmark.collection import Ending, results_file
from weft.benchmark.json_lines import read_lines, reason_against_texts
from weft.benchmark.provenance import commit_of_tree
from weft.benchmark.row import append_line
from weft.errors import ConfigError, RemoteError, shown
from weft.testing.remote.interface import Runner
from weft.testing.remote.program import follow_program

_FOLDER = "results"


class RemoteDesk:
    """Measures by a runner that is open; see `Desk` for `folder` and `file`, which are here."""

    def __init__(self, runner: Runner, *, device: str, folder: Path, file: Path | None = None) -> None:
        self._runner, self._device, self._folder, self._file = runner, device, folder, file

    def measure(self, name: str) -> Ending:
        # A name of its own: a file that is there already would come back with rows that were not measured now.
        there = f"{_FOLDER}/collected-{uuid4().hex}.jsonl"
        program = ["main.py", f"--collect={name}", f"--device={self._device}", f"--json={there}"]
        reason = ""
        with TemporaryDirectory() as scratch:
            try:
                status = follow_program(self._runner, program, folders=[_FOLDER], into=Path(scratch))
                reason = f"exit status {status}" if status else ""
                num_rows = self._keep(Path(scratch) / there)
            except (
                Exception
            ) as error:  # of the runner, which may be anybody's: the next experiment is asked all the same
                return Ending(name=name, outcome="failed", reason=f"{type(error).__name__}: {error}")
        if not reason and not num_rows:
            reason = "it left no row"
        return Ending(name=name, outcome="failed" if reason else "measured", num_rows=num_rows, reason=reason)

    def _keep(self, file: Path) -> int:
        """Add the rows of a file that came back to those of their devices; how many."""
        if not file.exists():
            return 0
        try:
            records = read_lines(file, _reason_against, what="row", hint="the tree there is another", may_be_torn=True)
        except ConfigError as error:
            raise RemoteError(f"a line that is no row: {error.message}") from error
        commit, dirty = commit_of_tree()
        for record in records:
            if record["commit"] is None:
                record |= {"commit": commit, "dirty": dirty}
            device = "cpu" if record["driver"] is None else record["device"]
            target = self._file or self._folder / results_file(device)
            target.parent.mkdir(parents=True, exist_ok=True)
            append_line(record, target)
        return len(records)


def _reason_against(record: Any) -> str | None:
    reason = reason_against_texts(record, ("experiment", "metric", "device"))
    if reason is not None:
        return reason
    for name in ("driver", "commit"):
        if name not in record or not isinstance(record[name], str | None):
            return f"{name} must be a text or null, got {shown(record.get(name))}"
    return None
