"""Root-mean-square normalisation (Zhang and Sennrich 2019): the parameters, and the plain formula."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    weight: Float[Tensor, "E"]

    def __init__(self, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))


def rms_norm(x: Float[Tensor, "*rows E"], norm: RMSNorm) -> Float[Tensor, "*rows E"]:
    """Normalise in float32, cast to the input's dtype, then multiply by the weight: HuggingFace's order of casts.

    In bfloat16 the other order (multiply, then cast) moves the logits by 1.4 and 1.5 % of the argmaxes.
    """
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return norm.weight * (wide * torch.rsqrt(variance + norm.epsilon)).to(x.dtype)
