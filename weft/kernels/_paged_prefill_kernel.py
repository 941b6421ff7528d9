"""The kernel of paged prefill: some rows of one request and one key head over all keys they see. Knows no launcher.

With SPLIT a row is cut as paged decode cuts a sequence that ends with it (`pieces.cut`): its running softmax is closed
where one of its splits ends, and the parts are merged in their order, so that it has the bits of that decode in fixed
order. Rows of one tile may have splits of different sizes: what is closed is chosen row by row.
"""

from weft.kernels._jit import jit, tl
from weft.kernels.pieces import (
    blocks_of,
    cut,
    mean_of,
    merge_step,
    no_weight,
    part_of,
    scored,
    slots_of,
    softmax_step,
    weigh,
    weight_of,
)


@jit
def _tiles(
    query,
    asking,
    span,
    maximum,
    total,
    attended,
    merged_maximum,
    merged_total,
    merged,
    begin,
    end,
    oldest,
    length,
    pool_keys,
    pool_values,
    table,
    scale,
    soft_cap,
    window,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take the tiles of keys `begin : end` in. Unless MASKED every row sees every key of them."""
    column = tl.arange(0, BLOCK_D)[None, :]
    ahead = blocks_of(table, begin, oldest, length, P, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED:
            valid = (keys < length) & (keys >= oldest)
        else:
            valid = keys >= 0
        place = slots_of(ahead, start, P, BLOCK_N)[:, None] * STRIDE + column
        ahead = blocks_of(table, start + BLOCK_N, oldest, length, P, BLOCK_N)
        mask = (column < D) & valid[:, None]
        key = tl.load(pool_keys + place, mask=mask, other=0.0)
        scores = scored(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, soft_cap, SOFT_CAP)
        if MASKED:
            shown = valid[None, :] & (keys[None, :] <= asking[:, None])
            if WINDOW:
                shown &= keys[None, :] > asking[:, None] - window
            scores = tl.where(shown, scores, float("-inf"))
        weights, factor, maximum = softmax_step(scores, maximum)
        value = tl.load(pool_values + place, mask=mask, other=0.0)
        total = weigh(total, weights, factor, value.dtype, SPLIT > 0, PRECISION)
        attended = tl.dot(weights.to(value.dtype), value, acc=attended * factor[:, None], input_precision=PRECISION)
        if SPLIT > 0:  # noqa: SIM102  # a constant, which decides what is compiled
            if (start + BLOCK_N) % SPLIT == 0:
                closed = ((start + BLOCK_N) % span == 0) & (asking >= start + BLOCK_N)  # the last part stays open
                part, log_sum = part_of(attended, maximum, weight_of(total, True))
                with_it, highest, weight = merge_step(part, log_sum, merged, merged_maximum, merged_total)
                merged = tl.where(closed[:, None], with_it, merged)
                merged_maximum = tl.where(closed, highest, merged_maximum)
                merged_total = tl.where(closed, weight, merged_total)
                maximum = tl.where(closed, float("-inf"), maximum)
                total = tl.where(closed[:, None], 0.0, total)
                attended = tl.where(closed[:, None], 0.0, attended)
    return maximum, total, attended, merged_maximum, merged_total, merged


@jit
def paged_prefill_kernel(
    query,
    query_stride,
    pool_keys,
    pool_values,
    tables,
    table_stride,
    lengths,
    query_starts,
    batch,
    out,
    scale,
    soft_cap,
    window,
    H_Q: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group: tl.constexpr = H_Q // H_KV
    head_tiles: tl.constexpr = (group + HEADS - 1) // HEADS
    tokens: tl.constexpr = BLOCK_M // HEADS
    kv_head, head_tile = tl.program_id(0) // head_tiles, tl.program_id(0) % head_tiles
    # Late tiles see most keys, so they start first.
    ticket = tl.num_programs(1) - 1 - tl.program_id(1)

    # Request b holds the tickets from `query_starts[b] // tokens + b` on: one more than it could need.
    request, above = ticket * 0, ticket * 0 + batch
    while above - request > 1:
        middle = (request + above) // 2
        if tl.load(query_starts + middle).to(tl.int32) // tokens + middle <= ticket:
            request = middle
        else:
            above = middle
    first = tl.load(query_starts + request).to(tl.int32)
    count = tl.load(query_starts + request + 1).to(tl.int32) - first
    offset = (ticket - first // tokens - request) * tokens
    if offset >= count:
        return
    if SKIP_SINGLE and count == 1:
        return

    length = tl.load(lengths + request).to(tl.int32)
    line = tl.arange(0, BLOCK_M)
    token = offset + line // HEADS
    in_group = head_tile * HEADS + line % HEADS
    exists = (line < tokens * HEADS) & (token < count) & (in_group < group)
    column = tl.arange(0, BLOCK_D)
    head = kv_head * group + in_group
    mask = exists[:, None] & (column < D)[None, :]
    row = (first + token).to(tl.int64)
    queries = tl.load(query + row[:, None] * query_stride + head[:, None] * D + column[None, :], mask=mask, other=0.0)

    asking = length - count + token
    earliest = length - count + offset
    oldest = earliest * 0
    if WINDOW:
        oldest = tl.maximum(earliest + 1 - window, 0)
    end = tl.minimum(earliest + tokens, length)
    begin = oldest // BLOCK_N * BLOCK_N
    clear = begin if WINDOW else tl.maximum(earliest + 1, 0) // BLOCK_N * BLOCK_N

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = no_weight(BLOCK_M, SPLIT > 0)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    span, merged_maximum, merged_total, merged = asking, maximum, tl.zeros([BLOCK_M], tl.float32), attended
    if SPLIT > 0:
        span, _, _, _ = cut(asking + 1, window, WINDOW, SPLIT, MOST_SPLITS)
    keys, values = pool_keys + kv_head * D, pool_values + kv_head * D
    table = tables + request.to(tl.int64) * table_stride
    if not WINDOW:
        maximum, total, attended, merged_maximum, merged_total, merged = _tiles(
            queries, asking, span, maximum, total, attended, merged_maximum, merged_total, merged,
            begin, clear, oldest, length, keys, values, table, scale, soft_cap, window,
            H_KV * D, D, P, BLOCK_N, BLOCK_D, SPLIT, False, False, SOFT_CAP, PRECISION,
        )  # fmt: skip
    maximum, total, attended, merged_maximum, merged_total, merged = _tiles(
        queries, asking, span, maximum, total, attended, merged_maximum, merged_total, merged,
        clear, end, oldest, length, keys, values, table, scale, soft_cap, window,
        H_KV * D, D, P, BLOCK_N, BLOCK_D, SPLIT, True, WINDOW, SOFT_CAP, PRECISION,
    )  # fmt: skip
    if SPLIT > 0:
        part, log_sum = part_of(attended, maximum, weight_of(total, True))
        attended, _, merged_total = merge_step(part, log_sum, merged, merged_maximum, merged_total)
    else:
        merged_total = total
    place = (row[:, None] * H_Q + head[:, None]) * D + column[None, :]
    tl.store(out + place, mean_of(attended, merged_total).to(out.dtype.element_ty), mask=mask)
