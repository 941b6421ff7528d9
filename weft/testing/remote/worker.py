"""The plugin in the pytest of a run elsewhere: it runs the tests it was sent, and writes each hook as an event.

Loaded by `-p`, with two variables: the file of the job, and the descriptor that takes the events. What it writes gets
attempt and number from the process above it, which outlives it (`process.py`).
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.testing.remote.interface import Job

JOB, DESCRIPTOR = "WEFT_REMOTE_JOB", "WEFT_REMOTE_EVENTS"
Location = tuple[str, int | None, str]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Whatever the project's own options say: no run further away, no xdist, and to stop at a failure is for the run
    # that asked.
    config.option.modal = config.option.weft_runner = None
    config.option.maxfail = 0
    if hasattr(config.option, "dist"):
        config.option.dist, config.option.tx, config.option.numprocesses = "no", [], 0
    job = Job.from_json(Path(os.environ.pop(JOB)).read_text(encoding="utf-8"))
    config.pluginmanager.register(Worker(config, job, int(os.environ.pop(DESCRIPTOR))), "weft-remote-worker")


class Worker:
    """Hooks of one session."""

    def __init__(self, config: pytest.Config, job: Job, descriptor: int) -> None:
        self._config, self._node_ids = config, job.node_ids
        self._events = os.fdopen(descriptor, "w", encoding="ascii")
        self._process = os.getpid()

    def _tell(self, kind: str, **content: Any) -> None:
        if os.getpid() != self._process:  # a test has forked
            return
        print(json.dumps({"kind": kind, "content": content}, default=repr), file=self._events, flush=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """What was sent runs, in the order of the run that sent it, whatever would be deselected here."""
        found = {item.nodeid: item for item in items}
        yield
        items[:] = [found[node_id] for node_id in self._node_ids if node_id in found]
        self._tell("collected", missing=[node_id for node_id in self._node_ids if node_id not in found])

    def pytest_runtest_logstart(self, nodeid: str, location: Location) -> None:
        self._tell("start", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._tell("report", report=data)

    def pytest_runtest_logfinish(self, nodeid: str, location: Location) -> None:
        self._tell("finish", nodeid=nodeid, location=location)
