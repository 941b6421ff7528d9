"""The compiled forms of paged decode, for the check that none spills. Knows no tensor."""

import torch

from weft.kernels._invariant_tiles import invariant_tiles
from weft.kernels._paged_decode_kernel import AT_ONCE, paged_decode_kernel
from weft.kernels._paged_decode_tiles import (
    BLOCK_M,
    CANDIDATES,
    CROWDED,
    LEAST_REQUESTS,
    MANY_HEADS,
    MOST_SPLITS,
    NARROW,
    SPANNING,
    SPLIT,
    Tile,
)
from weft.kernels.paged import padded_head_dim
from weft.kernels.specialisation import Specialisation


def _form(
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


def forms() -> tuple[Specialisation, ...]:
    """Those that are launched on real models, and the candidates that a benchmark can force."""
    return (
        *(
            _form("bf16", head_dim, tile, whole=whole, forced=tile is not tiles[0])
            for (size, head_dim), tiles in CANDIDATES.items()
            if size == 2
            for tile in tiles
            for whole in (True, False)
        ),
        *(_form("bf16", 128, CANDIDATES[2, 128][0], whole=whole, early=False) for whole in (False, True)),
        *(_form("bf16", 64, CANDIDATES[2, 64][0], whole=whole, early=False) for whole in (False, True)),
        *(
            _form("bf16", 64, NARROW[2, 64], masked=masked, whole=whole)
            for masked in (False, True)
            for whole in (False, True)
        ),
        _form("bf16", 128, CANDIDATES[2, 128][0], block_size=16),
        _form("bf16", 128, SPANNING[2, 128], block_size=16, whole=True),
        *(
            _form("bf16", head_dim, CANDIDATES[2, head_dim][0], shares=32, whole=whole)
            for head_dim in (64, 128)
            for whole in (False, True)
        ),
        *(_form("bf16", 128, SPANNING[2, 128], block_size=16, shares=32, whole=whole) for whole in (False, True)),
        *(_form("bf16", 128, CROWDED[2, 128], masked=True, whole=whole) for whole in (False, True)),
        *(_form("bf16", 128, CROWDED[2, 128], masked=True, shares=32, whole=whole) for whole in (False, True)),
        *(
            _form(
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
            _form(
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
            _form(
                "bf16",
                head_dim,
                invariant_tiles(torch.bfloat16, head_dim, compute_capability=80).decode,
                fixed=True,
                whole=True,
                early=False,
            )
            for head_dim in (64, 128, 256)
        ),
        _form("bf16", 80, CANDIDATES[2, 128][0], whole=True),
        _form("fp16", 128, CROWDED[2, 128], new=False),
        *(_form("fp32", head_dim, CANDIDATES[4, head_dim][0], whole=True) for head_dim in (64, 128, 256)),
    )
