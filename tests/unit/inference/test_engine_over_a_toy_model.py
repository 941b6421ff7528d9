from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.policies import known_policies
from weft.inference.request import Request
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler
from weft.testing.toy import ToyExecutor, sequential

STOP = frozenset({7, 11})


class ToyEngine(RuleBasedStateMachine):
    """Random arrivals, aborts, chunks, blocks and pools: every request says what it says alone."""

    @initialize(
        policy=st.sampled_from(sorted(known_policies())),
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 12),
        chunk=st.none() | st.integers(1, 6),
        shareable=st.booleans(),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        policy: str,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        chunk: int | None,
        shareable: bool,
        prefix_caching: bool,
    ) -> None:
        config = SchedulerConfig(
            policy=policy, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_chunk_tokens=chunk
        )
        self.config, self.room = config, num_blocks * block_size
        geometry = BlockGeometry(num_blocks=num_blocks, block_size=block_size, shareable=shareable)
        make = known_policies()[policy]
        self.scheduler = Scheduler(config, make(max_num_seqs=max_num_seqs), geometry, prefix_caching=prefix_caching)
        self.executor = ToyExecutor(block_size)
        self.expected: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.salts: dict[str, str | None] = {}
        self.count = 0

    @rule(data=st.data(), salt=st.sampled_from([None, None, "a"]))
    def arrive(self, data: st.DataObject, salt: str | None) -> None:
        # Few different tokens, so that prompts begin alike.
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.room))
        max_tokens = data.draw(st.integers(1, self.room - len(prompt) + 1))
        request_id, self.count = str(self.count), self.count + 1
        self.scheduler.add(
            Request(
                request_id=request_id,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                params=SamplingParams(temperature=0),
                seed=0,
                stop_token_ids=STOP,
                max_len=len(prompt) + max_tokens,
                cache_salt=salt,
            )
        )
        self.expected[request_id] = sequential(prompt, max_tokens, STOP)
        self.said[request_id] = []

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.scheduler.finish(request_id)
        self.scheduler.finish(request_id)
        del self.expected[request_id]

    @rule()
    def step(self) -> None:
        if not self.scheduler.has_requests:
            return
        plan = self.scheduler.schedule()
        assert 0 < sum(plan.num_new_tokens) <= self.config.max_num_batched_tokens
        assert max(plan.num_new_tokens) <= (self.config.max_chunk_tokens or self.config.max_num_batched_tokens)
        assert len(plan.rows) <= self.config.max_num_seqs
        assert not set(plan.preempted_ids) & set(plan.request_ids)
        for output in self.scheduler.update(plan, self.executor.execute(plan)):
            self.said[output.request_id] += output.new_token_ids
            expected = self.expected[output.request_id]
            assert self.said[output.request_id] == expected[: len(self.said[output.request_id])]
            if output.finished:
                assert self.said[output.request_id] == expected
                assert output.finish_reason == ("stop" if expected[-1] in STOP else "length")
                del self.expected[output.request_id]

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler._allocator.check()

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
