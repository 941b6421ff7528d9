"""What a request may ask is checked by its own values; test_engine.py shows that an engine asks before it begins."""

import sys
from types import FrameType
from typing import Any

import pytest

from weft.config import BlockGeometry, Limits
from weft.errors import RequestError
from weft.inference.input_processor import InputProcessor, as_token_ids
from weft.inference.sampling_params import SamplingParams

EOS = (2, 5)


@pytest.fixture
def inputs() -> InputProcessor:
    """Of an engine whose pool (24 tokens) is smaller than its context (64)."""
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    geometry = BlockGeometry(block_size=8, num_blocks=3, shareable=True)
    return InputProcessor(limits=limits, geometry=geometry, vocab_size=11, eos_token_ids=EOS)


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "expected"), [(1, 5, 6), (60, 9, 64), (1, None, 25)])
def test_a_request_ends_where_it_asks_or_where_context_or_pool_do(
    num_prompt_tokens: int, max_tokens: int | None, expected: int, inputs: InputProcessor
) -> None:
    """The last token is never read back, so it needs no room."""
    assert inputs.max_len(num_prompt_tokens, SamplingParams(max_tokens=max_tokens)) == expected


def test_what_fills_the_pool_passes_and_one_more_does_not(inputs: InputProcessor) -> None:
    inputs.check([1] * 20, SamplingParams(max_tokens=5))
    with pytest.raises(RequestError, match="make 26 tokens, and the pool holds 24"):
        inputs.check([1] * 20, SamplingParams(max_tokens=6))


def test_what_stops_a_request_is_its_own_and_the_models(inputs: InputProcessor) -> None:
    assert inputs.stop_token_ids(SamplingParams(stop_token_ids=[7])) == {2, 5, 7}
    assert inputs.stop_token_ids(SamplingParams(stop_token_ids=[7], ignore_eos=True)) == {7}


def test_a_prompt_is_taken_in_as_fast_as_a_list_is_copied() -> None:
    """One by one the tokens of 64 prompts took 50 ms, in which the device had nothing to do."""

    def lines(length: int) -> int:
        """That Python runs, of which one copies a list: no clock, which others on the machine can slow down."""
        prompt, found = tuple(range(length)), 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal found
            found += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            as_token_ids(prompt)
        finally:
            sys.settrace(before)
        return found

    lines(1)  # what is asked of a type for the first time is remembered
    assert lines(100_000) == lines(10) > 0
