"""A run in this very process: for a debugger, on a machine with a GPU. A fault that ends the process ends the run."""

from collections.abc import Iterator, Sequence
from uuid import uuid4

import pytest
from _pytest.runner import runtestprotocol

from weft.testing.remote.events import Stamp
from weft.testing.remote.interface import Job


class InlineRunner:
    """Runs items that this session has collected, and says so as any other runner does."""

    description = "this process"
    elsewhere = False

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self._items = {item.nodeid: item for item in items}

    def open(self) -> None:
        """Nothing to make ready."""

    def run(self, job: Job) -> Iterator[str]:
        stamp = Stamp(uuid4().hex)
        yield stamp("begin", environment={})
        items = [self._items[node_id] for node_id in job.node_ids]
        failed = False
        for item, following in zip(items, [*items[1:], None], strict=True):
            yield stamp("start", nodeid=item.nodeid, location=item.location)
            for report in runtestprotocol(item, log=False, nextitem=following):
                failed |= report.failed
                data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
                yield stamp("report", report=data)
            yield stamp("finish", nodeid=item.nodeid, location=item.location)
        yield stamp("exit", code=int(failed), tail="")

    def close(self) -> None:
        """Nothing was taken."""
