"""Whole sequences in one step: on any backend what plain torch makes of them, and what cannot be packed is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.attention.test_sdpa import spec
from weft.attention import find_backend
from weft.attention.packed import packed, packed_on
from weft.errors import ConfigError
from weft.layers.heads import HeadTransform
from weft.layers.operations import Attend
from weft.layers.rope import RopeConfig, RotaryTable

CPU = torch.device("cpu")
ATTENTION = spec(4, 2, None)
D = ATTENTION.head_dim


def on(backend: str, lengths: list[Any], **changes: Any) -> Attend:
    return packed_on(
        find_backend(backend), [ATTENTION, replace(ATTENTION, **changes)], lengths, dtype=torch.float32, device=CPU
    )


def attended(attend: Attend, lengths: list[int], qkv: torch.Tensor) -> torch.Tensor:
    rotary = RotaryTable(RopeConfig.of({"max_position_embeddings": 64}, D), 64, dtype=torch.float32, device=CPU)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return attend(1, qkv, positions, HeadTransform(4, 2, D, rotary))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [33, 1, 2, 16]], ids=str)
@pytest.mark.parametrize("backend", ["paged_gather", "contiguous"])
def test_a_backend_attends_as_plain_torch_does(backend: str, lengths: list[int], window: int | None) -> None:
    qkv = torch.randn(sum(lengths), 8 * D)
    expected = attended(packed([ATTENTION, replace(ATTENTION, window=window)], lengths), lengths, qkv)
    assert torch.equal(attended(on(backend, lengths, window=window), lengths, qkv), expected)


@pytest.mark.parametrize("lengths", [[], [0], [2, 0, 1], [3, -1], [True]], ids=str)
def test_a_sequence_without_a_token_is_refused(lengths: list[Any]) -> None:
    """As many tokens as sequences would pass for a step of decodes: 2, 0 and 1, and nobody would know."""
    for pack in (lambda: packed([ATTENTION], lengths), lambda: on("paged_gather", lengths)):
        with pytest.raises(ConfigError, match=r"lengths=\[\] holds|lengths must be a positive integer") as caught:
            pack()
        assert "leave out" in str(caught.value.hint)


def test_what_a_backend_cannot_do_is_refused_and_not_left_out() -> None:
    for backend, changes, reason in (
        ("contiguous", {"soft_cap": 3.0}, "soft_cap=3.0 needs a backend with its own softmax"),
        ("paged_gather", {"cache_group": 1}, "one pool holds one cache group"),
    ):
        with pytest.raises(ConfigError, match=rf"packed_on\(backend='{backend}'\) cannot run .*: {reason}") as caught:
            on(backend, [3], **changes)
        assert "`packed`" in str(caught.value.hint)
    for in_order in (False, True):
        with pytest.raises(ConfigError, match=r"packed\(soft_cap=3.0\) would be left out") as caught:
            packed([ATTENTION, replace(ATTENTION, soft_cap=3.0)], [3], fixed_order=in_order)
        assert "packed_on" in str(caught.value.hint)


@pytest.mark.parametrize("backend", ["paged_gather", "contiguous"])
def test_a_gradient_that_would_be_left_out_is_refused(backend: str) -> None:
    qkv = torch.randn(3, 8 * D, requires_grad=True)
    with pytest.raises(ConfigError, match=rf"packed_on\(backend='{backend}'\) gives no gradients") as caught:
        attended(on(backend, [3]), [3], qkv)
    assert "no_grad" in str(caught.value.hint)
    with torch.no_grad():
        assert torch.equal(attended(on(backend, [3]), [3], qkv), attended(packed([ATTENTION] * 2, [3]), [3], qkv))
    attended(packed([ATTENTION] * 2, [3]), [3], qkv).sum().backward()
    assert qkv.grad is not None


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize(("lengths", "given"), [([3], [5]), ([3, 3], [5]), ([3, 2, 4], [5])], ids=str)
def test_rows_that_the_lengths_do_not_name_are_refused(lengths: list[int], given: list[int], fixed_order: bool) -> None:
    attend = packed([ATTENTION] * 2, lengths, fixed_order=fixed_order)
    with pytest.raises(ConfigError, match=f"have {sum(lengths)} tokens, and 5 came"):
        attended(attend, given, torch.randn(5, 8 * D))


@pytest.mark.parametrize("window", [0, -1, True], ids=repr)
def test_a_window_that_shows_no_key_is_no_attention(window: Any) -> None:
    """Weights of no key add up to no 1: in fixed order a query that sees nothing would give NaN."""
    with pytest.raises(ConfigError, match=r"^AttentionSpec.window must be a positive integer, got") as caught:
        replace(ATTENTION, window=window)
    assert "itself" in str(caught.value.hint)
