"""Steps of a backend under judgement, and what attention says of them in float64. Knows no law and no layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from weft.attention.interface import AttentionBackend, AttentionSpec, Cache
from weft.batch import Batch, GroupTables, SamplingRows
from weft.config import BlockGeometry, CacheConfig, Limits
from weft.errors import ConfigError
from weft.layers.heads import HeadTransform
from weft.layers.norm import RMSNorm
from weft.layers.rope import RopeConfig, RotaryTable
from weft.testing.finding import NotJudged

CPU = torch.device("cpu")
HEAD_DIM, LENGTH, NUM_LAYERS = 16, 21, 2
LIMITS = Limits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=24)
CONFIG = CacheConfig(block_size=8, num_blocks=9)
PLAIN = AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
# In blocks of 8: not in order, and none beside the one before.
_SCATTERED = ((4, 0, 5), (2, 8, 3), (7, 1, 6))

# One step: the new tokens of some requests, as (request, first position, one past the last).
Step = Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Bench:
    """A cache of a backend, its layers all of one spec, and the keys and values that requests are to have in it."""

    spec: AttentionSpec
    geometry: BlockGeometry
    cache: Cache
    qkvs: Float[Tensor, "layers requests S packed"]
    heads: HeadTransform

    @classmethod
    def of(cls, backend: AttentionBackend, spec: AttentionSpec = PLAIN, *, with_norms: bool = True) -> "Bench":
        """Memory that the backend leaves unset is NaN.

        Raises: NotJudged where the backend says that it cannot serve such a layer.
        """
        reason = backend.supports(spec, torch.float32, CPU)
        if reason is not None:
            raise NotJudged(reason)
        geometry = geometry_of(backend)
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            cache = backend.allocate([spec] * NUM_LAYERS, geometry, torch.float32, CPU)
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        shape = (NUM_LAYERS, LIMITS.max_num_seqs, LENGTH, (spec.num_query_heads + 2 * spec.num_kv_heads) * HEAD_DIM)
        qkvs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return cls(spec, geometry, cache, qkvs, _heads_of(spec, with_norms))

    def table_of(self, request: int) -> list[int]:
        """Blocks of a request's own."""
        if self.geometry.block_size >= LENGTH:
            return [(request + 1) % LIMITS.max_num_seqs]
        if self.geometry.block_size == CONFIG.block_size:
            return list(_SCATTERED[request])
        count = self.geometry.blocks_for(LIMITS.max_model_len)
        return list(range(request * count, (request + 1) * count))[::-1]

    def run(
        self,
        step: Step,
        layer: int = 0,
        *,
        qkvs: Tensor | None = None,
        tables: dict[int, list[int]] | None = None,
        silent: Sequence[int] = (),
    ) -> list[Float[Tensor, "T attended"]]:
        """What each request of the step is given.

        qkvs: in place of the bench's, `[requests, S, packed]`.   tables: blocks of requests that have not their own.
        silent: requests whose slots are -1.
        """
        of_layer = self.qkvs[layer] if qkvs is None else qkvs
        blocks = {request: (tables or {}).get(request, self.table_of(request)) for request, _, _ in step}
        batch = _batch_of(step, blocks, self.geometry.block_size, silent)
        packed = torch.cat([of_layer[request, first:last] for request, first, last in step])
        attended = self.cache.prepare(batch)(layer, packed, batch.positions, self.heads)
        return list(attended.split([last - first for _, first, last in step]))

    def chunks(self, request: int, ends: Sequence[int], layer: int = 0, qkvs: Tensor | None = None) -> Tensor:
        """A request that comes in chunks up to these positions, alone."""
        pieces = [self.run([(request, first, last)], layer, qkvs=qkvs)[0] for first, last in pairwise((0, *ends))]
        return torch.cat(pieces)

    def truth(self, request: int, layer: int = 0, qkvs: Tensor | None = None) -> Float[Tensor, "S attended"]:
        """Softmax attention over a whole sequence, in float64."""
        spec = self.spec
        packed = (self.qkvs[layer] if qkvs is None else qkvs)[request]
        length = len(packed)
        query, key, value = (part.double() for part in self.heads(packed, torch.arange(length)))
        group = spec.num_query_heads // spec.num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (spec.window or length))
        scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def geometry_of(backend: AttentionBackend) -> BlockGeometry:
    """Nine blocks of eight tokens; or what the backend makes of the limits, where it has no such blocks."""
    try:
        return backend.geometry(LIMITS, CONFIG)
    except ConfigError:
        return backend.geometry(LIMITS, CacheConfig())


def _heads_of(spec: AttentionSpec, with_norms: bool) -> HeadTransform:
    rope = RopeConfig.of({"max_position_embeddings": LIMITS.max_model_len}, HEAD_DIM)
    rotary = RotaryTable(rope, LIMITS.max_model_len, dtype=torch.float32, device=CPU)
    norms = []
    for epsilon, low in ((1e-5, 0.5), (1e-6, 2.5)) if with_norms else ():
        norm = RMSNorm(HEAD_DIM, epsilon, dtype=torch.float32, device=CPU)
        torch.nn.init.uniform_(norm.weight, low, low + 1.0, generator=torch.Generator().manual_seed(1))
        norm.weight.requires_grad_(False)
        norms.append(norm)
    return HeadTransform(spec.num_query_heads, spec.num_kv_heads, HEAD_DIM, rotary, *norms)


def _batch_of(step: Step, blocks: dict[int, list[int]], block_size: int, silent: Sequence[int]) -> Batch:
    counts = torch.tensor([last - first for _, first, last in step])
    positions = torch.cat([torch.arange(first, last) for _, first, last in step])
    tables = torch.tensor([blocks[request] for request, _, _ in step])
    owners = torch.arange(len(step)).repeat_interleave(counts)
    slots = tables[owners, positions // block_size] * block_size + positions % block_size
    writes = torch.tensor([request not in silent for request, _, _ in step])[owners]
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        sequence_lengths=torch.tensor([last for _, _, last in step]),
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        groups=(GroupTables(block_tables=tables, slot_mapping=torch.where(writes, slots, -1)),),
        logit_rows=nothing,
        sampling=SamplingRows(temperatures=torch.empty(0), seeds=nothing, positions=nothing, any_noise=False),
    )
