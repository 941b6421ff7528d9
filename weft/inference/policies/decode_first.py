"""Streams before prompts: who is one token away from an output gets it, whatever prompts are being read."""

from collections.abc import Iterator

from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request


class DecodeFirst(Policy):
    """Promise: a long prompt never stalls a stream. Every stream that runs gains a token in every step.

    How long such a step takes is for `max_num_batched_tokens` to say. Only a dry pool breaks a stream. (Policies that
    serve who runs in the order of admission keep this too, since a request comes in only where those before it leave a
    part of the budget, and prompts only get shorter; here it holds in any order.)
    """

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        running = view.running
        yield from (request for request in running if request.is_decoding)
        yield from (request for request in running if not request.is_decoding)
        yield from view.waiting


POLICY = DecodeFirst
