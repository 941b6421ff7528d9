"""The kernel of paged decode: a tile of query heads of one key head over some splits of one request. Knows no launcher.

WHOLE takes all splits of a request and merges them in registers; else a program takes a run of them and stores parts.
With SHARES the runs are those that `_paged_decode_shares` gives to long requests: the launch that is not WHOLE makes
their parts, and the one that is takes the short requests and merges the parts of the long ones.

With NEW a key comes that no launch has written, and opens its split from registers. In FIXED order it is written first
and is then a key like all others, with the bits that it would have if it had lain there; and weights are summed by a
product (`pieces.weigh`), in the one order that every tile has.
"""

from weft.kernels._jit import jit, tl
from weft.kernels._paged_decode_shares import cuts_of, is_long, rank_of, run_of, share_of
from weft.kernels.pieces import (
    blocks_of,
    cut,
    mean_of,
    merge_step,
    no_weight,
    part_of,
    rotated,
    scored,
    slots_of,
    softmax_step,
    weigh,
    weight_of,
)

AT_ONCE = 4  # parts that are loaded before the first of them is merged


@jit
def _opened(last, new_maximum, new_total, new_value, like):
    """What a split begins with: nothing, or the new key where it is the last one."""
    maximum = tl.where(last, new_maximum, float("-inf"))
    total = tl.where(last, new_total, 0.0)
    return maximum, total, tl.where(last, new_value, 0.0) + tl.zeros_like(like)


@jit
def _merged(parts, log_sums, own, exists, inside, first, count, D: tl.constexpr, AT_ONCE: tl.constexpr):
    """What parts `first` to `count` of some heads sum to, and its weight; from place `own` on, `[R]`."""
    column = tl.arange(0, inside.shape[0])
    maximum = tl.full(own.shape, float("-inf"), tl.float32)
    total = tl.zeros(own.shape, tl.float32)
    merged = tl.zeros([own.shape[0], inside.shape[0]], tl.float32)
    for start in range(first, count, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            number = start + index + tl.zeros(own.shape, tl.int32)
            there = exists & (number < count)
            place = own + number
            log_sum = tl.load(log_sums + place, mask=there, other=float("-inf"))
            mask = there[:, None] & inside[None, :]
            part = tl.load(parts + place[:, None] * D + column[None, :], mask=mask, other=0.0)
            merged, maximum, total = merge_step(part, log_sum, merged, maximum, total)
    return merged, total


@jit
def _end_with_the_other_launch(last_request):
    """One program waits, so that whatever runs after this launch also runs after the one that makes parts."""
    if last_request & (tl.program_id(0) == 0):
        tl.extra.cuda.gdc_wait()


@jit
def paged_decode_kernel(
    rows,
    row_stride,
    positions,
    slots,
    cos,
    sin,
    query_norm,
    key_norm,
    query_epsilon,
    key_epsilon,
    pool_keys,
    pool_values,
    tables,
    table_stride,
    lengths,
    query_starts,
    batch,
    parts,
    log_sums,
    num_parts,
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
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    NEW: tl.constexpr,
    FIXED: tl.constexpr,
    NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ONE_EACH: tl.constexpr,
    WHOLE: tl.constexpr,
    SHARES: tl.constexpr,
    REQUESTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
    FOLLOWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if EARLY and not FOLLOWS:  # a launch that follows the one with the parts has everything that came before that one
        tl.extra.cuda.gdc_wait()
    group: tl.constexpr = H_Q // H_KV
    head_tiles: tl.constexpr = (group + BLOCK_M - 1) // BLOCK_M
    kv_head, head_tile = tl.program_id(0) // head_tiles, tl.program_id(0) % head_tiles
    request = tl.program_id(2).to(tl.int64)
    rank = request  # where a request's parts lie
    run, which = 0, tl.program_id(1)
    if SHARES > 0:
        if EARLY and not WHOLE:
            tl.extra.cuda.gdc_launch_dependents()  # the short requests need nothing of this launch
        spans, counts = cuts_of(lengths, query_starts, batch, window, WINDOW, SPLIT, MOST_SPLITS, ONE_EACH, REQUESTS)
        run = run_of(spans, counts, SPLIT, SHARES)
        if not WHOLE:
            found, which = share_of(which, spans, counts, run)
            if found < 0:
                return
            request, rank = found.to(tl.int64), rank_of(found, spans, counts, run).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    token = request
    if not ONE_EACH:
        token = tl.load(query_starts + request).to(tl.int64)
        if tl.load(query_starts + request + 1) - token != 1:
            if WHOLE and SHARES > 0 and EARLY:
                _end_with_the_other_launch(request == batch - 1)
            return
    span, oldest, first, count = cut(length, window, WINDOW, SPLIT, MOST_SPLITS)
    each = tl.cdiv(run, span) if SHARES > 0 else tl.cdiv(count - first, tl.num_programs(1))
    end = count
    if not WHOLE:
        first += which * each
        end = tl.minimum(first + each, count)
        if SHARES == 0 and first >= end:
            return

    in_group = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = in_group < group
    head = kv_head * group + in_group
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    shown = exists[:, None] & inside[None, :]
    if WHOLE and SHARES > 0:  # noqa: SIM102  # a constant, which decides what is compiled
        if is_long(span, count - first, run):
            long_ahead = rank_of(request, spans, counts, run)
            if EARLY:
                tl.extra.cuda.gdc_wait()
            own = (long_ahead.to(tl.int64) * H_Q + head) * num_parts
            mean, weight = _merged(parts, log_sums, own, exists, inside, first, count, D, AT_ONCE)
            place = (token * H_Q + head[:, None]) * D + column[None, :]
            tl.store(out + place, mean_of(mean, weight).to(out.dtype.element_ty), mask=shown)
            return
    dtype = pool_keys.dtype.element_ty
    row = rows + token * row_stride
    seen = length
    if NEW:
        position = tl.load(positions + token).to(tl.int64)
        cos += position * (D // 2)
        sin += position * (D // 2)
        queries = row + head[:, None] * D
        query = rotated(queries, exists[:, None], query_norm, query_epsilon, cos, sin, D, BLOCK_D, NORM).to(dtype)
        if not FIXED:
            seen = length - 1  # the last key is this launch's own
    else:
        query = tl.load(row + head[:, None] * D + column[None, :], mask=shown, other=0.0)

    table = tables + request * table_stride
    stride: tl.constexpr = H_KV * D
    only = tl.zeros([1], tl.int32)[:, None]
    new_maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    new_total = no_weight(BLOCK_M, FIXED)
    new_value = tl.zeros([1, BLOCK_D], tl.float32)
    if NEW:  # noqa: SIM102  # a constant, which decides what is compiled
        if (end == count) & (length > 0):
            keys_row = row + (H_Q + kv_head) * D + only
            key = rotated(keys_row, only == 0, key_norm, key_epsilon, cos, sin, D, BLOCK_D, NORM).to(dtype)
            value = tl.load(row + (H_Q + H_KV + kv_head) * D + only + column[None, :], mask=inside[None, :], other=0.0)
            slot = tl.load(slots + token).to(tl.int64)
            place = slot * stride + kv_head * D + column[None, :]
            if FIXED or head_tile == 0:  # who reads a key back has written it: the same bits, if others do too
                written = inside[None, :] & (place >= 0)  # slot -1 lies before the pool
                tl.store(pool_keys + place, key, mask=written)
                tl.store(pool_values + place, value, mask=written)
            if FIXED:
                tl.debug_barrier()  # a thread loads what others of its program have stored
            else:
                product = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
                new_maximum = scored(product, scale, soft_cap, SOFT_CAP)
                new_total = tl.full([BLOCK_M], 1.0, tl.float32)
                new_value = value.to(tl.float32)

    merged_maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    merged_total = tl.zeros([BLOCK_M], tl.float32)
    merged = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    split = first
    maximum, total, attended = _opened(split == count - 1, new_maximum, new_total, new_value, merged)
    low = tl.maximum(first * span, oldest)
    high = tl.minimum(end * span, seen)
    begin = low // BLOCK_N * BLOCK_N
    ahead = blocks_of(table, begin, low, high, P, BLOCK_N)
    for start in range(begin, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = (keys >= low) & (keys < high)
        place = slots_of(ahead, start, P, BLOCK_N)[:, None] * stride + (kv_head * D + column[None, :])
        ahead = blocks_of(table, start + BLOCK_N, low, high, P, BLOCK_N)
        mask = valid[:, None] & inside[None, :]
        key = tl.load(pool_keys + place, mask=mask, other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = tl.where(valid[None, :], scored(products, scale, soft_cap, SOFT_CAP), float("-inf"))
        weights, factor, maximum = softmax_step(scores, maximum)
        value = tl.load(pool_values + place, mask=mask, other=0.0)
        total = weigh(total, weights, factor, dtype, FIXED, PRECISION)
        attended = tl.dot(weights.to(dtype), value, acc=attended * factor[:, None], input_precision=PRECISION)
        if (start + BLOCK_N == (split + 1) * span) & (split + 1 < end):
            part, log_sum = part_of(attended, maximum, weight_of(total, FIXED))
            if WHOLE:
                merged, merged_maximum, merged_total = merge_step(part, log_sum, merged, merged_maximum, merged_total)
            else:
                place_of_part = (rank * H_Q + head) * num_parts + split
                tl.store(parts + place_of_part[:, None] * D + column[None, :], part, mask=shown)
                tl.store(log_sums + place_of_part, log_sum, mask=exists)
            split += 1
            maximum, total, attended = _opened(split == count - 1, new_maximum, new_total, new_value, attended)
    part, log_sum = part_of(attended, maximum, weight_of(total, FIXED))
    if WHOLE:
        merged, _, merged_total = merge_step(part, log_sum, merged, merged_maximum, merged_total)
        if EARLY and SHARES == 0:
            tl.extra.cuda.gdc_launch_dependents()
        place = (token * H_Q + head[:, None]) * D + column[None, :]
        tl.store(out + place, mean_of(merged, merged_total).to(out.dtype.element_ty), mask=shown)
        if SHARES > 0 and EARLY:
            _end_with_the_other_launch(request == batch - 1)
    else:
        if EARLY and SHARES == 0:
            tl.extra.cuda.gdc_launch_dependents()
        place_of_part = (rank * H_Q + head) * num_parts + split
        tl.store(parts + place_of_part[:, None] * D + column[None, :], part, mask=shown)
        tl.store(log_sums + place_of_part, log_sum, mask=exists)
