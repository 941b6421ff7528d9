"""Ragged paged prefill: the new tokens of each request attend to all it has, read through block tables.

A program takes some rows of one request and one key head: tokens times the query heads that share it, so that a key is
loaded once for all of them. Which request a program belongs to is found by bisection; the grid is an upper bound that
follows from shapes. Tiles of keys lie at absolute positions, those that no row sees are skipped, and a tile that a row
sees nothing of changes none of its bits: neither chunks nor batch-mates show in a result. With `split`, and the tiles
of `_invariant_tiles`, a row also has the bits of the decode of its position.

Softmax in one pass as in FlashAttention-2 (Dao 2023). Products accumulate and softmax runs in float32; weights are
rounded to the inputs' dtype before they meet the values.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._arguments import check_count, check_size
from weft.kernels._invariant_tiles import SPLIT as INVARIANT_SPLIT
from weft.kernels._invariant_tiles import invariant_tiles
from weft.kernels._jit import capability, cdiv
from weft.kernels._paged_decode_tiles import MOST_SPLITS
from weft.kernels._paged_prefill_kernel import paged_prefill_kernel
from weft.kernels._paged_prefill_tiles import CANDIDATES, CROWDED, MODEST_CANDIDATES, Tile, candidates
from weft.kernels.paged import (
    PagedKeys,
    Scoring,
    check_keys,
    check_rows,
    check_scoring,
    padded_head_dim,
    result_of,
)
from weft.kernels.specialisation import CAPABILITIES, Specialisation


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


def paged_prefill(
    query: Float[Tensor, "T_total width"],
    paged: PagedKeys,
    scoring: Scoring,
    *,
    num_query_heads: int,
    skip_single: bool = False,
    split: int | None = None,
    out: Float[Tensor, "T_total attended"] | None = None,
    tile: Tile | None = None,
    debug: bool | None = None,
) -> Float[Tensor, "T_total attended"]:
    """Attention of every row of the step over keys that are in the pool already, its own included.

    query: rotated, `[T_total, H_q * D]`.   skip_single: leave out requests with one row, for `paged_decode` to fill in.
    split: cut a row's keys as `paged_decode` does with this `split`, and merge the parts as it does; None: one part.
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
    out = result_of("query", query, num_query_heads * head_dim, out)
    if count == 0 or batch == 0:
        return out
    crowded = scoring.window is not None or scoring.soft_cap is not None
    tile = tile or candidates(query.dtype, head_dim, capability(query.device), crowded=crowded)[0]
    check_size("tile.block_m", tile.block_m)
    check_size("tile.block_n", tile.block_n)
    if split is not None:
        check_count("split", split)
        if split % tile.block_n:
            raise KernelError(f"split={split} is no multiple of the tile's {tile.block_n} keys")
    group = num_query_heads // num_kv_heads
    heads = min(group, tile.block_m)
    grid = (num_kv_heads * cdiv(group, heads), count // (tile.block_m // heads) + batch)
    paged_prefill_kernel[grid](
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
        SPLIT=split or 0,
        MOST_SPLITS=MOST_SPLITS,
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
    split: int = 0,
    capabilities: tuple[int, ...] = (90, 100),
    forced: bool = False,
) -> Specialisation:
    tensors = ("query", "pool_keys", "pool_values", "out")
    integers = ("tables", "lengths", "query_starts")
    return Specialisation(
        name=f"{dtype}-D{head_dim}-P{block_size}-m{tile.block_m}n{tile.block_n}w{tile.num_warps}s{tile.num_stages}"
        + ("-masked" if masked else "")
        + (f"-split{split}" if split else "")
        + ("-modest" if 90 not in capabilities else ""),
        kernel=paged_prefill_kernel,
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
            "SPLIT": split,
            "MOST_SPLITS": MOST_SPLITS,
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
    *(_specialisation("bf16", *which, masked=True) for which in ((64, CROWDED[2, 64]), (128, CANDIDATES[2, 128][0]))),
    *(
        _specialisation(
            "bf16",
            head_dim,
            invariant_tiles(torch.bfloat16, head_dim, soft_cap=masked).prefill,
            block_size=block_size,
            masked=masked,
            split=INVARIANT_SPLIT,
            forced=(head_dim, block_size, masked) != (128, 64, False),
        )
        for head_dim in (64, 128, 256)
        for block_size, masked in ((64, False), (16, False), (64, True))
    ),
    _specialisation("bf16", 64, invariant_tiles(torch.bfloat16, 64, group=1).prefill, split=INVARIANT_SPLIT),
    *(
        _specialisation(
            "bf16",
            head_dim,
            invariant_tiles(torch.bfloat16, head_dim, compute_capability=80).prefill,
            split=INVARIANT_SPLIT,
            capabilities=(80, 89),
        )
        for head_dim in (64, 128, 256)
    ),
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
