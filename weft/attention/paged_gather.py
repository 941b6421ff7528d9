"""The paged backend in plain torch: a pool of blocks, written by scatter, read by gather.

The pool is `[2, L, N + 1, P, H_kv, D]`; the block after the last is scratch for padding. It is the reference for every
paged kernel, and the CPU's way of serving. It reads the step's lengths back once a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.attention.fixed_order import FixedOrderAttend, check_places
from weft.attention.interface import AttentionSpec, shared_geometry
from weft.attention.ragged import RaggedAttend, Span, spans_of
from weft.batch import Batch, GroupTables
from weft.config import BlockGeometry, CacheConfig, Limits
from weft.layers.operations import Attend

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What one step reads of a layer: blocks, and how their tokens fall into pieces, by turns a gap and a span."""

    blocks: Int[Tensor, "blocks"]
    pieces: list[int]


class BlockStore:
    """Token t of request b lies in block `block_tables[b, t // P]`, at `t % P`."""

    def __init__(self, pool: Tensor, tables: GroupTables, spans: Sequence[Span]) -> None:
        self._pool = pool
        self._tables = tables
        self._spans = spans
        self._reaches: dict[int | None, Reach] = {}

    def write(self, layer: int, key: Float[Tensor, "T_total H_kv D"], value: Float[Tensor, "T_total H_kv D"]) -> None:
        for part, new in enumerate((key, value)):
            # Slot -1, which writes nothing, is the last slot of the scratch block.
            self._pool[part, layer].flatten(0, 1)[self._tables.slot_mapping] = new

    def read(
        self, layer: int, window: int | None
    ) -> Iterator[tuple[Float[Tensor, "1 H_kv S D"], Float[Tensor, "1 H_kv S D"]]]:
        if window not in self._reaches:
            self._reaches[window] = self._reach(window)
        reach = self._reaches[window]
        # One gather for all requests, but keys and values apart: over both it would copy the whole layer first.
        gathered = (self._pool[part, layer].index_select(0, reach.blocks) for part in (0, 1))
        keys, values = (
            tokens.flatten(0, 1).transpose(0, 1)[None].split(reach.pieces, dim=2)[1::2] for tokens in gathered
        )
        return zip(keys, values, strict=True)

    def _reach(self, window: int | None) -> Reach:
        """Built once a step. P 4, tokens 1 to 5 of one request, then 0 to 1: 3 blocks, pieces of 1, 5, 2, 2 and 2."""
        size = self._pool.shape[3]
        tables, pieces = [], [0]
        for request, span in enumerate(self._spans):
            oldest = span.oldest(window)
            first, last = oldest // size, -(-span.end // size)
            tables.append(self._tables.block_tables[request, first:last])
            pieces[-1] += oldest - first * size
            pieces += [span.end - oldest, last * size - span.end]
        return Reach(blocks=torch.cat(tables), pieces=pieces)


class PagedGatherCache:
    """The pool, and nothing else: who owns which block is the allocator's to know."""

    capturable = False  # slices depend on lengths that the host reads

    def __init__(self, pool: Tensor, specs: Sequence[AttentionSpec], *, fixed_order: bool = False) -> None:
        self.pool = pool
        self._specs = tuple(specs)
        self._attend = FixedOrderAttend if fixed_order else RaggedAttend

    def prepare(self, batch: Batch) -> Attend:
        spans = spans_of(batch)
        return self._attend(BlockStore(self.pool, batch.groups[0], spans), self._specs, spans)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = (torch.tensor(side, device=self.pool.device) for side in zip(*pairs, strict=True))
        self.pool[:, :, targets] = self.pool[:, :, sources]


class PagedGather:
    """Blocks of `block_size` tokens, shared by whoever begins alike."""

    name = "paged_gather"

    def __init__(self, *, fixed_order: bool = False) -> None:
        self._fixed_order = fixed_order

    def in_fixed_order(self) -> "PagedGather":
        return PagedGather(fixed_order=True)

    def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        if spec.soft_cap is not None:
            return f"soft_cap={spec.soft_cap} needs a backend with its own softmax"
        if spec.cache_group != 0:
            return "one pool holds one cache group"
        return None

    def geometry(self, limits: Limits, config: CacheConfig) -> BlockGeometry:
        """As many blocks as asked for, or as many as the limits could ever fill."""
        size = config.block_size or DEFAULT_BLOCK_SIZE
        most = limits.max_num_seqs * -(-limits.max_model_len // size)
        return BlockGeometry(num_blocks=config.num_blocks or most, block_size=size, shareable=True)

    def bytes_per_block(self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype) -> int:
        spec = shared_geometry(specs)
        return 2 * len(specs) * spec.num_kv_heads * geometry.block_size * spec.head_dim * dtype.itemsize

    def allocate(
        self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype, device: torch.device
    ) -> PagedGatherCache:
        spec = shared_geometry(specs)
        shape = (2, len(specs), geometry.num_blocks + 1, geometry.block_size, spec.num_kv_heads, spec.head_dim)
        if self._fixed_order:
            check_places(specs, device)
        pool = torch.empty(shape, dtype=dtype, device=device)
        return PagedGatherCache(pool, specs, fixed_order=self._fixed_order)


BACKEND = PagedGather()
