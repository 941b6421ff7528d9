"""The feed-forward part of a block. Data only: operations compute it."""

import torch
from torch import nn

from weft.layers.linear import Linear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (SwiGLU, Shazeer 2020), gate and up packed."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        width = intermediate_size
        self.gate_up = Linear(hidden_size, (width, width), bias=bias, dtype=dtype, device=device)
        self.down = Linear(width, (hidden_size,), bias=bias, dtype=dtype, device=device)
