"""A position has one result, to the bit: by prefill or decode, in any chunk, beside any batch-mates, in any form.

With the tiles of `_invariant_tiles` on a GPU; with small ones in the interpreter, where lengths that cross all of their
edges take no time. `one_sequence.py` says what numbers they get there.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from tests.kernels.one_sequence import OneSequence, make_sequence
from tests.kernels.paged_step import LAYER, Step, assert_attends, decode, make_step, prefill
from weft.errors import KernelError
from weft.kernels import (
    _paged_decode_tiles,
    _paged_prefill_tiles,
    cache_write,
    merge_parts,
    paged_decode,
    paged_prefill,
)
from weft.kernels._invariant_tiles import SPLIT, InvariantTiles, invariant_tiles
from weft.kernels._jit import capability
from weft.kernels._paged_decode_tiles import MANY_HEADS, by_shapes
from weft.kernels.cache_write import rotate_and_write

N, CUT, MOST = 16, 32, 3  # keys of a tile, keys of a split, and splits of a sequence before they grow


def tiles_of(decode: int = 16, prefill: int = 64, split: int = CUT) -> InvariantTiles:
    """Small tiles of so many rows."""
    alike = {"block_n": N, "num_warps": 4, "num_stages": 2}
    return InvariantTiles(
        decode=_paged_decode_tiles.Tile(block_m=decode, **alike),
        prefill=_paged_prefill_tiles.Tile(block_m=prefill, **alike),
        split=split,
    )


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """So that splits grow within a hundred tokens, as they do on a GPU beyond 8,192."""
    if device.type != "cuda":
        for module in (paged_decode, paged_prefill):
            monkeypatch.setattr(module, "MOST_SPLITS", MOST)


# Around the first key, the edges of tiles and of splits, and where the size of splits doubles, at 97.
EDGES = (1, 17, 32, 33, 96, 97, 98, 129)


def check(sequence: OneSequence, lengths: tuple[int, ...], tiles: InvariantTiles, **options: Any) -> None:
    whole = sequence.prefilled([len(sequence.query)], [len(sequence.query)], tiles)
    found = sequence.decoded(lengths, tiles, **options)
    same = (found == whole[[length - 1 for length in lengths]]).all(1)
    assert same.all(), f"{[length for length, one in zip(lengths, same.tolist(), strict=True) if not one]} differ"


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        (EDGES, {}),
        ((33, 98, 129), {"window": 70, "soft_cap": 2.0}),
        ((33, 98), {"heads": (2, 1), "dtype": torch.float16}),
        pytest.param((1, 17, 65, 98, 129), {"heads": (1, 1)}, marks=pytest.mark.nightly),
        pytest.param((1, 17, 65, 98, 129), {"heads": (16, 2), "window": 40}, marks=pytest.mark.nightly),
        pytest.param(tuple(range(1, 130)), {"heads": (1, 1)}, marks=pytest.mark.nightly),
        pytest.param(tuple(range(1, 130)), {"heads": (1, 1), "window": 35}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_prefill_has_the_bits_of_the_decode_of_each_position(
    lengths: tuple[int, ...], options: dict[str, Any], device: torch.device
) -> None:
    check(make_sequence(130, device=device, **options), lengths, tiles_of())


@pytest.mark.nightly
@pytest.mark.parametrize(("decode", "prefill"), [(64, 16), (16, 32)])
def test_rows_of_a_tile_change_no_bit(decode: int, prefill: int, device: torch.device) -> None:
    check(make_sequence(130, device=device), (33, 97, 130), tiles_of(decode, prefill))


@pytest.mark.parametrize("form", [{"programs": 10**6}, {"programs": 6, "lend": True}], ids=str)
def test_every_form_of_decode_has_the_bits_of_the_prefill(form: dict[str, Any], device: torch.device) -> None:
    check(make_sequence(130, device=device, heads=(1, 1), window=70), (5, 130), tiles_of(), **form)


@pytest.mark.parametrize("counts", [(1, 2, 63, 64), pytest.param((65, 65), marks=pytest.mark.nightly)], ids=str)
def test_chunks_change_no_bit(counts: tuple[int, ...], device: torch.device) -> None:
    """All in one step, so that each chunk is also a batch-mate of the others."""
    sequence = make_sequence(130, device=device, heads=(1, 1))
    expected = sequence.prefilled([130], [130], tiles_of())
    assert torch.equal(sequence.prefilled(list(accumulate(counts)), counts, tiles_of()), expected)


@pytest.mark.parametrize("size", [64, pytest.param(8, marks=pytest.mark.nightly)])
def test_sizes_of_blocks_change_no_bit(size: int, device: torch.device) -> None:
    sequence = make_sequence(70, device=device, heads=(1, 1))
    expected = sequence.prefilled([70], [70], tiles_of())
    assert torch.equal(sequence.in_blocks_of(size).prefilled([70], [70], tiles_of()), expected)
    assert torch.equal(sequence.in_blocks_of(size).decoded([70], tiles_of()), expected[69:])


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, {}),
        ({"heads": (1, 1), "window": 40}, {"programs": 6, "lend": True}),
        pytest.param({"heads": (6, 2), "soft_cap": 2.0}, {"programs": 10**6}, marks=pytest.mark.nightly),
        pytest.param({"heads": (40, 2)}, {"programs": 1}, marks=pytest.mark.nightly),  # two tiles of heads a key head
    ],
    ids=str,
)
def test_a_key_that_is_written_and_read_back_has_the_bits_of_one_that_lay_there(
    options: dict[str, Any], form: dict[str, Any], device: torch.device
) -> None:
    step = make_step((1, 33, 97, 130, 2), (1,) * 5, device=device, block_size=16, **options)
    check_reading_back(step, tiles_of(), **form)


@pytest.mark.usefixtures("backwards")
@pytest.mark.parametrize("form", [{"programs": 1}, {"programs": 10**6}], ids=str)
def test_whoever_reads_a_key_back_has_written_it(form: dict[str, Any], device: torch.device) -> None:
    """Two tiles of heads read the same key, and on a GPU neither waits for the other."""
    check_reading_back(make_step((33, 2), (1, 1), device=device, heads=(20, 1)), tiles_of(), **form)


def check_reading_back(step: Step, tiles: InvariantTiles, **form: Any) -> None:
    """Queries and keys here turn by random angles, so that a rotation in another order would show."""
    given = {"num_query_heads": step.num_query_heads, "tile": tiles.decode, "split": tiles.split, **form}
    given["fixed_order"] = True
    before, now = step.pool.clone(), step.pool.clone()
    new, scoring = step.new, step.scoring
    query = rotate_and_write(
        step.qkv, new.positions, new.slots, new.rotation, before, LAYER, num_query_heads=step.num_query_heads
    )
    expected = paged_decode.paged_decode(query.flatten(1), step.paged(before), scoring, **given)
    found = paged_decode.paged_decode(step.qkv, step.paged(now), scoring, new=new, **given)
    assert torch.equal(found, expected)
    assert torch.equal(now.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 40, "soft_cap": 2.0}], ids=str)
def test_both_kernels_attend(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """What they have in common may be wrong in both."""
    step, tiles = make_step((1, 33, 98), (1, 1, 1), dtype=dtype, device=device, **options), tiles_of()
    found = decode(step, step.pool.clone(), fixed_order=True, tile=tiles.decode, split=tiles.split)
    assert_attends(found, step)
    assert_attends(prefill(step, step.pool.clone(), tile=tiles.prefill, split=tiles.split), step)


class Recorder:
    """In the place of a kernel: what it is launched with."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_, **options: self.launched.append(options)


def test_no_launch_lets_the_compiler_fuse_a_product_with_a_sum(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does it follows its own mind in each kernel, and the interpreter never does."""
    recorder = Recorder()
    for module, name in (
        (cache_write, "_cache_write_kernel"),
        (paged_decode, "paged_decode_kernel"),
        (merge_parts, "_merge_parts_kernel"),
        (paged_prefill, "paged_prefill_kernel"),
    ):
        monkeypatch.setattr(module, name, recorder)
    step, tiles = make_step((130, 2), (1, 1), device=device), tiles_of()
    prefill(step, step.pool.clone(), tile=tiles.prefill, split=tiles.split)
    decode(step, step.pool.clone(), fixed_order=True, tile=tiles.decode, split=tiles.split, programs=10**6)
    assert [options["enable_fp_fusion"] for options in recorder.launched] == [False] * 4


@pytest.mark.parametrize("slot", [-1, 0])
def test_a_key_that_would_be_read_from_elsewhere_is_refused_in_debug_mode(slot: int, device: torch.device) -> None:
    step = make_step((3, 34, 20), (1, 1, 1), device=device, block_size=16)
    tiles, slots = tiles_of(), step.new.slots.clone()
    own, slots[1] = int(slots[1]), slot
    changed = replace(step, new=replace(step.new, slots=slots))
    form = {"tile": tiles.decode, "split": tiles.split}
    with pytest.raises(KernelError, match=rf"slots\[1\]={slot}, .* token 33 is read back from slot {own}") as caught:
        decode(changed, step.pool.clone(), fixed_order=True, debug=True, **form)
    assert "fixed_order=False" in str(caught.value.hint)
    decode(changed, step.pool.clone(), fixed_order=False, debug=True, **form)
    decode(step, step.pool.clone(), fixed_order=True, debug=True, **form)


def test_heads_with_norms_are_refused(device: torch.device) -> None:
    step = make_step((3,), (1,), device=device, norm=True)
    with pytest.raises(KernelError, match="fixed_order=True"):
        paged_decode.paged_decode(
            step.qkv, step.paged(step.pool), step.scoring, num_query_heads=6, new=step.new, fixed_order=True
        )


def test_without_splits_and_with_others_it_would_show(device: torch.device) -> None:
    sequence = make_sequence(130, device=device)
    decoded = sequence.decoded([70], tiles_of())
    for split in (None, 2 * CUT):
        assert not torch.equal(sequence.prefilled([70], [1], tiles_of(), split=split), decoded)
    assert torch.equal(sequence.prefilled([70], [1], tiles_of()), decoded)


def test_splits_that_cut_tiles_are_refused(device: torch.device) -> None:
    with pytest.raises(KernelError, match="split=24"):
        make_sequence(5, device=device).prefilled([5], [5], tiles_of(split=24))


@pytest.mark.parametrize("soft_cap", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gpu", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("group", [1, 4])
def test_all_kernels_take_as_many_keys_of_which_a_split_is_a_multiple(
    gpu: int, dtype: torch.dtype, head_dim: int, soft_cap: bool, group: int
) -> None:
    tiles = [
        invariant_tiles(dtype, head_dim, group=group, heads=heads, soft_cap=soft_cap, compute_capability=gpu)
        for heads in (1, MANY_HEADS)
    ]
    assert len({form.block_n for both in tiles for form in (both.decode, both.prefill)}) == 1
    assert tiles[0].prefill == tiles[1].prefill
    assert SPLIT % tiles[0].decode.block_n == 0


def test_tiles_follow_from_heads_that_share_keys_and_from_how_many_there_are() -> None:
    """Bits do not: what other tests compare, any of these passes."""

    def decode_of(**options: Any) -> tuple[int, int, int]:
        tile = invariant_tiles(torch.bfloat16, options.pop("head_dim", 64), **options).decode
        return tile.block_n, tile.num_warps, tile.num_stages

    assert decode_of(heads=1) == decode_of(heads=10**4) == (64, 4, 3)
    assert decode_of(group=1, heads=MANY_HEADS - 1) == (32, 4, 3), "a warp each would not fill the chip"
    assert decode_of(group=1, heads=MANY_HEADS) == (32, 1, 3)
    assert decode_of(group=1, heads=1, compute_capability=89) == (64, 4, 2)
    assert decode_of(head_dim=128) == decode_of(head_dim=128, group=1) == (64, 8, 3)
    assert decode_of(head_dim=128, soft_cap=True) == (32, 4, 2)
    assert decode_of(head_dim=128, soft_cap=True, compute_capability=89) == (64, 8, 2)


LONG = (1, 2, 63, 64, 65, 127, 128, 129, 512, 1000, 4097, 8192, 8193, 16_385, 16_500)
GPU_OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 700},
    {"soft_cap": 20.0},
    {"heads": (8, 1)},
    {"heads": (2, 2), "block_size": 64},
]


def chosen_tiles(
    dtype: torch.dtype, head_dim: int, options: dict[str, Any], device: torch.device
) -> tuple[InvariantTiles, ...]:
    """For few heads and for many, where that makes a difference."""
    heads, kv_heads = options.get("heads", (3, 1))
    tiles = (
        invariant_tiles(
            dtype,
            head_dim,
            group=heads // kv_heads,
            heads=count,
            soft_cap="soft_cap" in options,
            compute_capability=capability(device),
        )
        for count in (1, MANY_HEADS)
    )
    return tuple(dict.fromkeys(tiles))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [SPLIT, pytest.param(256, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_real_tiles_give_prefill_and_decode_the_same_bits(
    dtype: torch.dtype, head_dim: int, options: dict[str, Any], split: int, device: torch.device
) -> None:
    sequence = make_sequence(16_500, head_dim=head_dim, dtype=dtype, device=device, **options)
    few, *many = (replace(tiles, split=split) for tiles in chosen_tiles(dtype, head_dim, options, device))
    for tiles in (*many, few):
        for form in ({}, {"programs": 1}, {"programs": 10**4}, {"lend": True}):
            check(sequence, LONG, tiles, **form)
    whole = sequence.prefilled([16_500], [16_500], few)
    counts = (1, 2, 63, 64, 65, 511, 4000, 11_794)
    assert torch.equal(sequence.prefilled(list(accumulate(counts)), counts, few), whole)
    for length in (65, 1000, 16_385):
        assert torch.equal(sequence.decoded([length], few)[0], whole[length - 1])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"soft_cap": 20.0}, {"heads": (2, 2)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_real_tiles_read_back_what_they_wrote(
    dtype: torch.dtype, head_dim: int, options: dict[str, Any], device: torch.device
) -> None:
    lengths = tuple(length for length in LONG if length < 5000)  # each has as many blocks as the longest
    step = make_step(
        lengths, (1,) * len(lengths), head_dim=head_dim, dtype=dtype, block_size=64, device=device, **options
    )
    for tiles in chosen_tiles(dtype, head_dim, options, device):
        for form in ({}, {"programs": 1}, {"programs": 10**4}, {"lend": True}):
            check_reading_back(step, tiles, **form)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_fast_tiles_do_not(head_dim: int, device: torch.device) -> None:
    """The control: unsplit prefill, and decode as it is launched for few heads and for many."""
    sequence = make_sequence(3000, head_dim=head_dim, heads=(4, 1), dtype=torch.bfloat16, device=device)
    tiles = invariant_tiles(torch.bfloat16, head_dim)
    whole = sequence.prefilled([3000], [3000], tiles, split=None)
    decoded = []
    for heads in (1, 1000):
        tile, split = by_shapes(heads, 4, torch.bfloat16, head_dim, 16)
        default = tile or _paged_decode_tiles.candidates(torch.bfloat16, head_dim, 16, crowded=True)[0]
        fast = InvariantTiles(decode=default, prefill=tiles.prefill, split=split)
        decoded.append(sequence.decoded([1000, 2000, 3000], fast, fixed_order=False))
    assert not torch.equal(decoded[0], decoded[1])
    assert not torch.equal(decoded[1], whole[[999, 1999, 2999]])
