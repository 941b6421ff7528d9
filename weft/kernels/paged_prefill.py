"""Ragged paged prefill: the new tokens of each request attend to all it has, read through block tables.

A program takes some rows of one request and one key head: tokens times the query heads that share it, so that a key is
loaded once for all of them. Which request a program belongs to is found by bisection; the grid is an upper bound that
follows from shapes. Tiles of keys lie at absolute positions, those that no row sees are skipped, and a tile that a row
sees nothing of changes none of its bits: neither chunks nor batch-mates show in a result.

Softmax in one pass as in FlashAttention-2 (Dao 2023). Products accumulate and softmax runs in float32; weights are
rounded to the inputs' dtype before they meet the values.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._arguments import check_device, check_size
from weft.kernels._jit import capability, cdiv, jit, tl
from weft.kernels.paged import PagedKeys, Scoring, check_keys, check_rows, check_scoring, padded_head_dim
from weft.kernels.pieces import blocks_of, scored, slots_of, softmax_step
from weft.kernels.specialisation import CAPABILITIES, Specialisation


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows of a program (tokens times heads), keys that one iteration takes, and how the compiler overlaps them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By bytes of an element and columns of a head, the first being the default; a device script times the rest.
CANDIDATES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (2, 64): (
        Tile(block_m=128, block_n=64, num_warps=4, num_stages=3),
        Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
        Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
        Tile(block_m=128, block_n=128, num_warps=8, num_stages=3),
    ),
    (2, 128): (
        Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
        Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
        Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
        Tile(block_m=128, block_n=128, num_warps=8, num_stages=2),
    ),
    (2, 256): (Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),),
    (4, 64): (Tile(block_m=16, block_n=32, num_warps=4, num_stages=2),),
    (4, 128): (Tile(block_m=16, block_n=16, num_warps=4, num_stages=2),),
    (4, 256): (Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),),
}


# For GPUs without the warpgroup's matrix instruction, which need more registers, and down to 99 KiB of shared memory.
MODEST_CANDIDATES: dict[tuple[int, int], tuple[Tile, ...]] = {
    **CANDIDATES,
    (2, 64): (Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),),
    (2, 128): (Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),),
}


# A window and a cap take registers too, more than four warps have at this width.
_CROWDED = {(2, 64): Tile(block_m=128, block_n=64, num_warps=8, num_stages=3)}


def candidates(
    dtype: torch.dtype, head_dim: int, compute_capability: int, *, crowded: bool = False
) -> tuple[Tile, ...]:
    """Tiles that fit this dtype, head and GPU (90 is a Hopper), the default first; `crowded` by a window or a cap."""
    modern = compute_capability in (90, 100)
    shape = dtype.itemsize, max(64, padded_head_dim(head_dim))
    found = (CANDIDATES if modern else MODEST_CANDIDATES)[shape]
    return (_CROWDED[shape], *found) if crowded and modern and shape in _CROWDED else found


def reference(
    query: Float[Tensor, "T_total H_q D"], paged: PagedKeys, scoring: Scoring
) -> Float[Tensor, "T_total attended"]:
    """The same in plain torch, request by request, softmax in float32 at least."""
    block_size, num_kv_heads, head_dim = paged.pool.shape[3:]
    out = torch.zeros(query.shape[0], query.shape[1] * head_dim, dtype=query.dtype, device=query.device)
    starts = paged.query_starts.tolist()
    for request, length in enumerate(paged.sequence_lengths.tolist()):
        rows = query[starts[request] : starts[request + 1]]
        if len(rows) == 0 or length == 0:
            continue
        blocks = paged.block_tables[request, : cdiv(length, block_size)]
        keys, values = (part[blocks].flatten(0, 1)[:length] for part in (paged.keys, paged.values))
        repeats = query.shape[1] // num_kv_heads
        keys, values = (part.repeat_interleave(repeats, dim=1) for part in (keys, values))
        scores = torch.einsum("thd,shd->hts", rows, keys) * scoring.scale
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
        places = torch.arange(length, device=query.device)
        asking = torch.arange(length - len(rows), length, device=query.device)[:, None]
        hidden = places > asking
        if scoring.window is not None:
            hidden |= places <= asking - scoring.window
        wide = scores if scores.dtype == torch.float64 else scores.float()
        weights = wide.masked_fill(hidden, -torch.inf).softmax(dim=-1).masked_fill(hidden, 0.0).to(query.dtype)
        out[starts[request] : starts[request + 1]] = torch.einsum("hts,shd->thd", weights, values).flatten(1)
    return out


@jit
def _tiles(
    query,
    asking,
    maximum,
    total,
    attended,
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
        weights, factor, maximum, total = softmax_step(scores, maximum, total)
        value = tl.load(pool_values + place, mask=mask, other=0.0)
        attended = tl.dot(weights.to(value.dtype), value, acc=attended * factor[:, None], input_precision=PRECISION)
    return maximum, total, attended


@jit
def _paged_prefill_kernel(
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
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys, values = pool_keys + kv_head * D, pool_values + kv_head * D
    table = tables + request.to(tl.int64) * table_stride
    if not WINDOW:
        maximum, total, attended = _tiles(
            queries, asking, maximum, total, attended, begin, clear, oldest, length, keys, values, table,
            scale, soft_cap, window, H_KV * D, D, P, BLOCK_N, BLOCK_D, False, False, SOFT_CAP, PRECISION,
        )  # fmt: skip
    maximum, total, attended = _tiles(
        queries, asking, maximum, total, attended, clear, end, oldest, length, keys, values, table,
        scale, soft_cap, window, H_KV * D, D, P, BLOCK_N, BLOCK_D, True, WINDOW, SOFT_CAP, PRECISION,
    )  # fmt: skip
    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (row[:, None] * H_Q + head[:, None]) * D + column[None, :]
    tl.store(out + place, attended.to(out.dtype.element_ty), mask=mask)


def paged_prefill(
    query: Float[Tensor, "T_total width"],
    paged: PagedKeys,
    scoring: Scoring,
    *,
    num_query_heads: int,
    skip_single: bool = False,
    out: Float[Tensor, "T_total attended"] | None = None,
    tile: Tile | None = None,
    debug: bool | None = None,
) -> Float[Tensor, "T_total attended"]:
    """Attention of every row of the step over keys that are in the pool already, its own included.

    query: rotated, `[T_total, H_q * D]`.   skip_single: leave out requests with one row, for `paged_decode` to fill in.
    tile: force one of `candidates`.
    Raises: KernelError for shapes, dtypes, strides and geometry that do not fit.
    """
    if query.ndim != 2:
        raise KernelError(f"query has shape {tuple(query.shape)}, not [T_total, width]")
    check_keys(paged, num_query_heads, len(query), debug=debug)
    check_scoring(scoring)
    block_size, num_kv_heads, head_dim = paged.pool.shape[3:]
    check_rows("query", query, num_query_heads * head_dim, paged.pool)
    count, batch = len(query), paged.block_tables.shape[0]
    if out is None:
        out = torch.empty(count, num_query_heads * head_dim, dtype=query.dtype, device=query.device)
    elif not out.is_contiguous() or out.shape != (count, num_query_heads * head_dim) or out.dtype != query.dtype:
        raise KernelError(f"out is {out.dtype} {tuple(out.shape)} and must be contiguous like the result")
    check_device("query", query, others={"out": out})
    if count == 0 or batch == 0:
        return out
    crowded = scoring.window is not None or scoring.soft_cap is not None
    tile = tile or candidates(query.dtype, head_dim, capability(query.device), crowded=crowded)[0]
    check_size("tile.block_m", tile.block_m)
    check_size("tile.block_n", tile.block_n)
    group = num_query_heads // num_kv_heads
    heads = min(group, tile.block_m)
    grid = (num_kv_heads * cdiv(group, heads), count // (tile.block_m // heads) + batch)
    _paged_prefill_kernel[grid](
        query,
        query.stride(0),
        paged.keys,
        paged.values,
        paged.block_tables,
        paged.block_tables.stride(0),
        paged.sequence_lengths,
        paged.query_starts,
        batch,
        out,
        scoring.scale,
        scoring.soft_cap or 0.0,
        scoring.window or 0,
        H_Q=num_query_heads,
        H_KV=num_kv_heads,
        D=head_dim,
        P=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        HEADS=heads,
        SKIP_SINGLE=skip_single,
        WINDOW=scoring.window is not None,
        SOFT_CAP=scoring.soft_cap is not None,
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,  # or the loops with and without a mask round differently, and chunks show in the bits
    )
    return out


def _specialisation(
    dtype: str,
    head_dim: int,
    tile: Tile,
    *,
    block_size: int = 64,
    masked: bool = False,
    capabilities: tuple[int, ...] = (90, 100),
    forced: bool = False,
) -> Specialisation:
    tensors = ("query", "pool_keys", "pool_values", "out")
    integers = ("tables", "lengths", "query_starts")
    return Specialisation(
        name=f"{dtype}-D{head_dim}-P{block_size}-m{tile.block_m}n{tile.block_n}w{tile.num_warps}s{tile.num_stages}"
        + ("-masked" if masked else "")
        + ("-modest" if 90 not in capabilities else ""),
        kernel=_paged_prefill_kernel,
        signature={
            **dict.fromkeys(tensors, f"*{dtype}"),
            **dict.fromkeys(integers, "*i64"),
            **dict.fromkeys(("query_stride", "table_stride", "batch", "window"), "i32"),
            "scale": "fp32",
            "soft_cap": "fp32",
        },
        constants={
            "H_Q": 32,
            "H_KV": 8,
            "D": head_dim,
            "P": block_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": padded_head_dim(head_dim),
            "HEADS": 4,
            "SKIP_SINGLE": True,
            "WINDOW": masked,
            "SOFT_CAP": masked,
            "PRECISION": "ieee",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset({*tensors, *integers, "query_stride"}),
        options={"enable_fp_fusion": False},
        capabilities=(90,) if forced else capabilities,
        forced=forced,
    )


SPECIALISATIONS = (
    *(
        _specialisation("bf16", head_dim, tile, forced=tile is not CANDIDATES[2, head_dim][0])
        for head_dim in (64, 128)
        for tile in CANDIDATES[2, head_dim]
    ),
    *(_specialisation("bf16", *which, masked=True) for which in ((64, _CROWDED[2, 64]), (128, CANDIDATES[2, 128][0]))),
    _specialisation("bf16", 128, CANDIDATES[2, 128][0], block_size=16),
    _specialisation("bf16", 80, CANDIDATES[2, 128][0]),
    _specialisation("fp16", 128, CANDIDATES[2, 128][0]),
    *(
        _specialisation("bf16", head_dim, MODEST_CANDIDATES[2, head_dim][0], masked=masked, capabilities=(80, 89))
        for head_dim in (64, 128)
        for masked in (False, True)
    ),
    _specialisation("bf16", 256, CANDIDATES[2, 256][0], capabilities=CAPABILITIES),
    *(
        _specialisation("fp32", head_dim, CANDIDATES[4, head_dim][0], capabilities=CAPABILITIES)
        for head_dim in (64, 128, 256)
    ),
)
