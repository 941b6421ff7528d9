"""Which tiles paged prefill uses, by head dimension, dtype and GPU.

The first tile of a row is the one that is launched; the others are candidates that a benchmark can force. Knows no
tensor and no kernel.
"""

from dataclasses import dataclass

import torch

from weft.kernels._jit import MODERN
from weft.kernels.paged import padded_head_dim


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows of a program (tokens times heads), keys that one iteration takes, and how the compiler overlaps them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By bytes of an element and columns of a head, the first being the default; a device script times the rest.
CANDIDATES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (2, 64): (
        Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
        Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
        Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
        Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
    ),
    (2, 128): (
        Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
        Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
        Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
        Tile(block_m=128, block_n=128, num_warps=8, num_stages=2),
    ),
    (2, 256): (Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),),
    (4, 64): (Tile(block_m=16, block_n=32, num_warps=4, num_stages=2),),
    (4, 128): (Tile(block_m=16, block_n=16, num_warps=4, num_stages=2),),
    (4, 256): (Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),),
}


# For GPUs without the warpgroup's matrix instruction, which need more registers, and down to 99 KiB of shared memory.
MODEST_CANDIDATES: dict[tuple[int, int], tuple[Tile, ...]] = {
    **CANDIDATES,
    (2, 64): (Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),),
    (2, 128): (Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),),
}


# A window and a cap take registers too, more than four warps have at this width.
CROWDED = {(2, 64): Tile(block_m=128, block_n=64, num_warps=8, num_stages=3)}


def candidates(
    dtype: torch.dtype, head_dim: int, compute_capability: int, *, crowded: bool = False
) -> tuple[Tile, ...]:
    """Tiles that fit this dtype, head and GPU (90 is a Hopper), the default first; `crowded` by a window or a cap."""
    modern = compute_capability in MODERN
    shape = dtype.itemsize, max(64, padded_head_dim(head_dim))
    found = (CANDIDATES if modern else MODEST_CANDIDATES)[shape]
    return (CROWDED[shape], *found) if crowded and modern and shape in CROWDED else found
