"""Attention request by request, over keys and values that a backend's store writes and reads. Knows no layout."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from weft.attention.interface import AttentionSpec
from weft.attention.sdpa import attend, visible
from weft.batch import Batch
from weft.layers.heads import HeadTransform


@dataclass(frozen=True, slots=True)
class Span:
    """One request in one step: queries `first : last` of the batch are tokens `start : end` of its sequence."""

    first: int
    last: int
    start: int
    end: int

    def oldest(self, window: int | None) -> int:
        """The first token that any query of the span sees: a decode step reads its window and no more."""
        return 0 if window is None else max(0, self.start + 1 - window)


@runtime_checkable
class Store(Protocol):
    """Where one step keeps keys and values."""

    def write(self, layer: int, key: Float[Tensor, "T_total H_kv D"], value: Float[Tensor, "T_total H_kv D"]) -> None:
        """Put the step's new keys and values in their places."""
        ...

    def read(
        self, layer: int, window: int | None
    ) -> Iterable[tuple[Float[Tensor, "1 H_kv S D"], Float[Tensor, "1 H_kv S D"]]]:
        """For each span in turn, keys and values of tokens `oldest(window) : end`; all at once, if that is faster."""
        ...


class RaggedAttend:
    """Writes the step's keys and values, then attends over each request's own: no padding, any mix of lengths."""

    def __init__(self, store: Store, specs: Sequence[AttentionSpec], spans: Sequence[Span]) -> None:
        self._store = store
        self._specs = specs
        self._spans = spans
        self._num_queries = [span.last - span.first for span in spans]
        self._masks: dict[int | None, list[Bool[Tensor, "T S"] | None]] = {}

    def __call__(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]:
        spec = self._specs[layer]
        query, key, value = heads(qkv, positions)
        self._store.write(layer, key, value)
        # One call cuts all queries and one joins all results: at a token each, calls cost more than arithmetic.
        queries = query.transpose(0, 1)[None].split(self._num_queries, dim=2)
        masks = self._masks_of(spec.window, query.device)
        own = zip(queries, self._store.read(layer, spec.window), masks, strict=True)
        attended = torch.cat([attend(query, keys, values, spec, mask) for query, (keys, values), mask in own], dim=2)
        return attended[0].transpose(0, 1).flatten(1)

    def _masks_of(self, window: int | None, device: torch.device) -> list[Bool[Tensor, "T S"] | None]:
        """Each span's mask, built once a step and shared by its layers; spans of one shape share one."""
        if window not in self._masks:
            lengths = [span.end - span.oldest(window) for span in self._spans]
            shapes = list(zip(self._num_queries, lengths, strict=True))
            built = {shape: visible(*shape, window, device) for shape in set(shapes)}
            self._masks[window] = [built[shape] for shape in shapes]
        return self._masks[window]


def spans_of(batch: Batch) -> list[Span]:
    """Each request's queries and tokens, read back from the device once a step."""
    starts, ends = batch.query_starts.tolist(), batch.sequence_lengths.tolist()
    return [
        Span(first, last, end - (last - first), end)
        for first, last, end in zip(starts[:-1], starts[1:], ends, strict=True)
    ]
