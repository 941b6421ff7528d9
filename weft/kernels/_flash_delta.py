"""What both backward kernels start from, per query row. Knows no tensor: `flash_attention.py` checks and launches."""

from weft.kernels._flash_forward import VARYING, load_rows, place, span
from weft.kernels._jit import jit, tl


@jit
def padded(query_starts, batch, head, num_heads, length, RAGGED: tl.constexpr, PADDING: tl.constexpr):
    """Where a head's row 0 stands in the scratch that `flash_delta` writes: every sequence starts at a multiple of
    PADDING there and is followed by rows up to the next, so that no block of rows needs a mask.
    """
    start = 0
    item = batch * num_heads + head
    if RAGGED:
        start = (tl.load(query_starts + batch) + batch * PADDING) // PADDING * PADDING
        item = head
    return item.to(tl.int64) * length + start


@jit(do_not_specialize=VARYING)
def flash_delta(
    output,
    output_gradient,
    lse,
    lse_gradient,
    level,
    slope,
    query_starts,
    inverse_scale,
    num_queries,
    num_blocks,
    num_items,
    num_heads,
    width,
    scratch_length,
    output_stride_batch,
    output_stride_token,
    output_stride_head,
    gradient_stride_batch,
    gradient_stride_token,
    gradient_stride_head,
    lse_stride_batch,
    lse_stride_head,
    RAGGED: tl.constexpr,
    HAS_LSE_GRADIENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What scores and their slopes start from, per row, so that a product can begin with it and need no subtraction:
    `level` = -lse / scale, -inf for rows that see no key and for rows that do not exist, whose weights are then 0;
    `slope` = -(sum of output times its gradient, less the gradient of lse).
    """
    block, item = place(num_blocks, num_items, 1, False)
    batch = item // num_heads
    head = item % num_heads
    base, num_queries = span(query_starts, batch, num_queries, RAGGED)
    start = block * BLOCK_M
    if start >= num_queries:
        return
    tensor_batch = batch * 0 if RAGGED else batch
    rows = load_rows(
        output, tensor_batch, head, base, start, num_queries, output_stride_batch, output_stride_token,
        output_stride_head, width, BLOCK_M, BLOCK_D, False, True, False,
    )  # fmt: skip
    gradients = load_rows(
        output_gradient, tensor_batch, head, base, start, num_queries, gradient_stride_batch, gradient_stride_token,
        gradient_stride_head, width, BLOCK_M, BLOCK_D, False, True, False,
    )  # fmt: skip
    sums = tl.sum(rows.to(tl.float32) * gradients.to(tl.float32), 1)
    row = start + tl.arange(0, BLOCK_M)
    exists = row < num_queries
    offset = tensor_batch.to(tl.int64) * lse_stride_batch + head.to(tl.int64) * lse_stride_head + base
    if HAS_LSE_GRADIENT:
        sums -= tl.load(lse_gradient + offset + row, mask=exists, other=0.0)
    logarithm = tl.load(lse + offset + row, mask=exists, other=float("-inf"))
    target = padded(query_starts, batch, head, num_heads, scratch_length, RAGGED, BLOCK_M) + row
    tl.store(level + target, tl.where(logarithm == float("-inf"), logarithm, -logarithm * inverse_scale))
    tl.store(slope + target, -sums)
