"""What has been heard of each test that was sent away, and how much of it may be believed.

Events come through networks, and from machines that are taken away. So they are put in the order of their numbers, and
one that is missing ends what can be believed of its attempt. Once a second attempt speaks, nothing of the first is
heard. A test counts when it is whole, a measurement when its attempt is. Of each test there is a result, or a reason
why there is none.
"""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.testing.remote.events import Event

# pytest's own: all passed, some failed, none collected. Any other says that the run itself went wrong.
_JUDGED = (0, 1, 5)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One test, whole. reports: as pytest serialised them, in order."""

    node_id: str
    reports: tuple[dict[str, Any], ...]


@dataclass(kw_only=True)
class _Attempt:
    name: str
    next_number: int = 0
    early: dict[int, Event] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    open_test: str | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    held: list[Result] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    artefacts: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    tail: str = ""


class Ledger:
    """Of one job.

    problems: what was wrong with the run itself.   environment: of the last attempt.
    """

    def __init__(self, node_ids: Sequence[str], measured: Collection[str] = ()) -> None:
        """measured: those whose results must not span two attempts."""
        self._node_ids = dict.fromkeys(node_ids)
        self._measured = set(measured)
        self._done: set[str] = set()
        self._failed = False
        self._spanning: set[str] = set()
        self._past: set[str] = set()
        self._current: _Attempt | None = None
        self.problems: list[str] = []
        self.environment: dict[str, str] = {}

    def hear(self, event: Event) -> list[Result]:
        """The tests of which, with this event, there is a result."""
        if event.attempt in self._past:
            return []
        if self._current is None or event.attempt != self._current.name:
            self._begin(event.attempt)
        attempt = self._current
        assert attempt is not None
        if event.number >= attempt.next_number:  # else it came twice
            attempt.early.setdefault(event.number, event)
        results = []
        while attempt.next_number in attempt.early:
            results += self._take(attempt, attempt.early.pop(attempt.next_number))
            attempt.next_number += 1
        return results

    def artefacts(self) -> dict[str, str]:
        """Contents in base64 by path; none of a run that did not end well, or of whose measurements one was lost."""
        attempt = self._current
        if attempt is None or attempt.exit_code not in _JUDGED or self._spanning:
            return {}
        return dict(attempt.artefacts)

    def close(self, ending: str = "the stream of its events has ended") -> dict[str, str]:
        """The tests without a result, each with the reason. ending: why there is no more to hear."""
        attempt = self._current
        lost = [node_id for node_id in self._node_ids if node_id not in self._done]
        if attempt is None:
            return dict.fromkeys(lost, f"nothing was heard of the run elsewhere: {ending}")
        if attempt.exit_code is not None:
            ending = _ending(attempt.exit_code)
            self._judge_exit(attempt.exit_code, lost)
        if attempt.early:
            ending = f"events {attempt.next_number} to {min(attempt.early) - 1} of the run elsewhere never came"
        tail = f"\nthe end of its output:\n{attempt.tail}" if attempt.tail and attempt.exit_code not in (0, 1) else ""
        reasons = {}
        for node_id in lost:
            if node_id in self._spanning:
                reasons[node_id] = "begun in an attempt that was lost; a measurement never spans two, run it again"
            elif node_id in attempt.missing:
                reasons[node_id] = "collected here, and not elsewhere: the trees or what they depend on differ"
            else:
                place = "in" if node_id in attempt.begun else "before"
                reasons[node_id] = f"the worker was lost {place} this test: {ending}{tail}"
                tail = ""  # once is enough
        return reasons

    def _begin(self, name: str) -> None:
        if self._current is not None:
            self._past.add(self._current.name)
            self._spanning |= (self._current.begun & self._measured) - self._done
        self._current = _Attempt(name=name)

    def _take(self, attempt: _Attempt, event: Event) -> list[Result]:
        content = event.content
        match event.kind:
            case "begin":
                self.environment = dict(content.get("environment", {}))
            case "collected":
                attempt.missing.update(content.get("missing", ()))
            case "start":
                attempt.open_test, attempt.reports = str(content.get("nodeid")), []
                attempt.begun.add(attempt.open_test)
            case "report":
                self._add_report(attempt, content.get("report"))
            case "finish":
                return self._finish(attempt, str(content.get("nodeid")))
            case "artefact":
                attempt.artefacts[str(content.get("path"))] = str(content.get("content"))
            case "exit":
                attempt.exit_code, attempt.tail = int(content.get("code", -1)), str(content.get("tail", ""))
                held, attempt.held = attempt.held, []
                return self._release(held)
        return []

    def _add_report(self, attempt: _Attempt, report: Any) -> None:
        if not isinstance(report, dict) or report.get("nodeid") != attempt.open_test:
            named = report.get("nodeid") if isinstance(report, dict) else report
            self.problems.append(f"a report of {named!r} came while {attempt.open_test!r} ran")
            return
        attempt.reports.append(report)

    def _finish(self, attempt: _Attempt, node_id: str) -> list[Result]:
        whole = any(report.get("when") == "teardown" for report in attempt.reports)
        if node_id != attempt.open_test or not whole:
            self.problems.append(f"{node_id!r} ended without all of its reports")
            return []
        result = Result(node_id=node_id, reports=tuple(attempt.reports))
        attempt.open_test = None
        if node_id in self._measured:
            attempt.held.append(result)
            return []
        return self._release([result])

    def _release(self, results: list[Result]) -> list[Result]:
        released = []
        for result in results:
            if result.node_id not in self._node_ids:
                self.problems.append(f"a report of {result.node_id!r}, which was not sent")
            elif result.node_id not in self._done | self._spanning:  # else an attempt before this one told it
                self._done.add(result.node_id)
                self._failed |= any(report.get("outcome") == "failed" for report in result.reports)
                released.append(result)
        return released

    def _judge_exit(self, code: int, lost: Sequence[str]) -> None:
        if code not in _JUDGED:
            self.problems.append(_ending(code))
        elif code == 1 and not self._failed and not lost:
            self.problems.append("pytest elsewhere ended with status 1, and no test of it has failed")


def _ending(code: int) -> str:
    if code >= 0:
        return f"pytest elsewhere ended with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the process elsewhere was ended by {name}"
