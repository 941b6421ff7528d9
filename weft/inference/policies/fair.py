"""The same share for every user, whatever each asks for: virtual token counters (Sheng et al. 2024, Algorithm 2)."""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import nlargest
from operator import itemgetter

from weft.config import SchedulerConfig
from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request

# What a user is charged: a token written weighs as much as two read.
READ_COST, WRITE_COST = 1, 2
# Of the users who left with more than their share, how many are remembered: those who had most.
MAX_ABSENT = 1024


class Fair(Policy):
    """Promise: of two users who both have requests waiting all the time, neither is ever served more than the other by
    more than what one prompt and the running requests of one user can cost; how many requests each sends says nothing.

    A counter a user: what it was served, in cost. The user with the least goes next, with its oldest request. A user
    who comes anew starts at the least of those present, so that idling saves up nothing.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._served: dict[str | None, int] = {}  # by user; None is one user too
        self._charged: dict[Request, int] = {}  # what each admitted request has cost its user so far

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        running = view.running
        yield from (request for request in running if request.is_decoding)
        waiting = view.waiting
        self._account(running, waiting)
        yield from sorted(
            (request for request in running if not request.is_decoding), key=lambda request: self._served[request.user]
        )
        # In order of arrival: of users who were served alike, the one whose request came first. By the last, users who
        # come anew would go before one who waits, for as long as any come.
        queues: dict[str | None, deque[Request]] = {}
        for request in waiting:
            queues.setdefault(request.user, deque()).append(request)
        while queues:
            user = min(queues, key=self._served.__getitem__)
            chosen = queues[user].popleft()
            if not queues[user]:
                del queues[user]
            yield chosen
            if chosen.row is None:
                return

    def admitted(self, request: Request) -> None:
        self._charge(request)

    def _account(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Charge what was served since the last look, let users in, and forget those who owe nothing."""
        for request in list(self._charged):
            self._charge(request)
        present = {request.user for request in (*running, *waiting)}
        known = [self._served[user] for user in present if user in self._served]
        least = min(known, default=0)
        counters = {user: max(least, self._served.get(user, 0)) for user in present}
        # Who left with more than the least has to find that again; who left with less would start at the least anyway.
        gone = {user: cost for user, cost in self._served.items() if user not in present and known and cost > least}
        if len(gone) > MAX_ABSENT:  # to half of it, so that not every departure sorts them
            gone = dict(nlargest(MAX_ABSENT // 2, gone.items(), key=itemgetter(1)))
        self._served = gone | counters
        alive = set(running) | set(waiting)
        self._charged = {request: cost for request, cost in self._charged.items() if request in alive}

    def _charge(self, request: Request) -> None:
        """Its prompt once, then each token written. Computing it again after a preemption is not the user's fault."""
        written = request.num_tokens + request.num_unread_tokens - request.num_prompt_tokens
        cost = READ_COST * request.num_prompt_tokens + WRITE_COST * written
        self._served[request.user] = self._served.get(request.user, 0) + cost - self._charged.get(request, 0)
        self._charged[request] = cost


POLICY = Fair
