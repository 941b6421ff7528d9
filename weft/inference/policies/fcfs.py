"""First come, first served: continuous batching in the order of arrival."""

from collections.abc import Iterator

from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request


class FirstComeFirstServed(Policy):
    """Promise: of two requests, the one that came first never waits for room that the other takes."""

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from view.running
        yield from view.waiting


POLICY = FirstComeFirstServed
