"""Cases of attention with gradients, and the judge: how far from float64 a kernel may be."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tests.kernels.accuracy import SINGLE, assert_within, unit
from weft.kernels._flash_tiles import Choice
from weft.kernels.flash_attention import attention_reference, flash_attention

POINTERS = Choice.parse("16x16 w4 s1 / 16x16 w4 s1 / 16x16 w4 s1")
UNEVEN = Choice.parse("32x16 w4 s1 / 16x32 w4 s1 / 32x16 w4 s1")
DESCRIPTORS = Choice.parse("16x32 w4 s1 tma / 32x16 w4 s1 tma / 16x32 w4 s1 tma")


# The kernel's error against float64 is at most this many times that of plain torch in the same dtype (design, section
# 3: a kernel may keep more precision, never less).
RMS_RATIO, LARGEST_RATIO = 1.05, 2.0
# Gradients in 16 bits are held to that in pools of many values (`accuracy.py`). In a small case a few rows that see few
# keys count for much, and there shows that what softmax subtracts on its way back is summed from the rounded output
# (FlashAttention-2, section 2.3); largest found on 15 rows: 1.14. There each value is held to its roundings as well.
SMALL_RMS_RATIO = 1.2
# Both accumulate in fp32, so below this many of its units, of results of the order of 1, the ratio says nothing.
# Backward takes weights from a logarithm that was rounded to fp32: its size counts.
NOISE_UNITS = 2


@dataclass(frozen=True)
class Case:
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    dtype: torch.dtype = torch.float32
    batch: int = 1
    magnitude: float = 1.0

    def tensors(self, device: torch.device, seed: int = 0) -> list[Tensor]:
        """Query, key, value and the gradient of the output."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(self.num_queries, self.num_heads), *[(self.num_keys, self.num_kv_heads)] * 2]
        made = [
            torch.randn(self.batch, *shape, self.head_dim, generator=generator).to(self.dtype)
            for shape in [*shapes, shapes[0]]
        ]
        made[0] *= self.magnitude
        return [tensor.to(device) for tensor in made]


def results(attend: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], **arguments: object) -> list[Tensor]:
    """Output, lse and the gradients of query, key and value."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output, lse = attend(*inputs, **arguments)
    return [output.detach(), lse.detach(), *torch.autograd.grad(output, inputs, tensors[3])]


NAMES = ("output", "lse", "query gradient", "key gradient", "value gradient")


def roundings(
    tensors: list[Tensor],
    *,
    causal: bool = True,
    scale: float | None = None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> list[Tensor]:
    """How far the roundings on the way may take each value of the gradients of query, key and value.

    Of the inputs' dtype: weights, their slopes, and, in what softmax subtracts, the output. Of single precision: every
    sum, whatever its order; scores and their logarithm, in each weight; eight operations more.
    """
    if query_starts is not None:
        starts = [each.tolist() for each in (query_starts, query_starts if key_starts is None else key_starts)]
        parts = []
        for rows, columns in zip(*([slice(*pair) for pair in pairwise(each)] for each in starts), strict=True):
            one = [tensor[None, columns if index in (1, 2) else rows] for index, tensor in enumerate(tensors)]
            parts.append([bound[0] for bound in roundings(one, causal=causal, scale=scale)])
        return [torch.cat(bounds) for bounds in zip(*parts, strict=True)]
    rounding, head_dim = unit(tensors[0].dtype), tensors[0].shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    group = tensors[0].shape[2] // tensors[1].shape[2]
    q, k, v, do = (tensor.double().transpose(1, 2) for tensor in tensors)
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    count, num_keys = q.shape[2], k.shape[2]
    visible = torch.ones(count, num_keys, dtype=torch.bool, device=q.device)
    visible = visible.tril(num_keys - count) if causal else visible
    scores = (scale * q @ k.mT).masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True) if num_keys else scores.new_zeros(*scores.shape[:-1], 1)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    weights = (scores - lse).exp()
    of_score = SINGLE * (head_dim + 4) * scale * (q.abs() @ k.abs().mT)
    of_lse = of_score.masked_fill(~visible, 0).amax(-1, keepdim=True) if num_keys else lse
    of_weight = torch.expm1(of_score + of_lse + SINGLE * (num_keys + 8 + 8 * lse.abs())) * weights
    output, absolute = weights @ v, v.abs()
    size = do.abs() @ absolute.mT
    of_output = rounding * output.abs() + of_weight @ absolute + SINGLE * (num_keys + 4) * (weights @ absolute)
    of_delta = ((of_output + SINGLE * head_dim * output.abs()) * do.abs()).sum(-1, keepdim=True)
    difference = (do @ v.mT - (output * do).sum(-1, keepdim=True)).abs()
    of_difference = of_delta + SINGLE * (head_dim + 4) * size
    # Below the smallest normal number of its dtype a result loses digits; float32 arithmetic on a GPU makes it zero.
    least = max(rounding * torch.finfo(tensors[0].dtype).smallest_normal, torch.finfo(torch.float32).smallest_normal)
    weights_off = rounding * weights + of_weight + least
    slopes = weights * difference
    off = (rounding + 2 * SINGLE) * slopes + weights * of_difference + of_weight * (difference + of_difference) + least
    off, weights_off = off * visible, weights_off * visible

    def summed(error: Tensor, value: Tensor, by: Tensor, terms: int) -> Tensor:
        return error @ by + SINGLE * (terms + 4) * ((value + error) @ by)

    along_keys = scale * summed(off, slopes, k.abs(), num_keys)
    along_queries = [
        summed(error.mT, value.mT, by.abs(), group * count)
        for error, value, by in ((off, slopes, q), (weights_off, weights, do))
    ]
    of_key, of_value = (
        bound.unflatten(1, (-1, group)).sum(2) for bound in (scale * along_queries[0], along_queries[1])
    )
    return [bound.transpose(1, 2) for bound in (along_keys, of_key, of_value)]


def judge(found: list[Tensor], plain: list[Tensor], truth: list[Tensor], inside: list[Tensor]) -> None:
    """Assert that every result is finite where it should be and no further from the truth than plain torch, and
    gradients no further than their roundings allow.
    """
    for name, ours, exact, bound in zip(NAMES[2:], found[2:], truth[2:], inside, strict=True):
        assert ours.shape == exact.shape, name
        assert_within(ours, exact, bound)
    finite = truth[1][truth[1] != -torch.inf].abs()
    noise_unit = NOISE_UNITS * torch.finfo(torch.float32).eps * (1 + (finite.max().item() if finite.numel() else 0))
    for name, ours, theirs, exact in zip(NAMES, found, plain, truth, strict=True):
        assert ours.shape == exact.shape, name
        empty = exact == -torch.inf
        assert (ours[empty] == -torch.inf).all(), f"{name}: rows without a key"
        ours, theirs, exact = (tensor[~empty].double() for tensor in (ours, theirs, exact))
        assert ours.isfinite().all(), f"{name} is not finite"
        if not exact.numel():
            continue
        noise = noise_unit * (1 + exact.square().mean().sqrt().item())
        error, allowed = ours - exact, theirs - exact
        rms, rms_allowed = (each.square().mean().sqrt().item() for each in (error, allowed))
        small = name.endswith("gradient") and found[0].dtype != torch.float32
        ratio = SMALL_RMS_RATIO if small else RMS_RATIO
        assert rms <= max(ratio * rms_allowed, noise), f"{name}: RMS {rms:.3g}, plain torch {rms_allowed:.3g}"
        largest, largest_allowed = error.abs().max().item(), allowed.abs().max().item()
        limit = max(LARGEST_RATIO * largest_allowed, 5 * noise)  # of thousands of values
        assert largest <= limit, f"{name}: largest {largest:.3g}, plain torch {largest_allowed:.3g}"


def check(case: Case, device: torch.device, choice: Choice | None, **arguments: object) -> None:
    """The law: the kernel's results for this case stand beside float64 as closely as plain torch's do."""
    tensors = case.tensors(device)
    exact = [tensor.double() for tensor in tensors]
    found = results(flash_attention, tensors, causal=case.causal, choice=choice, **arguments)
    plain = results(attention_reference, tensors, causal=case.causal, **arguments)
    truth = results(attention_reference, exact, causal=case.causal, **arguments)
    judge(found, plain, truth, roundings(tensors, causal=case.causal, **arguments))


STARTS = [0, 1, 1, 4, 51, 53, 70]


def packed(
    device: torch.device, dtype: torch.dtype, num_heads: int = 2, head_dim: int = 16
) -> tuple[list[Tensor], Tensor]:
    """Tokens of a huge sequence among tiny ones, one of which is empty."""
    case = Case(STARTS[-1], STARTS[-1], num_heads, 1, head_dim, dtype=dtype)
    tensors = [tensor[0] for tensor in case.tensors(device)]
    return tensors, torch.tensor(STARTS, dtype=torch.int32, device=device)
