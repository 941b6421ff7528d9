"""Paged prefill against float64, its laws (chunks, batch-mates, decodes), and faults planted in it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.paged_step import (
    LAYER,
    Step,
    assert_attends,
    assert_many_by_the_rule,
    assert_pool_equals,
    decode,
    in_the_last_columns,
    make_step,
    prefill,
    truth,
)
from weft.errors import KernelError
from weft.kernels import paged_prefill
from weft.kernels.paged_prefill import Tile

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
P = 16
SMALL = Tile(block_m=32, block_n=16, num_warps=4, num_stages=2)
LENGTHS, COUNTS = (1, P - 1, P + 1, 2 * P, 60), (1, P - 1, P + 1, 1, 11)


def check(step: Step, **options: Any) -> torch.Tensor:
    pool = step.pool.clone()
    found = prefill(step, pool, **({"tile": SMALL} | options))
    exact, expected = truth(step)
    assert_attends(found, step, exact)
    assert_pool_equals(pool, expected, step.pool)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": (2, 2)},
        {"heads": (9, 3), "norm": True},
        {"heads": (5, 1)},  # 32 rows hold 6 tokens of 5 heads, and two rows are idle
        {"heads": (40, 1)},  # more query heads a key head than a program has rows
        {"head_dim": 80, "heads": (2, 1)},
        {"window": 1},
        {"window": P - 1},
        {"window": P + 5, "soft_cap": 2.0},
        {"soft_cap": 30.0},
        {"magnitude": 12.0},
        {"shared_blocks": 1},
    ],
    ids=str,
)
def test_chunks_and_prefixes_of_every_length(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    lengths, counts = LENGTHS, COUNTS
    if options.get("shared_blocks"):
        lengths, counts = (P + 1, 2 * P, 3 * P), (1, P, 5)
    check(make_step(lengths, counts, block_size=P, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_of_many_steps_stay_within_torchs(dtype: torch.dtype, device: torch.device) -> None:
    options: list[dict[str, Any]] = [{}, {"norm": True}, {"window": 30}]
    steps = [
        make_step((60, 90, 130), (40, 20, 30), heads=(8, 2), head_dim=64, dtype=dtype, device=device, **option)
        for option in options
    ]
    assert_many_by_the_rule(lambda step: prefill(step, step.pool.clone()), steps)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 256])
def test_the_last_columns_count(head_dim: int, device: torch.device) -> None:
    check(in_the_last_columns((33, 5, 20), (17, 5, 1), head_dim, device))


@pytest.mark.parametrize("head_dim", [80, 160])
def test_columns_that_are_left_out_are_convicted(
    head_dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = in_the_last_columns((33, 5, 20), (17, 5, 1), head_dim, device)
    monkeypatch.setattr(paged_prefill, "padded_head_dim", lambda head_dim: 64)
    found = prefill(step, step.pool.clone(), tile=SMALL)
    with pytest.raises(AssertionError):
        assert_attends(found, step)


@pytest.mark.parametrize("block_size", [1, 8, 24, 64])
def test_any_block_size(block_size: int, device: torch.device) -> None:
    check(make_step((5, 33, 40), (5, 9, 1), block_size=block_size, device=device))


def test_default_tiles(device: torch.device) -> None:
    check(make_step((130, 7, 65), (70, 7, 65), heads=(2, 1), device=device), tile=None)
    check(make_step((130, 7), (70, 7), heads=(2, 1), dtype=torch.float16, device=device), tile=None)


def test_one_long_among_many_short(device: torch.device) -> None:
    check(make_step((2, 3, 120, 1, 2), (2, 3, 60, 1, 1), heads=(2, 1), device=device))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("cuts", [(50,), (1, 49), (17, 16, 17)], ids=str)
def test_chunked_prefill_is_one_prefill_to_the_bit(
    window: int | None, cuts: tuple[int, ...], device: torch.device
) -> None:
    whole = make_step((50,), (50,), window=window, heads=(4, 2), device=device)
    expected = prefill(whole, whole.pool.clone(), tile=SMALL)
    pool, parts, end = whole.pool.clone(), [], 0
    for count in cuts:
        rows, end = slice(end, end + count), end + count
        new = replace(whole.new, positions=whole.new.positions[rows], slots=whole.new.slots[rows])
        chunk = replace(whole, qkv=whole.qkv[rows], lengths=(end,), counts=(count,), new=new)
        parts.append(prefill(chunk, pool, tile=SMALL))
    assert torch.equal(torch.cat(parts), expected)


def test_batch_mates_never_change_a_bit(device: torch.device) -> None:
    step = make_step((40, 21, 64, 3), (40, 2, 33, 1), dtype=torch.float16, device=device)
    whole = check(step)
    for request in range(4):
        rows = slice(int(step.starts[request]), int(step.starts[request + 1]))
        assert torch.equal(check(step.only(request)), whole[rows])


def test_a_decode_is_the_last_row_of_a_prefill(device: torch.device) -> None:
    step = make_step((50, 33, 17), (50, 33, 17), device=device)
    pool = step.pool.clone()
    last = prefill(step, pool)[step.starts[1:] - 1]
    rows = step.starts[1:] - 1
    new = replace(step.new, positions=step.new.positions[rows], slots=step.new.slots[rows])
    single = replace(step, qkv=step.qkv[rows], counts=(1, 1, 1), new=new)
    torch.testing.assert_close(decode(single, pool, split=32), last, rtol=1e-5, atol=1e-6)


def test_single_tokens_can_be_left_to_the_decode_kernel(device: torch.device, guarded: Any) -> None:
    step = make_step((40, 21, 33), (1, 5, 1), device=device)
    out, check_bands = guarded((7, 6 * 16), torch.float32)
    prefill(step, step.pool.clone(), skip_single=True, out=out, tile=SMALL)
    check_bands()
    assert out[[0, 6]].isnan().all()
    assert torch.equal(out[1:6], check(step.only(1)))


def test_rows_without_a_key_attend_to_nothing(device: torch.device) -> None:
    step = make_step((20, 9), (6, 9), device=device)
    pool = truth(step)[1].float()
    query = torch.randn(15, 6 * 16, device=device)
    short = replace(step, lengths=(4, 9))  # 6 rows ask, and the first 2 stand before token 0
    found = paged_prefill.paged_prefill(query, short.paged(pool), step.scoring, num_query_heads=6, tile=SMALL)
    assert (found[:2] == 0).all()
    assert found.isfinite().all()
    expected = paged_prefill.reference(query.view(15, 6, 16), short.paged(pool), step.scoring)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_window_shows_exactly_its_keys(device: torch.device) -> None:
    """Values that name their token: the mean over equal scores says which were seen."""
    step = make_step((9,), (9,), window=4, heads=(1, 1), device=device)
    pool = step.pool.clone()
    pool[0] = 0.0
    for token in range(9):
        pool[1, LAYER, step.tables[0, 0], token] = torch.eye(16, device=device)[token]
    query = torch.randn(9, 16, device=device)
    found = paged_prefill.paged_prefill(query, step.paged(pool), step.scoring, num_query_heads=1, tile=SMALL)
    assert (found > 0).sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]


FAULTS: dict[str, Callable[[Step], Step]] = {
    "window one too wide": lambda step: replace(step, scoring=replace(step.scoring, window=12)),
    "window one too narrow": lambda step: replace(step, scoring=replace(step.scoring, window=10)),
    "table a column off": lambda step: replace(
        step, tables=torch.where(step.tables == 2**30, 0, step.tables).roll(1, dims=1)
    ),
    "context one too short": lambda step: replace(step, lengths=tuple(length - 1 for length in step.lengths)),
    "rows of a neighbour": lambda step: replace(step, counts=(step.counts[0] - 1, step.counts[1] + 1)),
    "soft cap forgotten": lambda step: replace(step, scoring=replace(step.scoring, soft_cap=None)),
}


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter, where a fault reads what nobody wrote
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_convicted(fault: str, device: torch.device) -> None:
    window = 11 if "window" in fault else None
    soft_cap = 1.5 if fault == "soft cap forgotten" else None
    step = make_step((37, 50), (20, 18), window=window, soft_cap=soft_cap, device=device)
    check(step)
    found = prefill(FAULTS[fault](step), step.pool.clone(), tile=SMALL)
    with pytest.raises(AssertionError):
        assert_attends(found, step)


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    step = make_step((5, 9), (5, 2), device=device)
    query = torch.zeros(7, 96, device=device)
    call: Callable[..., object] = lambda query=query, heads=6, scoring=step.scoring, **options: (  # noqa: E731
        paged_prefill.paged_prefill(query, step.paged(step.pool), scoring, num_query_heads=heads, **options)
    )
    for message, attempt in {
        "query is torch.float16": lambda: call(query.half()),
        "query has shape": lambda: call(query[:, :80]),
        "query has stride": lambda: call(torch.zeros(96, 7, device=device).T),
        "num_query_heads=3": lambda: call(heads=3),
        "window=-1": lambda: call(scoring=replace(step.scoring, window=-1)),
        "out is": lambda: call(out=query[:3]),
    }.items():
        with pytest.raises(KernelError, match=message):
            attempt()
