"""Plain operations whose sums run in one order, whatever else a step holds: batch invariance without kernels.

A library may sum a row in another order when there are more rows beside it. So rows go through in blocks of eight, the
last one filled up with zeros: every call has one shape. What is left to the library is that a row's place in its block
shows in no bit, and `check_places` looks whether that holds before an engine serves.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import ConfigError
from weft.layers.linear import Linear, Projection
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm, rms_norm
from weft.layers.operations import PlainOperations
from weft.layers.prepacked import PrepackedLinear

ROWS = 8  # more would be padding beside a lone request, fewer would read every matrix more often for a prompt


def by_blocks(
    function: Callable[[Float[Tensor, "ROWS in"]], Float[Tensor, "ROWS *out"]], x: Float[Tensor, "rows in"]
) -> Float[Tensor, "rows *out"]:
    """`function(x)`, which treats each row for itself, eight rows at a time.

    >>> by_blocks(lambda block: block * len(block), torch.ones(3, 1)).tolist()
    [[8.0], [8.0], [8.0]]
    """
    count = len(x)
    if count == 0:
        return function(x)
    filled = functional.pad(x, (0, 0, 0, -count % ROWS))
    return torch.cat([function(block) for block in filled.split(ROWS)])[:count]


class FixedOrderOperations(PlainOperations):
    """Rounding points are those of the plain operations; of the sums only the order may differ from theirs."""

    def norm_linear(
        self, hidden: Float[Tensor, "T_total E"], norm: RMSNorm, linear: Projection
    ) -> Float[Tensor, "T_total out"]:
        return by_blocks(lambda rows: linear(rms_norm(rows, norm)), hidden)

    def linear_add(
        self, x: Float[Tensor, "T_total in"], linear: Projection, hidden: Float[Tensor, "T_total E"]
    ) -> Float[Tensor, "T_total E"]:
        return hidden + by_blocks(linear, x)

    def norm_mlp_add(
        self, hidden: Float[Tensor, "T_total E"], norm: RMSNorm, mlp: GatedMLP
    ) -> Float[Tensor, "T_total E"]:
        def gated(rows: Float[Tensor, "ROWS E"]) -> Float[Tensor, "ROWS inner"]:
            gate, up = mlp.gate_up(rms_norm(rows, norm)).chunk(2, dim=-1)
            # Row by row: torch's vectorised exp and its scalar tail differ, and a block has one tail for all its rows.
            return torch.stack([functional.silu(row) for row in gate]) * up

        return self.linear_add(by_blocks(gated, hidden), mlp.down, hidden)

    def logits(
        self, hidden: Float[Tensor, "T_total E"], rows: Int[Tensor, "R"], norm: RMSNorm, head: Projection
    ) -> Float[Tensor, "R V"]:
        return self.norm_linear(hidden[rows], norm, head).float()


def check_places(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Look whether a row's bits depend on its place among eight: one product by a matrix of each shape.

    Raises: ConfigError if they do, since nothing above could then promise that they do not depend on the batch.
    """
    by_shape = {
        (type(module), module.in_features, module.out_features): (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Linear | PrepackedLinear)
    }
    generator = torch.Generator().manual_seed(0)
    for (_, width, height), (name, module) in by_shape.items():
        row = torch.randn(1, width, generator=generator).to(device, dtype)
        with torch.no_grad():
            found = module(row.expand(ROWS, -1).contiguous())
        if not torch.equal(found, found[:1].expand_as(found)):
            raise ConfigError(
                f"batch_invariant=True cannot be kept on this machine: the products of equal rows by {name} "
                f"[{height}, {width}] differ",
                hint="cpu_linear='plain' or 'prepacked', whichever it is not, or batch_invariant=False",
            )
