"""A row times a matrix has one result, to the bit: beside any number of others, in any tile, its planes summed or not.

In the interpreter a product of tiles is the library's, whose order of summation is its own. So factors there are small
whole numbers, a power of two smaller in each part of the inside: no sum of a part is rounded, every sum of parts is.
"""

from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._few_rows_tiles import (
    CANDIDATES,
    FEWEST,
    FEWEST_LONG,
    LONG,
    MANY,
    MANY_ROWS,
    MODEST,
    NARROW,
    SOME,
    SOME_GATED,
    SOME_LOW,
    WIDE,
    WIDE_GATED,
    Tile,
    block_t_of,
    part_of,
    tile_of,
)
from weft.kernels.add_norm import add_norm
from weft.kernels.few_rows_gemm import few_rows_gemm
from weft.kernels.specialisation import SHARED_MEMORY_BYTES

SPLITS, INNER = 3, 560  # parts of 256, 256 and 48 columns; in steps of 64 and not 128 they would be of 192
TILES = tuple(tile for tile in dict.fromkeys((*MANY, WIDE, MODEST, *CANDIDATES[2])) if tile.block_k <= 128)

# The longest has room for 32 rows of x, as the widest has with a gate, and they are taken of no more.
OTHERS = (
    *(*TILES, LONG, NARROW, FEWEST, SOME, SOME_GATED, SOME_LOW),
    *(replace(tile, block_t=32) for tile in (FEWEST_LONG, WIDE_GATED)),
)


def factors(count: int, outer: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and a matrix in half precision."""
    if device.type == "cuda":
        return torch.randn(count, INNER).half().to(device), (torch.randn(outer, INNER) * 0.1).half().to(device)
    scale = 2.0 ** (-2 - 9 * (torch.arange(INNER) // part_of(INNER, SPLITS, 128)))
    x, weight = (torch.randint(-8, 9, (rows, INNER)).float() * scale for rows in (count, outer))
    return x.half(), weight.half()


def has_room_for_a_gate(tile: Tile) -> bool:
    """Beside the rows, as many as a tile of no size of its own takes at most, and a tile of weights."""
    return (2 * tile.block_n + (tile.block_t or 64)) * tile.block_k * tile.num_stages * 2 < SHARED_MEMORY_BYTES[90]


def in_order(planes: Tensor) -> Tensor:
    total = planes[0]
    for plane in planes[1:]:
        total = total + plane
    return total


@pytest.mark.parametrize("count", [2, 17, 65, pytest.param(129, marks=pytest.mark.nightly), 200])
def test_a_row_among_any_number_of_others(count: int, device: torch.device) -> None:
    """At every edge of a tile of rows; as it is chosen for a Hopper."""
    x, weight = factors(count, 40, device)
    for outer in (24, 40):
        tile = tile_of(count, outer, INNER, 2)
        whole = few_rows_gemm(x, weight[:outer].contiguous(), splits=SPLITS, tile=tile)
        for row in {0, 15, 16, 63, 64, 127, 128, count - 1} & set(range(count)):
            alone = few_rows_gemm(x[row : row + 1].contiguous(), weight[:outer].contiguous(), splits=SPLITS)
            assert torch.equal(alone[:, 0], whole[:, row])


@pytest.mark.parametrize("count", [150, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("tile", OTHERS, ids=str)
def test_no_tile_changes_a_bit_and_a_sum_is_that_of_its_planes(tile: Tile, count: int, device: torch.device) -> None:
    x, weight = factors(count, 40, device)
    expected = in_order(few_rows_gemm(x, weight, splits=SPLITS, tile=MODEST))
    assert torch.equal(in_order(few_rows_gemm(x, weight, splits=SPLITS, tile=tile)), expected)
    if tile != MANY[0]:
        summed = few_rows_gemm(x, weight, splits=SPLITS, summed=True, tile=tile)
        assert summed.shape == (1, count, 40)
        assert summed.dtype == torch.float32
        assert torch.equal(summed[0], expected)
    if has_room_for_a_gate(tile):
        x, weight = x[:, :256].contiguous(), weight[:, :256].contiguous()  # one part
        gated = few_rows_gemm(x, weight, swiglu=True, tile=MODEST)
        assert torch.equal(few_rows_gemm(x, weight, swiglu=True, tile=tile), gated)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_add_norm_makes_the_same_of_planes_and_of_their_sum(splits: int, device: torch.device) -> None:
    x, weight = factors(19, 24, device)
    residual, scale = torch.randn(19, 24, device=device).half(), torch.ones(24, device=device).half()
    planes = few_rows_gemm(x, weight, splits=splits)
    summed = few_rows_gemm(x, weight, splits=splits, summed=True)
    assert torch.equal(summed[0], in_order(planes))
    for one, other in zip(
        add_norm(planes, residual, scale, 1e-5), add_norm(summed, residual, scale, 1e-5), strict=True
    ):
        assert torch.equal(one, other)


def test_a_different_number_of_planes_would_show(device: torch.device) -> None:
    x, weight = factors(19, 24, device)
    two, three = (few_rows_gemm(x, weight, splits=splits, summed=True) for splits in (2, 3))
    assert not torch.equal(two, three)
    assert not torch.equal(few_rows_gemm(x, weight, splits=3).flip(0).sum(0), three[0])


def test_tiles_of_programs_that_go_together_cover_every_tile_once(device: torch.device) -> None:
    """More tiles of rows than go together, and a last group that is smaller."""
    tile = Tile(block_n=16, block_k=16, num_warps=4, num_stages=2, block_t=16)
    x, weight = factors(150, 40, device)
    x, weight = x[:, :16].contiguous(), weight[:, :16].contiguous()
    assert torch.equal(few_rows_gemm(x, weight, tile=tile), few_rows_gemm(x, weight, tile=MODEST))


def test_few_rows_take_tiles_by_how_much_a_program_reads() -> None:
    usual = CANDIDATES[2][0]
    for count, plain, part, long_part, tall, gated, less_gated, low in (
        (1, FEWEST_LONG, FEWEST, FEWEST_LONG, usual, WIDE_GATED, usual, FEWEST),
        (16, FEWEST_LONG, FEWEST, FEWEST_LONG, usual, WIDE_GATED, usual, FEWEST),
        (32, FEWEST_LONG, FEWEST, FEWEST_LONG, WIDE, WIDE_GATED, usual, FEWEST),
        (33, LONG, usual, LONG, WIDE, usual, usual, NARROW),
        (64, LONG, usual, LONG, WIDE, usual, usual, NARROW),
        (65, SOME_LOW, SOME, SOME, SOME, MANY[1], SOME_GATED, SOME_LOW),
        (MANY_ROWS - 1, SOME_LOW, SOME, SOME, SOME, MANY[1], SOME_GATED, SOME_LOW),
    ):
        assert tile_of(count, 3072, 2048, 2) == plain
        assert tile_of(count, 2048, 8192, 2, planes=4) == part
        assert tile_of(count, 4096, 14_336, 2, planes=2) == long_part
        assert tile_of(count, 128_256, 2048, 2) == tall
        assert tile_of(count, 14_336, 4096, 2, doubled=True) == gated
        assert tile_of(count, 8192, 2048, 2, doubled=True) == less_gated
        assert tile_of(count, 1024, 1024, 2, planes=2) == low
        assert tile_of(count, 3072, 2048, 2, compute_capability=100) == plain
        for gpu in (0, 80, 89):
            assert tile_of(count, 3072, 2048, 2, compute_capability=gpu) == MODEST
    assert tile_of(1, 1024, 1000, 2, planes=3) == usual  # the parts of another would be others
    # A program sums the parts of its tile itself: they are no programs more.
    assert tile_of(80, 2048, 8192, 2, planes=4, doubled=True) == SOME_LOW


def test_no_number_of_rows_takes_other_parts_or_more_memory_than_there_is() -> None:
    """Of every kind of matrix that a choice tells apart, as wide as a tile and a little wider."""
    fits = SHARED_MEMORY_BYTES[90] - 8 * 1024  # of results, which take what rows and weights leave
    widths = (64, 1000, 2048, 3072, 4096, 11_265, 16_384, 128_256)
    inners = (8, 64, 576, 1000, 1152, 2048, 4096, 5000, 8192, 14_336)
    for width, inner, planes, doubled in product(widths, inners, (1, 2, 3, 4, 8), (False, True)):
        tiles = {count: tile_of(count, width, inner, 2, planes=planes, doubled=doubled) for count in range(1, 131)}
        parts = {part_of(inner, planes, tile.block_k) for tile in tiles.values()}
        assert parts == {part_of(inner, planes, MODEST.block_k)}, (width, inner, planes, doubled)
        for count, tile in tiles.items():
            rows = (2 if doubled and planes == 1 else 1) * tile.block_n + (tile.block_t or block_t_of(count))
            assert rows * tile.block_k * tile.num_stages * 2 <= fits, (count, width, inner, planes, doubled)


@pytest.mark.parametrize(
    ("options", "planes", "doubled"),
    [({}, 1, False), ({"splits": 2}, 2, False), ({"splits": 2, "summed": True}, 2, True), ({"swiglu": True}, 1, True)],
    ids=str,
)
def test_a_tile_is_chosen_for_what_is_launched(
    options: dict[str, Any], planes: int, doubled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the matrices that the interpreter has the time for, all tiles are as right."""
    asked: list[tuple[Any, ...]] = []

    def noted(*given: Any, **named: Any) -> Tile:
        asked.append((*given, named))
        return MODEST

    monkeypatch.setattr("weft.kernels.few_rows_gemm.tile_of", noted)
    monkeypatch.setattr("weft.kernels.few_rows_gemm.capability", lambda _device: 89)
    few_rows_gemm(*factors(3, 16, device), **options)
    width = 8 if "swiglu" in options else 16
    assert asked == [(3, width, INNER, 2, {"planes": planes, "doubled": doubled, "compute_capability": 89})]


def test_many_rows_take_the_largest_tile_that_keeps_most_multiprocessors_busy() -> None:
    chosen = {
        (count, width, doubled): tile_of(count, width, 4096, 2, planes=4, doubled=doubled)
        for count, width, doubled in (
            (96, 4096, True),
            (512, 6144, False),
            (2048, 6144, False),
            (2048, 3072, False),  # 192 programs of the largest tile are two turns, 384 of its halves three
            (512, 2816, True),
            (2048, 2048, True),
            (256, 4096, True),
        )
    }
    assert list(chosen.values()) == [SOME_LOW, MANY[0], MANY[0], MANY[1], MANY[1], MANY[1], MANY[2]]
    for tile in MANY:
        rows = tile.block_n + (tile.block_t or 0)
        assert rows * tile.block_k * tile.num_stages * 2 < SHARED_MEMORY_BYTES[90]
    assert [has_room_for_a_gate(tile) for tile in MANY] == [False, True, True]


def test_planes_are_cut_by_the_matrix_alone() -> None:
    for inner, planes in ((INNER, SPLITS), (14_336, 4), (8192, 3), (200, 3), (1000, 16)):
        parts = {part_of(inner, planes, tile.block_k) for tile in chain(TILES, CANDIDATES[4])}
        assert len(parts) == 1, (inner, planes, parts)
        assert parts.pop() * planes >= inner


def test_a_sum_of_no_planes_is_refused(device: torch.device) -> None:
    x, weight = factors(2, 8, device)
    with pytest.raises(KernelError, match="summed"):
        few_rows_gemm(x, weight, summed=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("outer", "inner"), [(4096, 4096), (4096, 14_336), (2048, 8192), (6144, 4096), (1000, 5000)])
def test_real_matrices(outer: int, inner: int, device: torch.device) -> None:
    x = torch.randn(700, inner, device=device).bfloat16()
    weight = (torch.randn(outer, inner, device=device) * inner**-0.5).bfloat16()
    for splits in (1, 3, 4):
        whole = few_rows_gemm(x, weight, splits=splits, summed=True)[0]
        gated = few_rows_gemm(x, weight, swiglu=True)
        for tile in TILES:
            assert torch.equal(in_order(few_rows_gemm(x, weight, splits=splits, tile=tile)), whole), tile
        for count in (1, 2, 15, 16, 17, 33, 64, 65, 95, 96, 127, 128, 129, 255, 256, 257, 699):
            some = x[-count:].contiguous()
            assert torch.equal(in_order(few_rows_gemm(some, weight, splits=splits)), whole[-count:]), count
            assert torch.equal(few_rows_gemm(some, weight, splits=splits, summed=True)[0], whole[-count:]), count
            assert torch.equal(few_rows_gemm(some, weight, swiglu=True), gated[-count:]), count
    assert not torch.equal(whole, few_rows_gemm(x, weight, splits=2, summed=True)[0])  # 4 against 2 planes


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [576, 1000, 2048, 4096])
def test_threads_sum_a_real_row_alike_whether_its_planes_were_summed_or_not(columns: int, device: torch.device) -> None:
    x, weight = factors(96, columns, device)
    residual, scale = torch.randn(96, columns, device=device).half(), torch.rand(columns, device=device).half()
    for splits in (1, 2, 4):
        planes, summed = (few_rows_gemm(x, weight, splits=splits, summed=is_summed) for is_summed in (False, True))
        for some in (planes, planes[:, -5:].contiguous()):
            count = some.shape[1]
            found = add_norm(some, residual[-count:].contiguous(), scale, 1e-5)[1]
            assert torch.equal(found, add_norm(summed, residual, scale, 1e-5)[1][-count:])


@pytest.mark.gpu
def test_real_gates_and_heads(device: torch.device) -> None:
    """Matrices of so many rows that few rows of x take the widest tiles."""
    x = torch.randn(130, 1024, device=device).bfloat16()
    weight = (torch.randn(28_672, 1024, device=device) / 32).bfloat16()
    gated, plain = few_rows_gemm(x, weight, swiglu=True), few_rows_gemm(x, weight)
    for count in (1, 16, 17, 32, 33, 64, 65, 96):
        some = x[-count:].contiguous()
        assert torch.equal(few_rows_gemm(some, weight, swiglu=True), gated[-count:]), count
        assert torch.equal(few_rows_gemm(some, weight), plain[-count:]), count
