"""Gradients of queries: walks along the keys. Knows no tensor: `flash_attention.py` checks and launches.

Source: Dao, "FlashAttention-2" (2023), algorithm 2; why it is a kernel of its own: `_flash_backward_keys.py`.
"""

from weft.kernels._flash_delta import held, lanes, start_of
from weft.kernels._flash_forward import VARYING, load_rows, place, span, store_rows
from weft.kernels._jit import jit, tl


@jit
def _along_keys(
    query_sums,
    queries,
    gradients,
    start_level,
    start_slope,
    key,
    value,
    low,
    high,
    row,
    shift,
    scale,
    width,
    tensor_batch,
    kv_head,
    key_base,
    num_keys,
    key_stride_batch,
    key_stride_token,
    key_stride_head,
    value_stride_batch,
    value_stride_token,
    value_stride_head,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add what keys `low` to `high` give to the gradients of a block of queries."""
    for first in tl.range(low, high, BLOCK_N):
        first = tl.multiple_of(first, BLOCK_N)
        keys = load_rows(
            key, tensor_batch, kv_head, key_base, first, num_keys, key_stride_batch, key_stride_token, key_stride_head,
            width, BLOCK_N, BLOCK_D, DESCRIPTOR, MASKED, RAGGED,
        )  # fmt: skip
        values = load_rows(
            value, tensor_batch, kv_head, key_base, first, num_keys, value_stride_batch, value_stride_token,
            value_stride_head, width, BLOCK_N, BLOCK_D, DESCRIPTOR, MASKED, RAGGED,
        )  # fmt: skip
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        slopes = tl.dot(gradients, tl.trans(values), input_precision="ieee")
        if MASKED:
            column = tl.arange(0, BLOCK_N)
            visible = (column < num_keys - first)[None, :]
            if CAUSAL:
                visible = visible & (column[None, :] <= (row + (shift - first))[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        weights = tl.exp2(scores * scale + start_level[:, None])
        slopes = weights * (slopes + start_slope[:, None])
        query_sums = tl.dot(slopes.to(keys.dtype), keys, query_sums, input_precision="ieee")
    return query_sums


@jit(do_not_specialize=VARYING)
def flash_backward_queries(
    query,
    key,
    value,
    output_gradient,
    query_gradient,
    numbers,
    query_starts,
    key_starts,
    scale,
    score_scale,
    num_queries,
    num_keys,
    num_blocks,
    num_items,
    section,
    num_heads,
    group,
    width,
    query_stride_batch,
    query_stride_token,
    query_stride_head,
    key_stride_batch,
    key_stride_token,
    key_stride_head,
    value_stride_batch,
    value_stride_token,
    value_stride_head,
    gradient_stride_batch,
    gradient_stride_token,
    gradient_stride_head,
    result_stride_batch,
    result_stride_token,
    result_stride_head,
    numbers_stride_batch,
    numbers_stride_token,
    numbers_stride_head,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """One program: the gradients of BLOCK_M queries of one head."""
    block, item = place(num_blocks, num_items, section, CAUSAL)
    batch = item // num_heads
    head = item % num_heads
    query_base, num_queries = span(query_starts, batch, num_queries, RAGGED)
    key_base, num_keys = span(key_starts, batch, num_keys, RAGGED)
    start = block * BLOCK_M
    if start >= num_queries:
        return
    numbers += start_of(
        batch, head, query_base + start, numbers_stride_batch, numbers_stride_token, numbers_stride_head
    )
    numbers += lanes(numbers_stride_token, BLOCK_M, GROUP)
    kept = held(num_queries - start, BLOCK_M, GROUP)
    start_level = tl.load(numbers, mask=kept, other=float("-inf")) * scale
    start_slope = tl.load(numbers + GROUP, mask=kept, other=0.0)
    tl.debug_barrier()  # these rows' gradients are written where their numbers stood
    tensor_batch = batch * 0 if RAGGED else batch
    kv_head = head // group
    queries = load_rows(
        query, tensor_batch, head, query_base, start, num_queries, query_stride_batch, query_stride_token,
        query_stride_head, width, BLOCK_M, BLOCK_D, DESCRIPTOR, True, False,
    )  # fmt: skip
    gradients = load_rows(
        output_gradient, tensor_batch, head, query_base, start, num_queries, gradient_stride_batch,
        gradient_stride_token, gradient_stride_head, width, BLOCK_M, BLOCK_D, DESCRIPTOR, True, False,
    )  # fmt: skip
    row = start + tl.arange(0, BLOCK_M)
    query_sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    shift = num_keys - num_queries
    if CAUSAL:
        high = tl.maximum(tl.minimum(start + BLOCK_M + shift, num_keys), 0)
        clear = tl.maximum(tl.minimum(start + shift + 1, num_keys), 0) // BLOCK_N * BLOCK_N
    else:
        high = num_keys
        clear = num_keys // BLOCK_N * BLOCK_N
    query_sums = _along_keys(
        query_sums, queries, gradients, start_level, start_slope, key, value, 0, clear, row, shift, scale, width,
        tensor_batch, kv_head, key_base, num_keys, key_stride_batch, key_stride_token, key_stride_head,
        value_stride_batch, value_stride_token, value_stride_head, CAUSAL, RAGGED, BLOCK_N, BLOCK_D, DESCRIPTOR, False,
    )  # fmt: skip
    query_sums = _along_keys(
        query_sums, queries, gradients, start_level, start_slope, key, value, clear, high, row, shift, scale, width,
        tensor_batch, kv_head, key_base, num_keys, key_stride_batch, key_stride_token, key_stride_head,
        value_stride_batch, value_stride_token, value_stride_head, CAUSAL, RAGGED, BLOCK_N, BLOCK_D, DESCRIPTOR, True,
    )  # fmt: skip
    store_rows(
        query_gradient, query_sums * score_scale, tensor_batch, head, query_base, start, num_queries,
        result_stride_batch, result_stride_token, result_stride_head, width, BLOCK_M, BLOCK_D,
    )  # fmt: skip
