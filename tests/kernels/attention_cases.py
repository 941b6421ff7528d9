"""Cases of attention with gradients, and the judge: how far from float64 a kernel may be."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The kernel's error against float64 is at most this many times that of plain torch in the same dtype (design, section
# 3: a kernel may keep more precision, never less).
RMS_RATIO, LARGEST_RATIO = 1.05, 2.0
# Gradients may stand a little further off: what softmax subtracts on its way back is summed from the rounded output
# (FlashAttention-2, section 2.3), which shows where rows see few keys. Largest found in fp16 on 15 rows: 1.14.
GRADIENT_RMS_RATIO = 1.2
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


def judge(found: list[Tensor], plain: list[Tensor], truth: list[Tensor]) -> None:
    """Assert that every result is finite where it should be and no further from the truth than plain torch allows."""
    finite = truth[1][truth[1] != -torch.inf].abs()
    unit = NOISE_UNITS * torch.finfo(torch.float32).eps * (1 + (finite.max().item() if finite.numel() else 0))
    for name, ours, theirs, exact in zip(NAMES, found, plain, truth, strict=True):
        assert ours.shape == exact.shape, name
        empty = exact == -torch.inf
        assert (ours[empty] == -torch.inf).all(), f"{name}: rows without a key"
        ours, theirs, exact = (tensor[~empty].double() for tensor in (ours, theirs, exact))
        assert ours.isfinite().all(), f"{name} is not finite"
        if not exact.numel():
            continue
        noise = unit * (1 + exact.square().mean().sqrt().item())
        error, allowed = ours - exact, theirs - exact
        rms, rms_allowed = (each.square().mean().sqrt().item() for each in (error, allowed))
        ratio = GRADIENT_RMS_RATIO if name.endswith("gradient") else RMS_RATIO
        assert rms <= max(ratio * rms_allowed, noise), f"{name}: RMS {rms:.3g}, plain torch {rms_allowed:.3g}"
        largest, largest_allowed = error.abs().max().item(), allowed.abs().max().item()
        limit = max(LARGEST_RATIO * largest_allowed, 5 * noise)  # of thousands of values
        assert largest <= limit, f"{name}: largest {largest:.3g}, plain torch {largest_allowed:.3g}"
