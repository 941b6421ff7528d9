"""Attention over whole sequences side by side, with no cache: what training and scoring call, gradients included.

In fixed order a sequence's bits are those of an engine that serves it batch-invariantly, whatever is packed beside it.
"""

from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from weft.attention.fixed_order import FixedOrderAttend
from weft.attention.interface import AttentionSpec
from weft.attention.ragged import RaggedAttend, Span
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
