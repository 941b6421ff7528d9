"""What is sent away, and who takes it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Job:
    """Tests for one pytest, or one program.

    node_ids: what runs, in this order.   arguments: pytest's options, without files.
    artefact_folders: of these folders, relative to the root, changed files come back.
    program: a Python file and its arguments, run in place of tests; its output comes as events of kind `log`.
    """

    node_ids: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    artefact_folders: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        return cls(**{name: tuple(values) for name, values in json.loads(text).items()})


@runtime_checkable
class Runner(Protocol):
    """Runs jobs. `open` comes first, `close` last, whatever happened in between.

    description: for the summary.   elsewhere: tests run in another process, so that this one's plugins see nothing.
    """

    description: str
    elsewhere: bool

    def open(self) -> None:
        """Make ready, or say why not. Raises: RemoteError."""

    def run(self, job: Job) -> Iterator[str]:
        """Events of the job (see `events.py`), a line each. A stream that ends without `exit` is a lost worker."""

    def close(self) -> None:
        """Give back what was taken."""
