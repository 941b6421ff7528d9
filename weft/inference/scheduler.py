"""Decides, once a step, which requests compute how many tokens, and finds room for them. Plain Python, no torch.

There are no prefill and decode phases: a request's computed tokens chase its tokens under one budget a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.block_allocator import BlockAllocator
from weft.inference.plan import Admission, NewBlocks, StepPlan
from weft.inference.policies import Policy
from weft.inference.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step gave one request. `stop_reason`: the stop token that ended it, if one did."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


class Scheduler:
    """Owns every request that has not ended, its row and its blocks."""

    def __init__(self, config: SchedulerConfig, policy: Policy, geometry: BlockGeometry) -> None:
        self._config = config
        self._policy = policy
        self._geometry = geometry
        self._allocator = BlockAllocator(geometry.num_blocks)
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        assert request.request_id not in self, f"request {request.request_id!r} is already here"
        self._waiting[request.request_id] = request

    def schedule(self) -> StepPlan:
        """The next step. Requests that it admits move from waiting to running."""
        budget = self._config.max_num_batched_tokens
        chunk = self._config.max_chunk_tokens or budget
        scheduled: list[tuple[Request, int]] = []
        admissions: list[Admission] = []
        new_blocks: list[NewBlocks] = []
        for request in self._policy.candidates(tuple(self._running.values()), tuple(self._waiting.values())):
            if budget == 0:
                break
            count = min(request.num_uncomputed_tokens, chunk, budget)
            if request.row is None:
                if not self._fits(request, count):
                    break
                admissions.append(self._admit(request))
            if grown := self._grow(request, count):
                new_blocks.append(grown)
            scheduled.append((request, count))
            budget -= count
        assert scheduled or not self.has_requests, "requests wait and the step schedules none"
        return StepPlan(
            request_ids=tuple(request.request_id for request, _ in scheduled),
            rows=tuple(_row(request) for request, _ in scheduled),
            num_new_tokens=tuple(count for _, count in scheduled),
            num_logit_rows=tuple(int(count == request.num_uncomputed_tokens) for request, count in scheduled),
            admissions=tuple(admissions),
            new_blocks=(tuple(new_blocks),),
        )

    def update(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Take the tokens that the step sampled (-1: its logits were not finite); requests that end leave at once."""
        outputs = []
        for request_id, count, new in zip(plan.request_ids, plan.num_new_tokens, tokens, strict=True):
            request = self._running.get(request_id)
            if request is None:  # ended between the step's start and now
                continue
            request.num_computed_tokens += count
            if new:
                outputs.append(self._append(request, new[-1]))
        return outputs

    def finish(self, request_id: str) -> None:
        """Forget a request in any state and free what it holds; unknown ids are ignored, so that it is idempotent."""
        request = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        if request is not None and request.row is not None:
            self._free_rows.append(request.row)
            self._allocator.free(request.blocks)
            request.row, request.blocks = None, []

    def _append(self, request: Request, token: int) -> StepOutput:
        if token < 0:
            self.finish(request.request_id)
            return StepOutput(request_id=request.request_id, new_token_ids=(), finished=True, finish_reason="error")
        request.token_ids.append(token)
        ended = request.stop_after(token)
        if ended is None:
            return StepOutput(request_id=request.request_id, new_token_ids=(token,))
        self.finish(request.request_id)
        reason, stop_token = ended
        return StepOutput(
            request_id=request.request_id,
            new_token_ids=(token,),
            finished=True,
            finish_reason=reason,
            stop_reason=stop_token,
        )

    def _fits(self, request: Request, count: int) -> bool:
        return bool(self._free_rows) and self._geometry.blocks_for(count) <= self._allocator.num_free

    def _admit(self, request: Request) -> Admission:
        request.row = self._free_rows.pop()
        self._running[request.request_id] = self._waiting.pop(request.request_id)
        return Admission(
            row=request.row,
            token_ids=tuple(request.token_ids),
            num_computed_tokens=request.num_computed_tokens,
            params=request.params,
            seed=request.seed,
        )

    def _grow(self, request: Request, count: int) -> NewBlocks | None:
        """Blocks for `count` more computed tokens; None if those it has suffice."""
        held = len(request.blocks)
        wanted = self._geometry.blocks_for(request.num_computed_tokens + count) - held
        if wanted <= 0:
            return None
        blocks = self._allocator.allocate(wanted)
        assert blocks is not None, "an admitted request always finds its blocks in an unshareable cache"
        request.blocks.extend(blocks)
        return NewBlocks(row=_row(request), first=held, blocks=tuple(blocks))


def _row(request: Request) -> int:
    assert request.row is not None, f"request {request.request_id!r} has no row"
    return request.row
