"""Residual sum and RMSNorm of it in one pass over a row; the addend may be planes of a product split along its inside.

One program takes a whole row, so neither batch-mates nor the number of rows change a bit. The sum is rounded to the
stream's dtype and normalised as rounded, as in the plain order; planes are summed in their order in float32 and not
rounded before, and the product with the weight is rounded once, where HuggingFace rounds the normalised row first.

On a GPU that can, the launch does not wait for the kernel ahead to end; its programs do, all but their read of the
weight, which must not be a result of that kernel.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._arguments import check_device, check_epsilon, check_floats
from weft.kernels._jit import early_launch, jit, next_power_of_2, tl
from weft.kernels.specialisation import Specialisation

MOST_COLUMNS = 16384  # a row is held in registers


def reference(
    addend: Float[Tensor, "*planes T E"],
    residual: Float[Tensor, "T E"] | None,
    weight: Float[Tensor, "E"],
    epsilon: float,
) -> tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
    """The same in plain torch, in HuggingFace's order of casts: the sum, and its norm times the weight."""
    x = (addend.sum(0) if addend.ndim == 3 else addend).to(weight.dtype)
    total = x if residual is None else residual + x
    wide = total if total.dtype == torch.float64 else total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return total, weight * scaled.to(total.dtype)


@jit
def _add_norm_kernel(
    addend,
    plane_stride,
    addend_stride,
    residual,
    residual_stride,
    weight,
    epsilon,
    total,
    normed,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_E)
    inside = column < E
    scale = tl.load(weight + column, mask=inside, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(addend + row * addend_stride + column, mask=inside, other=0.0).to(tl.float32)
    for plane in tl.static_range(1, PLANES):
        x += tl.load(addend + plane * plane_stride + row * addend_stride + column, mask=inside, other=0.0)
    if RESIDUAL:
        x += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(total.dtype.element_ty)
    tl.store(total + row * E + column, rounded, mask=inside)
    x = rounded.to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) / E + epsilon))
    scaled = x * inverse * scale.to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(normed + row * E + column, scaled.to(normed.dtype.element_ty), mask=inside)


def add_norm(
    addend: Float[Tensor, "*planes T E"],
    residual: Float[Tensor, "T E"] | None,
    weight: Float[Tensor, "E"],
    epsilon: float,
) -> tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
    """`residual + addend`, the new residual stream, and its RMSNorm times `weight`, both in the weight's dtype.

    addend: rows in the weight's dtype, or float32 planes `[planes, T, E]` that are summed first.
    Raises: KernelError for shapes, dtypes and strides that do not fit.
    """
    if addend.ndim not in (2, 3) or (addend.ndim == 3 and len(addend) == 0):
        raise KernelError(f"addend has shape {tuple(addend.shape)}, not [T, E] or one plane [planes, T, E] at least")
    check_floats("weight", weight)
    check_epsilon("epsilon", epsilon)
    planes = addend.shape[0] if addend.ndim == 3 else 1
    count, columns = addend.shape[-2:]
    if weight.shape != (columns,) or not weight.is_contiguous():
        raise KernelError(f"weight has shape {tuple(weight.shape)}, not a contiguous [{columns}] as the rows ask for")
    if columns > MOST_COLUMNS:
        raise KernelError(f"rows of {columns} columns do not fit, {MOST_COLUMNS} are the most")
    wanted = torch.float32 if addend.ndim == 3 else weight.dtype
    if addend.dtype != wanted:
        raise KernelError(f"addend is {addend.dtype}, not {wanted}")
    if residual is not None and (residual.shape != (count, columns) or residual.dtype != weight.dtype):
        raise KernelError(f"residual is {residual.dtype} {tuple(residual.shape)}, not {weight.dtype} {count, columns}")
    if addend.stride(-1) != 1 or (residual is not None and residual.stride(-1) != 1):
        raise KernelError("neighbours of a row must lie side by side in addend and residual")
    check_device("addend", addend, others={"residual": residual, "weight": weight})
    total = torch.empty(count, columns, dtype=weight.dtype, device=addend.device)
    normed = torch.empty_like(total)
    if count and columns:
        _add_norm_kernel[(count,)](
            addend,
            addend.stride(0) if addend.ndim == 3 else 0,
            addend.stride(-2),
            total if residual is None else residual,
            0 if residual is None else residual.stride(0),
            weight,
            epsilon,
            total,
            normed,
            E=columns,
            BLOCK_E=next_power_of_2(columns),
            PLANES=planes,
            RESIDUAL=residual is not None,
            num_warps=_warps(columns),
            **early_launch(addend.device),
        )
    return total, normed


def _warps(columns: int) -> int:
    return min(16, max(1, next_power_of_2(columns) // 128))


def _specialisation(
    dtype: str, columns: int, planes: int, *, summed: bool = False, early: bool = True
) -> Specialisation:
    """summed: the one plane is a sum of others."""
    pointers = ("addend", "residual", "weight", "total", "normed")
    strides = ("plane_stride", "addend_stride", "residual_stride")
    return Specialisation(
        name=f"{dtype}-E{columns}-planes{planes}" + ("-summed" if summed else "") + ("-early" if early else ""),
        kernel=_add_norm_kernel,
        signature={
            **dict.fromkeys(pointers, f"*{dtype}"),
            **dict.fromkeys(strides, "i32"),
            "addend": "*fp32" if planes > 1 or summed else f"*{dtype}",
            "epsilon": "fp32",
        },
        constants={
            "E": columns,
            "BLOCK_E": next_power_of_2(columns),
            "PLANES": planes,
            "RESIDUAL": True,
            "EARLY": early,
        },
        num_warps=_warps(columns),
        num_stages=3,
        aligned=frozenset({*pointers, *strides}),
        capabilities=(90, 100) if early else (80, 89),
        waits=early,
        reads_ahead=True,
    )


SPECIALISATIONS = (
    _specialisation("bf16", 576, 1),
    _specialisation("bf16", 4096, 1),
    _specialisation("bf16", 4096, 1, summed=True),
    _specialisation("bf16", 4096, 4),
    _specialisation("bf16", 4096, 16),
    _specialisation("fp32", 16384, 1),
    _specialisation("bf16", 4096, 4, early=False),
)
