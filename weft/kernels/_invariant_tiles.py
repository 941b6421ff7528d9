"""Which tiles prefill and decode take in fixed order, whatever else a step holds.

Three things decide bits of attention: where keys are cut into parts (`SPLIT`), how many keys one iteration takes, and
in which order a row of weights is summed. The last is a product's (`pieces.weigh`), which is the same in every tile, so
that rows, warps and stages are each kernel's own. Keys follow from what is the same for all requests of a model, never
from a batch, a length or a size of blocks.
"""

from dataclasses import dataclass

import torch

from weft.kernels import _paged_decode_tiles, _paged_prefill_tiles
from weft.kernels._jit import MODERN
from weft.kernels._paged_decode_tiles import MANY_HEADS
from weft.kernels.paged import padded_head_dim

SPLIT = 128  # keys; any multiple of a tile's would do, and another one gives other bits


@dataclass(frozen=True, kw_only=True)
class InvariantTiles:
    """What `paged_decode` in fixed order and `paged_prefill` are given as `tile` and `split`, for the same bits."""

    decode: _paged_decode_tiles.Tile
    prefill: _paged_prefill_tiles.Tile
    split: int = SPLIT


def _tiles(block_n: int, decode: tuple[int, int], prefill: tuple[int, int, int]) -> InvariantTiles:
    """decode: warps and stages.   prefill: rows, warps and stages."""
    num_warps, num_stages = decode
    rows, prefill_warps, prefill_stages = prefill
    return InvariantTiles(
        decode=_paged_decode_tiles.Tile(block_n=block_n, num_warps=num_warps, num_stages=num_stages),
        prefill=_paged_prefill_tiles.Tile(
            block_m=rows, block_n=block_n, num_warps=prefill_warps, num_stages=prefill_stages
        ),
    )


# By bytes of an element and columns of a head.
_TILES: dict[tuple[int, int], InvariantTiles] = {
    (2, 64): _tiles(64, (4, 3), (64, 4, 3)),
    (2, 128): _tiles(64, (8, 3), (128, 8, 3)),
    (2, 256): _tiles(32, (4, 3), (32, 8, 2)),
    (4, 64): _tiles(16, (4, 2), (16, 4, 2)),
    (4, 128): _tiles(16, (4, 2), (16, 4, 2)),
    (4, 256): _tiles(16, (8, 2), (16, 8, 2)),
}
# Heads that share no keys: see `_paged_decode_tiles.by_shapes`. Few of them do not fill the chip with one warp each.
_ALONE = {(2, 64): _tiles(32, (1, 3), (64, 4, 3))}
_FEW_ALONE = {(2, 64): _tiles(32, (4, 3), (64, 4, 3))}
# A cap takes registers that two accumulators leave no room for.
_CAPPED = {(2, 128): _tiles(32, (4, 2), (128, 8, 3))}
# For GPUs with less shared memory than those for which the others were made, down to 99 KiB.
_MODEST = {(2, 64): _tiles(64, (4, 2), (64, 4, 2)), (2, 128): _tiles(64, (8, 2), (64, 4, 2))}
HOPPER = 90


def invariant_tiles(
    dtype: torch.dtype,
    head_dim: int,
    *,
    group: int = 2,
    heads: int = MANY_HEADS,
    soft_cap: bool = False,
    compute_capability: int = HOPPER,
) -> InvariantTiles:
    """The tiles for this dtype and head.

    group: query heads that share keys.   heads: tiles of query heads times requests, which decide no bit.
    soft_cap: whether scores of this layer are capped.

    >>> invariant_tiles(torch.bfloat16, 80).prefill.block_m, invariant_tiles(torch.bfloat16, 80).decode.block_m
    (128, 16)
    """
    shape = dtype.itemsize, max(64, padded_head_dim(head_dim))
    if compute_capability not in MODERN and shape in _MODEST:
        return _MODEST[shape]
    if group == 1 and shape in _ALONE:
        return (_FEW_ALONE if heads < MANY_HEADS else _ALONE)[shape]
    return (_CAPPED if soft_cap and shape in _CAPPED else _TILES)[shape]
