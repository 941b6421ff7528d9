"""A scheduler over the toy model, taken as source, so that a fault can be planted in it, and what each request says.

A fault is a replacement in the source of the scheduler, the allocator, the prefix cache or the loop around them; one
whose text is no longer there is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from tests.unit.inference.planting import planted_in
from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.plan import StepPlan
from weft.inference.policies import build_policy
from weft.inference.request import Request
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_output import StepOutput
from weft.inference.token_logprobs import StepLogprobs, TokenLogprobs
from weft.testing.toy import ToyExecutor, ToyHandle, never_fails, scored, sequential


@dataclass
class Bench:
    """One scheduler (of the module given) over the toy model, and what each request has said."""

    module: ModuleType
    num_blocks: int
    block_size: int
    max_num_seqs: int = 4
    chunk: int | None = None
    prefix_caching: bool = True
    policy: str = "fcfs"
    expected: dict[str, list[int]] = field(default_factory=dict)
    said: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[tuple[TokenLogprobs | None, ...]]] = field(default_factory=dict)  # one if asked for
    computed: dict[str, int] = field(default_factory=dict)  # tokens computed for each request, again after a preemption
    preempted: list[str] = field(default_factory=list)
    overlap: bool = False
    fails: Callable[[Sequence[int]], bool] = never_fails
    events: list[str] = field(default_factory=list)  # what the loop did, in order
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            policy=self.policy,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=64,
            max_chunk_tokens=self.chunk,
        )
        geometry = BlockGeometry(num_blocks=self.num_blocks, block_size=self.block_size, shareable=True)
        self.scheduler = self.module.Scheduler(
            config, build_policy(config), geometry, prefix_caching=self.prefix_caching
        )
        self.executor = ToyExecutor(self.block_size, self.fails)
        pipeline = import_module("weft.inference.pipeline")  # the planted one, if one is planted
        self.pipeline = pipeline.Pipeline(self.scheduler, self, overlap=self.overlap)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        stop: frozenset[int] = frozenset(),
        **params: Any,
    ) -> None:
        self.requests[request_id] = request = Request(
            request_id=request_id,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0, **params),
            seed=0,
            stop_token_ids=stop,
            max_len=len(prompt) + max_tokens,
        )
        self.expected[request_id] = sequential(prompt, max_tokens, stop)
        self.said[request_id], self.logprobs[request_id], self.prompt_logprobs[request_id] = [], [], []
        self.pipeline.add(request)

    def execute(self, plan: StepPlan) -> "BenchHandle":
        """As a runner does."""
        assert sum(plan.num_new_tokens) > 0, "a step computes nothing"
        for request_id, count, sampled in zip(plan.request_ids, plan.num_new_tokens, plan.num_logit_rows, strict=True):
            request = self.requests[request_id]
            known = request.num_tokens + request.num_unread_tokens - sampled
            assert request.num_computed_tokens <= known, "more is computed than there is"
            self.computed[request_id] = self.computed.get(request_id, 0) + count
        self.preempted += plan.preempted_ids
        self.plans.append(plan)
        self.events.append(f"execute {len(self.plans)}")
        return BenchHandle(self, len(self.plans), self.executor.launch(plan))

    def step(self) -> list[StepOutput]:
        outputs: list[StepOutput] = self.pipeline.step()
        for output in outputs:
            self.said[output.request_id] += output.new_token_ids
            self.logprobs[output.request_id] += output.logprobs
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[output.request_id].append(output.prompt_logprobs)
            request = self.requests[output.request_id]
            assert request.num_tokens == request.num_prompt_tokens + len(self.said[output.request_id])
        self.scheduler._allocator.check()
        return outputs

    def run(self) -> "Bench":
        for _ in range(1000):
            if not self.scheduler.has_requests:
                break
            self.step()
        assert self.said == self.expected
        for request_id, request in self.requests.items():
            self.check_logprobs(request_id, request)
        self.scheduler.check_idle()
        return self

    def check_logprobs(self, request_id: str, request: Request) -> None:
        """As many as tokens, each of its own token in its place; those of the prompt once, before anything else."""
        prompt, said = request.token_ids[: request.num_prompt_tokens], self.said[request_id]
        assert self.logprobs[request_id] == expected_logprobs(prompt, said, request.params.logprobs)
        expected = expected_prompt_logprobs(prompt, request.params.prompt_logprobs)
        assert self.prompt_logprobs[request_id] == ([expected] if said and expected is not None else [])


def expected_logprobs(prompt: Sequence[int], said: Sequence[int], num_top: int | None) -> list[TokenLogprobs]:
    if num_top is None:
        return []
    return [scored([*prompt, *said[:place]], token, num_top) for place, token in enumerate(said)]


def expected_prompt_logprobs(prompt: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs | None, ...] | None:
    if num_top is None:
        return None
    return (None, *(scored(prompt[:place], prompt[place], num_top) for place in range(1, len(prompt))))


@dataclass(frozen=True)
class BenchHandle:
    bench: Bench
    number: int
    launched: ToyHandle

    def tokens(self) -> list[list[int]]:
        self.bench.events.append(f"read {self.number}")
        return self.launched.tokens()

    def logprobs(self) -> StepLogprobs | None:
        return self.launched.logprobs()


@dataclass(frozen=True)
class Fault:
    """A report, the law that sees it, and the fault as replacements (module, what stands there, what is put there)."""

    report: str
    law: Callable[[ModuleType], None]
    edits: tuple[tuple[str, str, str], ...]


def fault(report: str, law: Callable[[ModuleType], None], *edits: tuple[str, str, str]) -> Fault:
    return Fault(report, law, edits)


@contextmanager
def planted(edits: Sequence[tuple[str, str, str]]) -> Iterator[ModuleType]:
    """The scheduler's module with the edits made to it and to what it imports; nobody else sees them."""
    names = ("block_allocator", "prefix_cache", "policies.fair", "prompt_scores", "draft", "scheduler", "pipeline")
    with planted_in(names, edits) as made:
        yield made["scheduler"]
