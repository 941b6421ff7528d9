"""Attention over whole sequences side by side, as training and scoring call it.

In fixed order a sequence's bits are those of an engine that serves it batch-invariantly, whatever is packed beside it.
`packed` is plain torch with no cache, gradients included; `packed_on` is a backend's own forward pass.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from weft.attention.fixed_order import FixedOrderAttend
from weft.attention.interface import AttentionBackend, AttentionSpec
from weft.attention.ragged import RaggedAttend, Span
from weft.batch import Batch, GroupTables, SamplingRows
from weft.config import CacheConfig, Limits
from weft.layers.operations import Attend


class PackedStore:
    """The keys and values of one layer at a time, as they were made: autograd sees through them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._written: tuple[int, Tensor, Tensor] | None = None

    def write(self, layer: int, key: Float[Tensor, "T_total H_kv D"], value: Float[Tensor, "T_total H_kv D"]) -> None:
        self._written = layer, key, value

    def read(
        self, layer: int, window: int | None
    ) -> Iterator[tuple[Float[Tensor, "1 H_kv S D"], Float[Tensor, "1 H_kv S D"]]]:
        """A window reaches back to the first token: a span here is a whole sequence."""
        assert self._written is not None, "nothing was written"
        assert self._written[0] == layer, f"layer {layer} reads what layer {self._written[0]} wrote"
        for span in self._spans:
            key, value = (part[span.first : span.last].transpose(0, 1)[None] for part in self._written[1:])
            yield key, value


def packed(specs: Sequence[AttentionSpec], lengths: Sequence[int], *, fixed_order: bool = False) -> Attend:
    """The attention of sequences of these lengths, one after another in a batch. specs: one a layer."""
    spans, first = [], 0
    for length in lengths:
        spans.append(Span(first, first + length, 0, length))
        first += length
    return (FixedOrderAttend if fixed_order else RaggedAttend)(PackedStore(spans), specs, spans)


def packed_on(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Attend:
    """The same by a backend, as one step whose cache holds these sequences and goes with the Attend: no gradients."""
    limits = Limits(max_num_seqs=len(lengths), max_num_batched_tokens=sum(lengths), max_model_len=max(lengths))
    geometry = backend.geometry(limits, CacheConfig())
    cache = backend.allocate(specs, geometry, dtype, device)
    size = geometry.block_size
    tables = torch.arange(geometry.num_blocks).view(len(lengths), -1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = tables[rows, positions // size] * size + positions % size
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    batch = Batch(
        token_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        sequence_lengths=torch.tensor(lengths, device=device),
        query_starts=torch.tensor([0, *lengths], device=device).cumsum(0),
        groups=(GroupTables(block_tables=tables.to(device), slot_mapping=slots.to(device)),),
        logit_rows=nothing,
        sampling=SamplingRows(temperatures=nothing.float(), seeds=nothing, positions=nothing, any_noise=False),
    )
    return cache.prepare(batch)
