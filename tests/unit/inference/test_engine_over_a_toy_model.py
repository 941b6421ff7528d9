"""Scheduler, allocator, prefix cache and every policy over a toy model, on a virtual clock.

Whatever arrives, ends, fails or is preempted, and whenever: each request says what it says alone, it ends once, and it
is overtaken only as its policy promises.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.inference.toy_bench import expected_logprobs, expected_prompt_logprobs
from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.pipeline import Pipeline
from weft.inference.plan import StepPlan
from weft.inference.policies import build_policy, known_policies
from weft.inference.policies.prefix_first import MAX_OVERTAKEN
from weft.inference.request import Request
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler
from weft.inference.step_output import StepOutput
from weft.testing.toy import ToyExecutor, ToyHandle, sequential

STOP = frozenset({7, 11})
AGEING_S = 2.0
NAMES = "abcdefghijkl"  # few, so that they come back at once


class InterruptionError(Exception):
    """Raised in the middle of a step."""


def fails(token_ids: Sequence[int]) -> bool:
    return hash((-2, *token_ids)) % 31 == 0


def never(later: Request, earlier: Request) -> bool:
    return False


# Whether a request may be admitted while one that came earlier still waits.
MAY_OVERTAKE: dict[str, Callable[[Request, Request], bool]] = {
    "static": never,
    "fcfs": never,
    "decode_first": never,
    "prefill_first": never,
    "priority": lambda later, earlier: (
        later.arrival_s - earlier.arrival_s < (earlier.priority - later.priority) * AGEING_S
    ),
    "shortest_first": lambda later, earlier: (
        later.arrival_s - earlier.arrival_s < (earlier.max_len - later.max_len) / 1000
    ),
    "deadline": lambda later, earlier: (
        later.arrival_s + (later.ttft_deadline_s or 60) < earlier.arrival_s + (earlier.ttft_deadline_s or 60)
    ),
    "fair": lambda later, earlier: later.user != earlier.user,
    "prefix_first": lambda later, earlier: True,  # as often as the count below allows
}


def test_every_policy_says_who_may_overtake_whom() -> None:
    assert MAY_OVERTAKE.keys() == known_policies().keys()


class ToyEngine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(sorted(known_policies())),
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 12),
        chunk=st.none() | st.integers(1, 6),
        max_prefills=st.none() | st.integers(1, 3),
        shareable=st.booleans(),
        prefix_caching=st.booleans(),
        overlap=st.booleans(),
    )
    def start(
        self,
        policy: str,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        chunk: int | None,
        max_prefills: int | None,
        shareable: bool,
        prefix_caching: bool,
        overlap: bool,
    ) -> None:
        self.config = SchedulerConfig(
            policy=policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_chunk_tokens=chunk,
            max_prefills_per_round=max_prefills if policy == "prefill_first" else None,
            priority_ageing_s=AGEING_S if policy == "priority" else None,
        )
        self.room = num_blocks * block_size
        geometry = BlockGeometry(num_blocks=num_blocks, block_size=block_size, shareable=shareable)
        policy_object = build_policy(self.config)
        self.scheduler = Scheduler(self.config, policy_object, geometry, prefix_caching=prefix_caching)
        self.executor = ToyExecutor(block_size, fails)
        self.pipeline = Pipeline(self.scheduler, self, overlap=overlap)
        self.before: Callable[[], None] = lambda: None  # happens between plan and execution
        self.after: Callable[[], None] = lambda: None  # happens between execution and reading
        self.places: dict[str, int] = {}  # in order of arrival
        self.waiting: dict[str, Request] = {}  # never admitted so far, in order of arrival
        self.requests: dict[str, Request] = {}
        self.overtaken: dict[str, int] = {}
        self.expected: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.said: dict[str, list[int]] = {}
        self.count, self.now_s = 0, 0.0

    @precondition(lambda self: len(self.expected) < len(NAMES))
    @rule(
        data=st.data(),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(-2, 2),
        user=st.sampled_from([None, "ann", "bob"]),
        deadline_s=st.none() | st.sampled_from([1.0, 20.0, 100.0]),
        logprobs=st.sampled_from([None, None, 0, 3]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )
    def arrive(
        self,
        data: st.DataObject,
        salt: str | None,
        priority: int,
        user: str | None,
        deadline_s: float | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> None:
        # Few different tokens, so that prompts begin alike.
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.room))
        max_tokens = data.draw(st.integers(1, self.room - len(prompt) + 1))
        request_id = data.draw(st.sampled_from([name for name in NAMES if name not in self.expected]))
        self.places[request_id], self.count = self.count, self.count + 1
        request = Request(
            request_id=request_id,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
            seed=0,
            stop_token_ids=STOP,
            max_len=len(prompt) + max_tokens,
            cache_salt=salt,
            arrival_s=self.now_s,
            priority=priority,
            user=user,
            ttft_deadline_s=deadline_s,
        )
        self.scheduler.add(request)
        self.waiting[request_id] = self.requests[request_id] = request
        self.overtaken[request_id] = 0
        said = sequential(prompt, max_tokens, STOP)
        reason = "stop" if said[-1] in STOP else "length"
        for place in range(len(said)):
            if fails([*prompt, *said[:place]]):
                said, reason = said[:place], "error"
                break
        self.expected[request_id], self.reasons[request_id], self.said[request_id] = said, reason, []

    @rule(seconds=st.sampled_from([0.001, 1.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        output = self.scheduler.finish(request_id, "abort")
        assert output is not None
        assert (output.request_id, output.finished, output.finish_reason) == (request_id, True, "abort")
        assert self.scheduler.finish(request_id, "abort") is None
        self.forget(request_id)

    @precondition(lambda self: len(self.scheduler.running) > 1 and not self.scheduler._under_way)
    @rule()
    def preempt(self) -> None:
        self.scheduler._preempt()

    @rule()
    def step(self) -> None:
        self.take(self.pipeline.step())

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), is_executed=st.booleans())
    def step_during_which_one_is_aborted(self, data: st.DataObject, is_executed: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        aborted = []

        def abort() -> None:
            aborted.append(self.scheduler.finish(request_id, "abort"))
            self.forget(request_id)

        if is_executed:
            self.after = abort
        else:
            self.before = abort
        outputs = self.pipeline.step()
        self.before = self.after = lambda: None
        assert not aborted or request_id not in {output.request_id for output in outputs}
        self.take(outputs)

    @precondition(lambda self: self.scheduler.has_requests)
    @rule(where=st.sampled_from(["before", "after"]))
    def step_that_raises(self, where: str) -> None:
        raised = []

        def fail() -> None:
            raised.append(where)
            raise InterruptionError

        setattr(self, where, fail)
        try:
            self.take(self.pipeline.step())
        except InterruptionError:
            assert not self.scheduler.running
        self.before = self.after = lambda: None

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler._allocator.check()

    @invariant()
    def references_are_owners(self) -> None:
        if hasattr(self, "scheduler"):
            owners = (*self.scheduler.running, *self.scheduler._ending.values())
            held = [block for request in owners for block in request.blocks]
            assert all(self.scheduler._allocator.references(block) == held.count(block) for block in held)
            assert len(set(held)) == self.scheduler.num_blocks_in_use

    def execute(self, plan: StepPlan) -> ToyHandle:
        """As a runner does."""
        self.check(plan)
        self.before()
        launched = self.executor.launch(plan)
        self.after()
        return launched

    def check(self, plan: StepPlan) -> None:
        assert 0 < sum(plan.num_new_tokens) <= self.config.max_num_batched_tokens
        assert max(plan.num_new_tokens) <= (self.config.max_chunk_tokens or self.config.max_num_batched_tokens)
        assert len(plan.rows) <= self.config.max_num_seqs
        assert not set(plan.preempted_ids) & set(plan.request_ids)
        new = [request_id for request_id in plan.request_ids if request_id in self.waiting]
        for request_id in new:
            later = self.waiting.pop(request_id)
            for earlier in self.waiting.values():
                came_first = self.places[earlier.request_id] < self.places[request_id]
                if came_first and earlier.request_id not in new:
                    assert MAY_OVERTAKE[self.config.policy](later, earlier), (later, earlier)
                    self.overtaken[earlier.request_id] += 1
        if self.config.policy == "prefix_first" and len(self.waiting) < 20:  # all of them are looked at
            assert all(self.overtaken[request_id] <= MAX_OVERTAKEN for request_id in self.waiting)

    def take(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.check_logprobs(output)
            self.said[output.request_id] += output.new_token_ids
            expected = self.expected[output.request_id]
            assert self.said[output.request_id] == expected[: len(self.said[output.request_id])]
            if output.finished:
                assert self.said[output.request_id] == expected
                assert output.finish_reason == self.reasons[output.request_id]
                assert output.stop_reason == (expected[-1] if output.finish_reason == "stop" else None)
                self.forget(output.request_id)

    def check_logprobs(self, output: StepOutput) -> None:
        """As many as tokens, each of its own token in its place; those of the prompt once, with the first token."""
        request, said = self.requests[output.request_id], self.said[output.request_id]
        prompt, params = request.token_ids[: request.num_prompt_tokens], request.params
        everything = [*said, *output.new_token_ids]
        assert list(output.logprobs) == expected_logprobs(prompt, everything, params.logprobs)[len(said) :]
        is_first = bool(output.new_token_ids) and not said
        expected = expected_prompt_logprobs(prompt, params.prompt_logprobs) if is_first else None
        assert output.prompt_logprobs == expected

    def forget(self, request_id: str) -> None:
        assert request_id not in self.scheduler
        del self.expected[request_id]
        self.waiting.pop(request_id, None)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_requests:
                break
            self.step()
        assert not self.scheduler.has_requests, "requests never end"
        assert not self.expected, "requests end without their last token"
        self.scheduler.check_idle()


TestToyEngine = ToyEngine.TestCase


@pytest.mark.nightly
class TestToyEngineAtNight(TestToyEngine):  # the same machine, for as long as the profile `nightly` says
    pass
