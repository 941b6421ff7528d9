"""Priorities with ageing: a smaller number goes first, and waiting makes every number smaller."""

from collections.abc import Iterator, Sequence

from weft.config import SchedulerConfig
from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request

DEFAULT_AGEING_S = 10.0


class Priority(Policy):
    """Promise: of requests that came together the smaller `priority` is served first and gives way last; and a request
    is overtaken by one of k less only if that one came at most k * `priority_ageing_s` seconds later.

    Both age alike, so who goes first is settled when they come: by `priority * ageing + arrival`.
    """

    options = frozenset({"priority_ageing_s"})

    def __init__(self, config: SchedulerConfig) -> None:
        self._ageing_s = DEFAULT_AGEING_S if config.priority_ageing_s is None else config.priority_ageing_s

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from sorted(view.running, key=self._rank)
        yield from sorted(view.waiting, key=self._rank)

    def victim(self, running: Sequence[Request]) -> Request:
        """The one that would be served last: the one that would be first always stays."""
        return sorted(running, key=self._rank)[-1]

    def _rank(self, request: Request) -> float:
        return request.priority * self._ageing_s + request.arrival_s


POLICY = Priority
