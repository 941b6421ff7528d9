"""Decides, once a step, which requests compute how many tokens, and finds room for them. Plain Python, no torch.

There are no prefill and decode phases: a request's computed tokens chase its tokens under one budget a step. A step may
be planned while the one before is under way: what that one samples counts already and is read later.
"""

from collections import deque
from collections.abc import Sequence

from weft.config import BlockGeometry, SchedulerConfig
from weft.inference import failures
from weft.inference.block_allocator import BlockAllocator
from weft.inference.draft import Draft, Step
from weft.inference.plan import Admission, NewBlocks, StepPlan
from weft.inference.policies.interface import Policy
from weft.inference.prefix_cache import PrefixCache
from weft.inference.prompt_scores import PromptScores
from weft.inference.request import FinishReason, Request
from weft.inference.step_output import StepOutput
from weft.inference.token_logprobs import StepLogprobs


class Scheduler:
    """Owns every request that has not ended, its row and its blocks. To its policy it is a SchedulerView."""

    def __init__(
        self, config: SchedulerConfig, policy: Policy, geometry: BlockGeometry, *, prefix_caching: bool = False
    ) -> None:
        self._config = config
        self._policy = policy
        self._geometry = geometry
        self._caches_prefixes = prefix_caching and geometry.shareable
        self._open_memory()
        self._waiting: dict[str, Request] = {}
        self._preempted: dict[str, Request] = {}  # they wait too
        self._running: dict[str, Request] = {}
        # They keep row and blocks and only await a token that is sampled already and ends them by length.
        self._ending: dict[str, Request] = {}
        self._prompt_scores = PromptScores()
        self._under_way: deque[Step] = deque()  # steps whose tokens have not been read, oldest first
        self._num_waiting_tokens = 0

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in place for place in (self._running, self._waiting, self._preempted, self._ending))

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting or self._preempted or self._ending)

    @property
    def running(self) -> tuple[Request, ...]:
        """Those that hold a row and have tokens to compute, in the order in which they were admitted."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[Request, ...]:
        return (*self._preempted.values(), *self._waiting.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of requests that have not started yet."""
        return self._num_waiting_tokens

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks that requests own; what is only kept for a prefix hit is not in use."""
        return self._allocator.num_owned

    def num_cached_tokens(self, request: Request) -> int:
        return len(self._hits(request)) * self._geometry.block_size

    def add(self, request: Request) -> None:
        assert request.request_id not in self, f"request {request.request_id!r} is already here"
        self._prompt_scores.add(request)
        self._waiting[request.request_id] = request
        self._num_waiting_tokens += request.num_tokens

    def schedule(self) -> StepPlan:
        """The next step. Requests that it admits move from waiting to running; preempted ones move back.

        The step before may still be under way. The plan is empty if nothing can be done before that one is read.
        """
        left = self._config.max_num_batched_tokens
        chunk = self._config.max_chunk_tokens or left
        size = self._geometry.block_size
        draft = Draft()
        counts, running, free_rows = draft.num_new_tokens, self._running, self._free_rows
        open_door = True  # to those who wait
        for request in self._policy.candidates(self):
            if left == 0:
                break
            if request.row is None:
                open_door = open_door and not draft.is_short and self._admit(request, min(chunk, left), draft)
                if not open_door:
                    if len(counts) == len(running):
                        break
                    continue
            end = len(request.token_ids) + request.num_unread_tokens
            count = end - request.num_computed_tokens
            if count > 1 and count > min(chunk, left):
                count = min(chunk, left)
                draft.chunk_ends[request] = end = request.num_computed_tokens + count
            counts[request] = count
            left -= count
            if end > len(request.blocks) * size:
                while request in counts and not self._grow(request, end, draft):
                    left += draft.withdraw(request) if self._ending else draft.preempt(self._preempt())
            if not free_rows and len(counts) == len(running):
                break  # before a policy sorts those who cannot come in
        return self._launch(draft)

    def update(
        self, plan: StepPlan, tokens: Sequence[Sequence[int]], logprobs: StepLogprobs | None = None
    ) -> list[StepOutput]:
        """Take the tokens that the step sampled (below 0: see `failures`); requests that end leave at once.

        logprobs: those that the plan's requests ask for; None if none of them does.
        Steps are read in the order in which they were scheduled. What a request sampled after its end is dropped.
        """
        step = self._under_way.popleft()
        assert step.plan is plan, "another step is to be read first"
        gives_logprobs = logprobs is not None or bool(self._prompt_scores)
        self._prompt_scores.read(plan, step.requests, logprobs)
        outputs: list[StepOutput] = []
        give, make = outputs.append, tuple.__new__  # a NamedTuple's own constructor is Python, and a third of the loop
        size = self._geometry.block_size if self._caches_prefixes else None
        for request, new in zip(step.requests, tokens, strict=True):
            if request.has_ended:
                continue
            known = request.token_ids
            if new:
                token, end = new[-1], len(known)
                if token < 0:  # what a failed step wrote is not to be read by anybody
                    give(self._end(request, (), "error")._replace(error=failures.reason(token, request.params)))
                    continue
            else:
                token, end = None, step.chunk_ends[request]
            # Up to the end of this step: what later ones add, already planned or even done, is not confirmed.
            if size is not None and end // size > request.num_published_blocks and request.row is not None:
                self._publish(request, end)
            if token is None:
                continue
            known.append(token)
            request.num_unread_tokens -= 1
            ended = request.stop_after(token)
            if ended is None:
                cached = request.num_cached_tokens
                give(make(StepOutput, (request.request_id, (token,), False, None, None, cached, (), None, None)))
            else:
                give(self._end(request, (token,), *ended))
        return self._prompt_scores.complete(step.requests, outputs, logprobs) if gives_logprobs else outputs

    def finish(self, request_id: str, reason: FinishReason) -> StepOutput | None:
        """End a request in any state and free what it holds; its last output, or None if it is not here (any more)."""
        for place in (self._running, self._waiting, self._preempted, self._ending):
            if request_id in place:
                return self._end(place[request_id], (), reason)
        return None

    def restart(self) -> None:
        """Whoever runs gives back row and blocks and waits, before all others, to compute its tokens again.

        For a step that failed between `schedule` and `update`: nobody knows how much of its plan the device took in;
        and for a request whose coming or end was interrupted, after which it is there or gone. Steps under way are
        forgotten, and the tokens that nobody has read are sampled again. Nothing is found in the cache any more.
        """
        held = {**self._ending, **self._running}
        self._preempted = {
            request_id: request for request_id, request in {**held, **self._preempted}.items() if not request.has_ended
        }
        self._running, self._ending = {}, {}
        for request_id, request in self._preempted.items():
            self._waiting.pop(request_id, None)
            request.row, request.blocks = None, []
            request.num_published_blocks = request.num_computed_tokens = 0
            request.num_unread_tokens = 0
        self._waiting = {name: request for name, request in self._waiting.items() if not request.has_ended}
        self._num_waiting_tokens = sum(request.num_tokens for request in self._waiting.values())
        self._prompt_scores = PromptScores()
        for request in self.waiting:
            self._prompt_scores.add(request)
        self._under_way.clear()
        self._open_memory()  # an interrupt may have come between a block and its owner: all are counted anew

    def _open_memory(self) -> None:
        """Every row and block is free."""
        self._prefixes = PrefixCache(self._geometry.block_size)
        self._allocator = BlockAllocator(self._geometry.num_blocks, on_evict=self._prefixes.forget)
        self._free_rows = list(reversed(range(self._config.max_num_seqs)))

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

    def _end(
        self, request: Request, new_token_ids: tuple[int, ...], reason: FinishReason, stop_token: int | None = None
    ) -> StepOutput:
        request_id = request.request_id
        request.has_ended = True
        self._prompt_scores.forget(request)
        request.num_unread_tokens = 0  # what is still to come is dropped
        if self._running.pop(request_id, None) is not None or self._ending.pop(request_id, None) is not None:
            # A step under way may still write these blocks. Whoever gets them writes later: the device runs in order.
            self._vacate(request)
        elif self._preempted.pop(request_id, None) is None:
            self._num_waiting_tokens -= self._waiting.pop(request_id).num_tokens
        return StepOutput(request_id, new_token_ids, True, reason, stop_token, request.num_cached_tokens)

    def _launch(self, draft: Draft) -> StepPlan:
        """Count as computed and sampled what the step will compute and sample."""
        chunk_ends = draft.chunk_ends
        prompt_rows = self._prompt_scores.plan(draft.num_new_tokens) if self._prompt_scores else ()
        for request, count in draft.num_new_tokens.items():
            request.num_computed_tokens += count
            if chunk_ends and request in chunk_ends:
                continue
            request.num_unread_tokens = unread = request.num_unread_tokens + 1
            if len(request.token_ids) + unread >= request.max_len:
                self._ending[request.request_id] = request
                del self._running[request.request_id]
        for request in draft.admissions:
            request.has_started = True
        step = draft.step(prompt_rows)
        if step.requests:
            self._under_way.append(step)
        assert self._under_way or not self.has_requests, "requests wait and the step schedules none"
        return step.plan

    def _admit(self, request: Request, most: int, draft: Draft) -> bool:
        """Give a waiting request a row, what of its prefix is cached, and room for its first `most` tokens.

        False, and nothing has changed, if any of these is missing: an admission takes nothing from those who run. The
        last token is always computed, for its logits. Where the cache holds even that one, its block is copied first,
        since others may read it; if no block is left for the copy, the block is computed anew instead.
        """
        if not self._free_rows:
            return False
        assert not request.num_unread_tokens, "an admission brings all of its tokens"
        size = self._geometry.block_size
        hits = self._hits(request)
        self._allocator.share(hits)  # first, so that what follows cannot evict them
        is_copied = len(hits) * size == request.num_tokens
        if is_copied and self._allocator.num_available == 0:
            self._release([hits.pop()])
            is_copied = False
        computed = min(len(hits) * size, request.num_tokens - 1)
        end = min(request.num_tokens, computed + most)
        blocks = self._allocator.allocate(self._geometry.blocks_for(end) - len(hits) + is_copied)
        if blocks is None:
            self._release(hits)
            return False
        request.num_published_blocks = computed // size
        if request.num_published_blocks:
            request.prefix_entry = self._prefixes.entry_of(hits[request.num_published_blocks - 1])
        if is_copied:
            source = hits.pop()
            draft.copies[request] = source, blocks[0]
            self._release([source])
        self._running[request.request_id] = request  # first: an interrupt may find it twice, but not lose it
        if self._preempted.pop(request.request_id, None) is None:
            self._num_waiting_tokens -= self._waiting.pop(request.request_id).num_tokens
        if not request.has_started:
            request.num_cached_tokens = computed
        request.row = self._free_rows.pop()
        request.blocks = [*hits, *blocks]
        request.num_computed_tokens = computed
        draft.new_blocks[request] = NewBlocks(row=request.row, first=0, blocks=tuple(request.blocks))
        draft.admissions[request] = Admission(
            row=request.row,
            token_ids=tuple(request.token_ids),
            num_computed_tokens=computed,
            params=request.params,
            seed=request.seed,
            num_prompt_tokens=request.num_prompt_tokens,
            stop_token_ids=request.stop_token_ids,
        )
        self._policy.admitted(request)
        return True

    def _hits(self, request: Request) -> list[int]:
        """Blocks that hold what it begins with. Logits are not kept: whoever needs a prompt's computes the prompt."""
        if not self._caches_prefixes or request.needs_scores:
            return []
        return self._prefixes.lookup(request.token_ids, request.cache_salt)

    def _grow(self, request: Request, end: int, draft: Draft) -> bool:
        """Find blocks for the tokens of a running request, up to `end`; False if the pool is dry."""
        held = len(request.blocks)
        blocks = self._allocator.allocate(self._geometry.blocks_for(end) - held)
        if blocks is None:
            return False
        request.blocks += blocks
        draft.new_blocks[request] = NewBlocks(_row(request), held, tuple(blocks))
        return True

    def _preempt(self) -> Request:
        """A request that runs gives back row and blocks, and waits before all others to compute its tokens again."""
        assert len(self._running) > 1, "a request alone always finds its blocks"
        request = self._policy.victim(self.running)
        self._preempted = {request.request_id: request, **self._preempted}
        del self._running[request.request_id]
        self._vacate(request)
        return request

    def _vacate(self, request: Request) -> None:
        self._free_rows.append(_row(request))
        self._release(request.blocks)
        request.row, request.blocks = None, []
        request.num_computed_tokens = request.num_published_blocks = 0

    def _release(self, blocks: Sequence[int]) -> None:
        self._allocator.release(blocks, keep=self._prefixes.__contains__)

    def _publish(self, request: Request, end: int) -> None:
        """Let others find the blocks that this request has filled up to `end`: only full ones, only confirmed ones."""
        size = self._geometry.block_size
        for index in range(request.num_published_blocks, end // size):
            parent = request.prefix_entry if index else request.cache_salt
            tokens = request.token_ids[index * size : (index + 1) * size]
            request.prefix_entry = self._prefixes.publish(request.blocks[index], parent, tokens)
            request.num_published_blocks = index + 1


def _row(request: Request) -> int:
    assert request.row is not None, f"request {request.request_id!r} has no row"
    return request.row
