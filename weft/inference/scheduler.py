"""Decides, once a step, which requests compute how many tokens, and finds room for them. Plain Python, no torch.

There are no prefill and decode phases: a request's computed tokens chase its tokens under one budget a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.block_allocator import BlockAllocator
from weft.inference.plan import Admission, NewBlocks, StepPlan
from weft.inference.policies import Policy
from weft.inference.prefix_cache import PrefixCache
from weft.inference.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step gave one request. `stop_reason`: the stop token that ended it, if one did."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class _Entry:
    """What the plan under construction holds for one request; it goes as a whole if the request is preempted."""

    request: Request
    admission: Admission | None = None
    count: int = 0
    new_blocks: list[NewBlocks] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Owns every request that has not ended, its row and its blocks."""

    def __init__(
        self, config: SchedulerConfig, policy: Policy, geometry: BlockGeometry, *, prefix_caching: bool = False
    ) -> None:
        self._config = config
        self._policy = policy
        self._geometry = geometry
        self._prefixes = PrefixCache(geometry.block_size)
        self._caches_prefixes = prefix_caching and geometry.shareable
        self._allocator = BlockAllocator(geometry.num_blocks, on_evict=self._prefixes.forget)
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._waiting: dict[str, Request] = {}
        self._preempted: dict[str, Request] = {}  # they wait too, before all others
        self._running: dict[str, Request] = {}
        self._num_waiting_tokens = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting or request_id in self._preempted

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting or self._preempted)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of requests that have not started yet."""
        return self._num_waiting_tokens

    def add(self, request: Request) -> None:
        assert request.request_id not in self, f"request {request.request_id!r} is already here"
        self._waiting[request.request_id] = request
        self._num_waiting_tokens += request.num_tokens

    def schedule(self) -> StepPlan:
        """The next step. Requests that it admits move from waiting to running; preempted ones move back."""
        left = self._config.max_num_batched_tokens
        chunk = self._config.max_chunk_tokens or left
        draft: dict[Request, _Entry] = {}
        preempted: list[Request] = []
        waiting = tuple(chain(self._preempted.values(), self._waiting.values()))
        for request in self._policy.candidates(tuple(self._running.values()), waiting):
            if left == 0:
                break
            if request in preempted:
                continue
            entry = _Entry(request)
            if request.row is None and (preempted or not self._admit(entry, min(chunk, left))):
                break
            entry.count = min(request.num_uncomputed_tokens, chunk, left)
            draft[request] = entry
            left -= entry.count
            while request in draft and not self._grow(entry):
                victim = self._preempt_youngest()
                preempted.append(victim)
                if victim in draft:
                    left += draft.pop(victim).count
        assert draft or not self.has_requests, "requests wait and the step schedules none"
        return _plan(list(draft.values()), preempted)

    def update(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Take the tokens that the step sampled (-1: its logits were not finite); requests that end leave at once."""
        outputs = []
        for request_id, count, new in zip(plan.request_ids, plan.num_new_tokens, tokens, strict=True):
            request = self._running.get(request_id)
            if request is None:  # ended between the step's start and now
                continue
            request.num_computed_tokens += count
            failed = bool(new) and new[-1] < 0
            if self._caches_prefixes and not failed:  # what a failed step wrote is not to be read by anybody
                self._publish(request)
            if new:
                outputs.append(self._append(request, new[-1]))
        return outputs

    def finish(self, request_id: str) -> None:
        """Forget a request in any state and free what it holds; unknown ids are ignored, so that it is idempotent."""
        if request_id in self._running:
            self._vacate(self._running.pop(request_id))
        elif request_id in self._waiting:
            self._num_waiting_tokens -= self._waiting.pop(request_id).num_tokens
        else:
            self._preempted.pop(request_id, None)

    def check_idle(self) -> None:
        """Raise AssertionError, with the whole equation, if an idle engine still holds a row or a block."""
        allocator = self._allocator
        equation = (
            f"free {allocator.num_free} + cached {allocator.num_cached} + owned {allocator.num_owned}, "
            f"blocks {allocator.num_blocks}; free rows {len(self._free_rows)} of {self._config.max_num_seqs}"
        )
        assert allocator.num_free + allocator.num_cached == allocator.num_blocks, equation
        assert allocator.num_owned == 0, equation
        assert len(self._free_rows) == self._config.max_num_seqs, equation

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

    def _admit(self, entry: _Entry, most: int) -> bool:
        """Give a waiting request a row and what of its prefix is cached, if its first chunk finds room as well."""
        request = entry.request
        if not self._free_rows:
            return False
        hits = self._find_room(request, most)
        if hits is None:
            return False
        # The last token is always computed, for its logits.
        computed = min(len(hits) * self._geometry.block_size, request.num_tokens - 1)
        if self._preempted.pop(request.request_id, None) is None:
            self._num_waiting_tokens -= self._waiting.pop(request.request_id).num_tokens
            request.num_cached_tokens = computed
        self._running[request.request_id] = request
        request.row = self._free_rows.pop()
        request.blocks = list(hits)
        request.num_computed_tokens = computed
        request.num_published_blocks = computed // self._geometry.block_size
        if request.num_published_blocks:
            request.prefix_entry = self._prefixes.entry_of(hits[request.num_published_blocks - 1])
        if hits:
            entry.new_blocks.append(NewBlocks(row=request.row, first=0, blocks=tuple(hits)))
        entry.admission = Admission(
            row=request.row,
            token_ids=tuple(request.token_ids),
            num_computed_tokens=computed,
            params=request.params,
            seed=request.seed,
        )
        return True

    def _find_room(self, request: Request, most: int) -> list[int] | None:
        """Own the cached blocks of its prefix, if the rest of its first `most` tokens finds room too; None if not.

        A prompt that is cached to its last token needs one block more, to compute that token in a copy of its block; if
        that is one too many, the block is computed anew instead.
        """
        size = self._geometry.block_size
        hits = self._prefixes.lookup(request.token_ids, request.cache_salt) if self._caches_prefixes else []
        self._allocator.share(hits)
        to_the_end = len(hits) * size == request.num_tokens
        if to_the_end and self._allocator.num_available == 0:
            self._allocator.release([hits.pop()], keep=self._prefixes.__contains__)
            to_the_end = False
        computed = request.num_tokens - 1 if to_the_end else len(hits) * size
        end = min(request.num_tokens, computed + most)
        if self._geometry.blocks_for(end) - len(hits) + to_the_end <= self._allocator.num_available:
            return hits
        self._allocator.release(hits, keep=self._prefixes.__contains__)
        return None

    def _grow(self, entry: _Entry) -> bool:
        """Find room for the entry's tokens: blocks past the last, and a copy of a block that others may read."""
        request = entry.request
        held, start = len(request.blocks), request.num_computed_tokens
        first = start // self._geometry.block_size
        copied = first < held and self._is_read_by_others(request.blocks[first])
        wanted = self._geometry.blocks_for(start + entry.count) - held
        blocks = self._allocator.allocate(max(wanted, 0) + copied)
        if blocks is None:
            return False
        row = _row(request)
        if copied:
            source, target = request.blocks[first], blocks.pop()
            request.blocks[first] = target
            entry.copies.append((source, target))
            entry.new_blocks.append(NewBlocks(row=row, first=first, blocks=(target,)))
            self._allocator.release([source], keep=self._prefixes.__contains__)
        if blocks:
            request.blocks.extend(blocks)
            entry.new_blocks.append(NewBlocks(row=row, first=held, blocks=tuple(blocks)))
        return True

    def _is_read_by_others(self, block: int) -> bool:
        return self._allocator.references(block) > 1 or block in self._prefixes

    def _preempt_youngest(self) -> Request:
        """The request admitted last gives back row and blocks, and waits before all others to compute them again."""
        assert len(self._running) > 1, "a request alone always finds its blocks"
        request_id, request = self._running.popitem()
        self._vacate(request)
        self._preempted = {request_id: request, **self._preempted}
        return request

    def _vacate(self, request: Request) -> None:
        self._free_rows.append(_row(request))
        self._allocator.release(request.blocks, keep=self._prefixes.__contains__)
        request.row, request.blocks = None, []
        request.num_computed_tokens = request.num_published_blocks = 0

    def _publish(self, request: Request) -> None:
        """Let others find the blocks that this request has filled: only full ones, only computed ones."""
        size = self._geometry.block_size
        for index in range(request.num_published_blocks, request.num_computed_tokens // size):
            parent = request.prefix_entry if index else request.cache_salt
            tokens = request.token_ids[index * size : (index + 1) * size]
            request.prefix_entry = self._prefixes.publish(request.blocks[index], parent, tokens)
            request.num_published_blocks = index + 1


def _plan(entries: Sequence[_Entry], preempted: Sequence[Request]) -> StepPlan:
    return StepPlan(
        request_ids=tuple(entry.request.request_id for entry in entries),
        rows=tuple(_row(entry.request) for entry in entries),
        num_new_tokens=tuple(entry.count for entry in entries),
        num_logit_rows=tuple(int(entry.count == entry.request.num_uncomputed_tokens) for entry in entries),
        admissions=tuple(entry.admission for entry in entries if entry.admission is not None),
        new_blocks=(tuple(grown for entry in entries for grown in entry.new_blocks),),
        block_copies=tuple(pair for entry in entries for pair in entry.copies),
        preempted_ids=tuple(request.request_id for request in preempted),
    )


def _row(request: Request) -> int:
    assert request.row is not None, f"request {request.request_id!r} has no row"
    return request.row
