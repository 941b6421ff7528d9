"""A matrix and its bias, packed where several projections read the same input, and their plain product."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


@runtime_checkable
class Projection(Protocol):
    """What operations multiply by: a `Linear`, or what stands in its place and keeps its matrix in another layout."""

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]: ...


class Linear(nn.Module):
    """`y = x @ weight.T + bias`. `parts` are the widths of the projections packed into it, in order.

    Linear(576, (576, 192, 192))      # q, k and v in one matrix
    """

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, "out"] | None

    def __init__(
        self, in_features: int, parts: tuple[int, ...], *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.parts = parts
        self.in_features, self.out_features = in_features, sum(parts)
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(sum(parts), dtype=dtype, device=device)) if bias else None

    def forward(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        """HuggingFace's own call, hence its bits at equal shapes."""
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """One row a token. Data only: operations look up."""

    weight: Float[Tensor, "V E"]

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device))
