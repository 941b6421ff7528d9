"""Which tiles paged decode uses, by head dimension, dtype and block size, and how many programs share a head.

The first tile of a row is the one that is launched; the others are candidates that a benchmark can force. Knows no
tensor and no kernel.
"""

from dataclasses import dataclass

import torch

from weft.kernels.paged import padded_head_dim

PROGRAMS = 512  # two for each place that an H200's multiprocessors have for one


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Keys that one iteration takes, and how the compiler is told to overlap them."""

    block_n: int
    num_warps: int
    num_stages: int


# By bytes of an element and columns of a head, the first being the default; a device script times the rest.
CANDIDATES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (2, 64): (
        Tile(block_n=64, num_warps=4, num_stages=3),
        Tile(block_n=128, num_warps=4, num_stages=2),
        Tile(block_n=64, num_warps=2, num_stages=3),
        Tile(block_n=64, num_warps=4, num_stages=4),
        Tile(block_n=32, num_warps=2, num_stages=4),
    ),
    (2, 128): (
        Tile(block_n=32, num_warps=4, num_stages=3),
        Tile(block_n=64, num_warps=4, num_stages=3),
        Tile(block_n=32, num_warps=4, num_stages=4),
        Tile(block_n=32, num_warps=2, num_stages=4),
        Tile(block_n=64, num_warps=4, num_stages=4),
        Tile(block_n=64, num_warps=8, num_stages=3),
    ),
    (2, 256): (Tile(block_n=32, num_warps=8, num_stages=3), Tile(block_n=64, num_warps=8, num_stages=2)),
    (4, 64): (Tile(block_n=16, num_warps=4, num_stages=2),),
    (4, 128): (Tile(block_n=16, num_warps=4, num_stages=2),),
    (4, 256): (Tile(block_n=16, num_warps=8, num_stages=2),),
}


# The keys of a tile stay as many in all forms of a geometry: they decide the last bits, stages do not.
# Where a tile spans several blocks, each key has its own lookup, and one more stage hides it.
SPANNING = {(2, 128): Tile(block_n=32, num_warps=4, num_stages=4)}
# Few programs, each with a long way to go, have to keep more in flight.
LONG = {(2, 128): Tile(block_n=32, num_warps=4, num_stages=5)}
LONG_PARTS = 32
# With a window, a cap, norms or rows that come rotated, four warps get a stack frame from Triton 3.6.
CROWDED = {(2, 128): Tile(block_n=64, num_warps=8, num_stages=3)}


def candidates(
    dtype: torch.dtype, head_dim: int, block_size: int = 64, *, num_shared_parts: int = 0, crowded: bool = False
) -> tuple[Tile, ...]:
    """Tiles that fit this dtype, head and block, the default first.

    num_shared_parts: splits that a table has room for, if several programs share a head.
    crowded: the kernel does more than rotate, write and attend.
    """
    shape = dtype.itemsize, max(64, padded_head_dim(head_dim))
    found = CANDIDATES[shape]
    if crowded and shape in CROWDED and block_size % CROWDED[shape].block_n == 0:
        return (CROWDED[shape], *found)
    deeper = SPANNING if block_size % found[0].block_n else LONG if num_shared_parts >= LONG_PARTS else {}
    return (deeper[shape], *found) if shape in deeper else found


def programs_of(heads: int, num_parts: int, programs: int = PROGRAMS) -> int:
    """Programs that share one head's splits, by shapes alone: few heads need many, and 512 heads none but their own.

    heads: tiles of query heads times requests.   num_parts: splits of the longest sequence that a table has room for.
    """
    return max(1, min(num_parts, programs // max(heads, 1)))
