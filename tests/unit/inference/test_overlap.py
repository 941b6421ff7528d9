"""Reading tokens one step late never changes what anybody says, whatever ends, fails or is aborted meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.unit.inference.conftest import Build
from weft import LLM
from weft.config import BlockGeometry, SchedulerConfig
from weft.errors import WeftError
from weft.inference.pipeline import Pipeline
from weft.inference.plan import StepPlan
from weft.inference.policies import build_policy, known_policies
from weft.inference.request import FinishReason, Request
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler
from weft.inference.token_logprobs import StepLogprobs
from weft.testing.toy import ToyExecutor, ToyHandle, next_token

STOP = frozenset({7, 11, 13})


def fails(token_ids: Sequence[int]) -> bool:
    return hash((-2, *token_ids)) % 29 == 0


@dataclass(frozen=True)
class Job:
    """A request under a name that others had or will have, and when its caller has heard enough."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int
    abort_after: int | None
    salt: str | None


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | None = None


def alone(job: Job) -> Answer:
    """What is right, said without any engine."""
    said: list[int] = []
    while True:
        if len(said) == job.abort_after:
            return Answer(tuple(said), "abort")
        if fails([*job.prompt, *said]):
            return Answer(tuple(said), "error")
        said.append(next_token([*job.prompt, *said]))
        if said[-1] in STOP:
            return Answer(tuple(said), "stop", said[-1])
        if len(said) == job.max_tokens:
            return Answer(tuple(said), "length")


class InterruptionError(Exception):
    """Raised in the middle of a step."""


class FaultyRunner:
    """Runs the toy model and raises where it is told: at these calls, before or after the work, or at a reading."""

    def __init__(self, executor: ToyExecutor, raises: frozenset[tuple[int, str]]) -> None:
        self.executor, self.raises, self.calls = executor, raises, 0

    def execute(self, plan: StepPlan) -> "FaultyHandle":
        self.calls += 1
        self.fail("before")
        launched = self.executor.launch(plan)
        self.fail("after")
        return FaultyHandle(self, self.calls, launched)

    def fail(self, when: str) -> None:
        if (self.calls, when) in self.raises:
            raise InterruptionError


@dataclass(frozen=True)
class FaultyHandle:
    runner: FaultyRunner
    number: int
    handle: ToyHandle

    def tokens(self) -> list[list[int]]:
        if (self.number, "reading") in self.runner.raises:
            raise InterruptionError
        return self.handle.tokens()

    def logprobs(self) -> StepLogprobs | None:
        return self.handle.logprobs()


@dataclass(frozen=True)
class Setting:
    policy: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    chunk: int | None
    prefix_caching: bool
    raises: frozenset[tuple[int, str]]


def serve(jobs: Sequence[Job], setting: Setting, *, overlap: bool) -> list[Answer]:
    """Each job's answer. A job arrives as soon as its time has come and nobody else has its name."""
    config = SchedulerConfig(
        policy=setting.policy,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.budget,
        max_chunk_tokens=setting.chunk,
    )
    geometry = BlockGeometry(num_blocks=setting.num_blocks, block_size=setting.block_size, shareable=True)
    scheduler = Scheduler(config, build_policy(config), geometry, prefix_caching=setting.prefix_caching)
    runner = FaultyRunner(ToyExecutor(setting.block_size, fails), setting.raises)
    pipeline = Pipeline(scheduler, runner, overlap=overlap)
    answers: dict[int, Answer] = {}
    said: dict[int, list[int]] = {}
    serving: dict[str, int] = {}
    left = list(range(len(jobs)))

    def abort_those_who_heard_enough() -> None:
        for name, place in list(serving.items()):
            if len(said[place]) == jobs[place].abort_after:
                output = scheduler.finish(name, "abort")
                assert output is not None
                assert (output.new_token_ids, output.finish_reason) == ((), "abort")
                answers[place] = Answer(tuple(said[place]), "abort")
                del serving[name]

    for now in range(3000):
        for place in list(left):
            job = jobs[place]
            if job.arrives <= now and job.name not in serving:
                serving[job.name], said[place] = place, []
                left.remove(place)
                scheduler.add(request_of(job))
                abort_those_who_heard_enough()
        if not left and not scheduler.has_requests:
            break
        try:
            outputs = pipeline.step()
        except InterruptionError:
            continue
        for output in outputs:
            place = serving[output.request_id]
            said[place] += output.new_token_ids
            if output.finish_reason is not None:
                answers[place] = Answer(tuple(said[place]), output.finish_reason, output.stop_reason)
                del serving[output.request_id]
        abort_those_who_heard_enough()
        scheduler._allocator.check()
    scheduler.check_idle()
    return [answers[place] for place in range(len(jobs))]


def request_of(job: Job) -> Request:
    return Request(
        request_id=job.name,
        token_ids=list(job.prompt),
        num_prompt_tokens=len(job.prompt),
        params=SamplingParams(temperature=0),
        seed=0,
        stop_token_ids=STOP,
        max_len=len(job.prompt) + job.max_tokens,
        cache_salt=job.salt,
    )


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Job], Setting]:
    setting = Setting(
        policy=draw(st.sampled_from(sorted(known_policies()))),
        num_blocks=draw(st.integers(1, 10)),
        block_size=draw(st.integers(1, 4)),
        max_num_seqs=draw(st.integers(1, 4)),
        budget=draw(st.integers(4, 12)),
        chunk=draw(st.none() | st.integers(1, 5)),
        prefix_caching=draw(st.booleans()),
        raises=draw(
            st.frozensets(st.tuples(st.integers(1, 12), st.sampled_from(["before", "after", "reading"])), max_size=2)
        ),
    )
    room = setting.num_blocks * setting.block_size
    jobs = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=room)))
        jobs.append(
            Job(
                name=draw(st.sampled_from("abcd")),
                prompt=prompt,
                max_tokens=draw(st.integers(1, room - len(prompt) + 1)),
                arrives=draw(st.integers(0, 12)),
                abort_after=draw(st.none() | st.integers(0, 4)),
                salt=draw(st.sampled_from([None, None, "a"])),
            )
        )
    return jobs, setting


def check(jobs: Sequence[Job], setting: Setting) -> None:
    right = [alone(job) for job in jobs]
    for answer in right:
        event(f"ends by {answer.finish_reason}")
    assert serve(jobs, setting, overlap=False) == right
    assert serve(jobs, setting, overlap=True) == right


@given(scenes())
def test_overlap_never_changes_output(scene: tuple[list[Job], Setting]) -> None:
    check(*scene)


@pytest.mark.nightly
@given(scenes())
def test_overlap_never_changes_output_at_night(scene: tuple[list[Job], Setting]) -> None:
    check(*scene)


PROMPTS = {"a": [10, 11, 12], "b": [20, 21, 22, 23, 24], "c": [30], "d": [20, 21, 22, 23, 25]}


def outcomes(build: Build, stops: Sequence[int], **options: object) -> dict[str, list[object]]:
    engine = build(block_size=2, **options)
    found: dict[str, list[object]] = {name: [] for name in PROMPTS}
    for place, (name, prompt) in enumerate(PROMPTS.items()):
        params = SamplingParams(
            temperature=0.7 * (place % 2),
            seed=place,
            max_tokens=9 + place,
            stop_token_ids=list(stops),
            ignore_eos=True,
        )
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] += output.new_token_ids
            if output.finished:
                found[output.request_id] += [output.finish_reason, output.stop_reason]
    return found


@pytest.mark.parametrize("num_blocks", [8, 11, None])
@pytest.mark.parametrize("chunk", [None, 2])
def test_overlap_never_changes_what_a_real_engine_says(build: Build, num_blocks: int | None, chunk: int | None) -> None:
    unstopped = outcomes(build, [], overlap=False)
    stops = [unstopped["a"][3], unstopped["b"][5], unstopped["c"][0]]
    for ids in ([], stops):
        options = {"num_blocks": num_blocks, "max_chunk_tokens": chunk, "max_num_seqs": 3}
        apart = outcomes(build, ids, overlap=False, **options)  # type: ignore[arg-type]
        assert outcomes(build, ids, overlap=True, **options) == apart  # type: ignore[arg-type]


def test_generate_says_the_same_with_overlap(tiny_llama: Path) -> None:
    prompts = list(PROMPTS.values())
    params = [SamplingParams(temperature=0, max_tokens=max_tokens) for max_tokens in (1, 12, 2, 12)]
    said = []
    for overlap in (False, True):
        llm = LLM(str(tiny_llama), device="cpu", skip_tokenizer_init=True, max_num_seqs=2, overlap=overlap)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            said.append([(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs])
    assert said[1:] == said[:-1]
    assert {reason for _, reason in said[0]} == {"stop", "length"}


def test_overlap_is_off_on_cpus_unless_asked_for(build: Build) -> None:
    assert [build(overlap=overlap).overlaps for overlap in (None, False, True)] == [False, False, True]


def test_the_first_step_gives_nothing_and_the_next_one_its_tokens(build: Build) -> None:
    engine = build(overlap=True)
    for _ in range(2):  # the second time a step that nobody waits for is under way
        engine.add_request("a", [10, 11], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert engine.step() == []
        assert engine.has_unfinished_requests()
        assert [output.finished for output in engine.step()] == [False]
        engine.abort("a")
        assert not engine.has_unfinished_requests()
        assert engine.step() == []


def test_an_id_and_its_row_may_be_used_again_at_once(build: Build) -> None:
    def say(prompt: list[int], **options: bool) -> list[int]:
        engine = build(max_num_seqs=1, **options)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        engine.add_request("a", [40, 41, 42], params)
        engine.step()
        engine.step()
        engine.abort("a")
        engine.add_request("a", prompt, params)
        said: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                said += output.new_token_ids
        return said

    assert say([10, 11], overlap=True) == say([10, 11], overlap=False)


def test_a_refusal_during_a_step_leaves_it_alone(build: Build) -> None:
    engine = build(overlap=True)
    engine.add_request("a", [10], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    engine.step()
    with pytest.raises(WeftError, match="still in use"):  # it awaits its only token
        engine.add_request("a", [10], SamplingParams())
    assert [output.finish_reason for output in engine.step()] == ["length"]
