"""A model and its cache in integers, so that logits are exact: of a request alone, in any batch, chunk or order.

It stands in for a real one where all else of an engine is weft's own. A slot holds a number made of its token and
place; a token's logits are made of the sum of all slots up to it, so that whatever is stale, foreign or missing shows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.batch import Batch
from weft.config import BlockGeometry

VOCAB_SIZE = 24


def mixed(numbers: Tensor) -> Tensor:
    """Each bit of an int64 depends on all those below it, and the low ones on the high ones too."""
    numbers = (numbers ^ (numbers >> 31)) * 0x5851F42D4C957F2D
    return (numbers ^ (numbers >> 29)) * 0x14057B7EF767814F


class IntegerCache:
    def __init__(self, geometry: BlockGeometry, *, capturable: bool) -> None:
        """capturable: whether the engine may take it for one whose steps can be captured."""
        self.capturable = capturable
        self.block_size = geometry.block_size
        # What nobody has written is no zero, which a sum would not show.
        self.slots = mixed(torch.arange(1, (geometry.num_blocks + 1) * geometry.block_size + 1))

    def prepare(self, batch: Batch) -> Any:
        return IntegerAttend(self, batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        blocks = self.slots.view(-1, self.block_size)
        for source, target in pairs:
            blocks[target] = blocks[source]


class IntegerAttend:
    def __init__(self, cache: IntegerCache, batch: Batch) -> None:
        (tables,) = batch.groups
        self._slots = cache.slots
        self._written = tables.slot_mapping  # -1 is the last slot of the block for padding
        offsets = torch.arange(cache.block_size)
        slots_of = (tables.block_tables[:, :, None] * cache.block_size + offsets).flatten(1)
        owners = torch.searchsorted(batch.query_starts[1:], torch.arange(len(batch.token_ids)), right=True)
        self._read = slots_of[owners.clamp(max=len(slots_of) - 1)]

    def sums(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self._slots[self._written] = mixed(token_ids * 1009 + positions + 1)
        is_before = torch.arange(self._read.shape[1]) <= positions[:, None]
        return (self._slots[self._read] * is_before).sum(dim=1)


class IntegerModel:
    attention_specs = ()

    def weight_slots(self) -> Any:
        raise NotImplementedError("it has no weights")

    def forward(self, token_ids: Tensor, positions: Tensor, ops: Any) -> Tensor:
        sums: Tensor = ops.sums(token_ids, positions)
        return sums

    def logits(self, hidden: Tensor, rows: Tensor, ops: Any) -> Tensor:
        """256 of them between 0 and 16: near enough to be drawn, and now and then equal."""
        return ((mixed(hidden[rows][:, None] + torch.arange(VOCAB_SIZE) * 7919) >> 40) & 255).float() / 16
