import pytest

from tests.unit.inference.conftest import Build
from weft.config import SchedulerConfig
from weft.errors import ConfigError, ContextLengthError, QueueFullError
from weft.inference.engine import Engine
from weft.inference.sampling_params import SamplingParams


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


@pytest.mark.parametrize("options", [{"block_size": 0}, {"num_blocks": 0}, {"enable_prefix_caching": "yes"}], ids=str)
def test_a_pool_that_cannot_be_is_an_error_at_construction(build: Build, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        build(**options)


def test_rows_take_no_block_options(build: Build) -> None:
    with pytest.raises(ConfigError, match="block_size=16"):
        build(attention_backend="contiguous", block_size=16)


def test_the_default_serves_in_order_of_arrival() -> None:
    assert SchedulerConfig().policy == "fcfs"
