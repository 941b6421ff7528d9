"""Which tiles give a position the same bits in prefill and in decode, whatever else its step holds.

Three things decide bits of attention: where keys are cut into parts (`SPLIT`), how many keys one iteration takes, and
in which order a row of weights is summed, which follows from how a tile is laid out over threads. Here both kernels
take as many keys, and their row sums are laid out alike: on a Hopper four or eight warps, each with 16 rows of its own,
elsewhere and in float32 by the same rows and warps. Decode pays for that with rows that no query head fills. Chosen by
what is the same for all requests of a model, never by a batch, a length or a size of blocks. Stages change no bit.
"""

from dataclasses import dataclass, replace

import torch

from weft.kernels import _paged_decode_tiles, _paged_prefill_tiles
from weft.kernels.paged import padded_head_dim

SPLIT = 256  # keys; any multiple of a tile's would do, and another one gives other bits


@dataclass(frozen=True, kw_only=True)
class InvariantTiles:
    """What `paged_decode` and `paged_prefill` are given as `tile` and `split`, so that both give the same bits."""

    decode: _paged_decode_tiles.Tile
    prefill: _paged_prefill_tiles.Tile
    split: int = SPLIT


def _tiles(block_n: int, num_warps: int, num_stages: int, *, decode: int, prefill: int) -> InvariantTiles:
    """decode, prefill: rows of each."""
    alike = {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
    return InvariantTiles(
        decode=_paged_decode_tiles.Tile(block_m=decode, **alike),
        prefill=_paged_prefill_tiles.Tile(block_m=prefill, **alike),
    )


# By bytes of an element and columns of a head.
_TILES: dict[tuple[int, int], InvariantTiles] = {
    (2, 64): _tiles(64, 4, 3, decode=64, prefill=64),
    (2, 128): _tiles(64, 4, 3, decode=64, prefill=64),
    (2, 256): _tiles(32, 8, 2, decode=16, prefill=32),
    (4, 64): _tiles(32, 4, 2, decode=16, prefill=16),
    (4, 128): _tiles(16, 4, 2, decode=16, prefill=16),
    (4, 256): _tiles(16, 8, 2, decode=16, prefill=16),
}

# A cap takes registers that two accumulators leave no room for: see `_TILES`.
_CAPPED = {(2, 128): _tiles(32, 4, 3, decode=64, prefill=64)}

# A Hopper's matrix instruction gives 16 rows to a warp, so twice the rows and warps lay a row out as before.
_DOUBLED = {(2, 128)}
HOPPER = 90


def invariant_tiles(
    dtype: torch.dtype, head_dim: int, *, soft_cap: bool = False, compute_capability: int = HOPPER
) -> InvariantTiles:
    """The tiles for this dtype and head; `soft_cap`: whether scores of this layer are capped.

    >>> invariant_tiles(torch.bfloat16, 80).prefill.block_m, invariant_tiles(torch.bfloat16, 80).decode.block_m
    (128, 64)
    """
    shape = dtype.itemsize, max(64, padded_head_dim(head_dim))
    found = (_CAPPED if soft_cap and shape in _CAPPED else _TILES)[shape]
    if compute_capability == HOPPER and shape in _DOUBLED:
        rows, warps = 2 * found.prefill.block_m, 2 * found.prefill.num_warps
        return replace(found, prefill=replace(found.prefill, block_m=rows, num_warps=warps))
    if compute_capability < HOPPER and dtype.itemsize == 2:  # down to 99 KiB of shared memory
        return replace(found, decode=replace(found.decode, num_stages=2), prefill=replace(found.prefill, num_stages=2))
    return found
