"""A step's plan under construction, kept by request until it is put into columns. Decides nothing; no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple, cast

from weft.inference.plan import Admission, NewBlocks, PromptRows, StepPlan
from weft.inference.request import Request


class Step(NamedTuple):
    """A step under way. Requests, not ids or rows: both may belong to others by the time its tokens are read."""

    plan: StepPlan
    requests: list[Request]
    chunk_ends: dict[Request, int]


@dataclass(slots=True)
class Draft:
    """The plan under construction. Each part is kept by request, so that a preempted one goes as a whole."""

    num_new_tokens: dict[Request, int] = field(default_factory=dict)
    chunk_ends: dict[Request, int] = field(default_factory=dict)  # of chunks that stop short of the request's end
    admissions: dict[Request, Admission] = field(default_factory=dict)
    new_blocks: dict[Request, NewBlocks] = field(default_factory=dict)
    copies: dict[Request, tuple[int, int]] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    is_short: bool = False  # of room for somebody who runs

    def preempt(self, request: Request) -> int:
        """Take out a request that has lost its blocks; the tokens that it leaves to others."""
        self.preempted.append(request)
        if request in self.admissions and not request.has_started:
            request.num_cached_tokens = 0  # what was found may be gone when it is admitted again
        for part in (self.admissions, self.new_blocks, self.copies):
            part.pop(request, None)
        return self.withdraw(request)

    def withdraw(self, request: Request) -> int:
        """Give a request nothing in this step; the tokens that it leaves to others."""
        self.is_short = True
        self.chunk_ends.pop(request, None)
        return self.num_new_tokens.pop(request, 0)

    def step(self, prompt_rows: tuple[PromptRows, ...]) -> Step:
        # Whole columns, and no call a request: what a step of hundreds of requests affords in plain Python.
        requests, chunk_ends = list(self.num_new_tokens), self.chunk_ends
        ends = [int(request not in chunk_ends) for request in requests] if chunk_ends else [1] * len(requests)
        plan = StepPlan(
            request_ids=tuple([request.request_id for request in requests]),
            rows=cast("tuple[int, ...]", tuple([request.row for request in requests])),
            num_new_tokens=tuple(self.num_new_tokens.values()),
            num_logit_rows=tuple(ends),
            admissions=tuple(self.admissions.values()),
            new_blocks=(tuple(self.new_blocks.values()),),
            block_copies=tuple(self.copies.values()),
            preempted_ids=tuple(request.request_id for request in self.preempted),
            prompt_rows=prompt_rows,
        )
        return Step(plan, requests, chunk_ends)
