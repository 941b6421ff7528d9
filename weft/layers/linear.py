"""A matrix and its bias, packed where several projections read the same input. Data only: operations multiply."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


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
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(sum(parts), dtype=dtype, device=device)) if bias else None


class Embedding(nn.Module):
    """One row a token."""

    weight: Float[Tensor, "V E"]

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device))
