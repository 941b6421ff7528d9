"""Requests of all kinds in one engine, whatever happens to it: each says what it says alone in an engine of its own.

Tokens, text, logprobs, those of the prompt, why it ended and where: all equal, bit for bit, since the model counts in
integers. See `mixed_bench.py`.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.inference.integer_model import VOCAB_SIZE
from tests.unit.inference.mixed_bench import MAX_MODEL_LEN, WAYS, Bench, faultless
from weft.errors import SamplingParamsError
from weft.inference.policies import known_policies
from weft.inference.sampling_params import SamplingParams

MAX_PROMPT = 9
MOST_OPEN = 6
PART_BY_DAY = 16  # of the profile's examples: a step takes a hundred times as long as one of a scheduler alone

tokens = st.integers(0, VOCAB_SIZE - 1)
penalties = st.sampled_from([-2.0, -0.5, 0.75, 2.0])
asked_for = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.0, 0.4, 1.0, 3.0]), "max_tokens": st.sampled_from([None, 1, 2, 5, 8])},
    optional={
        "n": st.integers(2, 3),
        "seed": st.sampled_from([0, 1, 2**63, 2**64 - 1]),
        "top_k": st.sampled_from([-1, 1, 4]),
        "top_p": st.sampled_from([0.2, 0.9]),
        "min_p": st.sampled_from([0.1, 0.7]),
        "min_tokens": st.integers(1, 6),
        "stop": st.lists(st.sampled_from(["a", "ba", "cb", "abb", " "]), min_size=1, max_size=2),
        "stop_token_ids": st.lists(tokens, min_size=1, max_size=4),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "presence_penalty": penalties,
        "frequency_penalty": penalties,
        "repetition_penalty": st.sampled_from([0.6, 1.5]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -3.0, 2.5, 100.0]), min_size=1, max_size=3),
        "bad_words": st.lists(st.sampled_from(["a", "bb"]) | st.lists(tokens, min_size=1, max_size=2), max_size=3),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=6),
        "logprobs": st.sampled_from([-1, 0, 2]),
        "prompt_logprobs": st.sampled_from([-1, 0, 2]),
        "detokenize": st.booleans(),
        "skip_special_tokens": st.booleans(),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> SamplingParams:
    """What one asks for, of all that a request can; contradictions are left out."""
    asked: dict[str, Any] = draw(asked_for)
    if asked["temperature"] == 0:
        asked.pop("n", None)
    if not asked.get("detokenize", True):
        asked.pop("stop", None)
    if "min_tokens" in asked and asked["max_tokens"] is not None:
        asked["min_tokens"] = min(asked["min_tokens"], asked["max_tokens"])
    return SamplingParams(**asked)


class MixedEngine(RuleBasedStateMachine):
    @initialize(
        way=st.sampled_from(WAYS),
        policy=st.sampled_from(sorted(known_policies())),
        block_size=st.integers(1, 5),
        spare=st.integers(0, 8),
        max_num_seqs=st.integers(1, 5),
        more=st.integers(0, 10),
        chunk=st.none() | st.integers(1, 5),
        batch_sizes=st.none() | st.sets(st.integers(1, 5), min_size=1, max_size=2),
        prefix_caching=st.booleans(),
        overlap=st.booleans(),
        logprobs_mode=st.sampled_from(["raw_logprobs", "processed_logprobs"]),
    )
    def start(
        self,
        way: str,
        policy: str,
        block_size: int,
        spare: int,
        max_num_seqs: int,
        more: int,
        chunk: int | None,
        batch_sizes: set[int] | None,
        prefix_caching: bool,
        overlap: bool,
        logprobs_mode: str,
    ) -> None:
        self.bench = Bench(
            faultless(),
            way,
            policy=policy,
            block_size=block_size,
            num_blocks=-(-MAX_MODEL_LEN // block_size) + spare,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + more,
            max_chunk_tokens=chunk,
            graph_batch_sizes=batch_sizes and tuple({min(size, max_num_seqs) for size in batch_sizes}),
            enable_prefix_caching=prefix_caching,
            overlap=overlap,
            logprobs_mode=logprobs_mode,
        )
        self.count = 0

    @precondition(lambda self: len(self.bench.asked) < MOST_OPEN)
    @rule(
        # Few different tokens before the last, so that prompts begin alike.
        beginning=st.lists(st.sampled_from([6, 7]), max_size=MAX_PROMPT - 1),
        last=tokens,
        params=requests(),
        streams=st.booleans(),
    )
    def arrive(self, beginning: list[int], last: int, params: SamplingParams, streams: bool) -> None:
        self.count += 1
        name = str(self.count)
        try:
            self.bench.add(name, [*beginning, last], params, streams=streams)
        except SamplingParamsError:  # no token is left to begin with
            assert params.allowed_token_ids is not None
            assert name not in self.bench.text.open_requests

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @precondition(lambda self: self.bench.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.abort(data.draw(st.sampled_from(sorted(self.bench.asked))))

    @rule()
    def preempt(self) -> None:
        if len(self.scheduler.running) > 1 and not self.scheduler._under_way:
            self.scheduler._preempt()

    @rule(where=st.sampled_from(["before", "after"]))
    def step_that_raises(self, where: str) -> None:
        def fail() -> None:
            raise MemoryError

        setattr(self.bench, where, fail)
        try:
            self.bench.step()
        except MemoryError:
            assert not self.scheduler.running
        self.bench.before = self.bench.after = lambda: None

    @invariant()
    def who_brings_no_seed_has_one_of_its_own(self) -> None:
        if hasattr(self, "bench"):
            drawn = [
                self.bench.seeds[f"{name}/0"] for name, asked in self.bench.asked.items() if asked.params.seed is None
            ]
            assert len(set(drawn)) == len(drawn)

    @property
    def scheduler(self) -> Any:
        return self.bench.engine._scheduler

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.run()


@pytest.mark.usefixtures("as_users_run_it")
class TestMixedEngine(MixedEngine.TestCase):
    settings = settings(max_examples=max(1, settings().max_examples // PART_BY_DAY))


@pytest.mark.nightly
@pytest.mark.usefixtures("as_users_run_it")
class TestMixedEngineAtNight(MixedEngine.TestCase):  # the same machine, for as long as the profile `nightly` says
    pass
