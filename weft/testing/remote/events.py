"""What a run elsewhere says, a JSON object a line, numbered within an attempt; and pytest's reports as such objects.

| kind | content |
|---|---|
| `begin` | `environment`: GPU, driver, versions |
| `collected` | `missing`: node ids that are not there |
| `start`, `finish` | `nodeid`, `location` |
| `report` | `report`: as pytest serialises it |
| `log` | `text`: a line that a program printed |
| `artefact` | `path`, relative to the root; `content` in base64 |
| `exit` | `code` of the process, negative for a signal; `tail`: the end of its output |
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import pytest

from weft.errors import RemoteError

Kind = Literal["begin", "collected", "start", "report", "finish", "log", "artefact", "exit"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """attempt: whose it is; a job that was begun again is another attempt.   number: its place there, from 0."""

    attempt: str
    number: int
    kind: str
    content: dict[str, Any]

    def to_line(self) -> str:
        """Values that JSON has no form for, as a test may record, become their `repr`."""
        return json.dumps(asdict(self), default=repr)


class Stamp:
    """Gives the events of one attempt their numbers."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._next = 0

    def __call__(self, kind: str, **content: Any) -> str:
        event = Event(attempt=self._attempt, number=self._next, kind=kind, content=content)
        self._next += 1
        return event.to_line()


def read_event(line: str) -> Event:
    """Raises: RemoteError for a line that is no event."""
    try:
        found = json.loads(line)
        event = Event(**found)
        sound = isinstance(event.attempt, str) and type(event.number) is int and isinstance(event.content, dict)
    except (ValueError, TypeError) as error:
        raise RemoteError(f"a line that is no event: {line[:200]!r}") from error
    if not sound or event.kind not in get_args(Kind):
        raise RemoteError(f"a line that is no event: {line[:200]!r}")
    return event


def read_report(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    """The report, with the tuples that JSON has made lists of: pytest's reporters unpack and compare them as such.

    Raises: RemoteError for what is no report of a test.
    """
    restored = dict(data)
    try:
        restored["location"] = tuple(data["location"])
        for name in ("sections", "user_properties"):
            restored[name] = [tuple(pair) for pair in data.get(name, ())]
        if isinstance(data["longrepr"], list):  # where and why a test was skipped
            restored["longrepr"] = tuple(data["longrepr"])
        report = config.hook.pytest_report_from_serializable(config=config, data=restored)
    except (KeyError, TypeError) as error:
        raise RemoteError(f"no report of a test: {str(data)[:200]}") from error
    if not isinstance(report, pytest.TestReport):
        raise RemoteError(f"no report of a test: {str(data)[:200]}")
    return report
