"""Long requests of a batch get programs of their own: every split is taken once, and no bit changes."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_step import assert_attends, assert_pool_equals, decode, make_step, truth
from weft.kernels import paged_decode
from weft.kernels._jit import jit, tl
from weft.kernels._paged_decode_shares import cuts_of, is_long, rank_of, run_of, share_of
from weft.kernels._paged_decode_tiles import FEW, LONG_ROOM, NARROW, PROGRAMS, by_shapes, candidates, lends, programs_of

SPLIT, MOST_SPLITS = 32, 64
TILE = paged_decode.Tile(block_n=16, num_warps=4, num_stages=2)


@jit
def _plan(
    lengths,
    starts,
    batch,
    shares,
    longs,
    ONE_EACH: tl.constexpr,  # noqa: N803  # as kernels have them
    REQUESTS: tl.constexpr,  # noqa: N803  # as kernels have them
    SHARES: tl.constexpr,  # noqa: N803  # as kernels have them
    SPLIT: tl.constexpr,  # noqa: N803  # as kernels have them
    MOST_SPLITS: tl.constexpr,  # noqa: N803  # as kernels have them
):
    spans, counts = cuts_of(lengths, starts, batch, 0, False, SPLIT, MOST_SPLITS, ONE_EACH, REQUESTS)
    run = run_of(spans, counts, SPLIT, SHARES)
    index = tl.program_id(0)
    request, which = share_of(index, spans, counts, run)
    tl.store(shares + index * 4, request)
    tl.store(shares + index * 4 + 1, which)
    tl.store(shares + index * 4 + 2, rank_of(request, spans, counts, run))
    tl.store(shares + index * 4 + 3, run)
    tl.store(longs + tl.arange(0, REQUESTS), is_long(spans, counts, run).to(tl.int32))


def plan(lengths: list[int], shares: int, device: torch.device, rows: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """What each of 2 * shares programs takes: request, which of its runs, its rank, keys a run; and who is long."""
    size = max(128, 1 << (len(lengths) - 1).bit_length())
    found = torch.full((2 * shares, 4), -7, dtype=torch.int32, device=device)
    longs = torch.full((size,), -7, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *(rows or [1] * len(lengths))]).cumsum(0).to(device)
    given = torch.tensor(lengths, device=device)
    sizes: dict[str, Any] = {"REQUESTS": size, "SHARES": shares, "SPLIT": SPLIT, "MOST_SPLITS": MOST_SPLITS}
    _plan[(2 * shares,)](given, starts, len(lengths), found, longs, ONE_EACH=rows is None, **sizes)
    return found.cpu(), longs.cpu()


def cuts(length: int) -> tuple[int, int]:
    span = SPLIT * max(1, -(-length // (SPLIT * MOST_SPLITS)))
    return span, -(-length // span)


CASES: dict[str, Callable[[], list[int]]] = {
    "one huge among many tiny": lambda: [17] * 20 + [9000] + [3] * 20,
    "equal": lambda: [2000] * 40,
    "two": lambda: [5000, 70],
    "nothing at all": lambda: [0] * 5,
    "random": lambda: (torch.rand(50) ** 6 * 9000).long().tolist(),
    "more than one look takes": lambda: (torch.rand(150) ** 8 * 9000).long().tolist(),
}


@pytest.mark.parametrize("shares", [1, 8, 32])
@pytest.mark.parametrize("case", CASES)
def test_every_run_of_a_long_request_is_taken_once_and_there_are_programs_enough(
    case: str, shares: int, device: torch.device
) -> None:
    lengths = CASES[case]()
    found, longs = plan(lengths, shares, device)
    run = int(found[0, 3])
    work = sum(span * count for span, count in map(cuts, lengths))
    assert run == max(2 * SPLIT, -(-work // shares))
    expected = []
    for request, (span, count) in enumerate(map(cuts, lengths)):
        each = -(-run // span)
        assert bool(longs[request]) == (count > each)
        if count > each:
            rank = int(longs[:request].sum())
            expected += [[request, which, rank] for which in range(-(-count // each))]
    assert longs[: len(lengths)].sum() < max(shares, 1), "no room for the parts"
    assert len(expected) <= 2 * shares, "no programs for the last runs"
    assert found[: len(expected), :3].tolist() == expected
    assert (found[len(expected) :, 0] == -1).all()


def test_requests_of_equal_length_lend_nothing_and_one_huge_is_spread(device: torch.device) -> None:
    assert not plan([2048] * 64, 32, device)[1].any()
    spread = plan([20] * 63 + [9000], 32, device)[0]
    assert (spread[:, 0] == 63).sum() >= 16


def test_a_request_with_several_rows_is_no_work(device: torch.device) -> None:
    found, longs = plan([9000, 40, 9000], 8, device, rows=[5, 1, 1])
    assert longs[:3].tolist() == [0, 0, 1]
    assert (found[:, 0] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", [{}, {"norm": True, "window": 300}, {"soft_cap": 3.0}], ids=str)
def test_lending_programs_changes_no_bit(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    lengths = (5, 700, 33, 1, 64, 410, 97)
    step = make_step(lengths, (1,) * len(lengths), heads=(4, 1), dtype=dtype, device=device, **options)
    pools = [step.pool.clone() for _ in range(2)]
    found = decode(step, pools[0], split=SPLIT, tile=TILE, programs=12, lend=True)
    exact, expected = truth(step)
    assert_attends(found, step, exact)
    assert_pool_equals(pools[0], expected, step.pool)
    assert torch.equal(found, decode(step, pools[1], split=SPLIT, tile=TILE, programs=1, lend=False))
    assert torch.equal(pools[0].nan_to_num(nan=7.0), pools[1].nan_to_num(nan=7.0))


def test_requests_with_several_rows_stay_as_they_are(device: torch.device, guarded: Any) -> None:
    step = make_step((400, 21, 33, 390), (1, 5, 1, 3), heads=(4, 1), device=device)
    out, check_bands = guarded((10, 4 * 16), torch.float32)
    decode(step, step.pool.clone(), split=SPLIT, tile=TILE, programs=12, lend=True, out=out)
    check_bands()
    assert out[1:6].isnan().all()
    assert out[7:].isnan().all()
    for row, request in ((0, 0), (6, 2)):
        alone = step.only(request)
        assert torch.equal(out[row : row + 1], decode(alone, alone.pool.clone(), split=SPLIT, tile=TILE))


def test_a_launch_that_loses_its_last_run_is_convicted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step((5, 700, 33), (1, 1, 1), heads=(4, 1), device=device)
    kernel = paged_decode.paged_decode_kernel

    class Fewer:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return kernel[(grid[0], max(1, grid[1] // 3), grid[2])]

    whole = decode(step, step.pool.clone(), split=SPLIT, tile=TILE, lend=False, programs=1)
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)  # parts that nobody wrote
    assert torch.equal(decode(step, step.pool.clone(), split=SPLIT, tile=TILE, programs=12, lend=True), whole)
    monkeypatch.setattr(paged_decode, "paged_decode_kernel", Fewer())
    assert not torch.equal(decode(step, step.pool.clone(), split=SPLIT, tile=TILE, programs=12, lend=True), whole)


def test_who_lends_follows_from_shapes() -> None:
    room = LONG_ROOM
    assert not lends(1, 64, room - 1, 128), "equal lengths in a narrow table keep the plain form"
    assert lends(1, 64, room, 128)
    assert not lends(1, 64, room, 64), "narrow heads are done before a second launch begins"
    assert lends(programs_of(16 * 8, 64, PROGRAMS), 16, room, 128)
    assert not lends(programs_of(8, 64, PROGRAMS), 1, room, 128), "one request has the GPU to itself"
    assert not lends(FEW, 4, room, 128)


def test_the_tile_and_the_split_follow_from_shapes() -> None:
    bf16, narrow = torch.bfloat16, NARROW[2, 64]
    splits = [by_shapes(heads, 4, bf16, 128, 64)[1] for heads in (1, 16, 17, 128, 129, 4096)]
    assert splits == [64, 64, 128, 128, 256, 256], "few heads are cut finer"
    assert by_shapes(128, 1, bf16, 64, 64) == (narrow, 128)
    assert by_shapes(4096, 1, torch.float16, 64, 32) == (narrow, 256)
    for given in (
        (127, 1, bf16, 64, 64),  # too few heads to fill a GPU with single warps
        (128, 2, bf16, 64, 64),  # heads that share keys
        (128, 1, torch.float32, 64, 64),
        (128, 1, bf16, 128, 64),
        (128, 1, bf16, 80, 64),
        (128, 1, bf16, 64, 16),  # a tile would span blocks, each key with a lookup of its own
        (128, 1, bf16, 64, 48),
    ):
        assert by_shapes(*given)[0] is None, given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_every_split_that_is_chosen_is_whole_tiles_of_every_form(head_dim: int, dtype: torch.dtype) -> None:
    """The launcher takes the tile that fits the form, of which the choice of a split knows nothing."""
    for heads, block_size, shared, crowded in itertools.product((1, 17, 129), (16, 32, 64), (0, 1), (0, 1)):
        tile, split = by_shapes(heads, 1, dtype, head_dim, block_size)
        default = candidates(dtype, head_dim, block_size, shared=bool(shared), crowded=bool(crowded))[0]
        assert split % (tile or default).block_n == 0
