"""Which tiles paged decode uses, by head dimension, dtype and block size, and how heads are laid over programs.

The first tile of a row is the one that is launched; the others are candidates that a benchmark can force. Knows no
tensor and no kernel.
"""

from dataclasses import dataclass

import torch

from weft.kernels._jit import cdiv
from weft.kernels.paged import padded_head_dim

BLOCK_M = 16  # the least a matrix instruction takes
SPLIT = 256  # keys; a multiple for a sequence of more than MOST_SPLITS of them
MOST_SPLITS = 64  # bounds the scratch, which every request and head needs
PROGRAMS = 512  # that an H200 runs at once
MANY_HEADS = 128  # tiles of query heads times requests, from which on a warp each keeps an H200 busy
WHOLE_HEADS = 256  # from which on a program each of several warps does

FEW = 16  # programs a head, which one alone would need to keep up with a batch
LENDING_HEAD_DIM = 64  # up to here the second launch costs a batch of equals a third of its time
LONG_ROOM = 8192  # tokens; a head of fewer takes one program no longer than a batch takes
LEAST_REQUESTS = 128  # whose lengths one look at long requests takes: so many, or the batch


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Keys that one iteration takes, how the compiler is told to overlap them, and rows that query heads share."""

    block_n: int
    num_warps: int
    num_stages: int
    most_registers: int | None = None  # a thread; None leaves it to the compiler
    block_m: int = BLOCK_M


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
        Tile(block_n=32, num_warps=4, num_stages=3, most_registers=128),
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
# Where a tile spans several blocks, each key has its own lookup, and one more stage hides it, if one program has a head
# to itself. If several share it, four programs have to fit on a multiprocessor, or 512 of them take two turns.
SPANNING = {(2, 128): Tile(block_n=32, num_warps=4, num_stages=4, most_registers=128)}
# Heads that share no keys: see `by_shapes`.
NARROW = {(2, 64): Tile(block_n=32, num_warps=1, num_stages=4)}
# With a window, a cap, norms or rows that come rotated, four warps get a stack frame from Triton 3.6.
CROWDED = {(2, 128): Tile(block_n=64, num_warps=8, num_stages=3)}


def candidates(
    dtype: torch.dtype, head_dim: int, block_size: int = 64, *, shared: bool = False, crowded: bool = False
) -> tuple[Tile, ...]:
    """Tiles that fit this dtype, head and block, the default first.

    shared: several programs share a head.
    crowded: the kernel does more than rotate, write and attend.
    """
    shape = dtype.itemsize, max(64, padded_head_dim(head_dim))
    found = CANDIDATES[shape]
    if crowded and shape in CROWDED and block_size % CROWDED[shape].block_n == 0:
        return (CROWDED[shape], *found)
    if shape in SPANNING and block_size % found[0].block_n and not shared:
        return (SPANNING[shape], *found)
    return found


def by_shapes(heads: int, group: int, dtype: torch.dtype, head_dim: int, block_size: int) -> tuple[Tile | None, int]:
    """The tile (None: the default) and the keys a split that are fastest for so many heads, whatever that does to bits.

    Few heads leave programs idle unless their keys are cut finer. Heads that share no keys fill one row of sixteen in a
    tile, so that loads are all it does: one warp does them with less waiting.

    heads: tiles of query heads times requests.   group: query heads that share keys.
    """
    split = 64 if heads <= 16 else 128 if heads <= MANY_HEADS else 256
    narrow = NARROW.get((dtype.itemsize, head_dim))
    if group == 1 and narrow is not None and heads >= MANY_HEADS and block_size % narrow.block_n == 0:
        return narrow, split
    return None, split


def programs_of(heads: int, num_parts: int, programs: int) -> int:
    """Programs that share one head's splits when there are to be about so many in all.

    heads: tiles of query heads times requests.   num_parts: splits of the longest sequence that a table has room for.
    """
    return max(1, min(num_parts, programs // max(heads, 1)))


def usual_programs(heads: int, num_warps: int) -> int:
    """How many there are to be, by shapes alone.

    Of several warps half as many as can run keep the GPU busy, and a head that one of them has to itself needs no
    merge: at 512 tokens 13.6 µs where two a head take 16.6 (256 heads of 64). A few heads too few for that get two
    each: at 3,000 tokens one each would take a quarter longer.
    """
    if num_warps == 1:
        return PROGRAMS
    return 2 * heads if MANY_HEADS < heads < WHOLE_HEADS else WHOLE_HEADS


def lends(sharing: int, batch: int, room: int, head_dim: int) -> bool:
    """Whether a long request gets programs that the batch-mates' heads do not need: where there is room for one.

    sharing: programs that each head of each request could have.   room: tokens that a row of the table has blocks for.
    """
    return batch > 1 and sharing < FEW and room >= LONG_ROOM and head_dim > LENDING_HEAD_DIM


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the splits of a call's heads are laid over programs. Follows from shapes, so that a grid does.

    head_tiles: of one request.   num_parts: splits of the longest sequence that a table has room for.
    sharing: programs a head, if nothing is lent.   shares: runs that all work is cut into; 0 if nothing is lent.
    """

    head_tiles: int
    num_parts: int
    sharing: int
    shares: int

    @property
    def is_whole(self) -> bool:
        """Whether every head has one program, which merges in registers."""
        return self.sharing == 1 and not self.shares

    def num_owners(self, batch: int) -> int:
        """Requests whose parts have to lie in memory; fewer are long than there are shares."""
        return min(batch, self.shares) if self.shares else 0 if self.is_whole else batch


def layout_of(
    *,
    batch: int,
    room: int,
    head_tiles: int,
    head_dim: int,
    split: int,
    num_warps: int,
    programs: int | None = None,
    lend: bool | None = None,
) -> Layout:
    """The layout of `batch` requests, whose tables have room for `room` tokens each.

    num_warps: of the tile.   programs, lend: forced; None decides by shapes.
    """
    heads = head_tiles * batch
    num_parts = max(1, min(MOST_SPLITS, cdiv(room, split)))
    most = programs or PROGRAMS
    if lend is None:
        lend = lends(programs_of(heads, num_parts, most), batch, room, head_dim)
    return Layout(
        head_tiles=head_tiles,
        num_parts=num_parts,
        sharing=programs_of(heads, num_parts, programs or usual_programs(heads, num_warps)),
        shares=max(1, most // head_tiles // 2) if lend and batch else 0,
    )
