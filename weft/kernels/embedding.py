"""Rows of an embedding by token id, for training: the lookup, and the gradient of the rows without atomic additions.

Backward sorts the token ids, and one program sums what belongs to one row of the vocabulary, in float32, in the order
in which the tokens stand, and rounds once. So the gradient is the same bits in every run; rows that no token names, as
those that pad a vocabulary, get zeros.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from weft.errors import KernelError
from weft.kernels._arguments import check_floats, debugging
from weft.kernels._jit import HAS_TRITON, cdiv, jit, next_power_of_2, runs_on, tl
from weft.kernels.specialisation import Specialisation

MOST_COLUMNS = 1024  # of a row that one program takes
_ROWS = 8  # loaded before the first of them is added


def reference(weight: Float[Tensor, "V E"], token_ids: Int[Tensor, "T_total"]) -> Float[Tensor, "T_total E"]:
    """The same in plain torch, whose backward may add in any order."""
    return functional.embedding(token_ids, weight)


@jit
def _lookup_kernel(weight, stride, token_ids, out, vocab_size, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(token_ids + row).to(tl.int64)
    there = tl.where((token >= 0) & (token < vocab_size), width, 0)  # columns of such a row
    values = tl.load(weight + token * stride + column, mask=column < there, other=float("nan"))
    tl.store(out + row * width + column, values, mask=inside)


@jit
def _sum_kernel(gradient, stride, order, starts, out, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    end = tl.load(starts + token + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(tl.load(starts + token), end, ROWS):
        for index in tl.static_range(ROWS):
            place = begin + index
            row = tl.load(order + place, mask=end > place, other=0)
            there = tl.where(end > place, width, 0)
            total += tl.load(gradient + row * stride + column, mask=column < there, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def embedding(weight: Float[Tensor, "V E"], token_ids: Int[Tensor, "T_total"]) -> Float[Tensor, "T_total E"]:
    """Row `token_ids[i]` of `weight` as row i, differentiable in `weight`.

    Whether an id lies in the vocabulary is checked on a CPU, and on a GPU, where that waits for the device, only with
    WEFT_DEBUG=1 in the environment; unchecked, such an id gives NaN and passes no gradient on. Where no kernel can run
    (a CPU), plain torch does the same. Raises: KernelError naming what does not fit.
    """
    if weight.ndim != 2 or not weight.is_floating_point() or (weight.numel() and weight.stride(1) != 1):
        raise KernelError(f"weight is {weight.dtype} {tuple(weight.shape)}", hint="floats [V, E] with dense rows")
    if token_ids.ndim != 1 or token_ids.dtype not in (torch.int32, torch.int64):
        raise KernelError(f"token_ids is {token_ids.dtype} {tuple(token_ids.shape)}", hint="int32 or int64 [T_total]")
    if token_ids.device != weight.device:
        raise KernelError(f"token_ids lies on {token_ids.device}, weight on {weight.device}")
    if token_ids.device.type != "cuda" or debugging():
        _check_range(token_ids, weight.shape[0])
    if not runs_on(weight.device):
        return reference(weight, token_ids)
    check_floats("weight", weight)
    return _embedding(weight, token_ids)


def _check_range(token_ids: Tensor, vocab_size: int) -> None:
    """Raise KernelError for the first id that no row of the vocabulary has."""
    outside = ((token_ids < 0) | (token_ids >= vocab_size)).nonzero()
    if outside.numel():
        place = int(outside[0])
        raise KernelError(f"token_ids[{place}] is {int(token_ids[place])}", hint=f"0 to {vocab_size - 1}")


def _block(width: int) -> int:
    return min(MOST_COLUMNS, next_power_of_2(width))


def _warps(block: int) -> int:
    return max(1, block // 256)


@torch.library.custom_op("weft::embedding", mutates_args=())
def _embedding(weight: Tensor, token_ids: Tensor) -> Tensor:
    count, (vocab_size, width) = len(token_ids), weight.shape
    out = torch.empty((count, width), dtype=weight.dtype, device=weight.device)
    if count and width:
        block = _block(width)
        _lookup_kernel[(count, cdiv(width, block))](
            weight,
            weight.stride(0),
            token_ids.contiguous(),
            out,
            vocab_size,
            width,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out


@_embedding.register_fake
def _(weight: Tensor, token_ids: Tensor) -> Tensor:
    return weight.new_empty(token_ids.shape[0], weight.shape[1])


@torch.library.custom_op("weft::embedding_backward", mutates_args=())
def _embedding_backward(gradient: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    width = gradient.shape[1]
    out = torch.empty((vocab_size, width), dtype=gradient.dtype, device=gradient.device)
    if vocab_size and width:
        ids, order = token_ids.sort(stable=True)
        tokens = torch.arange(vocab_size + 1, dtype=ids.dtype, device=ids.device)
        rows = gradient if gradient.stride(1) == 1 else gradient.contiguous()
        block = _block(width)
        _sum_kernel[(vocab_size, cdiv(width, block))](
            rows,
            rows.stride(0),
            order,
            torch.searchsorted(ids, tokens),
            out,
            width,
            BLOCK=block,
            ROWS=_ROWS,
            num_warps=_warps(block),
        )
    return out


@_embedding_backward.register_fake
def _(gradient: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    return gradient.new_empty(vocab_size, gradient.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    weight, token_ids = inputs
    ctx.save_for_backward(token_ids)
    ctx.vocab_size = weight.shape[0]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (token_ids,) = ctx.saved_tensors
    return _embedding_backward(gradient, token_ids, ctx.vocab_size), None


_embedding.register_autograd(_backward, setup_context=_keep)


def _form(name: str, kernel: Any, dtype: str, width: int) -> Specialisation:
    types = {
        **dict.fromkeys(("weight", "gradient", "out"), f"*{dtype}"),
        **dict.fromkeys(("token_ids", "order", "starts"), "*i64"),
    }
    constants = {"BLOCK": _block(width), **({"ROWS": _ROWS} if name == "sum" else {})}
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names if argument not in constants}
    return Specialisation(
        name=f"{name} {dtype} E={width}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        num_warps=_warps(_block(width)),
        num_stages=3,
        aligned=frozenset(signature) - {"vocab_size"},
    )


SPECIALISATIONS = tuple(
    _form(name, kernel, dtype, width)
    for dtype, width in (("bf16", 576), ("bf16", 4096), ("fp32", 4096))
    for name, kernel in (("lookup", _lookup_kernel), ("sum", _sum_kernel))
    if HAS_TRITON
)
