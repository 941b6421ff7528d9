"""Launches the flash-attention kernels: grids, strides, descriptors, scratch. Knows tensors; checks nothing that
`flash_attention.py` has checked, and decides no tile.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._flash_backward_keys import flash_backward_keys
from weft.kernels._flash_backward_queries import flash_backward_queries
from weft.kernels._flash_delta import flash_delta
from weft.kernels._flash_forward import flash_forward
from weft.kernels._flash_tiles import Choice, Tiles, padded_head_dim
from weft.kernels._jit import TensorDescriptor, cdiv

# Rows whose levels and slopes (`_flash_delta.py`) stand together: the fewest that a tile has, so that each group has a
# place in rows that a single program of the queries' kernel reads and then overwrites.
GROUP = 16
DELTA_ROWS = 128

# Keys and values of the heads that are computed side by side: half of an H200's L2 cache, so that they stay in it.
_SECTION_BYTES = 24 << 20

_LOG2_E = 1.4426950408889634

Pair = tuple[Tensor | None, Tensor | None]


def _batched(tensor: Tensor) -> Tensor:
    """`[B, N, H, D]` of either layout (a packed one has B = 1), its last dimension contiguous."""
    tensor = tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
    return tensor if tensor.ndim == 4 else tensor[None]


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    batch, token, head, _ = tensor.stride()
    if token >= 1 << 23:  # positions inside a tile are 32-bit
        raise KernelError(f"a token stride of {token} elements", hint=f"less than {1 << 23}: make it contiguous")
    return batch, token, head


def _describable(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can address it: steps of whole 16 bytes, none of them zero."""
    steps = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if size > 1]
    aligned = all(step > 0 and step * tensor.element_size() % 16 == 0 for step in steps)
    return tensor.data_ptr() % 16 == 0 and aligned and tensor.numel() > 0


def _described(tensor: Tensor, block: int) -> Any:
    """A descriptor of [1, 1, block, padded D] boxes over `[B, H, N, D]`; a box ends in zeros where the tensor ends."""
    columns = padded_head_dim(tensor.shape[-1])
    view = tensor.transpose(1, 2)
    # The step of a dimension of one entry is never taken, but has to be a multiple of 16 bytes.
    steps = [stride if size > 1 else columns for size, stride in zip(view.shape[:3], view.stride()[:3], strict=True)]
    return TensorDescriptor(view, list(view.shape), [*steps, 1], [1, 1, block, columns])


def _section(num_items: int, num_blocks: int, bytes_per_item: int) -> int:
    """How many (batch, head) items run side by side: as many as the L2 cache holds, and enough to fill the GPU."""
    return min(num_items, max(_SECTION_BYTES // max(1, bytes_per_item), cdiv(512, num_blocks)))


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _constants(tiles: Tiles, causal: bool, starts: Pair, width: int, descriptors: bool) -> dict[str, Any]:
    return {
        "CAUSAL": causal,
        "RAGGED": starts[0] is not None,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": padded_head_dim(width),
        "DESCRIPTOR": descriptors,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Pair,
    longest: tuple[int, int],
    causal: bool,
    scale: float,
    choice: Choice,
) -> tuple[Tensor, Tensor]:
    """Output, shaped as query and contiguous, and lse `[B, H_q, N]` or `[H_q, T_total]`."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    q, k, v, o = (_batched(tensor) for tensor in (query, key, value, output))
    batch, num_queries, num_heads, width = q.shape
    lse = torch.empty((batch, num_heads, num_queries), dtype=torch.float32, device=query.device)
    sequences = batch if starts[0] is None else starts[0].numel() - 1
    tiles = choice.forward
    num_blocks, num_items, group = cdiv(longest[0], tiles.block_m), sequences * num_heads, num_heads // k.shape[2]
    if output.numel() == 0 or num_blocks == 0:
        return output, lse if query.ndim == 4 else lse[0]
    if k.numel() == 0:
        return output.zero_(), (lse if query.ndim == 4 else lse[0]).fill_(-torch.inf)
    described = tiles.descriptors and all(_describable(tensor) for tensor in (q, k, v))
    sources = (q, k, v)
    if described:
        sources = (_described(q, tiles.block_m), _described(k, tiles.block_n), _described(v, tiles.block_n))
    section = _section(num_items, num_blocks, 2 * longest[1] * width * q.element_size() // group)
    with _on(query):
        flash_forward[(num_blocks * num_items,)](
            *sources, o, lse, *starts, scale * _LOG2_E, num_queries, k.shape[1], num_blocks, num_items, section,
            num_heads, group, width, *_strides(q), *_strides(k), *_strides(v), *_strides(o), *lse.stride()[:2],
            **_constants(tiles, causal, starts, width, described),
        )  # fmt: skip
    return output, lse if query.ndim == 4 else lse[0]


def _numbers(query_gradient: Tensor, starts: Pair, longest: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Where two float32 numbers a query row are kept until the gradients of queries are made, and the steps from one
    sequence, token and head to the next: in the memory of these gradients, so that backward needs none of its own;
    beside it where a row of them is too short (less than 64 columns of 16 bits), not aligned, or too far away.
    """
    batch, num_queries, num_heads, width = query_gradient.shape
    packed = starts[0] is not None
    row_bytes = width * query_gradient.element_size()
    if row_bytes >= 2 * 4 * GROUP and row_bytes % 16 == 0:
        numbers = query_gradient.view(torch.float32)
        of_sequence, of_token, of_head, _ = numbers.stride()
        if longest * of_token < 1 << 31:  # positions inside a sequence are 32-bit
            return numbers, (0 if packed else of_sequence, of_token, of_head)
    # Every packed sequence gets GROUP rows more than it has, so that none reaches into the next.
    rows = cdiv(num_queries + (GROUP * starts[0].numel() if starts[0] is not None else 0), GROUP) * GROUP
    numbers = torch.empty((batch, num_heads, 2 * rows), dtype=torch.float32, device=query_gradient.device)
    return numbers, (2 * GROUP if packed else numbers.stride(0), 2, numbers.stride(1))


def launch_backward(
    outputs: tuple[Tensor, Tensor | None, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    starts: Pair,
    longest: tuple[int, int],
    causal: bool,
    scale: float,
    choice: Choice,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous. `outputs`: gradient of the output, of lse, and these two."""
    gradients = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)
    q, k, v, dq, dk, dv, do, o = (_batched(tensor) for tensor in (*inputs, *gradients, outputs[0], outputs[2]))
    batch, num_queries, num_heads, width = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    sequences = batch if starts[0] is None else starts[0].numel() - 1
    if q.numel() == 0 or k.numel() == 0:
        return tuple(gradient.zero_() for gradient in gradients)  # type: ignore[return-value]
    lse = outputs[3] if outputs[3].ndim == 3 else outputs[3][None]
    lse_gradient = None if outputs[1] is None else outputs[1].contiguous()
    numbers, steps = _numbers(dq, starts, longest[0])
    num_blocks = cdiv(longest[0], DELTA_ROWS)
    sources = (q, k, v, do)
    common = (scale * _LOG2_E, scale, num_queries, num_keys)
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(do))
    describable = all(_describable(tensor) for tensor in sources)
    with _on(q):
        flash_delta[(num_blocks * sequences * num_heads,)](
            o, do, lse, lse_gradient, numbers, starts[0], 1.0 / scale, num_queries, num_blocks,
            sequences * num_heads, num_heads, width, *_strides(o), *_strides(do), *lse.stride()[:2], *steps,
            RAGGED=starts[0] is not None, HAS_LSE_GRADIENT=lse_gradient is not None, BLOCK_M=DELTA_ROWS,
            BLOCK_D=padded_head_dim(width), GROUP=GROUP, num_warps=8, num_stages=1,
        )  # fmt: skip
        for kernel, tiles, along_keys in (
            (flash_backward_keys, choice.keys, False),
            (flash_backward_queries, choice.queries, True),
        ):
            heads, results = (num_heads, (dq,)) if along_keys else (num_kv_heads, (dk, dv))
            num_blocks = cdiv(longest[0], tiles.block_m) if along_keys else cdiv(longest[1], tiles.block_n)
            loaded = 2 * width * q.element_size() * (longest[1] // group if along_keys else longest[0] * group)
            described = tiles.descriptors and describable
            blocks = (tiles.block_m, tiles.block_n, tiles.block_n, tiles.block_m)
            kernel[(num_blocks * sequences * heads,)](
                *(map(_described, sources, blocks) if described else sources), *results, numbers, *starts,
                *common, num_blocks, sequences * heads, _section(sequences * heads, num_blocks, loaded), heads, group,
                width, *strides, *_strides(results[0]), *steps, GROUP=GROUP,
                **_constants(tiles, causal, starts, width, described),
            )  # fmt: skip
    return gradients  # type: ignore[return-value]
