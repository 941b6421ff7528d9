"""Paged decode attention: one new token a request, keys and values read through block tables.

A sequence is cut into splits at absolute positions, whose size follows from the request's own length alone, and their
parts are merged in their order in float32 by their log-sum-exp, (0, -inf) being the part that saw no key. So neither
batch-mates nor the number of programs change a bit. The query heads of one key head share a tile of 16 rows.

Programs of one head share its splits, in runs, and a program's loads never pause where a split ends. If there are
enough heads for one program each (`programs_of`), it merges in registers what it made; else `merge_parts` does, with
the same arithmetic, so that both forms give the same bits. No product is fused with a sum but where it is written.

With `new` the rows are packed and not yet rotated: the program that owns a request's last split also rotates its key,
writes key and value to their slot, and takes them from registers, so one launch reads nothing that it writes.
Grid and scratch follow from shapes: programs of a head that find no split exit. After Flash-Decoding (Dao et al. 2023).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from weft.errors import KernelError
from weft.kernels import cache_write, paged_prefill
from weft.kernels._jit import cdiv, jit, launches_early, tl
from weft.kernels._paged_decode_tiles import (
    CANDIDATES,
    CROWDED,
    LONG,
    PROGRAMS,
    SPANNING,
    Tile,
    candidates,
    programs_of,
)
from weft.kernels.merge_parts import merge_parts
from weft.kernels.paged import (
    NewTokens,
    PagedKeys,
    Scoring,
    check_indices,
    check_keys,
    check_rotation,
    check_rows,
    check_scoring,
    padded_head_dim,
)
from weft.kernels.pieces import blocks_of, cut, mean_of, merge_step, part_of, rotated, scored, slots_of, softmax_step
from weft.kernels.specialisation import CAPABILITIES, Specialisation

BLOCK_M = 16  # the least a matrix instruction takes
SPLIT = 256  # keys; a multiple for a sequence of more than MOST_SPLITS of them
MOST_SPLITS = 64  # bounds the scratch, which every request and head needs


def reference(
    rows: Float[Tensor, "T_total width"],
    paged: PagedKeys,
    scoring: Scoring,
    *,
    num_query_heads: int,
    new: NewTokens | None = None,
) -> Float[Tensor, "T_total attended"]:
    """The same in plain torch: write if there is something new, then attend. Every request of the step, any count."""
    query = rows
    if new is not None:
        query = cache_write.reference(rows, new.positions, new.slots, new.rotation, paged.pool, paged.layer)
    return paged_prefill.reference(query.reshape(len(rows), num_query_heads, -1), paged, scoring)


@jit
def _opened(last, new_maximum, new_total, new_value, like):
    """What a split begins with: nothing, or the new key where it is the last one."""
    maximum = tl.where(last, new_maximum, float("-inf"))
    total = tl.where(last, new_total, 0.0)
    return maximum, total, tl.where(last, new_value, 0.0) + tl.zeros_like(like)


@jit
def _kernel(
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
    NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ONE_EACH: tl.constexpr,
    WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group: tl.constexpr = H_Q // H_KV
    head_tiles: tl.constexpr = (group + BLOCK_M - 1) // BLOCK_M
    kv_head, head_tile = tl.program_id(0) // head_tiles, tl.program_id(0) % head_tiles
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    token = request
    if not ONE_EACH:
        token = tl.load(query_starts + request).to(tl.int64)
        if tl.load(query_starts + request + 1) - token != 1:
            return
    span, oldest, first, count = cut(length, window, WINDOW, SPLIT, MOST_SPLITS)
    each = tl.cdiv(count - first, tl.num_programs(1))
    first += tl.program_id(1) * each
    end = tl.minimum(first + each, count)
    if not WHOLE and first >= end:
        return

    in_group = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = in_group < group
    head = kv_head * group + in_group
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    shown = exists[:, None] & inside[None, :]
    dtype = pool_keys.dtype.element_ty
    row = rows + token * row_stride
    seen = length
    if NEW:
        position = tl.load(positions + token).to(tl.int64)
        cos += position * (D // 2)
        sin += position * (D // 2)
        queries = row + head[:, None] * D
        query = rotated(queries, exists[:, None], query_norm, query_epsilon, cos, sin, D, BLOCK_D, NORM).to(dtype)
        seen = length - 1  # the last key is this launch's own
    else:
        query = tl.load(row + head[:, None] * D + column[None, :], mask=shown, other=0.0)

    table = tables + request * table_stride
    stride: tl.constexpr = H_KV * D
    only = tl.zeros([1], tl.int32)[:, None]
    new_maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    new_total = tl.zeros([BLOCK_M], tl.float32)
    new_value = tl.zeros([1, BLOCK_D], tl.float32)
    if NEW:  # noqa: SIM102  # a constant, which decides what is compiled
        if (end == count) & (length > 0):
            keys_row = row + (H_Q + kv_head) * D + only
            key = rotated(keys_row, only == 0, key_norm, key_epsilon, cos, sin, D, BLOCK_D, NORM).to(dtype)
            value = tl.load(row + (H_Q + H_KV + kv_head) * D + only + column[None, :], mask=inside[None, :], other=0.0)
            slot = tl.load(slots + token).to(tl.int64)
            place = slot * stride + kv_head * D + column[None, :]
            if head_tile == 0:
                written = inside[None, :] & (place >= 0)  # slot -1 lies before the pool
                tl.store(pool_keys + place, key, mask=written)
                tl.store(pool_values + place, value, mask=written)
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
        weights, factor, maximum, total = softmax_step(scores, maximum, total)
        value = tl.load(pool_values + place, mask=mask, other=0.0)
        attended = tl.dot(weights.to(dtype), value, acc=attended * factor[:, None], input_precision=PRECISION)
        if (start + BLOCK_N == (split + 1) * span) & (split + 1 < end):
            part, log_sum = part_of(attended, maximum, total)
            if WHOLE:
                merged, merged_maximum, merged_total = merge_step(part, log_sum, merged, merged_maximum, merged_total)
            else:
                place_of_part = (request * H_Q + head) * num_parts + split
                tl.store(parts + place_of_part[:, None] * D + column[None, :], part, mask=shown)
                tl.store(log_sums + place_of_part, log_sum, mask=exists)
            split += 1
            maximum, total, attended = _opened(split == count - 1, new_maximum, new_total, new_value, attended)
    part, log_sum = part_of(attended, maximum, total)
    if WHOLE:
        merged, _, merged_total = merge_step(part, log_sum, merged, merged_maximum, merged_total)
        place = (token * H_Q + head[:, None]) * D + column[None, :]
        tl.store(out + place, mean_of(merged, merged_total).to(out.dtype.element_ty), mask=shown)
    else:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        place_of_part = (request * H_Q + head) * num_parts + split
        tl.store(parts + place_of_part[:, None] * D + column[None, :], part, mask=shown)
        tl.store(log_sums + place_of_part, log_sum, mask=exists)


def paged_decode(
    rows: Float[Tensor, "T_total width"],
    paged: PagedKeys,
    scoring: Scoring,
    *,
    num_query_heads: int,
    new: NewTokens | None = None,
    out: Float[Tensor, "T_total attended"] | None = None,
    tile: Tile | None = None,
    split: int = SPLIT,
    programs: int = PROGRAMS,
    debug: bool | None = None,
) -> Float[Tensor, "T_total attended"]:
    """Attention of every request that has one row in this step; rows of the others stay as they are in `out`.

    rows: rotated queries `[T_total, H_q * D]`; with `new`, packed rows, and keys and values are written as well.
    tile, programs, split: force one of `candidates`, about how many programs, keys a split (which changes bits).
    Raises: KernelError for shapes, dtypes, strides and geometry that do not fit.
    """
    check_keys(paged, num_query_heads, debug=debug)
    check_scoring(scoring)
    block_size, num_kv_heads, head_dim = paged.pool.shape[3:]
    batch, columns = paged.block_tables.shape
    num_heads = num_query_heads if new is None else num_query_heads + 2 * num_kv_heads
    check_rows("rows", rows, num_heads * head_dim, paged.pool)
    if new is not None:
        check_indices("positions", new.positions, len(rows))
        check_indices("slots", new.slots, len(rows))
        check_rotation(new.rotation, paged.pool)
    num_parts = max(1, min(MOST_SPLITS, cdiv(columns * block_size, split)))
    head_tiles = num_kv_heads * cdiv(num_query_heads // num_kv_heads, BLOCK_M)
    sharing = programs_of(head_tiles * batch, num_parts, programs)
    rotation = None if new is None else new.rotation
    normed = rotation is not None and rotation.query_norm is not None
    crowded = new is None or normed or scoring.window is not None or scoring.soft_cap is not None
    shared = num_parts if sharing > 1 else 0
    tile = tile or candidates(rows.dtype, head_dim, block_size, num_shared_parts=shared, crowded=crowded)[0]
    if split % tile.block_n:
        raise KernelError(f"split={split} is no multiple of the tile's {tile.block_n} keys")
    if out is None:
        out = torch.empty(len(rows), num_query_heads * head_dim, dtype=rows.dtype, device=rows.device)
    elif not out.is_contiguous() or out.shape != (len(rows), num_query_heads * head_dim) or out.dtype != rows.dtype:
        raise KernelError(f"out is {out.dtype} {tuple(out.shape)} and must be contiguous like the result")
    if batch == 0:
        return out
    parts = log_sums = out
    if sharing > 1:
        parts = torch.empty(batch, num_query_heads, num_parts, head_dim, dtype=torch.float32, device=rows.device)
        log_sums = torch.empty(batch, num_query_heads, num_parts, dtype=torch.float32, device=rows.device)
    _kernel[(head_tiles, sharing, batch)](
        rows,
        rows.stride(0),
        rows if new is None else new.positions,
        rows if new is None else new.slots,
        rows if rotation is None else rotation.cos,
        rows if rotation is None else rotation.sin,
        rows if rotation is None or rotation.query_norm is None else rotation.query_norm,
        rows if rotation is None or rotation.key_norm is None else rotation.key_norm,
        0.0 if rotation is None else rotation.query_epsilon,
        0.0 if rotation is None else rotation.key_epsilon,
        paged.keys,
        paged.values,
        paged.block_tables,
        paged.block_tables.stride(0),
        paged.sequence_lengths,
        paged.query_starts,
        parts,
        log_sums,
        num_parts,
        out,
        scoring.scale,
        scoring.soft_cap or 0.0,
        scoring.window or 0,
        H_Q=num_query_heads,
        H_KV=num_kv_heads,
        D=head_dim,
        P=block_size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        SPLIT=split,
        MOST_SPLITS=MOST_SPLITS,
        NEW=new is not None,
        NORM=normed,
        WINDOW=scoring.window is not None,
        SOFT_CAP=scoring.soft_cap is not None,
        ONE_EACH=len(rows) == batch,
        WHOLE=sharing == 1,
        EARLY=sharing > 1 and launches_early(rows.device),
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    if sharing > 1:
        merge_parts(
            parts,
            log_sums,
            paged.sequence_lengths,
            paged.query_starts,
            out,
            split=split,
            most_splits=MOST_SPLITS,
            window=scoring.window,
        )
    return out


def _specialisation(
    dtype: str,
    head_dim: int,
    tile: Tile,
    *,
    block_size: int = 64,
    new: bool = True,
    masked: bool = False,
    whole: bool = False,
    early: bool = True,
    forced: bool = False,
) -> Specialisation:
    tensors = ("rows", "cos", "sin", "query_norm", "key_norm", "pool_keys", "pool_values", "out")
    integers = ("positions", "slots", "tables", "lengths", "query_starts")
    return Specialisation(
        name=f"{dtype}-D{head_dim}-P{block_size}-n{tile.block_n}w{tile.num_warps}s{tile.num_stages}"
        + ("-new" if new else "")
        + ("-masked" if masked else "")
        + ("-whole" if whole else "-early" if early else ""),
        kernel=_kernel,
        signature={
            **dict.fromkeys(tensors, f"*{dtype}"),
            **dict.fromkeys(integers, "*i64"),
            **dict.fromkeys(("row_stride", "table_stride", "num_parts", "window"), "i32"),
            **dict.fromkeys(("query_epsilon", "key_epsilon", "scale", "soft_cap"), "fp32"),
            "parts": "*fp32",
            "log_sums": "*fp32",
        },
        constants={
            "H_Q": 32,
            "H_KV": 8,
            "D": head_dim,
            "P": block_size,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": padded_head_dim(head_dim),
            "SPLIT": SPLIT,
            "MOST_SPLITS": MOST_SPLITS,
            "NEW": new,
            "NORM": masked,
            "WINDOW": masked,
            "SOFT_CAP": masked,
            "ONE_EACH": not masked,
            "WHOLE": whole,
            "EARLY": early,
            "PRECISION": "ieee",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset({*tensors, *integers, "row_stride", "parts", "log_sums"}),
        capabilities=(90,) if forced else (90, 100) if early and not whole else CAPABILITIES,
        options={"enable_fp_fusion": False},
        forced=forced,
    )


SPECIALISATIONS = (
    *(
        _specialisation("bf16", head_dim, tile, whole=whole, forced=tile is not tiles[0])
        for (size, head_dim), tiles in CANDIDATES.items()
        if size == 2
        for tile in tiles
        for whole in (True, False)
    ),
    _specialisation("bf16", 128, CANDIDATES[2, 128][0], early=False),
    _specialisation("bf16", 128, LONG[2, 128]),
    *(_specialisation("bf16", 128, SPANNING[2, 128], block_size=16, whole=whole) for whole in (False, True)),
    *(_specialisation("bf16", 128, CROWDED[2, 128], masked=True, whole=whole) for whole in (False, True)),
    _specialisation("bf16", 80, CANDIDATES[2, 128][0], whole=True),
    _specialisation("fp16", 128, CROWDED[2, 128], new=False),
    *(_specialisation("fp32", head_dim, CANDIDATES[4, head_dim][0], whole=True) for head_dim in (64, 128, 256)),
)
