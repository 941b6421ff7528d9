"""Short requests first: the least mean waiting time, paid for by the long ones, within bounds."""

from collections.abc import Iterator

from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request

# A second of waiting weighs as much as this many tokens.
AGEING_TOKENS_PER_S = 1000


class ShortestFirst(Policy):
    """Promise: of requests that came together the one of fewer tokens (prompt and `max_tokens`) starts first; and a
    request is overtaken by one shorter by n tokens only if that one came at most n / 1000 seconds later.
    """

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        running = view.running
        yield from (request for request in running if request.is_decoding)
        yield from sorted((request for request in running if not request.is_decoding), key=_rank)
        yield from sorted(view.waiting, key=_rank)


def _rank(request: Request) -> float:
    return request.max_len + request.arrival_s * AGEING_TOKENS_PER_S


POLICY = ShortestFirst
