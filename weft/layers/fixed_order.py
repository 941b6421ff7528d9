"""Plain operations whose sums run in one order, whatever else a step holds: batch invariance without kernels.

A library may sum a row in another order when there are more rows beside it. So rows go through in blocks of eight, the
last one filled up with zeros: every call has one shape. What is left to the library is that a row's place in its block
shows in no bit. `block_sizes` looks whether that holds before an engine serves, and which other sizes give the same
bits on this machine: a batch then needs fewer products, and a lone request a smaller one.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import ConfigError
from weft.layers.linear import Linear, Projection
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm, rms_norm
from weft.layers.operations import Attend, PlainOperations
from weft.layers.prepacked import PrepackedLinear

ROWS = 8  # more would be padding beside a lone request, fewer would read every matrix more often for a prompt
SIZES = (4, 8, 16, 32, 64)  # of blocks that may give the bits of eight rows; of more rows a matrix is read often enough
_READING = 8  # rows in whose time a matrix is read


def blocks_of(count: int, sizes: Sequence[int] = (ROWS,)) -> list[int]:
    """The blocks that so many rows take: the largest first, the last one filled up where that is no more work.

    sizes: those that are allowed, ascending.

    >>> blocks_of(9), blocks_of(3, SIZES), blocks_of(25, SIZES), blocks_of(70, SIZES)
    ([8, 8], [4], [32], [64, 8])
    """
    blocks = []
    while count > 0:
        below = [size for size in sizes if size <= count]
        above = [size for size in sizes if count <= size and (not below or size - count <= _READING)]
        blocks.append(above[0] if above else below[-1])
        count -= blocks[-1]
    return blocks


def by_blocks(
    function: Callable[[Float[Tensor, "rows in"]], Float[Tensor, "rows *out"]],
    x: Float[Tensor, "rows in"],
    sizes: Sequence[int] = (ROWS,),
) -> Float[Tensor, "rows *out"]:
    """`function(x)`, which treats each row for itself, in blocks of these sizes.

    >>> by_blocks(lambda block: block * len(block), torch.ones(3, 1)).tolist()
    [[8.0], [8.0], [8.0]]
    """
    count = len(x)
    if count == 0:
        return function(x)
    blocks = blocks_of(count, sizes)
    filled = functional.pad(x, (0, 0, 0, sum(blocks) - count))
    return torch.cat([function(block) for block in filled.split(blocks)])[:count]


class FixedOrderOperations(PlainOperations):
    """Rounding points are those of the plain operations; of the sums only the order may differ from theirs.

    sizes: of blocks that this machine gives the same bits (`block_sizes`).
    """

    def __init__(self, attend: Attend, sizes: Sequence[int] = (ROWS,)) -> None:
        super().__init__(attend)
        self._sizes = tuple(sizes)

    def norm_linear(
        self, hidden: Float[Tensor, "T_total E"], norm: RMSNorm, linear: Projection
    ) -> Float[Tensor, "T_total out"]:
        return by_blocks(lambda rows: linear(rms_norm(rows, norm)), hidden, self._sizes)

    def linear_add(
        self, x: Float[Tensor, "T_total in"], linear: Projection, hidden: Float[Tensor, "T_total E"]
    ) -> Float[Tensor, "T_total E"]:
        return hidden + by_blocks(linear, x, self._sizes)

    def norm_mlp_add(
        self, hidden: Float[Tensor, "T_total E"], norm: RMSNorm, mlp: GatedMLP
    ) -> Float[Tensor, "T_total E"]:
        def gated(rows: Float[Tensor, "rows E"]) -> Float[Tensor, "rows inner"]:
            gate, up = mlp.gate_up(rms_norm(rows, norm)).chunk(2, dim=-1)
            # Row by row: torch's vectorised exp and its scalar tail differ, and a block has one tail for all its rows.
            return torch.stack([functional.silu(row) for row in gate]) * up

        return self.linear_add(by_blocks(gated, hidden, self._sizes), mlp.down, hidden)

    def logits(
        self, hidden: Float[Tensor, "T_total E"], rows: Int[Tensor, "R"], norm: RMSNorm, head: Projection
    ) -> Float[Tensor, "R V"]:
        return self.norm_linear(hidden[rows], norm, head).float()


def block_sizes(model: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Those of SIZES whose blocks give each row the bits it has among eight: by a matrix and a norm of each shape.

    Raises: ConfigError if bits depend on a row's place among eight, since nothing above could then promise that they do
        not depend on the batch.
    """
    generator = torch.Generator().manual_seed(0)
    sizes: tuple[int, ...] = SIZES
    for name, module, width in _summing(model):
        rows = torch.randn(SIZES[-1], width, generator=generator).to(device, dtype)
        with torch.no_grad():
            equal = module(rows[:1].expand(ROWS, -1).contiguous())
            if not torch.equal(equal, equal[:1].expand_as(equal)):
                raise ConfigError(
                    f"batch_invariant=True cannot be kept on this machine: the products of equal rows by {name} "
                    f"{[equal.shape[1], width]} differ",
                    hint="cpu_linear='plain' or 'prepacked', whichever it is not, or batch_invariant=False",
                )
            expected = by_blocks(module, rows)
            sizes = tuple(size for size in sizes if torch.equal(by_blocks(module, rows, (size,)), expected))
    return sizes


def _summing(model: nn.Module) -> list[tuple[str, Callable[[Tensor], Tensor], int]]:
    """One of each kind that sums over a row: its name, what it does to rows, and their width."""
    found: dict[object, tuple[str, Callable[[Tensor], Tensor], int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear | PrepackedLinear):
            kind = type(module), module.in_features, module.out_features
            found[kind] = name, module, module.in_features
        elif isinstance(module, RMSNorm):
            width = len(module.weight)
            found[RMSNorm, width] = name, partial(rms_norm, norm=module), width
    return list(found.values())
