"""The contiguous backend: one row of S_max tokens a request, written at a cursor, read as a slice.

The slab is `[2, L, B, H_kv, S_max, D]` (keys, then values). Simple, exact and wasteful: the measure for the others.
It reads the step's lengths back once a step, so it is for CPUs and comparisons, not for graphs.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from weft.attention.fixed_order import FixedOrderAttend, check_places
from weft.attention.interface import AttentionSpec, shared_geometry
from weft.attention.ragged import RaggedAttend, Span, spans_of
from weft.batch import Batch
from weft.config import BlockGeometry, CacheConfig, Limits
from weft.errors import ConfigError
from weft.layers.operations import Attend

Slab = Float[Tensor, "2 L rows H_kv S_max D"]


class RowStore:
    """Request b of the step owns `rows[b]` of the slab."""

    def __init__(self, slab: Slab, rows: Sequence[int], spans: Sequence[Span]) -> None:
        self._slab = slab
        self._rows = rows
        self._spans = spans

    def write(self, layer: int, key: Float[Tensor, "T_total H_kv D"], value: Float[Tensor, "T_total H_kv D"]) -> None:
        for row, span in zip(self._rows, self._spans, strict=True):
            keys, values = self._slab[:, layer, row].unbind(0)  # each [H_kv, S_max, D]
            keys[:, span.start : span.end] = key[span.first : span.last].transpose(0, 1)
            values[:, span.start : span.end] = value[span.first : span.last].transpose(0, 1)

    def read(
        self, layer: int, window: int | None
    ) -> Iterator[tuple[Float[Tensor, "1 H_kv S D"], Float[Tensor, "1 H_kv S D"]]]:
        for row, span in zip(self._rows, self._spans, strict=True):
            keys, values = self._slab[:, layer, row : row + 1, :, span.oldest(window) : span.end].unbind(0)
            yield keys, values


class ContiguousCache:
    """The slab, and nothing else: who owns which row is the allocator's to know."""

    capturable = False  # slices depend on lengths that the host reads

    def __init__(self, slab: Slab, specs: Sequence[AttentionSpec], *, fixed_order: bool = False) -> None:
        self.slab = slab
        self._specs = tuple(specs)
        self._attend = FixedOrderAttend if fixed_order else RaggedAttend

    def prepare(self, batch: Batch) -> Attend:
        spans = spans_of(batch)
        rows = batch.groups[0].block_tables[:, 0].tolist()
        return self._attend(RowStore(self.slab, rows, spans), self._specs, spans)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.slab[:, :, target] = self.slab[:, :, source]


class Contiguous:
    """A block is a whole row: as many rows as requests may run, and one more for padding."""

    name = "contiguous"

    def __init__(self, *, fixed_order: bool = False) -> None:
        self._fixed_order = fixed_order

    def in_fixed_order(self) -> "Contiguous":
        return Contiguous(fixed_order=True)

    def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        if spec.soft_cap is not None:
            return f"soft_cap={spec.soft_cap} needs a backend with its own softmax"
        if spec.cache_group != 0:
            return "one slab holds one cache group"
        return None

    def geometry(self, limits: Limits, config: CacheConfig) -> BlockGeometry:
        for name in ("block_size", "num_blocks"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(config, name)} says nothing to the contiguous backend, whose block is a row",
                    hint="max_num_seqs and max_model_len size it; attention_backend='paged_gather' has blocks",
                )
        return BlockGeometry(num_blocks=limits.max_num_seqs, block_size=limits.max_model_len, shareable=False)

    def bytes_per_block(self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype) -> int:
        spec = shared_geometry(specs)
        return 2 * len(specs) * spec.num_kv_heads * geometry.block_size * spec.head_dim * dtype.itemsize

    def allocate(
        self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype, device: torch.device
    ) -> ContiguousCache:
        spec = shared_geometry(specs)
        shape = (2, len(specs), geometry.num_blocks + 1, spec.num_kv_heads, geometry.block_size, spec.head_dim)
        if self._fixed_order:
            check_places(specs, device)
        slab = torch.empty(shape, dtype=dtype, device=device)
        return ContiguousCache(slab, specs, fixed_order=self._fixed_order)


BACKEND = Contiguous()
