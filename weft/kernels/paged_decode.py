"""Paged decode attention: one new token a request, keys and values read through block tables.

A sequence is cut into splits at absolute positions, whose size follows from the request's own length alone, and their
parts are merged in their order in float32 by their log-sum-exp, (0, -inf) being the part that saw no key. So neither
batch-mates nor the number of programs change a bit. The query heads of one key head share a tile of 16 rows.

Programs of one head share its splits, in runs, and a program's loads never pause where a split ends. If there are
enough heads for one program each (`usual_programs`), it merges in registers what it made; else `merge_parts` does, with
the same arithmetic, so that both forms give the same bits. No product is fused with a sum but where it is written.
Where a table has room for a request that its batch-mates would wait for (`lends`), a launch ahead of the one that
merges in registers makes the parts of long requests, and that one merges them (`_paged_decode_shares`).

With `new` the rows are packed and not yet rotated: the program that owns a request's last split also rotates its key,
writes key and value to their slot, and takes them from registers or, in fixed order, from there.
Grid and scratch follow from shapes: programs of a head that find no split exit. After Flash-Decoding (Dao et al. 2023).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from weft.errors import KernelError
from weft.kernels import cache_write, paged_prefill
from weft.kernels._arguments import check_count, check_device, check_size, debugging
from weft.kernels._invariant_tiles import invariant_tiles
from weft.kernels._jit import cdiv, launches_early, next_power_of_2
from weft.kernels._paged_decode_kernel import AT_ONCE, paged_decode_kernel
from weft.kernels._paged_decode_tiles import (
    BLOCK_M,
    CANDIDATES,
    CROWDED,
    MANY_HEADS,
    MOST_SPLITS,
    NARROW,
    PROGRAMS,
    SPANNING,
    SPLIT,
    Tile,
    candidates,
    lends,
    programs_of,
    usual_programs,
)
from weft.kernels.merge_parts import merge_parts
from weft.kernels.paged import (
    NewTokens,
    PagedKeys,
    Scoring,
    check_keys,
    check_new,
    check_read_back,
    check_rows,
    check_scoring,
    padded_head_dim,
)
from weft.kernels.specialisation import Specialisation

LEAST_REQUESTS = 128  # whose lengths one look takes: so many, or the batch


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


def paged_decode(
    rows: Float[Tensor, "T_total width"],
    paged: PagedKeys,
    scoring: Scoring,
    *,
    num_query_heads: int,
    new: NewTokens | None = None,
    fixed_order: bool = False,
    out: Float[Tensor, "T_total attended"] | None = None,
    tile: Tile | None = None,
    split: int = SPLIT,
    programs: int | None = None,
    lend: bool | None = None,
    debug: bool | None = None,
) -> Float[Tensor, "T_total attended"]:
    """Attention of every request that has one row in this step; rows of the others stay as they are in `out`.

    rows: rotated queries `[T_total, H_q * D]`; with `new`, packed rows, and keys and values are written as well.
    fixed_order: give a row the bits of `paged_prefill` with this `split` and as many keys a tile, whatever else a tile
    is; the slot of a new key must then be its own in the table, since it is read from there (checked in debug mode).
    tile, programs, split: force one of `candidates`, about how many programs, keys a split (which changes bits).
    lend: whether long requests get programs of their own in a second launch; None decides by shapes.
    Raises: KernelError for shapes, dtypes, strides and geometry that do not fit.
    """
    if rows.ndim != 2:
        raise KernelError(f"rows has shape {tuple(rows.shape)}, not [T_total, width]")
    check_keys(paged, num_query_heads, len(rows), debug=debug)
    check_scoring(scoring)
    check_count("split", split)
    check_count("programs", PROGRAMS if programs is None else programs)
    block_size, num_kv_heads, head_dim = paged.pool.shape[3:]
    batch, columns = paged.block_tables.shape
    num_heads = num_query_heads if new is None else num_query_heads + 2 * num_kv_heads
    check_rows("rows", rows, num_heads * head_dim, paged.pool)
    if new is not None:
        check_new(new, len(rows), paged.pool, debug=debug)
        if fixed_order and debugging(debug):
            check_read_back(paged, new)
    num_parts = max(1, min(MOST_SPLITS, cdiv(columns * block_size, split)))
    block_m = BLOCK_M if tile is None else tile.block_m
    check_size("tile.block_m", block_m)
    head_tiles = num_kv_heads * cdiv(num_query_heads // num_kv_heads, block_m)
    heads = head_tiles * batch
    usual = usual_programs(heads, (tile or candidates(rows.dtype, head_dim)[0]).num_warps)
    sharing, most = programs_of(heads, num_parts, programs or usual), programs or PROGRAMS
    room = columns * block_size
    lending = lends(programs_of(heads, num_parts, most), batch, room, head_dim) if lend is None else lend and batch > 0
    rotation = None if new is None else new.rotation
    normed = rotation is not None and rotation.query_norm is not None
    if normed and fixed_order:
        raise KernelError("fixed_order=True and heads with norms, which `rotate_and_write` sums in an order of its own")
    crowded = new is None or normed or scoring.window is not None or scoring.soft_cap is not None
    shared = sharing > 1 and not lending
    whole_tile, shared_tile = (
        tile or candidates(rows.dtype, head_dim, block_size, shared=several, crowded=crowded)[0]
        for several in (False, True)
    )
    check_size("tile.block_n", whole_tile.block_n)
    if split % whole_tile.block_n:
        raise KernelError(f"split={split} is no multiple of the tile's {whole_tile.block_n} keys")
    if out is None:
        out = torch.empty(len(rows), num_query_heads * head_dim, dtype=rows.dtype, device=rows.device)
    elif not out.is_contiguous() or out.shape != (len(rows), num_query_heads * head_dim) or out.dtype != rows.dtype:
        raise KernelError(f"out is {out.dtype} {tuple(out.shape)} and must be contiguous like the result")
    check_device("rows", rows, others={"out": out})
    if batch == 0:
        return out
    parts = log_sums = out
    shares = max(1, most // head_tiles // 2) if lending else 0
    if lending or shared:
        owners = min(batch, shares) if lending else batch  # fewer are long than there are shares
        parts = torch.empty(owners, num_query_heads, num_parts, head_dim, dtype=torch.float32, device=rows.device)
        log_sums = torch.empty(owners, num_query_heads, num_parts, dtype=torch.float32, device=rows.device)
    early = launches_early(rows.device)

    def launch(num_programs: int, requests: int, *, whole: bool, follows: bool = False) -> None:
        form = whole_tile if whole else shared_tile
        paged_decode_kernel[(head_tiles, num_programs, requests)](
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
            batch,
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
            BLOCK_M=block_m,
            BLOCK_N=form.block_n,
            BLOCK_D=padded_head_dim(head_dim),
            SPLIT=split,
            MOST_SPLITS=MOST_SPLITS,
            NEW=new is not None,
            FIXED=fixed_order,
            NORM=normed,
            WINDOW=scoring.window is not None,
            SOFT_CAP=scoring.soft_cap is not None,
            ONE_EACH=len(rows) == batch,
            WHOLE=whole,
            SHARES=shares,
            REQUESTS=max(LEAST_REQUESTS, next_power_of_2(batch)),
            AT_ONCE=AT_ONCE,
            EARLY=early,
            FOLLOWS=follows,
            PRECISION="ieee",
            num_warps=form.num_warps,
            num_stages=form.num_stages,
            enable_fp_fusion=False,
            **({"maxnreg": form.most_registers} if form.most_registers else {}),
            **({"launch_pdl": True} if early else {}),
        )

    if lending:
        launch(2 * shares, 1, whole=False)
        launch(1, batch, whole=True, follows=True)
    elif not shared:
        launch(1, batch, whole=True)
    else:
        launch(sharing, batch, whole=False)
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
    fixed: bool = False,
    masked: bool = False,
    whole: bool = False,
    early: bool = True,
    shares: int = 0,
    group: int = 4,
    forced: bool = False,
) -> Specialisation:
    follows = whole and shares > 0
    tensors = ("rows", "cos", "sin", "query_norm", "key_norm", "pool_keys", "pool_values", "out")
    integers = ("positions", "slots", "tables", "lengths", "query_starts")
    return Specialisation(
        name=f"{dtype}-D{head_dim}-P{block_size}-"
        + (f"m{tile.block_m}" if tile.block_m != BLOCK_M else "")
        + f"n{tile.block_n}w{tile.num_warps}s{tile.num_stages}"
        + ("-new" if new else "")
        + ("-fixed" if fixed else "")
        + ("-masked" if masked else "")
        + ("-whole" if whole else "")
        + ("-early" if early else "")
        + ("-shares" if shares else ""),
        kernel=paged_decode_kernel,
        signature={
            **dict.fromkeys(tensors, f"*{dtype}"),
            **dict.fromkeys(integers, "*i64"),
            **dict.fromkeys(("row_stride", "table_stride", "batch", "num_parts", "window"), "i32"),
            **dict.fromkeys(("query_epsilon", "key_epsilon", "scale", "soft_cap"), "fp32"),
            "parts": "*fp32",
            "log_sums": "*fp32",
        },
        constants={
            "H_Q": 8 * group,
            "H_KV": 8,
            "D": head_dim,
            "P": block_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": padded_head_dim(head_dim),
            "SPLIT": SPLIT,
            "MOST_SPLITS": MOST_SPLITS,
            "NEW": new,
            "FIXED": fixed,
            "NORM": masked and not fixed,
            "WINDOW": masked,
            "SOFT_CAP": masked,
            "ONE_EACH": not masked,
            "WHOLE": whole,
            "SHARES": shares,
            "REQUESTS": LEAST_REQUESTS,
            "AT_ONCE": AT_ONCE,
            "EARLY": early,
            "FOLLOWS": follows,
            "PRECISION": "ieee",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset({*tensors, *integers, "row_stride", "parts", "log_sums"}),
        capabilities=(90,) if forced else (90, 100) if early else (80, 89),
        waits=early and not follows,
        options={
            "enable_fp_fusion": False,
            **({"maxnreg": tile.most_registers} if tile.most_registers else {}),
        },
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
    *(_specialisation("bf16", 128, CANDIDATES[2, 128][0], whole=whole, early=False) for whole in (False, True)),
    *(_specialisation("bf16", 64, CANDIDATES[2, 64][0], whole=whole, early=False) for whole in (False, True)),
    *(
        _specialisation("bf16", 64, NARROW[2, 64], masked=masked, whole=whole)
        for masked in (False, True)
        for whole in (False, True)
    ),
    _specialisation("bf16", 128, CANDIDATES[2, 128][0], block_size=16),
    _specialisation("bf16", 128, SPANNING[2, 128], block_size=16, whole=True),
    *(
        _specialisation("bf16", head_dim, CANDIDATES[2, head_dim][0], shares=32, whole=whole)
        for head_dim in (64, 128)
        for whole in (False, True)
    ),
    *(_specialisation("bf16", 128, SPANNING[2, 128], block_size=16, shares=32, whole=whole) for whole in (False, True)),
    *(_specialisation("bf16", 128, CROWDED[2, 128], masked=True, whole=whole) for whole in (False, True)),
    *(_specialisation("bf16", 128, CROWDED[2, 128], masked=True, shares=32, whole=whole) for whole in (False, True)),
    *(
        _specialisation(
            "bf16",
            head_dim,
            invariant_tiles(torch.bfloat16, head_dim, soft_cap=masked).decode,
            block_size=block_size,
            new=new,
            fixed=True,
            masked=masked,
            whole=whole,
            shares=shares,
            forced=(head_dim, block_size, masked, whole, shares) != (128, 64, False, True, 0),
        )
        for head_dim in (64, 128, 256)
        for block_size, masked in ((64, False), (16, False), (64, True))
        for whole, shares in ((True, 0), (False, 0), (True, 32), (False, 32))
        for new in (False, True)
    ),
    *(
        _specialisation(
            "bf16",
            64,
            invariant_tiles(torch.bfloat16, 64, group=1, heads=heads).decode,
            fixed=True,
            whole=whole,
            group=1,
        )
        for whole in (True, False)
        for heads in (1, MANY_HEADS)
    ),
    *(
        _specialisation(
            "bf16",
            head_dim,
            invariant_tiles(torch.bfloat16, head_dim, compute_capability=80).decode,
            fixed=True,
            whole=True,
            early=False,
        )
        for head_dim in (64, 128, 256)
    ),
    _specialisation("bf16", 80, CANDIDATES[2, 128][0], whole=True),
    _specialisation("fp16", 128, CROWDED[2, 128], new=False),
    *(_specialisation("fp32", head_dim, CANDIDATES[4, head_dim][0], whole=True) for head_dim in (64, 128, 256)),
)
