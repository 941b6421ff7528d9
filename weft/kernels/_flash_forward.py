"""The forward kernel of flash attention, and what both directions share: where a program works, how it loads rows.

Knows no tensor: `flash_attention.py` checks and launches. Source: Dao, "FlashAttention-2" (2023), algorithm 1; blocks
that need no mask run in a loop of their own, which is what makes causal attention cost half.
"""

from weft.kernels._jit import jit, tl

# Numbers that change from one batch to the next: a kernel is not compiled anew for those that 16 divides.
VARYING = ("num_queries", "num_keys", "num_blocks", "num_items", "section", "num_heads", "num_kv_heads", "group")


@jit
def place(num_blocks, num_items, section, LAST_FIRST: tl.constexpr):
    """Which block of which (batch, head) this program computes.

    Programs that run side by side work on `section` neighbouring heads, few enough for their keys and values to stay
    in the L2 cache; within a section every head's longest blocks come first, so that short ones fill the end.
    """
    program = tl.program_id(0)
    first = program // (num_blocks * section) * section
    width = tl.minimum(section, num_items - first)
    inside = program - first * num_blocks
    block = inside // width
    if LAST_FIRST:
        block = num_blocks - 1 - block
    return block, first + inside % width


@jit
def span(cumulative, batch, length, RAGGED: tl.constexpr):
    """First token and length of a sequence: from its running lengths, or the same for all."""
    first = 0
    if RAGGED:
        first = tl.load(cumulative + batch)
        length = tl.load(cumulative + batch + 1) - first
    return first, length


@jit
def load_rows(
    source,
    batch,
    head,
    base,  # first token of the sequence
    first,  # first row wanted, from there
    limit,  # rows of the sequence
    stride_batch,
    stride_token,
    stride_head,
    width,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    CHECKED: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """[BLOCK, BLOCK_D] of one head, zero beyond `width` columns.

    CHECKED: some rows may lie beyond `limit`; they are then zero, or, through a descriptor and without CLEAN, whatever
    the next sequence holds there: enough where such a row is dropped later, not where it is multiplied by zero.
    """
    if DESCRIPTOR:
        block = source.load([batch, head, base + first, 0]).reshape(BLOCK, BLOCK_D)
        if CHECKED and CLEAN:
            block = tl.where((first + tl.arange(0, BLOCK) < limit)[:, None], block, 0.0)
        return block
    else:  # a branch of its own: what follows a return is compiled too
        start = batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
        start += (base + first).to(tl.int64) * stride_token
        rows = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        pointers = source + start + (rows[:, None] * stride_token + columns[None, :])
        inside = (columns < width)[None, :]
        if CHECKED:
            inside = inside & (first + rows < limit)[:, None]
        return tl.load(pointers, mask=inside, other=0.0)


@jit
def store_rows(
    target,
    rows,
    batch,
    head,
    base,
    first,
    limit,
    stride_batch,
    stride_token,
    stride_head,
    width,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write [BLOCK, BLOCK_D] to one head, without the rows from `limit` on and the columns from `width` on."""
    start = batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    start += (base + first).to(tl.int64) * stride_token
    index = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    pointers = target + start + (index[:, None] * stride_token + columns[None, :])
    keep = (first + index < limit)[:, None] & (columns < width)[None, :]
    tl.store(pointers, rows.to(target.dtype.element_ty), mask=keep)


@jit
def _attend(
    output,
    top,
    total,
    query,
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
    """Take keys `low` to `high` into the running maximum (of scaled scores, base 2), sum and output of every row."""
    for first in tl.range(low, high, BLOCK_N):
        first = tl.multiple_of(first, BLOCK_N)
        keys = load_rows(
            key, tensor_batch, kv_head, key_base, first, num_keys, key_stride_batch, key_stride_token, key_stride_head,
            width, BLOCK_N, BLOCK_D, DESCRIPTOR, MASKED, False,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if MASKED:
            column = tl.arange(0, BLOCK_N)
            visible = (column < num_keys - first)[None, :]
            if CAUSAL:
                visible = visible & (column[None, :] <= (row + (shift - first))[:, None])
            scores = tl.where(visible, scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen no key yet keeps -inf, which must not be subtracted from itself.
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - anchor[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            anchor = new_top
            weights = tl.exp2(scores * scale - anchor[:, None])
        keep = tl.exp2(top - anchor)
        total = total * keep + tl.sum(weights, 1)
        output = output * keep[:, None]
        values = load_rows(
            value, tensor_batch, kv_head, key_base, first, num_keys, value_stride_batch, value_stride_token,
            value_stride_head, width, BLOCK_N, BLOCK_D, DESCRIPTOR, MASKED, RAGGED,
        )  # fmt: skip
        output = tl.dot(weights.to(values.dtype), values, output, input_precision="ieee")
        top = new_top
    return output, top, total


@jit(do_not_specialize=VARYING)
def flash_forward(
    query,
    key,
    value,
    output,
    lse,  # natural logarithm of every row's sum of exponentials, [B, H_q, N] or [1, H_q, T_total]
    query_starts,
    key_starts,
    scale,  # of the scores, times log2(e): exponentials are taken to base 2
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
    output_stride_batch,
    output_stride_token,
    output_stride_head,
    lse_stride_batch,
    lse_stride_head,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """One program: BLOCK_M rows of one query head against all keys that they see."""
    block, item = place(num_blocks, num_items, section, CAUSAL)
    batch = item // num_heads
    head = item % num_heads
    query_base, num_queries = span(query_starts, batch, num_queries, RAGGED)
    key_base, num_keys = span(key_starts, batch, num_keys, RAGGED)
    start = block * BLOCK_M
    if start >= num_queries:
        return
    tensor_batch = batch * 0 if RAGGED else batch
    kv_head = head // group
    rows = load_rows(
        query, tensor_batch, head, query_base, start, num_queries, query_stride_batch, query_stride_token,
        query_stride_head, width, BLOCK_M, BLOCK_D, DESCRIPTOR, True, False,
    )  # fmt: skip
    row = start + tl.arange(0, BLOCK_M)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The last query stands beside the last key: row i sees keys 0 to i + shift.
    shift = num_keys - num_queries
    if CAUSAL:
        high = tl.maximum(tl.minimum(start + BLOCK_M + shift, num_keys), 0)
        clear = tl.maximum(tl.minimum(start + shift + 1, num_keys), 0) // BLOCK_N * BLOCK_N
    else:
        high = num_keys
        clear = num_keys // BLOCK_N * BLOCK_N
    attended, top, total = _attend(
        attended, top, total, rows, key, value, 0, clear, row, shift, scale, width, tensor_batch, kv_head, key_base,
        num_keys, key_stride_batch, key_stride_token, key_stride_head, value_stride_batch, value_stride_token,
        value_stride_head, CAUSAL, RAGGED, BLOCK_N, BLOCK_D, DESCRIPTOR, False,
    )  # fmt: skip
    attended, top, total = _attend(
        attended, top, total, rows, key, value, clear, high, row, shift, scale, width, tensor_batch, kv_head, key_base,
        num_keys, key_stride_batch, key_stride_token, key_stride_head, value_stride_batch, value_stride_token,
        value_stride_head, CAUSAL, RAGGED, BLOCK_N, BLOCK_D, DESCRIPTOR, True,
    )  # fmt: skip
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    attended = attended / total[:, None]
    store_rows(
        output, attended, tensor_batch, head, query_base, start, num_queries, output_stride_batch, output_stride_token,
        output_stride_head, width, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    logarithm = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    place_of_lse = tensor_batch.to(tl.int64) * lse_stride_batch + head.to(tl.int64) * lse_stride_head + query_base
    tl.store(lse + place_of_lse + row, logarithm, mask=row < num_queries)
