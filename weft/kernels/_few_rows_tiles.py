"""Which tiles the product of few rows uses, by shapes, and into how many parts a matrix is cut. Knows no kernel.

Where sums are cut decides bits and follows from the matrix alone; tiles decide none. Which are fastest was measured on
an H200 (docs/log.md).
"""

from dataclasses import dataclass

from weft.kernels._jit import MODERN, cdiv, next_power_of_2

MOST_SPLITS = 16
_USUAL_SPLITS = 8  # the most that are chosen unasked
_PROGRAMS = 128  # one for each multiprocessor: with 64 rows of x two do not fit on one, and the second half would queue
_LEAST_INNER = 512  # columns of a part, below which starting it costs more than it reads
_PART = 128  # columns of which a part is a multiple, whatever the tile: they decide bits, the tile does not


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows of weights, columns of the inside that one iteration takes, how the compiler overlaps them, and rows of x.

    block_t: None for what `block_t_of` says.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    block_t: int | None = None


# By bytes of an element, the first being the default; `candidates` names those that fit.
CANDIDATES: dict[int, tuple[Tile, ...]] = {
    2: (
        Tile(block_n=64, block_k=128, num_warps=4, num_stages=4),
        Tile(block_n=64, block_k=64, num_warps=4, num_stages=6),
        Tile(block_n=128, block_k=64, num_warps=4, num_stages=4),
        Tile(block_n=64, block_k=64, num_warps=4, num_stages=8),
        Tile(block_n=64, block_k=128, num_warps=4, num_stages=3),
        Tile(block_n=64, block_k=256, num_warps=4, num_stages=2),
        Tile(block_n=64, block_k=256, num_warps=4, num_stages=3),
        Tile(block_n=128, block_k=128, num_warps=4, num_stages=2),
        Tile(block_n=128, block_k=128, num_warps=8, num_stages=3),
    ),
    4: (Tile(block_n=16, block_k=32, num_warps=4, num_stages=2),),
}


# For GPUs without the copy engine, whose compiler turns descriptors into pointers, and 99 KiB of shared memory.
MODEST = Tile(block_n=64, block_k=64, num_warps=4, num_stages=3)


# A program of up to 32 rows fetches more at once, and further ahead where its part is long or nothing is cut into
# planes. From 33 rows on x takes more of the memory.
FEWEST = Tile(block_n=64, block_k=256, num_warps=4, num_stages=3)
FEWEST_LONG = Tile(block_n=64, block_k=256, num_warps=4, num_stages=4)
LONG = Tile(block_n=64, block_k=128, num_warps=4, num_stages=5)
_FEWEST_ROWS = 32
MOST_FEW_ROWS = 64  # columns of a tile of x, and up to where this kernel is faster than the library's
_LONG_PART = 2048  # columns, beyond which a part is long

# With 64 rows of x a tile reads as much of x as of the matrix: in a matrix of many rows wider ones read it less often.
WIDE = Tile(block_n=128, block_k=128, num_warps=4, num_stages=2)
_TALL = 16_384
# The same for few rows and gates, if these are programs enough.
WIDE_GATED = Tile(block_n=128, block_k=128, num_warps=8, num_stages=3)

# Planes of a matrix of few rows, cut finer, so that more multiprocessors read it.
NARROW = Tile(block_n=32, block_k=256, num_warps=4, num_stages=3)
_FEW_PROGRAMS = 64

# For more rows than one tile of x has columns: its tiles follow each other, so that weights are read once. Gates, other
# products, and what these leave too few programs.
SOME_GATED = Tile(block_n=64, block_k=64, num_warps=4, num_stages=6, block_t=128)
SOME = Tile(block_n=128, block_k=128, num_warps=8, num_stages=3, block_t=64)
SOME_LOW = Tile(block_n=64, block_k=128, num_warps=4, num_stages=4, block_t=32)

# For many rows, when squares do most work for what they read; the larger first. Two accumulators of the first do not
# fit into registers, and so it neither gates nor sums parts. Two programs of the last fit on one multiprocessor.
MANY_ROWS = 96
MANY: tuple[Tile, ...] = (
    Tile(block_n=256, block_k=64, num_warps=8, num_stages=4, block_t=128),
    Tile(block_n=128, block_k=64, num_warps=8, num_stages=4, block_t=128),
    Tile(block_n=128, block_k=64, num_warps=4, num_stages=4, block_t=64),
)
_LEAST_PROGRAMS = 88  # of a tile for many rows: two thirds of an H200's multiprocessors
_MULTIPROCESSORS = 132  # of an H200
GROUP = 8  # tiles of rows whose programs follow each other, so that they read the same weights while those are near

_SHARED_BYTES = 200 * 1024  # for tiles on their way; results take some of the rest of Hopper's 227 KiB


def block_t_of(count: int) -> int:
    """Columns of the matrix instruction that so many rows of x fill.

    >>> block_t_of(1), block_t_of(20), block_t_of(65)
    (16, 32, 64)
    """
    return min(64, max(16, next_power_of_2(count)))


def candidates(count: int, itemsize: int, *, swiglu: bool = False) -> tuple[Tile, ...]:
    """Tiles for so many rows of x that fit into Hopper's shared memory, the first being the default."""

    def size(tile: Tile) -> int:
        rows = (2 if swiglu else 1) * tile.block_n + block_t_of(count)
        return rows * tile.block_k * tile.num_stages * itemsize

    return tuple(tile for tile in CANDIDATES[itemsize] if size(tile) <= _SHARED_BYTES)


def tile_of(
    count: int,
    width: int,
    inner: int,
    itemsize: int,
    *,
    planes: int = 1,
    doubled: bool = False,
    compute_capability: int = 90,
) -> Tile:
    """The tile that is launched unasked, by shapes; of many rows one that leaves few multiprocessors without a program.

    width: columns of the result.   planes: into which it is cut, each with programs of its own.
    doubled: whether a program has two accumulators, for a gate or for a sum of parts.
    """
    if itemsize != 2:
        return CANDIDATES[itemsize][0]
    if compute_capability not in MODERN:
        return MODEST
    if count >= MANY_ROWS:
        largest, square, low = (cdiv(width, tile.block_n) * cdiv(count, tile.block_t or count) for tile in MANY)
        # Two turns of the largest are worth four of its halves.
        as_fast = 2 * cdiv(largest, _MULTIPROCESSORS) <= cdiv(square, _MULTIPROCESSORS)
        if not doubled and largest >= _LEAST_PROGRAMS and as_fast:
            return MANY[0]
        for programs, tile in ((square, MANY[1]), (low, MANY[2])):
            if programs >= _LEAST_PROGRAMS:
                return tile
    if count > MOST_FEW_ROWS:
        return _tile_of_some_rows(count, width, planes, doubled)
    return _tile_of_few_rows(count, width, inner, planes, doubled)


def _tile_of_some_rows(count: int, width: int, planes: int, doubled: bool) -> Tile:
    """More than one tile of rows of x, and too few for squares."""
    for tile in (MANY[1], SOME_GATED) if doubled else (SOME,):
        programs = cdiv(width, tile.block_n) * cdiv(count, tile.block_t or count) * (1 if doubled else planes)
        if programs >= _LEAST_PROGRAMS:
            return tile
    return SOME_LOW


def _tile_of_few_rows(count: int, width: int, inner: int, planes: int, doubled: bool) -> Tile:
    """By timing each of them at 1, 8, 32 and 64 rows of fourteen matrices (docs/log.md, 2026-11-30)."""
    usual, fewest = CANDIDATES[2][0], count <= _FEWEST_ROWS
    if doubled:
        return WIDE_GATED if fewest and cdiv(width, WIDE_GATED.block_n) >= _LEAST_PROGRAMS else usual
    if width >= _TALL:
        return WIDE if block_t_of(count) >= 32 else usual
    part = part_of(inner, planes, _PART)
    is_long = planes == 1 or part > _LONG_PART
    if part_of(inner, planes, FEWEST.block_k) == part:  # or they would be other parts
        if fewest:
            return FEWEST_LONG if is_long else FEWEST
        if planes > 1 and cdiv(width, usual.block_n) * planes <= _FEW_PROGRAMS:
            return NARROW
    return LONG if is_long else usual


def part_of(inner: int, planes: int, block_k: int) -> int:
    """Columns of the inside that a plane takes, the last ones perhaps fewer; by the matrix, for any usual tile.

    >>> part_of(4096, 2, 64), part_of(1000, 3, 64), part_of(1000, 3, 128), part_of(1000, 3, 256)
    (2048, 384, 384, 512)
    """
    step = max(_PART, block_k)
    return cdiv(cdiv(inner, planes), step) * step


def split_choices(inner: int) -> tuple[int, ...]:
    """Numbers of parts worth timing, each of a few iterations at least.

    >>> split_choices(1024), split_choices(8192)
    ((1, 2, 4), (1, 2, 4, 8, 16))
    """
    powers = (1 << power for power in range(MOST_SPLITS.bit_length()))
    return tuple(splits for splits in powers if splits == 1 or inner // splits >= _LEAST_INNER // 2)


def splits_of(outer: int, inner: int) -> int:
    """Parts into which the inside of a matrix `[outer, inner]` is best cut: a power of two, whatever the batch.

    >>> splits_of(4096, 4096), splits_of(2048, 8192), splits_of(28672, 4096)
    (2, 4, 1)
    """
    wanted = max(1, _PROGRAMS // cdiv(outer, 64))
    wanted = 1 << (wanted.bit_length() - 1)
    return max(1, min(wanted, _USUAL_SPLITS, 1 << max(0, (inner // _LEAST_INNER).bit_length() - 1)))
