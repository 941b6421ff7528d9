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

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from weft.errors import KernelError
from weft.kernels import cache_write, paged_prefill
from weft.kernels._arguments import check_count, check_size, debugging
from weft.kernels._jit import cdiv, launches_early, next_power_of_2
from weft.kernels._paged_decode_forms import forms
from weft.kernels._paged_decode_kernel import AT_ONCE, paged_decode_kernel
from weft.kernels._paged_decode_tiles import (
    BLOCK_M,
    LEAST_REQUESTS,
    MOST_SPLITS,
    PROGRAMS,
    SPLIT,
    Tile,
    candidates,
    layout_of,
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
    result_of,
)

SPECIALISATIONS = forms()


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
    normed = new is not None and new.rotation.query_norm is not None
    if normed and fixed_order:
        raise KernelError("fixed_order=True and heads with norms, which `rotate_and_write` sums in an order of its own")
    block_m = BLOCK_M if tile is None else tile.block_m
    check_size("tile.block_m", block_m)
    crowded = new is None or normed or scoring.window is not None or scoring.soft_cap is not None
    whole_tile, shared_tile = (
        tile or candidates(rows.dtype, head_dim, block_size, shared=shared, crowded=crowded)[0]
        for shared in (False, True)
    )
    check_size("tile.block_n", whole_tile.block_n)
    if split % whole_tile.block_n:
        raise KernelError(f"split={split} is no multiple of the tile's {whole_tile.block_n} keys")
    out = result_of("rows", rows, num_query_heads * head_dim, out)
    if batch == 0:
        return out
    layout = layout_of(
        batch=batch,
        room=columns * block_size,
        head_tiles=num_kv_heads * cdiv(num_query_heads // num_kv_heads, block_m),
        head_dim=head_dim,
        split=split,
        num_warps=whole_tile.num_warps,
        programs=programs,
        lend=lend,
    )
    parts = log_sums = out  # which nobody reads where every head is whole
    if owners := layout.num_owners(batch):
        shape = owners, num_query_heads, layout.num_parts
        parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=rows.device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=rows.device)
    early = launches_early(rows.device)

    def launch(num_programs: int, requests: int, *, whole: bool, follows: bool = False) -> None:
        form = whole_tile if whole else shared_tile
        paged_decode_kernel[(layout.head_tiles, num_programs, requests)](
            rows,
            rows.stride(0),
            *_new_arguments(new, rows),
            paged.keys,
            paged.values,
            paged.block_tables,
            paged.block_tables.stride(0),
            paged.sequence_lengths,
            paged.query_starts,
            batch,
            parts,
            log_sums,
            layout.num_parts,
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
            SHARES=layout.shares,
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

    if layout.is_whole:
        launch(1, batch, whole=True)
    elif layout.shares:
        launch(2 * layout.shares, 1, whole=False)
        launch(1, batch, whole=True, follows=True)
    else:
        launch(layout.sharing, batch, whole=False)
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


def _new_arguments(new: NewTokens | None, rows: Tensor) -> tuple[Any, ...]:
    """Where new tokens stand, where they go and how their heads turn; `rows` stands in for what is not there."""
    if new is None:
        return (*(rows,) * 6, 0.0, 0.0)
    rotation = new.rotation
    norms = (rows, rows) if rotation.query_norm is None else (rotation.query_norm, rotation.key_norm)
    epsilons = rotation.query_epsilon, rotation.key_epsilon
    return (new.positions, new.slots, rotation.cos, rotation.sin, *norms, *epsilons)
