"""Requests that find most of their prompt in the cache first, before what they would find is evicted."""

from collections.abc import Iterator

from weft.config import SchedulerConfig
from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request

# Of those who wait, how many are looked up in a step: a lookup costs as much as the prompt is long.
WINDOW = 32
# How often a request lets others pass before it goes first whatever it finds.
MAX_OVERTAKEN = 16


class PrefixFirst(Policy):
    """Promise: of the 32 requests that came first, the one with the longest cached prefix is admitted first; and no
    request is overtaken more than 16 times by later ones once it is among the 32.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._window: list[Request] = []
        self._overtaken: dict[Request, int] = {}

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from view.running
        waiting = view.waiting
        self._window = list(waiting[:WINDOW])
        counts = {request: self._overtaken.get(request, 0) for request in self._window}
        pushed_out = self._overtaken.keys() - counts.keys()  # admitted or ended; or preempted ones came before it
        if pushed_out:
            counts |= {request: self._overtaken[request] for request in pushed_out.intersection(waiting)}
        self._overtaken = counts
        while self._window:
            chosen = self._choose(view)
            yield chosen
            if chosen.row is None:
                return

    def admitted(self, request: Request) -> None:
        place = self._window.index(request)
        for earlier in self._window[:place]:
            self._overtaken[earlier] += 1
        del self._window[place], self._overtaken[request]

    def _choose(self, view: SchedulerView) -> Request:
        for request in self._window:
            if self._overtaken[request] >= MAX_OVERTAKEN:
                return request
        return max(self._window, key=view.num_cached_tokens)  # of equals, the first


POLICY = PrefixFirst
