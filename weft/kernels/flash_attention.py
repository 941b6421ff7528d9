"""Attention for training, forward and backward: plain torch, and the launchers of the Triton kernels beside it.

Knows dense batches `[B, N, H, D]` and packed sequences `[T_total, H, D]`; knows no model, cache or block table. Nothing
of the size queries x keys is kept: forward leaves the output and one logarithm a row, and backward computes weights
anew from them. Gradients are the same bits in every run.
"""

import logging
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.errors import KernelError, shown
from weft.kernels._arguments import check_floats, debugging, is_number
from weft.kernels._flash_forms import forms
from weft.kernels._flash_launch import launch_backward, launch_forward
from weft.kernels._flash_tiles import LARGEST_HEAD_DIM, Choice, default_choice
from weft.kernels._jit import capability, runs_on

_LOGGER = logging.getLogger(__name__)

SPECIALISATIONS = forms()


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_attention` in plain torch, in the order of roundings of an eager model: products in the inputs' dtype,
    softmax in fp32 (fp64 stays fp64). Keeps queries x keys.
    """
    if query_starts is not None:
        starts = query_starts.tolist(), (query_starts if key_starts is None else key_starts).tolist()
        output = query.new_zeros(query.shape)
        lse = query.new_full((query.shape[1], query.shape[0]), -torch.inf, dtype=_wide(query.dtype))
        for of_queries, of_keys in zip(*map(pairwise, starts), strict=True):
            rows, columns = slice(*of_queries), slice(*of_keys)
            one = attention_reference(
                query[None, rows], key[None, columns], value[None, columns], causal=causal, scale=scale
            )
            output, lse = output.clone(), lse.clone()  # autograd keeps what earlier sequences were written into
            output[rows], lse[:, rows] = one[0][0], one[1][0]
        return output, lse
    num_queries, num_heads, head_dim = query.shape[1:]
    num_keys, group = key.shape[1], num_heads // key.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    q = query.transpose(1, 2)
    k, v = (tensor.transpose(1, 2).repeat_interleave(group, 1) for tensor in (key, value))
    scores = (q @ k.transpose(-1, -2) * scale).to(_wide(query.dtype))
    if causal:  # the last query stands beside the last key
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~visible.tril(num_keys - num_queries), -torch.inf)
    lse = scores.logsumexp(-1) if num_keys else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp().to(query.dtype)
    return (weights @ v).transpose(1, 2), lse


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    longest_query: int | None = None,
    longest_key: int | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * query @ key.T) @ value for every head, differentiable, and the logarithm of each row's sum.

    Dense: query `[B, N, H_q, D]`, key and value `[B, N_k, H_kv, D]`; returns the output, shaped as query, and lse
    `[B, H_q, N]`. Packed: query `[T_total, H_q, D]`, key and value `[T_keys, H_kv, D]`, `query_starts` (and
    `key_starts`, where keys are packed otherwise) int32 `[sequences + 1]`, running lengths from 0 to T_total; lse is
    `[H_q, T_total]`. `longest_query` and `longest_key` spare reading the starts back from the device.

    With `causal` the last query stands beside the last key: of N queries and N_k keys, query i sees keys 0 to
    i + N_k - N. A row that sees no key gives 0 and lse -inf, and passes no gradient on. lse is fp32 and natural.
    Sources: Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023).

    Tensors may be strided (a slice of a packed projection); only a last dimension that is not contiguous is copied.
    Scores, sums and products are accumulated in fp32; weights, and their slopes on the way back, are rounded to the
    inputs' dtype before they are multiplied. Where no kernel can run (a CPU), plain torch does the same.

    `choice` forces the tiles. Raises KernelError naming what does not fit.
    """
    _check(query, key, value, query_starts, key_starts)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not is_number(scale) or not 0 < scale < float("inf"):
        raise KernelError(f"scale is {shown(scale)}", hint="a positive number")
    if not isinstance(causal, bool):
        raise KernelError(f"causal is {shown(causal)}", hint="True or False")
    if query_starts is not None:
        key_starts = query_starts if key_starts is None else key_starts
        for name, starts in (("query_starts", query_starts), ("key_starts", key_starts)):
            if starts.device != query.device:
                raise KernelError(f"{name} lies on {starts.device} and query on {query.device}")
        _check_starts("query_starts", query_starts, query.shape[0], longest_query)
        _check_starts("key_starts", key_starts, key.shape[0], longest_key)
    if not runs_on(query.device):
        return attention_reference(
            query, key, value, causal=causal, scale=scale, query_starts=query_starts, key_starts=key_starts
        )
    if query_starts is None:
        longest_query, longest_key = query.shape[1], key.shape[1]
    else:
        assert key_starts is not None
        longest_query = int(query_starts.diff().max()) if longest_query is None else longest_query
        if longest_key is None:
            longest_key = longest_query if key_starts is query_starts else int(key_starts.diff().max())
    gpu = capability(query.device)
    _announce(gpu)
    choice = choice or default_choice(gpu, query.shape[-1], query.element_size(), query.ndim == 3)
    lengths = (query_starts, key_starts, longest_query, longest_key)
    return _flash_attention(query, key, value, *lengths, causal, scale, str(choice))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache
def _announce(gpu: int) -> None:
    path = "tensor memory accelerator and wgmma" if 90 <= gpu < 100 else "pointer loads, no Hopper instructions"
    _LOGGER.info("flash attention on sm_%d: %s", gpu, path if gpu else "Triton's interpreter")


def _check(query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, others: Tensor | None) -> None:
    """Raise KernelError for what no kernel could compute."""
    ndim = 4 if starts is None else 3
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != ndim:
            layout = "[B, N, H, D]" if starts is None else "[T_total, H, D], as query_starts is given"
            raise KernelError(f"{name} has shape {list(tensor.shape)}, expected {layout}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise KernelError(
                f"{name} is {tensor.dtype} on {tensor.device}, query is {query.dtype} on {query.device}",
                hint="all three must agree",
            )
    if runs_on(query.device):
        check_floats("query", query)
    if key.shape != value.shape:
        raise KernelError(f"key has shape {list(key.shape)}, value {list(value.shape)}", hint="they must be equal")
    if not 0 < query.shape[-1] <= LARGEST_HEAD_DIM or key.shape[-1] != query.shape[-1]:
        raise KernelError(
            f"head dimension {query.shape[-1]} of query, {key.shape[-1]} of key",
            hint=f"they must be equal, and from 1 to {LARGEST_HEAD_DIM}",
        )
    if not key.shape[-2] or query.shape[-2] % key.shape[-2]:
        raise KernelError(
            f"{query.shape[-2]} query heads over {key.shape[-2]} kv heads", hint="the second must divide the first"
        )
    if starts is None and (others is not None or key.shape[0] != query.shape[0]):
        raise KernelError(f"{query.shape[0]} sequences of queries, {key.shape[0]} of keys, and no query_starts")
    if starts is not None and others is not None and others.shape != starts.shape:
        raise KernelError(f"query_starts has {starts.numel()} entries, key_starts {others.numel()}")


def _check_starts(name: str, starts: Tensor, total: int, longest: int | None) -> None:
    """Raise KernelError for running lengths of the wrong kind; their values are read on a CPU, and on a GPU, where that
    waits for the device, only with WEFT_DEBUG=1 in the environment.
    """
    if starts.ndim != 1 or starts.numel() < 2 or starts.dtype != torch.int32 or not starts.is_contiguous():
        raise KernelError(
            f"{name} is {starts.dtype} {list(starts.shape)} with strides {starts.stride()}",
            hint="contiguous int32 [sequences + 1]",
        )
    if starts.device.type == "cuda" and not debugging():
        return
    values = starts.tolist()
    if values[0] != 0 or values[-1] != total:
        raise KernelError(f"{name} runs from {values[0]} to {values[-1]}, expected 0 to {total}")
    lengths = [last - first for first, last in pairwise(values)]
    if min(lengths) < 0:
        index = lengths.index(min(lengths))
        raise KernelError(f"{name} falls from {values[index]} to {values[index + 1]} at {index}")
    if longest is not None and longest < max(lengths):
        raise KernelError(f"{name} has a sequence of {max(lengths)}, the longest is said to be {longest}")


@torch.library.custom_op("weft::flash_attention", mutates_args=())
def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    longest_query: int,
    longest_key: int,
    causal: bool,
    scale: float,
    choice: str,
) -> tuple[Tensor, Tensor]:
    return launch_forward(
        query, key, value, (query_starts, key_starts), (longest_query, longest_key), causal, scale, Choice.parse(choice)
    )


@_flash_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = [query.shape[0], query.shape[2], query.shape[1]] if query.ndim == 4 else [query.shape[1], query.shape[0]]
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("weft::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    longest_query: int,
    longest_key: int,
    causal: bool,
    scale: float,
    choice: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_backward(
        (output_gradient, lse_gradient, output, lse),
        (query, key, value),
        (query_starts, key_starts),
        (longest_query, longest_key),
        causal,
        scale,
        Choice.parse(choice),
    )


@_flash_attention_backward.register_fake
def _(
    output_gradient: Tensor, lse_gradient: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    query_gradient, key_gradient, value_gradient = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)
    )
    return query_gradient, key_gradient, value_gradient


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, query_starts, key_starts, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, query_starts, key_starts)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, output_gradient: Tensor | None, lse_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, output, lse, query_starts, key_starts = ctx.saved_tensors
    nothing = (None,) * 7
    if output_gradient is None and lse_gradient is None:
        return None, None, None, *nothing
    output_gradient = torch.zeros_like(output) if output_gradient is None else output_gradient
    gradients = _flash_attention_backward(
        output_gradient, lse_gradient, query, key, value, output, lse, query_starts, key_starts, *ctx.numbers
    )
    return *gradients, *nothing


_flash_attention.register_autograd(_backward, setup_context=_keep)
