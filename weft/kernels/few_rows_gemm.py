"""Rows times a matrix, made for the few dozen of a decode step: weights as the wide side of the matrix instruction.

Rows of weights fill the instruction's 64 rows and the batch its columns; tiles come through tensor descriptors, which
Hopper's copy engine fetches. Where a matrix has too few rows to keep the chip busy, its inside is split into parts,
whose float32 planes `add_norm` sums in their order: no atomics, and parts that follow from the matrix alone.

Any number of rows can be multiplied, with the same bits for a row: the columns of a tile do not depend on each other,
and a tensor core adds up a part one way whatever the tile (measured on an H200). With many rows the chip is busy
without planes, and a program sums the parts itself (`summed`), each from zero and in the order of `add_norm`.
Accumulated in float32 and rounded once; SwiGLU is taken of unrounded products, where the plain order rounds them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from weft.errors import KernelError
from weft.kernels._arguments import check_count, check_device, check_floats, check_size
from weft.kernels._jit import TensorDescriptor, capability, cdiv, early_launch, jit, next_power_of_2, tl
from weft.kernels.silu_multiply import silu
from weft.kernels.specialisation import Specialisation

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
_GROUP = 8  # tiles of rows whose programs follow each other, so that they read the same weights while those are near

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
    if compute_capability not in (90, 100):
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


def reference(x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"], *, swiglu: bool = False) -> Float[Tensor, "T out"]:
    """The same in plain torch, in HuggingFace's order of casts; planes sum to it."""
    product = functional.linear(x, weight)
    if not swiglu:
        return product
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate.contiguous()) * up


@jit
def _grouped(across, down, columns, rows, GROUP: tl.constexpr):
    """The tile of a program when GROUP tiles of rows go together: all of them for one tile of columns, then the next.

    across, down: the program's place in a grid of `columns` by `rows`, in which columns follow each other.
    """
    ticket = down * columns + across
    group = ticket // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    place = ticket - group * GROUP * columns
    return place // height, group * GROUP + place % height


@jit(do_not_specialize=["count", "inner", "part"])  # one form for every batch and every matrix
def _few_rows_gemm_kernel(
    x,
    weight,
    out,
    count,
    width,
    inner,
    part,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    SUMMED: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    across, plane, down = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if GROUP > 0:
        across, down = _grouped(across, down, tl.num_programs(0), tl.num_programs(2), GROUP)
    first, top = across * BLOCK_N, down * BLOCK_T
    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if SUMMED:
        sums = tl.full([BLOCK_N, BLOCK_T], -0.0, tl.float32)  # to which a first plane is added without a change
        for begin in range(0, inner, part):
            plane_sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for column in range(begin, tl.minimum(begin + part, inner), BLOCK_K):
                tokens = tl.trans(x.load([top, column]))
                plane_sums = tl.dot(weight.load([first, column]), tokens, acc=plane_sums, input_precision=PRECISION)
            sums += plane_sums
    else:
        for column in range(plane * part, tl.minimum(plane * part + part, inner), BLOCK_K):
            tokens = tl.trans(x.load([top, column]))
            sums = tl.dot(weight.load([first, column]), tokens, acc=sums, input_precision=PRECISION)
            if SWIGLU:
                ups = tl.dot(weight.load([width + first, column]), tokens, acc=ups, input_precision=PRECISION)
    if SWIGLU:
        sums = silu(sums) * ups
    row, token = first + tl.arange(0, BLOCK_N), top + tl.arange(0, BLOCK_T)
    place = (plane * count + token).to(tl.int64)[None, :] * width + row[:, None]
    mask = (row < width)[:, None] & (token < count)[None, :]
    result = sums.to(out.dtype.element_ty)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + place, result, mask=mask)


def few_rows_gemm(
    x: Float[Tensor, "T K"],
    weight: Float[Tensor, "N K"],
    *,
    swiglu: bool = False,
    splits: int | None = None,
    summed: bool = False,
    tile: Tile | None = None,
) -> Float[Tensor, "*planes T out"]:
    """`x @ weight.T` in x's dtype, with `swiglu` `silu(first half) * second half` of it; or its planes.

    splits: None for one finished result; else as many float32 planes `[splits, T, N]`, which sum to it.
    summed: the one plane `[1, T, N]` instead that `add_norm` would make of these, to the bit.
    tile: force one of `CANDIDATES` or `MANY`.
    Raises: KernelError for shapes, dtypes and strides that do not fit, for planes of a SwiGLU, and a sum of no planes.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise KernelError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: [T, K] and [N, K] are wanted"
        )
    if x.dtype != weight.dtype or x.dtype.itemsize not in CANDIDATES or not x.is_floating_point():
        raise KernelError(f"x is {x.dtype} and weight {weight.dtype}: both must be float32, float16 or bfloat16")
    check_floats("x", x)
    count, inner = x.shape
    if inner == 0:
        raise KernelError(f"x has shape {tuple(x.shape)}: rows of no columns have no product")
    if inner * x.element_size() % 16 or not weight.is_contiguous() or not x.is_contiguous():
        raise KernelError(f"x and weight must be contiguous, with rows of a multiple of 16 bytes, got K={inner}")
    if swiglu and (splits is not None or weight.shape[0] % 2):
        raise KernelError(f"SwiGLU of {weight.shape[0]} rows in splits={splits} parts: an even number in one is wanted")
    if splits is not None:
        check_count("splits", splits)
        if splits > MOST_SPLITS:
            raise KernelError(f"splits={splits} is outside 1..{MOST_SPLITS}")
    elif summed:
        raise KernelError("summed=True sums planes, and splits=None makes none")
    check_device("x", x, others={"weight": weight})
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.data_ptr() % 16:
            raise KernelError(f"{name} begins {tensor.data_ptr() % 16} bytes beside a multiple of 16")
    if tile is not None:
        check_size("tile.block_n", tile.block_n)
        check_size("tile.block_k", tile.block_k)
        check_size("tile.block_t", 1 if tile.block_t is None else tile.block_t)
    width = weight.shape[0] // 2 if swiglu else weight.shape[0]
    parts = splits or 1
    planes = 1 if summed else parts
    shape = (count, width) if splits is None else (planes, count, width)
    out = torch.empty(shape, dtype=x.dtype if splits is None else torch.float32, device=x.device)
    if count == 0 or width == 0:
        return out
    if tile is None:
        tile = tile_of(
            count,
            width,
            inner,
            x.element_size(),
            planes=parts,
            doubled=swiglu or summed,
            compute_capability=capability(x.device),
        )
    block_t = tile.block_t or block_t_of(count)
    _few_rows_gemm_kernel[(cdiv(width, tile.block_n), planes, cdiv(count, block_t))](
        TensorDescriptor.from_tensor(x, [block_t, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        out,
        count,
        width,
        inner,
        part_of(inner, parts, tile.block_k),
        BLOCK_T=block_t,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SWIGLU=swiglu,
        SUMMED=summed,
        GROUP=0 if tile.block_t is None else _GROUP,
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_launch(x.device),
    )
    return out


def _specialisation(
    dtype: str,
    block_t: int,
    tile: Tile,
    *,
    swiglu: bool = False,
    summed: bool = False,
    early: bool = True,
    forced: bool = False,
) -> Specialisation:
    marks = {"grouped": tile.block_t is not None, "swiglu": swiglu, "summed": summed, "early": early}
    size = f"n{tile.block_n}k{tile.block_k}w{tile.num_warps}s{tile.num_stages}"
    return Specialisation(
        name=f"{dtype}-T{block_t}-{size}" + "".join(f"-{mark}" for mark in marks if marks[mark]),
        kernel=_few_rows_gemm_kernel,
        signature={
            "x": f"tensordesc<{dtype}[{block_t},{tile.block_k}]>",
            "weight": f"tensordesc<{dtype}[{tile.block_n},{tile.block_k}]>",
            "out": f"*{dtype}" if swiglu else "*fp32",
            **dict.fromkeys(("count", "width", "inner", "part"), "i32"),
        },
        constants={
            "BLOCK_T": block_t,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "SWIGLU": swiglu,
            "SUMMED": summed,
            "GROUP": 0 if tile.block_t is None else _GROUP,
            "PRECISION": "ieee",
            "EARLY": early,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset({"out", "width"}),
        capabilities=(80, 89) if not early else (90,) if forced else (90, 100),
        waits=early,
        forced=forced,
    )


_DEFAULT = CANDIDATES[2][0]
# What `tile_of` takes for fewer rows than MANY_ROWS: tile, columns of x and whether there is a gate.
_USUAL_FORMS = (
    *((_DEFAULT, block_t, swiglu) for block_t in (16, 64) for swiglu in (False, True)),
    *((tile, block_t, False) for block_t in (16, 32) for tile in (FEWEST, FEWEST_LONG)),
    *((tile, 64, False) for tile in (LONG, NARROW)),
    *((WIDE, block_t, False) for block_t in (32, 64)),
    *((WIDE_GATED, block_t, True) for block_t in (16, 32)),
)
SPECIALISATIONS = (
    *(_specialisation("bf16", block_t, tile, swiglu=swiglu) for tile, block_t, swiglu in _USUAL_FORMS),
    *(_specialisation("bf16", tile.block_t or 64, tile, forced=True) for tile in MANY),
    *(_specialisation("bf16", tile.block_t or 64, tile, swiglu=True) for tile in MANY[1:]),
    *(_specialisation("bf16", tile.block_t or 64, tile, summed=True) for tile in MANY[1:]),
    *(_specialisation("bf16", tile.block_t or 64, tile) for tile in (SOME, SOME_LOW)),
    *(_specialisation("bf16", tile.block_t or 64, tile, swiglu=True) for tile in (SOME_GATED, SOME_LOW)),
    *(_specialisation("bf16", tile.block_t or 64, tile, summed=True, forced=True) for tile in (SOME_GATED, SOME_LOW)),
    *(_specialisation("bf16", block_t, _DEFAULT, summed=True, forced=True) for block_t in (16, 64)),
    _specialisation("fp32", 16, CANDIDATES[4][0], swiglu=True),
    _specialisation("bf16", 32, MODEST, swiglu=True, early=False),
    _specialisation("fp32", 16, CANDIDATES[4][0], swiglu=True, early=False),
    *(
        _specialisation("bf16", block_t, tile, swiglu=swiglu, forced=True)
        for tile in CANDIDATES[2]
        for block_t in (16, 64)
        for swiglu in (False, True)
        if tile in candidates(block_t, 2, swiglu=swiglu) and (tile, block_t, swiglu) not in _USUAL_FORMS
    ),
)
