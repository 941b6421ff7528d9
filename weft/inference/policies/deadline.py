"""Earliest deadline first (Liu and Layland 1973), the deadline being that of the first token."""

from collections.abc import Iterator, Sequence

from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request

# What a request without a deadline of its own may wait, in seconds: with it nobody waits for ever.
DEFAULT_TTFT_DEADLINE_S = 60.0


class Deadline(Policy):
    """Promise: of two prompts, the one whose first token is due sooner never waits for room that the other takes.

    Streams have met their deadline and go on, a token a step.
    """

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        running = view.running
        yield from (request for request in running if request.is_decoding)
        yield from sorted((request for request in running if not request.is_decoding), key=_due_s)
        yield from sorted(view.waiting, key=_due_s)

    def victim(self, running: Sequence[Request]) -> Request:
        """The prompt that is due last, or the stream admitted last where no prompt is being read.

        The first stream always stays, and among prompts alone the one that is due first.
        """
        prompts = [request for request in running if not request.is_decoding]
        return sorted(prompts, key=_due_s)[-1] if prompts else running[-1]


def _due_s(request: Request) -> float:
    allowed = DEFAULT_TTFT_DEADLINE_S if request.ttft_deadline_s is None else request.ttft_deadline_s
    return request.arrival_s + allowed


POLICY = Deadline
