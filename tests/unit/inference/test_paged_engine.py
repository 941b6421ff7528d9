from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.inference.conftest import Build
from weft.batch import SamplingRows
from weft.config import SchedulerConfig
from weft.errors import ConfigError, ContextLengthError, QueueFullError, RequestError
from weft.inference.engine import Engine
from weft.inference.input_processor import MAX_PRIORITY
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_output import StepOutput


def say(engine: Engine, prompt: list[int], max_tokens: int = 6) -> list[int]:
    engine.add_request("only", prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    said: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            said += output.new_token_ids
    return said


@pytest.mark.parametrize("length", range(1, 13))
def test_a_prompt_sent_twice_is_answered_as_without_a_cache(build: Build, length: int) -> None:
    engine, cold = build(block_size=4), build(block_size=4, enable_prefix_caching=False)
    prompt = list(range(10, 10 + length))
    assert say(engine, prompt) == say(engine, prompt) == say(cold, prompt)


def test_three_requests_in_a_pool_of_three_blocks_preempt_each_other_and_say_what_each_says_alone(build: Build) -> None:
    prompts = {"a": [10, 11, 12], "b": [20, 21, 22], "c": [30, 31, 32]}
    alone = {name: say(build(), prompt, 9) for name, prompt in prompts.items()}
    engine, said = build(block_size=4, num_blocks=3), {name: [] for name in prompts}
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            said[output.request_id] += output.new_token_ids
    assert said == alone


def test_a_request_larger_than_the_pool_is_refused_and_the_next_is_served(build: Build) -> None:
    engine = build(block_size=4, num_blocks=3)
    with pytest.raises(ContextLengthError, match="the pool holds 12"):
        engine.add_request("large", [5] * 8, SamplingParams(max_tokens=6))
    engine.add_request("fits", [5] * 8, SamplingParams(max_tokens=5))  # 13 tokens, the last of which is never read
    engine.abort("fits")
    assert len(say(engine, [5, 6], 4)) == 4


def test_a_queue_that_is_full_refuses_and_stays_as_it_was(build: Build) -> None:
    engine = build(max_num_queued_requests=2)
    for name in ("a", "b"):
        engine.add_request(name, [5], SamplingParams())
    with pytest.raises(QueueFullError, match="2 requests wait"):
        engine.add_request("c", [5], SamplingParams())
    engine.abort("a")
    engine.add_request("c", [5], SamplingParams())
    tokens = build(max_num_queued_tokens=10)
    tokens.add_request("a", [5] * 8, SamplingParams())
    with pytest.raises(QueueFullError, match="8 tokens wait and 3 more"):
        tokens.add_request("b", [5] * 3, SamplingParams())
    tokens.add_request("b", [5] * 2, SamplingParams())
    tokens.abort("a")
    tokens.add_request("a", [5] * 8, SamplingParams())


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0},
        {"num_blocks": 0},
        {"num_blocks": 2**70},
        {"block_size": 10**400},
        {"enable_prefix_caching": "yes"},
    ],
    ids=lambda options: str(options)[:50],
)
def test_a_pool_that_cannot_be_is_an_error_at_construction(build: Build, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        build(**options)


def test_rows_take_no_block_options(build: Build) -> None:
    with pytest.raises(ConfigError, match="block_size=16"):
        build(attention_backend="contiguous", block_size=16)


def test_the_default_serves_in_order_of_arrival() -> None:
    assert SchedulerConfig().policy == "fcfs"


class FailsFor:
    """A sampler that raises as soon as a request of this seed is among the rows."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if self.seed in rows.seeds.tolist():
            raise ValueError("a processor of this request is broken")
        return logits.argmax(dim=-1)


def test_a_request_whose_sampling_raises_ends_with_error_and_the_others_say_what_they_say(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(sampler=FailsFor(13), block_size=4)
    for seed in (11, 13, 17):
        params = SamplingParams(seed=seed, max_tokens=5, ignore_eos=True)
        engine.add_request(str(seed), [10 + seed, 11, 12], params)
    outputs: dict[str, list[StepOutput]] = {"11": [], "13": [], "17": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    why = "sampling a token raised an exception, which the log shows"
    assert [(output.new_token_ids, output.finish_reason, output.error) for output in outputs["13"]] == [
        ((), "error", why)
    ]
    assert "a processor of this request is broken" in caplog.text
    for seed in (11, 17):
        said = [token for output in outputs[str(seed)] for token in output.new_token_ids]
        assert said == say(build(), [10 + seed, 11, 12], 5)


def test_an_interrupt_in_sampling_is_not_taken_for_a_failing_request(build: Build) -> None:
    def interrupted(logits: Tensor, rows: SamplingRows) -> Tensor:
        raise KeyboardInterrupt

    engine = build(sampler=interrupted)
    engine.add_request("a", [10], SamplingParams())
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_an_abort_gives_the_last_output_once(build: Build) -> None:
    engine = build(block_size=4)
    engine.add_request("a", [10, 11, 12], SamplingParams(temperature=0, ignore_eos=True))
    engine.step()
    assert engine.abort("a") == StepOutput("a", (), True, "abort")
    assert engine.abort("a") is None
    assert engine.abort("never here") is None
    assert not engine.has_unfinished_requests()
    assert len(say(engine, [10, 11, 12])) == 6, "the engine goes on"


def test_cached_tokens_are_told_with_every_output(build: Build) -> None:
    engine = build(block_size=4)
    say(engine, list(range(10, 20)))
    engine.add_request("again", list(range(10, 20)), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    told = []
    while engine.has_unfinished_requests():
        told += [output.num_cached_tokens for output in engine.step()]
    assert told == [8, 8]


def test_salts_share_no_prefix(build: Build) -> None:
    engine = build(block_size=4)
    params = SamplingParams(temperature=0, max_tokens=1)
    for name, salt, cached in (("a", "one", 0), ("b", "two", 0), ("c", "one", 8), ("d", None, 0)):
        engine.add_request(name, list(range(10, 20)), params, cache_salt=salt)
        (output,) = engine.step()
        assert output.num_cached_tokens == cached


@pytest.mark.parametrize(
    "options",
    [
        *({"priority": priority} for priority in (1.5, True, 2**53 + 1, -(10**400))),
        *({"ttft_deadline_s": seconds} for seconds in (0, -1.0, "soon", float("nan"), 10**400)),
        {"user": 7},
        {"cache_salt": 7},
    ],
    ids=lambda options: str(options)[:50],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_request_refused_leaves_no_trace(build: Build, options: dict[str, object]) -> None:
    engine = build()
    with pytest.raises(RequestError, match=next(iter(options))):
        engine.add_request("a", [10], SamplingParams(), **options)
    assert not engine.has_unfinished_requests()
    assert len(say(engine, [10, 11])) == 6


@pytest.mark.parametrize("policy", ["priority", "shortest_first"])
def test_the_largest_numbers_that_pass_can_be_ordered(build: Build, policy: str) -> None:
    options = {"priority_ageing_s": 1e308} if policy == "priority" else {}
    engine = build(policy=policy, max_num_seqs=1, **options)
    for place, priority in enumerate((MAX_PRIORITY, 0, -MAX_PRIORITY)):
        engine.add_request(str(place), [10], SamplingParams(max_tokens=2), priority=priority)
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize("request_id", [1, 1.0, float("nan"), None, ["a"], b"a"], ids=str)
@pytest.mark.usefixtures("as_users_run_it")
def test_an_id_is_a_string(build: Build, request_id: Any) -> None:
    engine = build()
    with pytest.raises(RequestError, match="request_id must be a string, got"):
        engine.add_request(request_id, [10], SamplingParams())
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("prompt", [None, 7, "text", b"text", {1: 2}, {1, 2}, torch.tensor(3), [1.0], [[1]]], ids=str)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(build: Build, prompt: Any) -> None:
    engine = build()
    with pytest.raises(RequestError, match=r"prompt_token_ids(\[0\])? must be"):
        engine.add_request("a", prompt, SamplingParams())
    assert len(say(engine, [10, 11])) == 6


@pytest.mark.usefixtures("as_users_run_it")
def test_a_prompt_may_be_read_once_only(build: Build) -> None:
    assert say(build(), iter([10, 11])) == say(build(), [10, 11])  # type: ignore[arg-type]


@pytest.mark.usefixtures("as_users_run_it")
def test_params_of_another_kind_are_refused(build: Build) -> None:
    engine = build()
    for params in (None, {"max_tokens": 3}):
        with pytest.raises(RequestError, match="params must be SamplingParams, got"):
            engine.add_request("a", [10], params)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


class FailsOnce:
    """Stands before a function and raises at its n-th call: in place of it, or once it is done."""

    def __init__(self, function: Callable[..., Any], error: BaseException, at: int, *, done: bool) -> None:
        self.function, self.error, self.left, self.done = function, error, at, done

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        result = self.function(*args) if self.left or self.done else None
        if self.left == 0:
            raise self.error
        return result


PROMPTS = {"a": [10, 11, 12], "b": [20, 21, 22, 23, 24], "c": [30]}


@pytest.fixture(scope="module")
def alone(build: Build) -> dict[str, list[int]]:
    engine = build(enable_prefix_caching=False)
    return {request_id: say(engine, prompt, 9) for request_id, prompt in PROMPTS.items()}


@pytest.mark.parametrize(("at", "error"), [(1, MemoryError("no room")), (2, KeyboardInterrupt()), (5, MemoryError())])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *(("_state", name) for name in ("apply", "_tensor", "gather", "commit")),
        ("_model", "forward"),
    ],
)
def test_a_step_that_raises_loses_nothing_and_the_next_goes_on(
    build: Build, alone: dict[str, list[int]], owner: str, name: str, done: bool, at: int, error: BaseException
) -> None:
    engine = build(block_size=2, num_blocks=9, max_chunk_tokens=3)
    part = getattr(engine._runner, owner)
    said: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    setattr(part, name, FailsOnce(getattr(part, name), error, at, done=done))
    raised = 0
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except (MemoryError, KeyboardInterrupt):
            raised += 1
            continue
        for output in outputs:
            said[output.request_id] += output.new_token_ids
    assert raised == 1
    assert said == alone


def test_a_step_in_which_nobody_wants_a_token_asks_no_sampler(build: Build) -> None:
    def first_row_speaks(logits: Tensor, rows: SamplingRows) -> Tensor:
        return logits[0].argmax().expand(len(logits)).clone()  # raises without a row

    engine = build(sampler=first_row_speaks, max_chunk_tokens=2)
    assert say(engine, [10, 11, 12, 13, 14]) == say(build(), [10, 11, 12, 13, 14])


def test_a_policy_of_the_engine_sees_priority_and_clock(build: Build) -> None:
    engine = build(policy="priority", max_num_seqs=1)
    greedy = SamplingParams(temperature=0, max_tokens=1)
    for name, priority in (("low", 3), ("high", -3)):
        engine.add_request(name, [10], greedy, priority=priority)
    assert [output.request_id for _ in range(2) for output in engine.step()] == ["high", "low"]


def test_what_a_request_brings_reaches_the_scheduler(build: Build) -> None:
    engine = build(clock=iter([1.5, 2.5]).__next__)
    options: dict[str, Any] = {"priority": 3, "user": "ann", "ttft_deadline_s": 4.0, "cache_salt": "one"}
    for name in ("a", "b"):
        engine.add_request(name, [10], SamplingParams(), **options)
    for request, arrival_s in zip(engine._scheduler.waiting, (1.5, 2.5), strict=True):
        assert {name: getattr(request, name) for name in options} == options
        assert request.arrival_s == arrival_s
