"""Rows times a matrix, made for the few dozen of a decode step: weights as the wide side of the matrix instruction.

Rows of weights fill the instruction's 64 rows and the batch its columns; tiles come through tensor descriptors, which
Hopper's copy engine fetches. Where a matrix has too few rows to keep the chip busy, its inside is split into parts,
whose float32 planes `add_norm` sums in their order: no atomics, and parts that follow from the matrix alone.

Any number of rows can be multiplied, with the same bits for a row: the columns of a tile do not depend on each other,
and a tensor core adds up a part one way whatever the tile (measured on an H200). With many rows the chip is busy
without planes, and a program sums the parts itself (`summed`), each from zero and in the order of `add_norm`.
Accumulated in float32 and rounded once; SwiGLU is taken of unrounded products, where the plain order rounds them.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from weft.errors import KernelError
from weft.kernels._arguments import check_count, check_device, check_floats, check_size
from weft.kernels._few_rows_tiles import (
    CANDIDATES,
    FEWEST,
    FEWEST_LONG,
    GROUP,
    LONG,
    MANY,
    MODEST,
    MOST_SPLITS,
    NARROW,
    SOME,
    SOME_GATED,
    SOME_LOW,
    WIDE,
    WIDE_GATED,
    Tile,
    block_t_of,
    candidates,
    part_of,
    tile_of,
)
from weft.kernels._jit import TensorDescriptor, capability, cdiv, early_launch, jit, tl
from weft.kernels.silu_multiply import silu
from weft.kernels.specialisation import Specialisation


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
        GROUP=0 if tile.block_t is None else GROUP,
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
            "GROUP": 0 if tile.block_t is None else GROUP,
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
