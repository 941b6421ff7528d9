"""Which sizes of steps are captured, and which of them serves a step. The graphs themselves need a GPU."""

import pytest

from weft.inference.graphs import StepGraphs, decode_sizes, step_sizes
from weft.inference.step_program import StepSize


def graphs_of(sizes: list[StepSize]) -> StepGraphs:
    """What `size_for` looks at, with nothing captured."""
    graphs = StepGraphs.__new__(StepGraphs)
    graphs._index(sizes)
    return graphs


@pytest.mark.parametrize("max_num_seqs", [1, 3, 16, 64, 100, 256, 700])
@pytest.mark.parametrize("most", [1, 40, 300, 2048, 16384])
def test_every_step_within_the_graphs_fits_the_size_that_serves_it(max_num_seqs: int, most: int) -> None:
    sizes = step_sizes(max_num_seqs, max(most, max_num_seqs))
    assert len(sizes) == len(set(sizes))
    graphs = graphs_of(sizes)
    for requests in range(1, max_num_seqs + 1, 7):
        decode = graphs.size_for(requests, requests)
        assert decode is not None
        assert decode.is_decode
        assert decode.num_requests >= requests
        for tokens in range(requests + 1, min(2048, max(most, max_num_seqs)) + 1, 97):
            size = graphs.size_for(tokens, requests)
            assert size is not None, (tokens, requests)
            assert not size.is_decode, "padding would pass for a step of decodes"
            assert size.num_tokens >= tokens
            assert size.num_requests >= requests
    assert graphs.size_for(max_num_seqs + 1, max_num_seqs + 1) is None
    assert graphs.size_for(10**6, 1) is None


def test_padding_stays_below_an_eighth_or_32_tokens() -> None:
    graphs = graphs_of(step_sizes(16, 2048))
    for tokens in range(17, 2049):
        size = graphs.size_for(tokens, 2)
        assert size is not None
        assert size.num_tokens - tokens < max(32, tokens / 8)


def test_about_twenty_batch_sizes_and_those_that_were_asked_for() -> None:
    assert len(decode_sizes(256)) == 22
    assert decode_sizes(1) == [1]
    asked = [size.num_tokens for size in step_sizes(64, 64, (4, 2, 4)) if size.is_decode]
    assert asked == [2, 4]
    assert graphs_of(step_sizes(64, 64, (2, 4))).size_for(5, 5) is None
