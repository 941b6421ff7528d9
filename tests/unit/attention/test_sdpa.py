"""Attention over dense keys: each query sees its window up to itself, whatever the mask that says so."""

import pytest
import torch
from torch import Tensor

from weft.attention.interface import AttentionSpec
from weft.attention.sdpa import attend, visible

CPU = torch.device("cpu")
HEAD_DIM = 16
SHAPES = [(1, 1), (8, 8), (1, 8), (3, 8), (7, 8), (2, 4)]
WINDOWS = [None, 1, 3, 4, 5, 8, 9]
GROUPS = [(2, 2), (3, 1), (6, 2), (8, 1)]


def spec(num_query_heads: int, num_kv_heads: int, window: int | None, scale: float = HEAD_DIM**-0.5) -> AttentionSpec:
    return AttentionSpec(
        num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, scale=scale, window=window
    )


def by_definition(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Key k is seen from position q if it is neither later nor `window` or more before."""
    first = num_keys - num_queries
    return torch.tensor(
        [[k <= q and (window is None or q - k < window) for k in range(num_keys)] for q in range(first, num_keys)]
    )


def naive(query: Tensor, keys: Tensor, values: Tensor, attention: AttentionSpec) -> Tensor:
    """Softmax attention in float64, a head at a time."""
    query, keys, values = query[0].double(), keys[0].double(), values[0].double()
    seen = by_definition(query.shape[1], keys.shape[1], attention.window)
    group = attention.num_query_heads // attention.num_kv_heads
    heads = []
    for head in range(attention.num_query_heads):
        scores = query[head] @ keys[head // group].T * attention.scale
        heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values[head // group])
    return torch.stack(heads)[None]


def random_inputs(num_queries: int, num_keys: int, attention: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, attention.num_query_heads, num_queries, HEAD_DIM, generator=generator)
    keys, values = torch.randn(2, 1, attention.num_kv_heads, num_keys, HEAD_DIM, generator=generator)
    return query, keys, values


@pytest.mark.parametrize(("num_queries", "num_keys"), SHAPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_visible_is_the_definition_or_what_torch_does_without_a_mask(
    window: int | None, num_queries: int, num_keys: int
) -> None:
    mask, wanted = visible(num_queries, num_keys, window, CPU), by_definition(num_queries, num_keys, window)
    if mask is not None:
        assert torch.equal(mask, wanted)
    elif num_queries == 1:
        assert wanted.all(), "torch lets one query see every key"
    else:
        assert torch.equal(wanted, torch.ones_like(wanted).tril()), "torch's causal rule is a square triangle"


def test_a_window_of_four_counts_the_query_itself() -> None:
    mask = visible(8, 8, 4, CPU)
    assert mask is not None
    assert mask.sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(("num_queries", "num_keys"), SHAPES)
@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), GROUPS)
def test_attend_equals_the_formula_in_float64(
    num_query_heads: int, num_kv_heads: int, window: int | None, num_queries: int, num_keys: int
) -> None:
    attention = spec(num_query_heads, num_kv_heads, window)
    inputs = random_inputs(num_queries, num_keys, attention)
    attended = attend(*inputs, attention, visible(num_queries, num_keys, window, CPU))
    torch.testing.assert_close(attended.double(), naive(*inputs, attention), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_the_scale_is_the_layers_own(scale: float) -> None:
    attention = spec(2, 2, None, scale)
    inputs = random_inputs(4, 4, attention)
    attended = attend(*inputs, attention, None)
    torch.testing.assert_close(attended.double(), naive(*inputs, attention), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_what_a_query_cannot_see_cannot_reach_it(window: int | None) -> None:
    attention = spec(6, 2, window)
    query, keys, values = random_inputs(3, 8, attention)
    mask = visible(3, 8, window, CPU)
    before = attend(query, keys, values, attention, mask)
    unseen = ~by_definition(3, 8, window)[0]  # by the first query, at position 5
    keys[:, :, unseen], values[:, :, unseen] = 1e3, -1e3
    after = attend(query, keys, values, attention, mask)
    torch.testing.assert_close(after[:, :, 0], before[:, :, 0])
    assert not torch.allclose(after[:, :, 2], before[:, :, 2])
