"""A few rows times a matrix in one pass over its weights, for steps of one or a few tokens: bound by memory alone.

A program takes a few rows of the matrix whole, so that norm, bias, SwiGLU and residual fit in around the product and
nothing is reduced across programs. Everything is float32 until one rounding at the end; the plain order also rounds the
norm, the product and what SwiGLU is made of. The scale of a norm is applied to the finished sums.
Another order of summation than a matrix instruction's: an engine whose bits must not depend on the batch leaves it out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from weft.errors import KernelError
from weft.kernels._jit import cdiv, jit, next_power_of_2, runs_on, tl
from weft.kernels.silu_multiply import silu
from weft.kernels.specialisation import Specialisation

MOST_ROWS = 8
_PRODUCTS = 4096  # that a program holds at once: 32 a thread


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm of the rows before they are multiplied."""

    weight: Float[Tensor, "K"]
    epsilon: float


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
def _finished(sums, scales, bias, row, there, BIAS: tl.constexpr):
    sums *= scales[:, None]
    if BIAS:
        sums += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[None, :]
    return sums


@jit
def _kernel(
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
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < width
    token = tl.arange(0, ROWS)
    exists = token < count
    weights = weight + row.to(tl.int64)[None, :, None] * K
    gates = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < K
        mask = exists[:, None] & inside[None, :]
        tokens = tl.load(x + token[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            squares += tokens * tokens
            tokens *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        mask3 = there[None, :, None] & inside[None, None, :]
        columns = column[None, None, :]
        gates += tokens[:, None, :] * tl.load(weights + columns, mask=mask3, other=0.0).to(tl.float32)
        if SWIGLU:
            second = weight + (row.to(tl.int64) + width)[None, :, None] * K + columns
            ups += tokens[:, None, :] * tl.load(second, mask=mask3, other=0.0).to(tl.float32)
    scales = tl.full([ROWS], 1.0, tl.float32)
    if NORM:
        scales = tl.div_rn(scales, tl.sqrt_rn(tl.sum(squares, 1) / K + epsilon))
    result = _finished(tl.sum(gates, 2), scales, bias, row, there, BIAS)
    if SWIGLU:
        result = silu(result) * _finished(tl.sum(ups, 2), scales, bias, row + width, there, BIAS)
    mask = exists[:, None] & there[None, :]
    if RESIDUAL:
        place = residual + token[:, None] * residual_stride + row[None, :]
        result += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * width + row[None, :], result.to(out.dtype.element_ty), mask=mask)


def gemv(
    x: Float[Tensor, "T K"],
    weight: Float[Tensor, "N K"],
    *,
    norm: Norm | None = None,
    bias: Float[Tensor, "N"] | None = None,
    residual: Float[Tensor, "T out"] | None = None,
    swiglu: bool = False,
) -> Float[Tensor, "T out"]:
    """`norm(x) @ weight.T + bias`, then `silu(first half) * second half` if `swiglu`, then `+ residual`.

    Raises: KernelError for more than MOST_ROWS rows, and for shapes, dtypes and strides that do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.stride(1) != 1:
        raise KernelError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: [T, K] and [N, K] are wanted"
        )
    count, inner = x.shape
    if count > MOST_ROWS:
        raise KernelError(f"{count} rows are too many, {MOST_ROWS} are the most", hint="a matrix product is faster")
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
    if not runs_on(x.device):
        raise KernelError(f"x lies on {x.device}", hint="CUDA, or TRITON_INTERPRET=1 on a CPU")
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    if count == 0 or width == 0:
        return out
    rows, block_n, block_k = tile_of(count, inner, swiglu)
    _kernel[(cdiv(width, block_n),)](
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
        ROWS=rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SWIGLU=swiglu,
        num_warps=4,
    )
    return out


def tile_of(count: int, inner: int, swiglu: bool) -> tuple[int, int, int]:
    """Rows of x, rows of the matrix and columns that a program holds at once."""
    rows = next_power_of_2(count)
    block_k = min(1024, max(32, next_power_of_2(inner)))
    block_n = max(1, min(4, _PRODUCTS // (rows * block_k)) // (2 if swiglu else 1))
    return rows, block_n, min(block_k, max(128, _PRODUCTS // (rows * block_n)))


def _specialisation(dtype: str, count: int, inner: int, swiglu: bool) -> Specialisation:
    rows, block_n, block_k = tile_of(count, inner, swiglu)
    pointers = ("x", "weight", "norm", "bias", "residual", "out")
    integers = ("x_stride", "residual_stride", "count", "width")
    return Specialisation(
        name=f"{dtype}-T{count}-K{inner}" + ("-swiglu" if swiglu else ""),
        kernel=_kernel,
        signature={**dict.fromkeys(pointers, f"*{dtype}"), **dict.fromkeys(integers, "i32"), "epsilon": "fp32"},
        constants={
            "K": inner,
            "ROWS": rows,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "NORM": True,
            "BIAS": False,
            "RESIDUAL": not swiglu,
            "SWIGLU": swiglu,
        },
        num_warps=4,
        num_stages=3,
        aligned=frozenset({*pointers, "x_stride", "residual_stride", "width"}),
    )


SPECIALISATIONS = (
    _specialisation("bf16", 1, 4096, False),
    _specialisation("bf16", 1, 4096, True),
    _specialisation("bf16", 1, 576, False),
    _specialisation("bf16", 4, 2048, True),
    _specialisation("fp32", 8, 4096, False),
)
