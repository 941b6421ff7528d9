"""Prompts before streams: the shortest way to everybody's first token."""

from collections.abc import Iterator
from itertools import islice

from weft.config import SchedulerConfig
from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request


class PrefillFirst(Policy):
    """Promise: no stream takes a token of the budget that a prompt could use, of `max_prefills_per_round` prompts.

    A step computes at most that many prompts, and streams get what they leave. Prompts hold rows, of which there are
    `max_num_seqs`, so that streams never wait for more than the prompts of that many requests.
    """

    options = frozenset({"max_prefills_per_round"})

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_prefills = config.max_prefills_per_round or config.max_num_seqs

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        running = view.running
        prompts = [request for request in running if not request.is_decoding]
        yield from islice(prompts, self._max_prefills)
        yield from islice(view.waiting, max(0, self._max_prefills - len(prompts)))
        yield from (request for request in running if request.is_decoding)


POLICY = PrefillFirst
