"""What the paged kernels are given, and what is checked before any of them is launched. Knows no kernel."""

import os
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._jit import interpreting, next_power_of_2, runs_on

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True)
class PagedKeys:
    """Keys and values of one layer, and which of them each request of the step owns.

    Token t of request b lies in block `block_tables[b, t // P]`, at `t % P`; request b asks with the step's rows
    `query_starts[b] : query_starts[b + 1]`, the last of which stands at token `sequence_lengths[b] - 1`.
    """

    pool: Float[Tensor, "2 L N P H_kv D"]
    layer: int
    block_tables: Int[Tensor, "B M"]
    sequence_lengths: Int[Tensor, "B"]
    query_starts: Int[Tensor, "B+1"]

    @property
    def keys(self) -> Float[Tensor, "N P H_kv D"]:
        return self.pool[0, self.layer]

    @property
    def values(self) -> Float[Tensor, "N P H_kv D"]:
        return self.pool[1, self.layer]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How products of queries and keys become scores.

    window: keys a query sees, itself included; None sees all.   soft_cap: `cap * tanh(score / cap)`, before masking.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class HeadRotation:
    """What is done to the heads of a packed row before they are stored or compared.

    query_norm, key_norm: weights of norms over each head, both or neither; with their epsilons.
    """

    cos: Float[Tensor, "S_max pairs"]
    sin: Float[Tensor, "S_max pairs"]
    query_norm: Float[Tensor, "D"] | None = None
    key_norm: Float[Tensor, "D"] | None = None
    query_epsilon: float = 0.0
    key_epsilon: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """What turns packed rows into queries, keys and values: where each token stands, where it goes, its rotation."""

    positions: Int[Tensor, "T_total"]
    slots: Int[Tensor, "T_total"]
    rotation: HeadRotation


def refusal(*, num_query_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the paged kernels cannot run this geometry, or None."""
    if dtype not in DTYPES:
        return f"dtype={dtype} is none of {', '.join(map(str, DTYPES))}"
    if head_dim % 2 or not 2 <= head_dim <= MOST_HEAD_DIM:
        return f"head_dim={head_dim} is not an even number up to {MOST_HEAD_DIM}"
    if num_query_heads % num_kv_heads:
        return f"num_query_heads={num_query_heads} is no multiple of num_kv_heads={num_kv_heads}"
    return None


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile that holds a head: a power of two that a matrix instruction takes."""
    return max(16, next_power_of_2(head_dim))


def check_pool(pool: Tensor, layer: int, num_query_heads: int) -> None:
    """Raises: KernelError for a pool, a layer or head counts that no paged kernel can use."""
    if pool.ndim != 6 or pool.shape[0] != 2 or not pool.is_contiguous():
        raise KernelError(f"the pool must be contiguous [2, L, N, P, H_kv, D], got shape {tuple(pool.shape)}")
    if not 0 <= layer < pool.shape[1]:
        raise KernelError(f"layer={layer} is outside the pool's {pool.shape[1]} layers")
    reason = refusal(
        num_query_heads=num_query_heads, num_kv_heads=pool.shape[4], head_dim=pool.shape[5], dtype=pool.dtype
    )
    if reason is not None:
        raise KernelError(reason)
    if not runs_on(pool.device):
        raise KernelError(f"the pool lies on {pool.device}", hint="CUDA, or TRITON_INTERPRET=1 on a CPU")
    if interpreting() and pool.dtype == torch.bfloat16:
        raise KernelError("Triton's interpreter computes bfloat16 wrongly", hint="float32 or float16")


def check_rows(name: str, rows: Tensor, width: int, pool: Tensor) -> None:
    """Raises: KernelError unless `rows` is `[T, width]` in the pool's dtype and on its device, each row dense."""
    if rows.ndim != 2 or rows.shape[1] != width:
        raise KernelError(f"{name} has shape {tuple(rows.shape)}, not [T_total, {width}] as the pool's heads ask for")
    if rows.dtype != pool.dtype:
        raise KernelError(f"{name} is {rows.dtype} and the pool {pool.dtype}")
    if rows.device != pool.device:
        raise KernelError(f"{name} lies on {rows.device} and the pool on {pool.device}")
    if rows.stride(1) != 1 and width > 1:
        raise KernelError(f"{name} has stride {rows.stride(1)} between neighbours of a row, not 1")


def check_rotation(rotation: HeadRotation, pool: Tensor) -> None:
    """Raises: KernelError for a table or norms that do not fit the pool's heads."""
    head_dim = pool.shape[5]
    for name in ("cos", "sin"):
        table = getattr(rotation, name)
        if table.ndim != 2 or table.shape[1] != head_dim // 2 or not table.is_contiguous():
            raise KernelError(f"{name} has shape {tuple(table.shape)}, not a contiguous [S_max, {head_dim // 2}]")
    if rotation.cos.shape != rotation.sin.shape:
        raise KernelError(f"cos has shape {tuple(rotation.cos.shape)} and sin {tuple(rotation.sin.shape)}")
    if (rotation.query_norm is None) != (rotation.key_norm is None):
        raise KernelError("norms on the heads of queries alone, or of keys alone, are not supported")
    for name in ("query_norm", "key_norm"):
        weight = getattr(rotation, name)
        if weight is not None and (weight.shape != (head_dim,) or not weight.is_contiguous()):
            raise KernelError(f"{name} has shape {tuple(weight.shape)}, not a contiguous [{head_dim}]")


def check_scoring(scoring: Scoring) -> None:
    """Raises: KernelError for a window or a cap that would let no key through."""
    if scoring.window is not None and scoring.window < 1:
        raise KernelError(f"window={scoring.window} lets a query see no key, not even its own")
    if scoring.soft_cap is not None and not scoring.soft_cap > 0:
        raise KernelError(f"soft_cap={scoring.soft_cap} must be above 0")


def check_keys(paged: PagedKeys, num_query_heads: int, *, debug: bool | None = None) -> None:
    """Raises: KernelError for tables that do not fit together and, in debug mode, for entries outside the pool.

    debug: read lengths and tables back and check their values; None asks WEFT_DEBUG=1.
    """
    check_pool(paged.pool, paged.layer, num_query_heads)
    batch = paged.block_tables.shape[0]
    if paged.block_tables.ndim != 2 or paged.block_tables.stride(1) != 1:
        raise KernelError(f"block_tables must be [B, M] with dense rows, got shape {tuple(paged.block_tables.shape)}")
    if paged.sequence_lengths.shape != (batch,) or paged.query_starts.shape != (batch + 1,):
        raise KernelError(
            f"block_tables has {batch} rows, sequence_lengths shape {tuple(paged.sequence_lengths.shape)} and "
            f"query_starts shape {tuple(paged.query_starts.shape)}"
        )
    for name in ("block_tables", "sequence_lengths", "query_starts"):
        tensor = getattr(paged, name)
        if tensor.dtype not in (torch.int32, torch.int64):
            raise KernelError(f"{name} is {tensor.dtype}, not int32 or int64")
        if tensor.ndim == 1 and not tensor.is_contiguous():
            raise KernelError(f"{name} has stride {tensor.stride(0)}, not 1")
    if debug or (debug is None and os.environ.get("WEFT_DEBUG") == "1"):
        _check_values(paged)


def check_indices(name: str, indices: Tensor, count: int) -> None:
    """Raises: KernelError unless `indices` holds one dense integer a token."""
    if indices.shape != (count,) or indices.dtype not in (torch.int32, torch.int64) or not indices.is_contiguous():
        raise KernelError(
            f"{name} must be {count} contiguous integers, one a token, got {indices.dtype} {tuple(indices.shape)}"
        )


def _check_values(paged: PagedKeys) -> None:
    num_blocks, block_size = paged.pool.shape[2:4]
    columns = paged.block_tables.shape[1]
    for request, length in enumerate(paged.sequence_lengths.tolist()):
        used = -(-length // block_size)
        if used > columns:
            raise KernelError(f"sequence_lengths[{request}]={length} needs {used} blocks, the table has {columns}")
        for column, block in enumerate(paged.block_tables[request, :used].tolist()):
            if not 0 <= block < num_blocks:
                raise KernelError(
                    f"block_tables[{request}, {column}]={block} is outside the pool's {num_blocks} blocks"
                )
