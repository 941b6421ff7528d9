"""A few rows times a matrix in one pass over its weights, for steps of one or a few tokens: bound by memory alone.

A program takes a few rows of the matrix whole into its registers, so that norm, bias, SwiGLU and residual fit in around
the product and nothing is reduced across programs; then it goes through the rows of x one by one. On a GPU that can,
the launch does not wait for the kernel ahead to end: parameters are on their way by then, and only x and the residual
are waited for. So weight, norm and bias must not be results of the kernel directly ahead.

Everything is float32 until one rounding at the end; the plain order also rounds the norm, the product and what SwiGLU
is made of. The scale of a norm is applied to the finished sums. Another order of summation than a matrix instruction's:
an engine whose bits must not depend on the batch leaves it out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from weft.errors import KernelError
from weft.kernels._arguments import check_device, check_epsilon, check_floats, check_size
from weft.kernels._jit import cdiv, early_launch, jit, next_power_of_2, tl
from weft.kernels.silu_multiply import silu
from weft.kernels.specialisation import Specialisation

MOST_ROWS = 8
MOST_COLUMNS = 16384  # rows of the matrix are held in registers
_SET_BYTES = 16_384  # of rows of the matrix that a program takes, if four rows have them
_WARP_BYTES = 1024  # of each row in a warp


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm of the rows before they are multiplied."""

    weight: Float[Tensor, "K"]
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows of the result's width that a program computes (twice as many of the matrix for SwiGLU), and its warps."""

    block_n: int
    num_warps: int


def candidates(inner: int, itemsize: int, *, swiglu: bool) -> tuple[Tile, ...]:
    """Tiles worth timing for rows of so many columns and bytes each, the first being the default."""
    first = tile_of(inner, itemsize, swiglu=swiglu)
    row = _row_bytes(inner, itemsize, swiglu)
    rest = (Tile(block_n=block_n, num_warps=warps) for block_n in (1, 2, 4) for warps in (1, 2, 4, 8, 16))
    fit = (tile for tile in rest if tile != first and 32 <= tile.block_n * row // (32 * tile.num_warps) <= 128)
    return first, *fit


def tile_of(inner: int, itemsize: int, *, swiglu: bool) -> Tile:
    """By the length of a row alone, so that neither the batch nor the height of the matrix asks for another form.

    >>> tile_of(4096, 2, swiglu=False), tile_of(2048, 2, swiglu=True)
    (Tile(block_n=2, num_warps=8), Tile(block_n=2, num_warps=4))
    """
    row = itemsize * _padded(inner)
    block_n = max(1, min(2 if swiglu else 4, _SET_BYTES // row))
    return Tile(block_n=block_n, num_warps=max(4, min(16, row // _WARP_BYTES)))


def _row_bytes(inner: int, itemsize: int, swiglu: bool) -> int:
    """Of the matrix for one column of the result, padding included."""
    return (2 if swiglu else 1) * itemsize * _padded(inner)


def _padded(inner: int) -> int:
    """Columns that a program has room for."""
    return max(32, next_power_of_2(inner))


def refusal(count: int, inner: int) -> str | None:
    """Why so many rows of x, or rows of so many columns, are not taken; None if they are."""
    if count > MOST_ROWS:
        return f"{count} rows are too many, {MOST_ROWS} are the most"
    if inner > MOST_COLUMNS:
        return f"rows of {inner} columns do not fit into registers, {MOST_COLUMNS} are the most"
    return None


def reference(
    x: Float[Tensor, "T K"],
    weight: Float[Tensor, "N K"],
    *,
    norm: Norm | None = None,
    bias: Float[Tensor, "N"] | None = None,
    residual: Float[Tensor, "T N"] | None = None,
    swiglu: bool = False,
) -> Float[Tensor, "T out"]:
    """The same in plain torch, in HuggingFace's order of casts."""
    if norm is not None:
        wide = x if x.dtype == torch.float64 else x.float()
        x = norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)).to(x.dtype)
    product = functional.linear(x, weight, bias)
    if swiglu:
        gate, up = product.chunk(2, dim=-1)
        product = functional.silu(gate) * up
    return product if residual is None else residual + product


@jit
def _sums_in_threads(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """Of neighbours, which one thread holds: nothing is exchanged."""
    return tl.sum(tl.reshape(values, [ROWS, COLUMNS // PIECE, PIECE]), 2)


@jit(do_not_specialize=["count"])
def _gemv_kernel(
    x,
    x_stride,
    weight,
    norm,
    epsilon,
    bias,
    residual,
    residual_stride,
    out,
    count,
    width,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    ONE: tl.constexpr,
    EARLY: tl.constexpr,
):
    HALVES: tl.constexpr = 2 if SWIGLU else 1  # gates and what they gate lie side by side
    PIECE: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth  # what one load brings to a thread
    index = tl.arange(0, BLOCK_N * HALVES)
    row = tl.program_id(0) * BLOCK_N + index // HALVES
    exists = row < width
    row += index % HALVES * width
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    place = weight + row.to(tl.int64)[:, None] * K + column[None, :]
    weights = tl.load(place, mask=exists[:, None] & inside[None, :], other=0.0)
    scale, shift = weights, weights
    if NORM:
        scale = tl.load(norm + column, mask=inside, other=0.0)
    if BIAS:
        shift = tl.load(bias + row, mask=exists, other=0.0)
    target = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = target < width
    if EARLY:
        tl.extra.cuda.gdc_wait()
    last = 0 if ONE else count - 1
    for token in range(last + 1):
        added = tl.zeros([BLOCK_N], tl.float32)
        if RESIDUAL:
            added = tl.load(residual + token * residual_stride + target, mask=there, other=0.0).to(tl.float32)
        tokens = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        scaled = tokens * scale.to(tl.float32) if NORM else tokens
        sums = _sums_in_threads(scaled[None, :] * weights.to(tl.float32), BLOCK_N * HALVES, BLOCK_K, PIECE)
        if NORM:  # both sums in one reduction, which is mostly waiting
            squares = _sums_in_threads((tokens * tokens)[None, :], 1, BLOCK_K, PIECE)
            squares = tl.broadcast_to(squares, [BLOCK_N * HALVES, BLOCK_K // PIECE])
            both = tl.permute(tl.join(sums, squares), [0, 2, 1])
            both = tl.sum(tl.reshape(both, [2 * BLOCK_N * HALVES, BLOCK_K // PIECE]), 1)
            sums, squares = tl.split(tl.reshape(both, [BLOCK_N * HALVES, 2]))
            sums *= tl.div_rn(1.0, tl.sqrt_rn(squares / K + epsilon))
        else:
            sums = tl.sum(sums, 1)
        if BIAS:
            sums += shift.to(tl.float32)
        if SWIGLU:
            gate, up = tl.split(tl.reshape(sums, [BLOCK_N, 2]))
            sums = silu(gate) * up
        if RESIDUAL:
            sums += added
        if EARLY:  # noqa: SIM102 -- the outer one is decided when the kernel is compiled
            if token == last:
                tl.extra.cuda.gdc_launch_dependents()
        tl.store(out + token * width + target, sums.to(out.dtype.element_ty), mask=there)


def gemv(
    x: Float[Tensor, "T K"],
    weight: Float[Tensor, "N K"],
    *,
    norm: Norm | None = None,
    bias: Float[Tensor, "N"] | None = None,
    residual: Float[Tensor, "T out"] | None = None,
    swiglu: bool = False,
    tile: Tile | None = None,
) -> Float[Tensor, "T out"]:
    """`norm(x) @ weight.T + bias`, then `silu(first half) * second half` if `swiglu`, then `+ residual`.

    tile: force one of `candidates`.
    Raises: KernelError for what `refusal` names, and for shapes, dtypes and strides that do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise KernelError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: [T, K] and [N, K] are wanted"
        )
    check_floats("x", x)
    if x.stride(1) != 1:
        raise KernelError(f"x has stride {x.stride(1)} between neighbours of a row, not 1")
    count, inner = x.shape
    refused = refusal(count, inner)
    if refused is not None:
        raise KernelError(refused, hint="few_rows_gemm or torch's product")
    if swiglu and weight.shape[0] % 2:
        raise KernelError(f"weight has {weight.shape[0]} rows, which are no two halves")
    width = weight.shape[0] // 2 if swiglu else weight.shape[0]
    wanted = {
        "weight": (weight, tuple(weight.shape)),
        "bias": (bias, (weight.shape[0],)),
        "norm.weight": (None if norm is None else norm.weight, (inner,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and (tensor.shape != shape or tensor.dtype != x.dtype or not tensor.is_contiguous()):
            raise KernelError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not a contiguous {x.dtype} {shape}")
    if residual is not None and (
        residual.shape != (count, width) or residual.dtype != x.dtype or residual.stride(1) != 1
    ):
        raise KernelError(f"residual is {residual.dtype} {tuple(residual.shape)}, not {x.dtype} {(count, width)}")
    if norm is not None:
        check_epsilon("norm.epsilon", norm.epsilon)
    beside = {name: tensor for name, (tensor, _) in wanted.items()}
    check_device("x", x, others={**beside, "residual": residual})
    if inner == 0:
        raise KernelError(f"x has shape {tuple(x.shape)}: rows of no columns have no product")
    if tile is not None:
        check_size("tile.block_n", tile.block_n)
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    if count == 0 or width == 0:
        return out
    tile = tile or tile_of(inner, x.element_size(), swiglu=swiglu)
    _gemv_kernel[(cdiv(width, tile.block_n),)](
        x,
        x.stride(0),
        weight,
        x if norm is None else norm.weight,
        0.0 if norm is None else norm.epsilon,
        x if bias is None else bias,
        x if residual is None else residual,
        0 if residual is None else residual.stride(0),
        out,
        count,
        width,
        K=inner,
        BLOCK_N=tile.block_n,
        BLOCK_K=_padded(inner),
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SWIGLU=swiglu,
        ONE=count == 1,
        num_warps=tile.num_warps,
        num_stages=1,
        **early_launch(x.device),
    )
    return out


def _specialisation(
    dtype: str,
    inner: int,
    *,
    swiglu: bool = False,
    bias: bool = False,
    one: bool = True,
    early: bool = True,
    tile: Tile | None = None,
) -> Specialisation:
    default = tile_of(inner, 4 if dtype == "fp32" else 2, swiglu=swiglu)
    form = tile or default
    pointers = ("x", "weight", "norm", "bias", "residual", "out")
    integers = ("x_stride", "residual_stride", "count", "width")
    marks = {"swiglu": swiglu, "bias": bias, "one": one, "early": early}
    return Specialisation(
        name=f"{dtype}-K{inner}-n{form.block_n}w{form.num_warps}"
        + "".join(f"-{mark}" for mark in marks if marks[mark]),
        kernel=_gemv_kernel,
        signature={**dict.fromkeys(pointers, f"*{dtype}"), **dict.fromkeys(integers, "i32"), "epsilon": "fp32"},
        constants={
            "K": inner,
            "BLOCK_N": form.block_n,
            "BLOCK_K": _padded(inner),
            "NORM": True,
            "BIAS": bias,
            "RESIDUAL": not swiglu,
            "SWIGLU": swiglu,
            "ONE": one,
            "EARLY": early,
        },
        num_warps=form.num_warps,
        num_stages=1,
        aligned=frozenset({*pointers, "x_stride", "residual_stride", "width"}),
        capabilities=(90, 100) if early else (80, 89),
        waits=early,
        reads_ahead=True,
        forced=form != default,
    )


SPECIALISATIONS = (
    _specialisation("bf16", 4096),
    _specialisation("bf16", 4096, swiglu=True),
    _specialisation("bf16", 4096, one=False),
    _specialisation("bf16", 4096, swiglu=True, one=False),
    _specialisation("bf16", 576, bias=True),
    _specialisation("bf16", 2048, swiglu=True, bias=True),
    _specialisation("bf16", 14_336),
    _specialisation("bf16", MOST_COLUMNS, swiglu=True),
    _specialisation("fp32", 4096),
    _specialisation("fp32", MOST_COLUMNS),
    _specialisation("bf16", 4096, swiglu=True, early=False),
    *(
        _specialisation("bf16", inner, swiglu=swiglu, tile=tile)
        for inner, swiglu in ((2048, False), (4096, True), (14_336, False))
        for tile in candidates(inner, 2, swiglu=swiglu)[1:]
    ),
)
