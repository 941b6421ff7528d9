"""Static batching: a batch is admitted together and runs until all of it has finished. The measure for the others."""

from collections.abc import Iterator
from itertools import takewhile

from weft.config import SchedulerConfig
from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request


class Static(Policy):
    """Promise: no request of a later batch computes a token before every request of this one has ended."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._batch: frozenset[Request] = frozenset()  # requests, not ids: an id may come back as another request

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        # Nobody of a later batch comes in, so who is left of this one waits before all others.
        members = list(takewhile(self._batch.__contains__, view.waiting))
        if not view.running and not members:
            members = list(view.waiting[: self._max_num_seqs])
            self._batch = frozenset(members)
        yield from view.running
        yield from members


POLICY = Static
