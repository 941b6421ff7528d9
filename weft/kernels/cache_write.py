"""New keys and values into the paged pool: split packed rows into heads, normalise, rotate, scatter by slot.

One program takes a token and a few of its heads. The heads of queries come back as a tensor, those of keys and values
go to `pool[0]` and `pool[1]`. Rounded once, at the end (see `pieces.rotated`), where the plain order rounds each step.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels._jit import cdiv, jit, tl
from weft.kernels.paged import HeadRotation, NewTokens, check_new, check_pool, check_rows, padded_head_dim
from weft.kernels.pieces import rotated
from weft.kernels.specialisation import Specialisation

_ELEMENTS = 1024  # of heads in one program: 8 heads of 128


def reference(
    qkv: Float[Tensor, "T_total packed"],
    positions: Int[Tensor, "T_total"],
    slots: Int[Tensor, "T_total"],
    rotation: HeadRotation,
    pool: Float[Tensor, "2 L N P H_kv D"],
    layer: int,
) -> Float[Tensor, "T_total H_q D"]:
    """The same in plain torch, in the inputs' dtype and in HuggingFace's order of casts. Writes to the pool."""
    num_kv_heads, head_dim = pool.shape[4:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    query, key, value = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if rotation.query_norm is not None and rotation.key_norm is not None:
        query = _normalised(query, rotation.query_norm, rotation.query_epsilon)
        key = _normalised(key, rotation.key_norm, rotation.key_epsilon)
    cos, sin = rotation.cos[positions][:, None], rotation.sin[positions][:, None]
    kept = slots >= 0
    for part, new in ((0, _turned(key, cos, sin)), (1, value)):
        pool[part, layer].flatten(0, 1)[slots[kept]] = new[kept]
    return _turned(query, cos, sin)


def _normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@jit
def _cache_write_kernel(
    qkv,
    qkv_stride,
    positions,
    slots,
    cos,
    sin,
    query_norm,
    key_norm,
    query_epsilon,
    key_epsilon,
    keys,
    values,
    query,
    H_Q: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    is_query, is_value = head < H_Q, head >= H_Q + H_KV
    is_key = (head >= H_Q) & (head < H_Q + H_KV)
    exists = head < H_Q + 2 * H_KV
    heads = qkv + token * qkv_stride + head * D
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    turned = rotated(
        heads,
        exists,
        tl.where(is_query, query_norm, key_norm),
        tl.where(is_query, query_epsilon, key_epsilon).reshape(BLOCK_H),
        cos + position * (D // 2),
        sin + position * (D // 2),
        D,
        BLOCK_D,
        NORM,
    ).to(query.dtype.element_ty)
    inside = column < D
    tl.store(query + (token * H_Q + head) * D + column, turned, mask=is_query & inside)
    row = slot * (H_KV * D) + column
    written = inside & (row >= 0)  # slot -1 lies before the pool
    tl.store(keys + row + (head - H_Q) * D, turned, mask=written & is_key)
    value = tl.load(heads + column, mask=is_value & exists & inside, other=0.0)
    tl.store(values + row + (head - H_Q - H_KV) * D, value, mask=written & is_value & exists)


def rotate_and_write(
    qkv: Float[Tensor, "T_total packed"],
    positions: Int[Tensor, "T_total"],
    slots: Int[Tensor, "T_total"],
    rotation: HeadRotation,
    pool: Float[Tensor, "2 L N P H_kv D"],
    layer: int,
    *,
    num_query_heads: int,
) -> Float[Tensor, "T_total H_q D"]:
    """Rotated queries; rotated keys, and values, go to their slots (`block * P + offset`; -1 writes nothing).

    Raises: KernelError for shapes, dtypes and strides that do not fit.
    """
    check_pool(pool, layer, num_query_heads)
    num_kv_heads, head_dim = pool.shape[4:]
    check_rows("qkv", qkv, (num_query_heads + 2 * num_kv_heads) * head_dim, pool)
    count = len(qkv)
    check_new(NewTokens(positions=positions, slots=slots, rotation=rotation), count, pool)
    query = torch.empty(count, num_query_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if count == 0:
        return query
    block_d = padded_head_dim(head_dim)
    block_h = max(1, _ELEMENTS // block_d)
    normed = rotation.query_norm is not None
    _cache_write_kernel[(count, cdiv(num_query_heads + 2 * num_kv_heads, block_h))](
        qkv,
        qkv.stride(0),
        positions,
        slots,
        rotation.cos,
        rotation.sin,
        rotation.query_norm if normed else rotation.cos,
        rotation.key_norm if normed else rotation.cos,
        rotation.query_epsilon,
        rotation.key_epsilon,
        pool[0, layer],
        pool[1, layer],
        query,
        H_Q=num_query_heads,
        H_KV=num_kv_heads,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_H=block_h,
        NORM=normed,
        num_warps=4,
        enable_fp_fusion=False,  # as in `paged_decode`, which rotates too, to the same bits
    )
    return query


def _specialisation(dtype: str, head_dim: int, normed: bool) -> Specialisation:
    tensors = ("qkv", "cos", "sin", "query_norm", "key_norm", "keys", "values", "query")
    block_d = padded_head_dim(head_dim)
    return Specialisation(
        name=f"{dtype}-D{head_dim}" + ("-norm" if normed else ""),
        kernel=_cache_write_kernel,
        signature={
            "qkv": f"*{dtype}",
            "qkv_stride": "i32",
            "positions": "*i64",
            "slots": "*i64",
            "query_epsilon": "fp32",
            "key_epsilon": "fp32",
            **dict.fromkeys(tensors[1:], f"*{dtype}"),
        },
        constants={
            "H_Q": 32,
            "H_KV": 8,
            "D": head_dim,
            "BLOCK_D": block_d,
            "BLOCK_H": max(1, _ELEMENTS // block_d),
            "NORM": normed,
        },
        num_warps=4,
        num_stages=3,
        aligned=frozenset({*tensors, "qkv_stride", "positions", "slots"}),
        options={"enable_fp_fusion": False},
    )


SPECIALISATIONS = tuple(
    _specialisation(dtype, head_dim, normed)
    for dtype, head_dim, normed in (
        ("bf16", 64, False),
        ("bf16", 80, False),
        ("bf16", 128, True),
        ("bf16", 256, False),
        ("fp16", 128, False),
        ("fp32", 128, True),
    )
)
