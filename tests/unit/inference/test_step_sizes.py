"""Which sizes of steps are captured, and which size serves a step."""

import pytest

from weft.config import Limits
from weft.inference.step_sizes import StepSize, StepSizes, decode_sizes


def sizes_of(
    max_num_seqs: int, most: int, most_tokens: int = 2048, batch_sizes: tuple[int, ...] | None = None
) -> StepSizes:
    limits = Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max(most, max_num_seqs), max_model_len=4096)
    return StepSizes(limits, batch_sizes=batch_sizes, most_tokens=most_tokens)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 16, 64, 100, 256, 700])
@pytest.mark.parametrize("most", [1, 40, 300, 2048, 16384])
@pytest.mark.parametrize("most_tokens", [1, 180, 5000])
def test_every_step_fits_the_size_that_serves_it(max_num_seqs: int, most: int, most_tokens: int) -> None:
    sizes = sizes_of(max_num_seqs, most, most_tokens)
    assert len(sizes.captured) == len(set(sizes.captured))
    most = max(most, max_num_seqs)
    for requests in {*range(1, max_num_seqs + 1, 7), max_num_seqs}:
        decode = sizes.size_for(requests, requests)
        assert decode in sizes
        assert decode.is_decode
        assert decode.num_requests >= requests
        # One beyond the budget: a step of single tokens of which one ends no prompt is padded by a token.
        for tokens in {*range(requests + 1, most + 2, 97), most, most + 1} - {requests}:
            if tokens < requests:
                continue
            size = sizes.size_for(tokens, requests)
            assert not size.is_decode, "padding would pass for a step of decodes"
            assert size.num_tokens >= tokens
            assert max_num_seqs >= size.num_requests >= requests
            assert size in sizes or tokens > min(most_tokens, most)


def test_padding_stays_below_an_eighth_or_32_tokens() -> None:
    sizes = sizes_of(16, 8192)
    for tokens in range(17, 8193):
        assert sizes.size_for(tokens, 2).num_tokens - tokens < max(32, tokens / 8)


def test_steps_without_a_graph_come_in_multiples_of_sixteen_up_to_the_longest() -> None:
    sizes = sizes_of(64, 5000, most_tokens=200)
    launched = {sizes.size_for(tokens, 3) for tokens in range(201, 5001)}
    assert {size.num_tokens % 16 for size in launched} == {0}
    assert max(launched) in sizes.longest
    assert not any(size in sizes for size in launched)


def test_what_is_captured_is_said_in_words() -> None:
    assert str(sizes_of(16, 64)) == "12 graphs of decodes (1 to 16 requests) and 2 of longer steps (up to 64 tokens)"


def test_about_twenty_batch_sizes_and_those_that_were_asked_for() -> None:
    assert len(decode_sizes(256)) == 22
    assert decode_sizes(1) == [1]
    asked = sizes_of(64, 64, batch_sizes=(4, 2, 4))
    assert [size.num_tokens for size in asked.captured if size.is_decode] == [2, 2, 4, 4]
    assert asked.size_for(5, 5) not in asked
    assert asked.size_for(5, 5).is_decode
    assert [asked.size_for(requests, requests).num_requests for requests in (1, 2, 3, 4)] == [2, 2, 4, 4]


def test_decodes_look_for_rows_to_truncate_if_asked_and_longer_steps_always() -> None:
    sizes = sizes_of(16, 64, most_tokens=32)
    for truncates in (False, True):
        assert sizes.size_for(3, 3, truncates=truncates) == StepSize(4, 4, truncates)
        assert sizes.size_for(3, 3, truncates=truncates) in sizes
        assert sizes.size_for(17, 3, truncates=truncates) == StepSize(32, 16, truncates=True)
        assert sizes.size_for(40, 3, truncates=truncates) == StepSize(48, 16, truncates=True)
    assert all(size.truncates for size in sizes.longest)


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 1), (16, 16), (32, 32), (33, 40)])
def test_the_longest_step_has_room_for_the_token_that_makes_it_no_decode(max_num_seqs: int, budget: int) -> None:
    """Single tokens of all that run, one of which ends no prompt: the memory for it was measured."""
    sizes = sizes_of(max_num_seqs, budget, most_tokens=1)
    size = sizes.size_for(max_num_seqs + 1, max_num_seqs)
    assert size in sizes or size.num_tokens <= max(sizes.longest).num_tokens
    assert max(sizes.longest).num_tokens > max_num_seqs
