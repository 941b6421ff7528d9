"""What both backward kernels start from, per query row. Knows no tensor: `flash_attention.py` checks and launches."""

from weft.kernels._flash_forward import VARYING, load_rows, place, span
from weft.kernels._jit import jit, tl


@jit
def start_of(batch, head, base, stride_batch, stride_token, stride_head):
    """Where the numbers of a head's first GROUP rows stand; those of the next ones follow GROUP tokens further."""
    return batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head + base.to(tl.int64) * stride_token


@jit
def lanes(stride_token, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Where the levels of BLOCK rows stand, from the first; their slopes stand GROUP further."""
    row = tl.arange(0, BLOCK)
    return row // GROUP * (GROUP * stride_token) + row % GROUP


@jit
def held(count, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Which of BLOCK rows have numbers: those of every group in which one of `count` rows stands."""
    return tl.arange(0, BLOCK) // GROUP * GROUP < count


@jit(do_not_specialize=VARYING)
def flash_delta(
    output,
    output_gradient,
    lse,
    lse_gradient,
    numbers,
    query_starts,
    inverse_scale,
    num_queries,
    num_blocks,
    num_items,
    num_heads,
    width,
    output_stride_batch,
    output_stride_token,
    output_stride_head,
    gradient_stride_batch,
    gradient_stride_token,
    gradient_stride_head,
    lse_stride_batch,
    lse_stride_head,
    numbers_stride_batch,
    numbers_stride_token,
    numbers_stride_head,
    RAGGED: tl.constexpr,
    HAS_LSE_GRADIENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """What scores and their slopes start from, per row, so that a product can begin with it and need no subtraction:
    `level` = -lse / scale, -inf for rows that see no key and for rows that do not exist, whose weights are then 0;
    `slope` = -(sum of output times its gradient, less the gradient of lse).

    `numbers` holds, for each GROUP rows of a head, GROUP levels and then as many slopes, where the first of these rows
    stands in the gradient of the queries: nothing is there until the kernel that makes it has read its own.
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
    numbers += start_of(batch, head, base + start, numbers_stride_batch, numbers_stride_token, numbers_stride_head)
    numbers += lanes(numbers_stride_token, BLOCK_M, GROUP)
    kept = held(num_queries - start, BLOCK_M, GROUP)
    tl.store(numbers, tl.where(logarithm == float("-inf"), logarithm, -logarithm * inverse_scale), mask=kept)
    tl.store(numbers + GROUP, -sums, mask=kept)
