"""What an attention backend is. One backend is one file beside this one; none knows a model, a request or a scheduler.

A backend is stateless and answers questions; the cache that it allocates holds keys and values; a cache prepares one
`Attend` a step, which every layer of that step calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from weft.batch import Batch
from weft.config import BlockGeometry, CacheConfig, Limits
from weft.errors import ConfigError
from weft.layers.operations import Attend
from weft.options import positive


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer, as its model declares it. Raises: ConfigError for a window that shows no key.

    scale: factor on query-key products.
    window: keys a query sees, itself included (window 4: itself and the 3 before); None sees all.
    soft_cap: scores become `cap * tanh(score / cap)` before masking; None leaves them.
    cache_group: layers of one group share geometry, dtype and block tables.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    cache_group: int = 0

    def __post_init__(self) -> None:
        positive("AttentionSpec", "1 is the query itself; None sees all", window=self.window)


def shared_geometry(specs: Sequence[AttentionSpec]) -> AttentionSpec:
    """The layer whose key heads all of a cache group have. Raises: ConfigError for one that has others."""
    first = specs[0]
    for layer, spec in enumerate(specs):
        if (spec.num_kv_heads, spec.head_dim) != (first.num_kv_heads, first.head_dim):
            raise ConfigError(
                f"layer 0 keeps {first.num_kv_heads} key heads of {first.head_dim} and layer {layer} "
                f"{spec.num_kv_heads} of {spec.head_dim}, which one cache does not hold"
            )
    return first


@runtime_checkable
class Cache(Protocol):
    """Keys and values of every layer of one engine."""

    @property
    def capturable(self) -> bool:
        """Whether `prepare` and its Attend read nothing back, so that a whole step can be captured in a graph.

        A captured step calls `prepare` inside the graph, on tensors gathered there from the device's state: every
        size must then follow from shapes (the columns of the block table), never from values.
        """
        ...

    def prepare(self, batch: Batch) -> Attend:
        """The Attend of this step: metadata is computed here, once a step, not once a layer."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in every layer."""
        ...


@runtime_checkable
class AttentionBackend(Protocol):
    """Stateless: says what it can do, and allocates."""

    name: str

    def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """None, or the reason why this layer cannot run here."""
        ...

    def geometry(self, limits: Limits, config: CacheConfig) -> BlockGeometry:
        """Blocks for these limits, before the memory is known to suffice. Raises: ConfigError."""
        ...

    def bytes_per_block(self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype) -> int:
        """Memory that one block takes over all layers. Raises: ConfigError for layers that one cannot hold."""
        ...

    def allocate(
        self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype, device: torch.device
    ) -> Cache:
        """The cache. Its contents are undefined until written; a correct Attend never reads them before."""
        ...


@runtime_checkable
class HasFixedOrder(Protocol):
    """A backend that can be batch-invariant. Who is none serves all the same, unless batch invariance is asked for."""

    def in_fixed_order(self) -> AttentionBackend:
        """The same backend, of which a token's bits follow from its own sequence alone.

        Neither what else the step holds may show, nor how the sequence was cut into chunks and blocks, nor whether a
        part of it was found in the cache. Where a machine cannot keep that, `allocate` raises ConfigError.
        """
        ...
