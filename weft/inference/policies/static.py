"""Static batching: a batch is admitted together and runs until all of it has finished. The measure for the others."""

from collections.abc import Iterator, Sequence

from weft.inference.request import Request


class Static:
    """Promise: no request of a later batch computes a token before every request of this one has ended."""

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._batch: frozenset[Request] = frozenset()  # requests, not ids: an id may come back as another request

    def candidates(self, running: Sequence[Request], waiting: Sequence[Request]) -> Iterator[Request]:
        members = [request for request in waiting if request in self._batch]
        if not running and not members:
            members = list(waiting[: self._max_num_seqs])
            self._batch = frozenset(members)
        yield from running
        yield from members


POLICY = Static
