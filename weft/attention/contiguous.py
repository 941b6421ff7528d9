"""The contiguous backend: one row of S_max tokens a request, written at a cursor, read as a slice.

The slab is `[2, L, B, H_kv, S_max, D]` (keys, then values). Simple, exact and wasteful: the measure for the others.
It reads the step's lengths back once a step, so it is for CPUs and comparisons, not for graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from weft.attention.interface import AttentionSpec
from weft.attention.sdpa import attend, visible
from weft.batch import Batch
from weft.config import BlockGeometry, Limits
from weft.layers.heads import HeadTransform

Slab = Float[Tensor, "2 L rows H_kv S_max D"]


@dataclass(frozen=True, slots=True)
class Span:
    """One request in one step: queries `first : last` of the batch go to tokens `start : end` of a slab row."""

    row: int
    first: int
    last: int
    start: int
    end: int


class ContiguousAttend:
    """Writes each request's new keys and values at its cursor, then attends over its row."""

    def __init__(self, slab: Slab, specs: Sequence[AttentionSpec], spans: Sequence[Span]) -> None:
        self._slab = slab
        self._specs = specs
        self._spans = spans
        self._masks: dict[tuple[int, int, int | None], Bool[Tensor, "T S"] | None] = {}

    def __call__(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]:
        spec = self._specs[layer]
        query, key, value = heads(qkv, positions)
        attended = query.new_empty(query.shape[0], spec.num_query_heads * spec.head_dim)
        for span in self._spans:
            queries = slice(span.first, span.last)
            keys, values = self._slab[:, layer, span.row].unbind(0)  # each [H_kv, S_max, D]
            keys[:, span.start : span.end] = key[queries].transpose(0, 1)
            values[:, span.start : span.end] = value[queries].transpose(0, 1)
            oldest = _oldest(span, spec.window)
            attended[queries] = attend(
                query[queries],
                keys[:, oldest : span.end],
                values[:, oldest : span.end],
                spec,
                self._mask(span.last - span.first, span.end - oldest, spec.window),
            )
        return attended

    def _mask(self, num_queries: int, num_keys: int, window: int | None) -> Bool[Tensor, "T S"] | None:
        """The mask, built once a step and shared by its layers."""
        key = (num_queries, num_keys, window)
        if key not in self._masks:
            self._masks[key] = visible(num_queries, num_keys, window, self._slab.device)
        return self._masks[key]


class ContiguousCache:
    """The slab, and nothing else: who owns which row is the allocator's to know."""

    capturable = False  # slices depend on lengths that the host reads

    def __init__(self, slab: Slab, specs: Sequence[AttentionSpec]) -> None:
        self.slab = slab
        self._specs = tuple(specs)

    def prepare(self, batch: Batch) -> ContiguousAttend:
        rows = batch.groups[0].block_tables[:, 0].tolist()
        starts, ends = batch.query_starts.tolist(), batch.sequence_lengths.tolist()
        spans = [
            Span(row, first, last, end - (last - first), end)
            for row, first, last, end in zip(rows, starts[:-1], starts[1:], ends, strict=True)
        ]
        return ContiguousAttend(self.slab, self._specs, spans)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.slab[:, :, target] = self.slab[:, :, source]


class Contiguous:
    """A block is a whole row: as many rows as requests may run, and one more for padding."""

    name = "contiguous"

    def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        if spec.soft_cap is not None:
            return f"soft_cap={spec.soft_cap} needs a backend with its own softmax"
        if spec.cache_group != 0:
            return "one slab holds one cache group"
        return None

    def geometry(self, limits: Limits) -> BlockGeometry:
        return BlockGeometry(num_blocks=limits.max_num_seqs, block_size=limits.max_model_len, shareable=False)

    def bytes_per_block(self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype) -> int:
        return 2 * len(specs) * specs[0].num_kv_heads * geometry.block_size * specs[0].head_dim * dtype.itemsize

    def allocate(
        self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype, device: torch.device
    ) -> ContiguousCache:
        spec = specs[0]
        assert all((s.num_kv_heads, s.head_dim) == (spec.num_kv_heads, spec.head_dim) for s in specs), "one geometry"
        shape = (2, len(specs), geometry.num_blocks + 1, spec.num_kv_heads, geometry.block_size, spec.head_dim)
        return ContiguousCache(torch.empty(shape, dtype=dtype, device=device), specs)


def _oldest(span: Span, window: int | None) -> int:
    """The first token that any query of the span sees: a decode step reads its window and no more."""
    if window is None:
        return 0
    return max(0, span.start + 1 - window)


BACKEND = Contiguous()
