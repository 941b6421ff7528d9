"""Attention over parts of the keys, merged into attention over all of them, in float32 and in the order of the parts.

A part is its weighted mean of values and the base-2 logarithm of what it was divided by; (0, -inf), a part that saw no
key, changes nothing. One program takes some columns of one head and its parts one after another, with the arithmetic
of `pieces.merge_step`: a program that made all parts of a head itself merges them in registers to the same bits.

On a GPU that can, the launch does not wait for the kernel that makes the parts to end; its programs do.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._arguments import check_count, check_device, check_floats, check_starts, debugging
from weft.kernels._jit import cdiv, jit, launches_early, next_power_of_2, tl
from weft.kernels.pieces import cut, mean_of, merge_step
from weft.kernels.specialisation import Specialisation

AT_ONCE = 16  # at most so many parts are loaded before the first of them is merged; changes no bit
BLOCK_C = 32  # columns: one a thread


def reference(
    parts: Float[Tensor, "splits *rows D"], log_sums: Float[Tensor, "splits *rows"]
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows"]]:
    """Parts of one attention, each over its own keys, as one: (0, -inf) says of a part that it saw none.

    log_sums: base 2, of the exponentials that each part was divided by.
    """
    highest = log_sums.amax(0)
    shift = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp2(log_sums - shift)
    total = weights.sum(0)
    merged = (parts * weights[..., None]).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    return merged, shift + torch.log2(total)


@jit
def _merge_parts_kernel(
    parts,
    log_sums,
    num_parts,
    lengths,
    query_starts,
    out,
    window,
    H_Q: tl.constexpr,
    D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_EACH: tl.constexpr,
    EARLY: tl.constexpr,
):
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    length = tl.load(lengths + request).to(tl.int32)
    token = request
    if not ONE_EACH:
        token = tl.load(query_starts + request).to(tl.int64)
        if tl.load(query_starts + request + 1) - token != 1:
            return
    _, _, first, count = cut(length, window, WINDOW, SPLIT, MOST_SPLITS)
    if EARLY:  # the lengths were there before the parts were begun
        tl.extra.cuda.gdc_wait()
    start = (request * H_Q + head) * num_parts
    inside = (column < D)[None, :]
    only = tl.zeros([1], tl.int32)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, BLOCK_C], tl.float32)
    for group in range(first, count, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            part = group + index + only
            there = part < count
            log_sum = tl.load(log_sums + start + part, mask=there, other=float("-inf"))
            place = (start + part)[:, None] * D + column[None, :]
            values = tl.load(parts + place, mask=there[:, None] & inside, other=0.0)
            merged, maximum, total = merge_step(values, log_sum, merged, maximum, total)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    place = out + (token * H_Q + head) * D + only[:, None] + column[None, :]
    tl.store(place, mean_of(merged, total).to(out.dtype.element_ty), mask=inside)


def merge_parts(
    parts: Float[Tensor, "B H_q parts D"],
    log_sums: Float[Tensor, "B H_q parts"],
    sequence_lengths: Int[Tensor, "B"],
    query_starts: Int[Tensor, "B+1"],
    out: Float[Tensor, "T_total attended"],
    *,
    split: int,
    most_splits: int,
    window: int | None = None,
) -> None:
    """Write the row of `out` of every request that has one row in this step; parts of splits it lacks are not read.

    split, most_splits: how a sequence was cut (see `pieces.cut`).
    Raises: KernelError for shapes, dtypes and strides that do not fit; with WEFT_DEBUG=1 also for parts too few.
    """
    if parts.ndim != 4:
        raise KernelError(f"parts has shape {tuple(parts.shape)}, not [B, H_q, parts, D]")
    batch, num_query_heads, num_parts, head_dim = parts.shape
    if parts.dtype != torch.float32 or log_sums.dtype != torch.float32 or log_sums.shape != parts.shape[:3]:
        raise KernelError(f"parts are {parts.dtype} {tuple(parts.shape)}, log_sums {log_sums.dtype} {log_sums.shape}")
    if not (parts.is_contiguous() and log_sums.is_contiguous() and out.is_contiguous()):
        raise KernelError("parts, log_sums and out must be contiguous")
    if out.ndim != 2 or out.shape[1] != num_query_heads * head_dim:
        raise KernelError(f"out has shape {tuple(out.shape)}, not [T_total, {num_query_heads * head_dim}]")
    check_floats("out", out)
    for name, tensor, count in (
        ("sequence_lengths", sequence_lengths, batch),
        ("query_starts", query_starts, batch + 1),
    ):
        whole = tensor.dtype in (torch.int32, torch.int64)
        if not whole or tensor.shape != (count,) or not tensor.is_contiguous():
            raise KernelError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not contiguous integers [{count}]")
    beside = {"log_sums": log_sums, "out": out, "sequence_lengths": sequence_lengths, "query_starts": query_starts}
    check_device("parts", parts, others=beside)
    for name, value in (("split", split), ("most_splits", most_splits), ("window", 1 if window is None else window)):
        check_count(name, value)
    if debugging():
        check_starts("query_starts", query_starts, len(out))
        for request, length in enumerate(sequence_lengths.tolist()):
            used = cdiv(length, split * max(1, cdiv(length, split * most_splits)))
            if used > num_parts:
                raise KernelError(
                    f"sequence_lengths[{request}]={length} has {used} parts, and parts room for {num_parts}"
                )
    if batch == 0:
        return
    _merge_parts_kernel[(cdiv(head_dim, BLOCK_C), num_query_heads, batch)](
        parts,
        log_sums,
        num_parts,
        sequence_lengths,
        query_starts,
        out,
        window or 0,
        H_Q=num_query_heads,
        D=head_dim,
        AT_ONCE=min(AT_ONCE, next_power_of_2(num_parts)),
        BLOCK_C=BLOCK_C,
        SPLIT=split,
        MOST_SPLITS=most_splits,
        WINDOW=window is not None,
        ONE_EACH=len(out) == batch,
        EARLY=launches_early(parts.device),
        num_warps=1,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if launches_early(parts.device) else {}),
    )


def _specialisation(dtype: str, head_dim: int, *, early: bool) -> Specialisation:
    return Specialisation(
        name=f"{dtype}-D{head_dim}" + ("-early" if early else ""),
        kernel=_merge_parts_kernel,
        signature={
            "parts": "*fp32",
            "log_sums": "*fp32",
            "num_parts": "i32",
            "lengths": "*i64",
            "query_starts": "*i64",
            "out": f"*{dtype}",
            "window": "i32",
        },
        constants={
            "H_Q": 32,
            "D": head_dim,
            "AT_ONCE": AT_ONCE,
            "BLOCK_C": BLOCK_C,
            "SPLIT": 256,
            "MOST_SPLITS": 64,
            "WINDOW": True,
            "ONE_EACH": False,
            "EARLY": early,
        },
        num_warps=1,
        num_stages=3,
        aligned=frozenset({"parts", "log_sums", "lengths", "query_starts", "out"}),
        capabilities=(90, 100) if early else (80, 89),
        waits=early,
        reads_ahead=early,  # lengths, which were there before the parts were begun
        options={"enable_fp_fusion": False},
    )


SPECIALISATIONS = (
    *(_specialisation("bf16", head_dim, early=True) for head_dim in (64, 80, 128)),
    _specialisation("bf16", 128, early=False),
    _specialisation("fp32", 128, early=True),
)
