"""What a step needs of the rows that take part in it, gathered from the device's state without a look at the host.

A program serves one request and takes every COLUMNS-th piece of its tokens and of its block table; the program after
the last request marks tokens that belong to nobody, so that sizes may be padded. Integers only: equal to the reference.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._arguments import check_count, check_device, check_range, check_starts, debugging
from weft.kernels._jit import cdiv, jit, tl
from weft.kernels.specialisation import Specialisation

BLOCK = 128  # tokens, or columns of a block table, that a program takes at once
_MOST_COLUMNS = 16


@dataclass(frozen=True, kw_only=True)
class StateTensors:
    """What the device knows of every row (`weft/inference/device_state.py`); `block_size` tokens to a block.

    num_steps: how many steps have been gathered, a counter that this kernel advances.
    """

    token_ids: Int[Tensor, "rows S_max"]
    num_computed_tokens: Int[Tensor, "rows"]
    block_table: Int[Tensor, "rows M"]
    temperatures: Float[Tensor, "rows"]
    top_k: Int[Tensor, "rows"]
    top_p: Float[Tensor, "rows"]
    min_p: Float[Tensor, "rows"]
    seeds: Int[Tensor, "rows"]
    num_steps: Int[Tensor, "1"]
    block_size: int


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """One step: request b owns tokens `query_starts[b] : query_starts[b + 1]`; tokens beyond the last are padding.

    slots: where a token's key and value go, `block * block_size + offset`; -1, nowhere, for padding.
    sequence_lengths: after this step.   last_tokens: where each request's last token stands in the step.
    """

    token_ids: Int[Tensor, "T_total"]
    positions: Int[Tensor, "T_total"]
    slots: Int[Tensor, "T_total"]
    sequence_lengths: Int[Tensor, "B"]
    block_tables: Int[Tensor, "B M"]
    last_tokens: Int[Tensor, "B"]
    temperatures: Float[Tensor, "B"]
    top_k: Int[Tensor, "B"]
    top_p: Float[Tensor, "B"]
    min_p: Float[Tensor, "B"]
    seeds: Int[Tensor, "B"]


def reference(
    state: StateTensors, rows: Int[Tensor, "B"], query_starts: Int[Tensor, "B+1"], num_tokens: int
) -> StepTensors:
    """The same in plain torch, and as synchronous as that is."""
    state.num_steps.add_(1)
    step = _empty(state, len(rows), num_tokens)
    step.token_ids.zero_()
    step.positions.zero_()
    step.slots.fill_(-1)
    starts = query_starts.tolist()
    for request, row in enumerate(rows.tolist()):
        first, end = starts[request : request + 2]
        computed = int(state.num_computed_tokens[row])
        positions = torch.arange(computed, computed + end - first, device=rows.device)
        step.positions[first:end] = positions
        step.token_ids[first:end] = state.token_ids[row, positions]
        blocks = state.block_table[row, positions // state.block_size]
        step.slots[first:end] = blocks * state.block_size + positions % state.block_size
        step.sequence_lengths[request] = computed + end - first
        step.last_tokens[request] = max(end - 1, 0)
    step.block_tables.copy_(state.block_table[rows])
    for name in ("temperatures", "top_k", "top_p", "min_p", "seeds"):
        getattr(step, name).copy_(getattr(state, name)[rows])
    return step


@jit
def _gather_step_kernel(
    state_tokens,
    token_stride,
    computed,
    table,
    table_stride,
    temperatures,
    top_k,
    top_p,
    min_p,
    seeds,
    num_steps,
    rows,
    starts,
    batch,
    num_tokens,
    out_tokens,
    out_positions,
    out_slots,
    out_lengths,
    out_tables,
    out_last,
    out_temperatures,
    out_top_k,
    out_top_p,
    out_min_p,
    out_seeds,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, column = tl.program_id(0), tl.program_id(1)
    piece = column * BLOCK + tl.arange(0, BLOCK)
    stride = tl.num_programs(1) * BLOCK
    if request == batch:
        first = tl.load(starts + batch)
        for offset in range(0, num_tokens - first, stride):
            token = first + offset + piece
            mask = token < num_tokens
            tl.store(out_tokens + token, piece.to(tl.int64) * 0, mask=mask)
            tl.store(out_positions + token, piece.to(tl.int64) * 0, mask=mask)
            tl.store(out_slots + token, piece.to(tl.int64) * 0 - 1, mask=mask)
        if column == 0:
            tl.store(num_steps, tl.load(num_steps) + 1)
        return
    row = tl.load(rows + request)
    first = tl.load(starts + request)
    count = tl.load(starts + request + 1) - first
    before = tl.load(computed + row)
    for offset in range(0, count, stride):
        index = offset + piece
        mask = index < count
        position = before + index
        block = tl.load(table + row * table_stride + position // P, mask=mask, other=0)
        tl.store(out_slots + first + index, block * P + position % P, mask=mask)
        tl.store(out_positions + first + index, position, mask=mask)
        token = tl.load(state_tokens + row * token_stride + position, mask=mask, other=0)
        tl.store(out_tokens + first + index, token, mask=mask)
    used = tl.cdiv(before + count, P)
    for offset in range(0, used, stride):
        index = offset + piece
        mask = index < used
        block = tl.load(table + row * table_stride + index, mask=mask, other=0)
        tl.store(out_tables + request.to(tl.int64) * table_stride + index, block, mask=mask)
    if column == 0:
        tl.store(out_lengths + request, before + count)
        tl.store(out_last + request, tl.maximum(first + count - 1, 0))
        tl.store(out_temperatures + request, tl.load(temperatures + row))
        tl.store(out_top_k + request, tl.load(top_k + row))
        tl.store(out_top_p + request, tl.load(top_p + row))
        tl.store(out_min_p + request, tl.load(min_p + row))
        tl.store(out_seeds + request, tl.load(seeds + row))


def gather_step(
    state: StateTensors, rows: Int[Tensor, "B"], query_starts: Int[Tensor, "B+1"], num_tokens: int
) -> StepTensors:
    """The step in which `rows` take part; columns of block tables past a request's length are undefined.

    num_tokens: T_total, padding included.
    Raises: KernelError for tensors that are not contiguous int64 on one device; with WEFT_DEBUG=1 also for rows, tokens
    and positions that do not exist.
    """
    check_state(state)
    check_count("num_tokens", num_tokens, 0)
    batch = rows.numel()
    for name, tensor, shape in (("rows", rows, (batch,)), ("query_starts", query_starts, (batch + 1,))):
        if tensor.shape != shape or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise KernelError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not a contiguous int64 {shape}")
    check_device("token_ids", state.token_ids, others={"rows": rows, "query_starts": query_starts})
    if debugging():
        check_range("rows", rows, 0, len(state.token_ids) - 1)
        check_starts("query_starts", query_starts, num_tokens)
        lengths = state.num_computed_tokens[rows] + query_starts.diff()
        check_range("lengths after the step", lengths, 0, _room(state))
    step = _empty(state, batch, num_tokens)
    # A request of the longest step has all tokens but one of each other; of padding requests, which have none, fewer.
    columns = max(1, min(_MOST_COLUMNS, cdiv(num_tokens - batch, BLOCK) + 1))
    _gather_step_kernel[(batch + 1, columns)](
        state.token_ids,
        state.token_ids.stride(0),
        state.num_computed_tokens,
        state.block_table,
        state.block_table.stride(0),
        state.temperatures,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seeds,
        state.num_steps,
        rows,
        query_starts,
        batch,
        num_tokens,
        step.token_ids,
        step.positions,
        step.slots,
        step.sequence_lengths,
        step.block_tables,
        step.last_tokens,
        step.temperatures,
        step.top_k,
        step.top_p,
        step.min_p,
        step.seeds,
        P=state.block_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return step


def check_state(state: StateTensors) -> None:
    """Raises: KernelError for tensors of a state that do not fit together, or that a kernel would read otherwise."""
    if state.token_ids.ndim != 2 or state.block_table.ndim != 2:
        shapes = tuple(state.token_ids.shape), tuple(state.block_table.shape)
        raise KernelError(f"token_ids and block_table have shapes {shapes[0]} and {shapes[1]}, not two dimensions")
    count = len(state.token_ids)
    for name, dtype, shape in (
        ("token_ids", torch.int64, (count, state.token_ids.shape[1])),
        ("num_computed_tokens", torch.int64, (count,)),
        ("block_table", torch.int64, (count, state.block_table.shape[1])),
        ("temperatures", torch.float32, (count,)),
        ("top_k", torch.int64, (count,)),
        ("top_p", torch.float32, (count,)),
        ("min_p", torch.float32, (count,)),
        ("seeds", torch.int64, (count,)),
        ("num_steps", torch.int64, (1,)),
    ):
        tensor: Tensor = getattr(state, name)
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise KernelError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not a contiguous {dtype} {shape}")
        check_device("token_ids", state.token_ids, others={name: tensor})
    check_count("block_size", state.block_size)


def _room(state: StateTensors) -> int:
    """Tokens that a row has a place and a block for."""
    return min(state.token_ids.shape[1], state.block_table.shape[1] * state.block_size)


def _empty(state: StateTensors, batch: int, num_tokens: int) -> StepTensors:
    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=state.token_ids.device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=state.token_ids.device)

    return StepTensors(
        token_ids=integers(num_tokens),
        positions=integers(num_tokens),
        slots=integers(num_tokens),
        sequence_lengths=integers(batch),
        block_tables=integers(batch, state.block_table.shape[1]),
        last_tokens=integers(batch),
        temperatures=floats(batch),
        top_k=integers(batch),
        top_p=floats(batch),
        min_p=floats(batch),
        seeds=integers(batch),
    )


_INTEGERS = ("state_tokens", "computed", "table", "top_k", "seeds", "num_steps", "rows", "starts")
_OUTPUTS = (
    "out_tokens",
    "out_positions",
    "out_slots",
    "out_lengths",
    "out_tables",
    "out_last",
    "out_top_k",
    "out_seeds",
)
_FLOATS = ("temperatures", "top_p", "min_p", "out_temperatures", "out_top_p", "out_min_p")
SPECIALISATIONS = (
    Specialisation(
        name="P64",
        kernel=_gather_step_kernel,
        signature={
            **dict.fromkeys((*_INTEGERS, *_OUTPUTS), "*i64"),
            **dict.fromkeys(_FLOATS, "*fp32"),
            **dict.fromkeys(("token_stride", "table_stride", "batch", "num_tokens"), "i32"),
        },
        constants={"P": 64, "BLOCK": BLOCK},
        num_warps=4,
        num_stages=3,
        aligned=frozenset({*_INTEGERS, *_OUTPUTS, *_FLOATS, "token_stride"} - {"starts"}),
    ),
)
