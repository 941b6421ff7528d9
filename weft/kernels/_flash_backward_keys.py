"""Gradients of keys and values. Knows no tensor: `flash_attention.py` checks and launches.

No program adds to what another has written, so gradients are the same bits in every run: this kernel walks along the
queries and keeps the gradients of a block of keys and values, over all query heads that share them; the one in
`_flash_backward_queries.py` walks along the keys. That is seven products where atomic additions would need five.
Source: Dao, "FlashAttention-2" (2023), algorithm 2.
"""

from weft.kernels._flash_delta import held, lanes, start_of
from weft.kernels._flash_forward import VARYING, load_rows, place, span, store_rows
from weft.kernels._jit import jit, tl


@jit
def _along_queries(
    key_sums,
    value_sums,
    keys,
    values,
    query,
    output_gradient,
    numbers,
    low,
    high,
    diagonal,  # key `column` of the block is seen by row `row` if column - row <= diagonal
    scale,
    width,
    group,
    numbers_stride_token: tl.constexpr,
    numbers_stride_head,
    tensor_batch,
    first_head,
    query_base,
    num_queries,
    query_stride_batch,
    query_stride_token,
    query_stride_head,
    gradient_stride_batch,
    gradient_stride_token,
    gradient_stride_head,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    MASKED: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """Add what query rows `low` to `high` of `group` heads give to the gradients of a block of keys and values.

    Scores stand transposed, [keys, queries], so that weights go into their product as they come out of the last.
    One loop over heads and rows: a loop in a loop would spill registers, and would stop loading ahead at each head. So
    would a step between tokens that is not compiled in: a thread reads the numbers of sixteen rows.
    """
    num_blocks = tl.cdiv(high - low, BLOCK_M)
    for step in tl.range(0, group * num_blocks):
        member = step // num_blocks
        head = first_head + member
        first = tl.multiple_of(low + (step - member * num_blocks) * BLOCK_M, BLOCK_M)
        own = numbers + (member * numbers_stride_head + first * numbers_stride_token)
        own += lanes(numbers_stride_token, BLOCK_M, GROUP)
        kept = held(high - first, BLOCK_M, GROUP)
        queries = load_rows(
            query, tensor_batch, head, query_base, first, num_queries, query_stride_batch, query_stride_token,
            query_stride_head, width, BLOCK_M, BLOCK_D, DESCRIPTOR, True, CLEAN,
        )  # fmt: skip
        row = tl.arange(0, BLOCK_M)
        start_level = tl.load(own, mask=kept, other=float("-inf"))
        scores = tl.broadcast_to(start_level[None, :], (BLOCK_N, BLOCK_M))
        scores = tl.dot(keys, tl.trans(queries), scores, input_precision="ieee")
        if MASKED:
            column = tl.arange(0, BLOCK_N)
            visible = (column - (first + diagonal))[:, None] <= row[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        weights = tl.exp2(scores * scale)
        gradients = load_rows(
            output_gradient, tensor_batch, head, query_base, first, num_queries, gradient_stride_batch,
            gradient_stride_token, gradient_stride_head, width, BLOCK_M, BLOCK_D, DESCRIPTOR, True, CLEAN,
        )  # fmt: skip
        value_sums = tl.dot(weights.to(gradients.dtype), gradients, value_sums, input_precision="ieee")
        start_slope = tl.load(own + GROUP, mask=kept, other=0.0)
        slopes = tl.broadcast_to(start_slope[None, :], (BLOCK_N, BLOCK_M))
        slopes = tl.dot(values, tl.trans(gradients), slopes, input_precision="ieee")
        slopes = weights * slopes
        key_sums = tl.dot(slopes.to(queries.dtype), queries, key_sums, input_precision="ieee")
    return key_sums, value_sums


@jit(do_not_specialize=VARYING)
def flash_backward_keys(
    query,
    key,
    value,
    output_gradient,
    key_gradient,
    value_gradient,
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
    num_kv_heads,
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
    numbers_stride_token: tl.constexpr,
    numbers_stride_head,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """One program: gradients of BLOCK_N keys and values of one kv head, from all query heads of its group."""
    block, item = place(num_blocks, num_items, section, False)
    batch = item // num_kv_heads
    kv_head = item % num_kv_heads
    query_base, num_queries = span(query_starts, batch, num_queries, RAGGED)
    key_base, num_keys = span(key_starts, batch, num_keys, RAGGED)
    start = block * BLOCK_N
    if start >= num_keys:
        return
    tensor_batch = batch * 0 if RAGGED else batch
    keys = load_rows(
        key, tensor_batch, kv_head, key_base, start, num_keys, key_stride_batch, key_stride_token, key_stride_head,
        width, BLOCK_N, BLOCK_D, DESCRIPTOR, True, False,
    )  # fmt: skip
    values = load_rows(
        value, tensor_batch, kv_head, key_base, start, num_keys, value_stride_batch, value_stride_token,
        value_stride_head, width, BLOCK_N, BLOCK_D, DESCRIPTOR, True, False,
    )  # fmt: skip
    key_sums = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_sums = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Rows from `low` on see some of these keys, from `clear` on all of them. What a descriptor loads behind the last
    # row of a packed sequence belongs to the next one, and a weight of zero does not silence a NaN.
    diagonal = num_keys - num_queries - start
    DIRTY: tl.constexpr = RAGGED and DESCRIPTOR
    end = num_queries // BLOCK_M * BLOCK_M if DIRTY else num_queries
    if CAUSAL:
        low = tl.minimum(tl.maximum(-diagonal, 0) // BLOCK_M * BLOCK_M, end)
        clear = tl.minimum(tl.cdiv(tl.maximum(BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M, end)
    else:
        low = 0
        clear = 0
    first_head = kv_head * group
    first_row = query_base + block * 0  # a tensor, where all sequences start at 0 too
    numbers += start_of(batch, first_head, first_row, numbers_stride_batch, numbers_stride_token, numbers_stride_head)
    if CAUSAL:
        key_sums, value_sums = _along_queries(
            key_sums, value_sums, keys, values, query, output_gradient, numbers, low, clear, diagonal, scale, width,
            group, numbers_stride_token, numbers_stride_head, tensor_batch, first_head, query_base, num_queries,
            query_stride_batch, query_stride_token, query_stride_head, gradient_stride_batch, gradient_stride_token,
            gradient_stride_head, BLOCK_M, BLOCK_N, BLOCK_D, GROUP, DESCRIPTOR, True, False,
        )  # fmt: skip
    key_sums, value_sums = _along_queries(
        key_sums, value_sums, keys, values, query, output_gradient, numbers, clear, end, diagonal, scale, width,
        group, numbers_stride_token, numbers_stride_head, tensor_batch, first_head, query_base, num_queries,
        query_stride_batch, query_stride_token, query_stride_head, gradient_stride_batch, gradient_stride_token,
        gradient_stride_head, BLOCK_M, BLOCK_N, BLOCK_D, GROUP, DESCRIPTOR, False, False,
    )  # fmt: skip
    if DIRTY:
        key_sums, value_sums = _along_queries(
            key_sums, value_sums, keys, values, query, output_gradient, numbers, end, num_queries, diagonal, scale,
            width, group, numbers_stride_token, numbers_stride_head, tensor_batch, first_head, query_base, num_queries,
            query_stride_batch, query_stride_token, query_stride_head, gradient_stride_batch, gradient_stride_token,
            gradient_stride_head, BLOCK_M, BLOCK_N, BLOCK_D, GROUP, DESCRIPTOR, CAUSAL, True,
        )  # fmt: skip
    store_rows(
        key_gradient, key_sums * score_scale, tensor_batch, kv_head, key_base, start, num_keys, result_stride_batch,
        result_stride_token, result_stride_head, width, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    store_rows(
        value_gradient, value_sums, tensor_batch, kv_head, key_base, start, num_keys, result_stride_batch,
        result_stride_token, result_stride_head, width, BLOCK_N, BLOCK_D,
    )  # fmt: skip
