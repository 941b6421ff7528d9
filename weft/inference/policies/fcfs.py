"""First come, first served: continuous batching in the order of arrival."""

from collections.abc import Iterator, Sequence

from weft.inference.request import Request


class FirstComeFirstServed:
    """Promise: of two requests, the one that came first never waits for room that the other takes."""

    def __init__(self, *, max_num_seqs: int) -> None:
        pass

    def candidates(self, running: Sequence[Request], waiting: Sequence[Request]) -> Iterator[Request]:
        yield from running
        yield from waiting


POLICY = FirstComeFirstServed
