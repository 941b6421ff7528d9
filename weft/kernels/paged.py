"""What the paged kernels are given, and what is checked before any of them is launched. Knows no kernel."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.errors import KernelError, shown
from weft.kernels._arguments import (
    DTYPES,
    check_count,
    check_device,
    check_epsilon,
    check_floats,
    check_range,
    check_starts,
    debugging,
    is_number,
)
from weft.kernels._jit import next_power_of_2

MOST_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True)
class PagedKeys:
    """Keys and values of one layer, and which of them each request of the step owns.

    As many rows as requests are one of each request: kernels then do not read `query_starts` at all.
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
    if num_kv_heads < 1 or num_query_heads < 1 or num_query_heads % num_kv_heads:
        return f"num_query_heads={num_query_heads} is no multiple of num_kv_heads={num_kv_heads}"
    return None


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile that holds a head: a power of two that a matrix instruction takes."""
    return max(16, next_power_of_2(head_dim))


def check_pool(pool: Tensor, layer: int, num_query_heads: int) -> None:
    """Raises: KernelError for a pool, a layer or head counts that no paged kernel can use."""
    if pool.ndim != 6 or pool.shape[0] != 2 or not pool.is_contiguous():
        raise KernelError(f"the pool must be contiguous [2, L, N, P, H_kv, D], got shape {tuple(pool.shape)}")
    if 0 in pool.shape:
        raise KernelError(f"the pool must hold something, got shape {tuple(pool.shape)}")
    check_count("layer", layer, 0)
    if layer >= pool.shape[1]:
        raise KernelError(f"layer={layer} is outside the pool's {pool.shape[1]} layers")
    check_count("num_query_heads", num_query_heads)
    reason = refusal(
        num_query_heads=num_query_heads, num_kv_heads=pool.shape[4], head_dim=pool.shape[5], dtype=pool.dtype
    )
    if reason is not None:
        raise KernelError(reason)
    check_device("the pool", pool)
    check_floats("the pool", pool)


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


def result_of(name: str, rows: Tensor, width: int, out: Tensor | None) -> Tensor:
    """Where `[T_total, width]` in the dtype of `rows` goes: `out`, or memory of its own.

    name: of the rows.   Raises: KernelError for an `out` that is not like that, or lies on another device.
    """
    if out is None:
        out = torch.empty(len(rows), width, dtype=rows.dtype, device=rows.device)
    elif not out.is_contiguous() or out.shape != (len(rows), width) or out.dtype != rows.dtype:
        raise KernelError(f"out is {out.dtype} {tuple(out.shape)} and must be contiguous like the result")
    check_device(name, rows, others={"out": out})
    return out


def check_rotation(rotation: HeadRotation, pool: Tensor) -> None:
    """Raises: KernelError for a table or norms that do not fit the pool's heads, and for an epsilon that is none."""
    head_dim = pool.shape[5]
    names = ("cos", "sin", "query_norm", "key_norm")
    check_device("the pool", pool, others={name: getattr(rotation, name) for name in names})
    for name in ("cos", "sin"):
        table = getattr(rotation, name)
        check_floats(name, table)
        if table.ndim != 2 or table.shape[1] != head_dim // 2 or not table.is_contiguous():
            raise KernelError(f"{name} has shape {tuple(table.shape)}, not a contiguous [S_max, {head_dim // 2}]")
    if rotation.cos.shape != rotation.sin.shape:
        raise KernelError(f"cos has shape {tuple(rotation.cos.shape)} and sin {tuple(rotation.sin.shape)}")
    if (rotation.query_norm is None) != (rotation.key_norm is None):
        raise KernelError("norms on the heads of queries alone, or of keys alone, are not supported")
    for name in ("query_epsilon", "key_epsilon"):
        check_epsilon(name, getattr(rotation, name))
    for name in ("query_norm", "key_norm"):
        weight = getattr(rotation, name)
        if weight is not None and (weight.shape != (head_dim,) or not weight.is_contiguous()):
            raise KernelError(f"{name} has shape {tuple(weight.shape)}, not a contiguous [{head_dim}]")
        if weight is not None and weight.dtype != pool.dtype:
            raise KernelError(f"{name} is {weight.dtype} and the pool {pool.dtype}")


def check_scoring(scoring: Scoring) -> None:
    """Raises: KernelError for a window or a cap that would let no key through, and for what makes scores infinite."""
    scale, soft_cap = scoring.scale, scoring.soft_cap
    if not is_number(scale) or not -math.inf < scale < math.inf:
        raise KernelError(f"scale={shown(scale)} is no finite number")
    window = scoring.window
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise KernelError(f"window={window} is no whole number of keys")
    if window is not None and window < 1:
        raise KernelError(f"window={window} lets a query see no key, not even its own")
    if soft_cap is not None and (not is_number(soft_cap) or not 0 < soft_cap < math.inf):
        raise KernelError(f"soft_cap={shown(soft_cap)} must be a number above 0 and finite")


def check_keys(paged: PagedKeys, num_query_heads: int, num_rows: int, *, debug: bool | None = None) -> None:
    """Raises: KernelError for tables that do not fit together and, in debug mode, for entries outside the pool.

    num_rows: T_total.   debug: read lengths, starts and tables back and check their values; None asks WEFT_DEBUG=1.
    """
    check_pool(paged.pool, paged.layer, num_query_heads)
    if paged.block_tables.ndim != 2 or paged.block_tables.stride(1) != 1:
        raise KernelError(f"block_tables must be [B, M] with dense rows, got shape {tuple(paged.block_tables.shape)}")
    batch = len(paged.block_tables)
    if paged.sequence_lengths.shape != (batch,) or paged.query_starts.shape != (batch + 1,):
        raise KernelError(
            f"block_tables has {batch} rows, sequence_lengths shape {tuple(paged.sequence_lengths.shape)} and "
            f"query_starts shape {tuple(paged.query_starts.shape)}"
        )
    for name in ("block_tables", "sequence_lengths", "query_starts"):
        tensor = getattr(paged, name)
        if tensor.dtype not in (torch.int32, torch.int64):
            raise KernelError(f"{name} is {tensor.dtype}, not int32 or int64")
        check_device("the pool", paged.pool, others={name: tensor})
        if tensor.ndim == 1 and not tensor.is_contiguous():
            raise KernelError(f"{name} has stride {tensor.stride(0)}, not 1")
    if debugging(debug):
        _check_values(paged, num_rows)


def check_indices(
    name: str, indices: Tensor, count: int, pool: Tensor, *, least: int, most: int, debug: bool | None = None
) -> None:
    """Raises: KernelError unless `indices` holds one dense integer a token; in debug mode, from `least` to `most`."""
    if indices.shape != (count,) or indices.dtype not in (torch.int32, torch.int64) or not indices.is_contiguous():
        raise KernelError(
            f"{name} must be {count} contiguous integers, one a token, got {indices.dtype} {tuple(indices.shape)}"
        )
    check_device("the pool", pool, others={name: indices})
    if debugging(debug):
        check_range(name, indices, least, most)


def check_new(new: NewTokens, count: int, pool: Tensor, *, debug: bool | None = None) -> None:
    """Raises: KernelError for what does not say of `count` tokens where they stand, how they turn and where they go.

    debug: read positions and slots back, and check that they lie in the table and in the pool.
    """
    check_rotation(new.rotation, pool)
    num_slots = pool.shape[2] * pool.shape[3]
    check_indices("positions", new.positions, count, pool, least=0, most=len(new.rotation.cos) - 1, debug=debug)
    check_indices("slots", new.slots, count, pool, least=-1, most=num_slots - 1, debug=debug)


def check_read_back(paged: PagedKeys, new: NewTokens) -> None:
    """Raises: KernelError unless the new key of each request with one row goes where its table has its last token.

    Reads lengths, starts, tables and slots back.
    """
    size, starts = paged.pool.shape[3], paged.query_starts.tolist()
    for request, length in enumerate(paged.sequence_lengths.tolist()):
        row, column = starts[request], (length - 1) // size
        if length == 0 or starts[request + 1] - row != 1:
            continue
        own = int(paged.block_tables[request, column]) * size + (length - 1) % size
        if (slot := int(new.slots[row])) != own:
            raise KernelError(
                f"slots[{row}]={slot}, and in fixed order the key of token {length - 1} is read back from slot {own}",
                hint="fixed_order=False takes it from registers",
            )


def _check_values(paged: PagedKeys, num_rows: int) -> None:
    num_blocks, block_size = paged.pool.shape[2:4]
    batch, columns = paged.block_tables.shape
    check_starts("query_starts", paged.query_starts, num_rows)
    if num_rows == batch:
        for request, start in enumerate(paged.query_starts.tolist()):
            if start != request:
                raise KernelError(
                    f"query_starts[{request}]={start}, where {batch} rows of {batch} requests are one each"
                )
    for request, length in enumerate(paged.sequence_lengths.tolist()):
        if length < 0:
            raise KernelError(f"sequence_lengths[{request}]={length} is below 0")
        used = -(-length // block_size)
        if used > columns:
            raise KernelError(f"sequence_lengths[{request}]={length} needs {used} blocks, the table has {columns}")
        for column, block in enumerate(paged.block_tables[request, :used].tolist()):
            if not 0 <= block < num_blocks:
                raise KernelError(
                    f"block_tables[{request}, {column}]={block} is outside the pool's {num_blocks} blocks"
                )
