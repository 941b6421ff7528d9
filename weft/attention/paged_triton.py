"""The paged backend in Triton: the pool of `paged_gather`, written and read by kernels, with nothing read back.

A step in which every request has one token is one launch a layer and the merge of its parts: rotation and cache write
are inside. Any other step rotates and writes first, then requests with several tokens go through the prefill kernel and
those with one through the same decode kernel, so that a request's bits do not depend on what else the step holds.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.attention.interface import AttentionSpec, shared_geometry
from weft.batch import Batch
from weft.config import BlockGeometry, CacheConfig, Limits
from weft.kernels._invariant_tiles import invariant_tiles
from weft.kernels._jit import HAS_TRITON, capability, cdiv, interpreting, runs_on
from weft.kernels._paged_decode_tiles import by_shapes
from weft.kernels.cache_write import rotate_and_write
from weft.kernels.paged import HeadRotation, PagedKeys, Scoring, refusal
from weft.kernels.paged_decode import BLOCK_M, NewTokens, paged_decode
from weft.kernels.paged_prefill import paged_prefill
from weft.layers.heads import HeadTransform

DEFAULT_BLOCK_SIZE = 64  # one table lookup a tile of keys


class PagedTritonAttend:
    """One step. Whether it is all decodes follows from its shapes: each request of a step has at least one token."""

    def __init__(
        self, pool: Tensor, specs: Sequence[AttentionSpec], batch: Batch, *, fixed_order: bool = False
    ) -> None:
        self._pool = pool
        self._specs = specs
        self._batch = batch
        self._fixed_order = fixed_order
        self._one_each = batch.token_ids.shape[0] == batch.sequence_lengths.shape[0]

    def __call__(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]:
        spec = self._specs[layer]
        tables = self._batch.groups[0]
        paged = PagedKeys(
            pool=self._pool,
            layer=layer,
            block_tables=tables.block_tables,
            sequence_lengths=self._batch.sequence_lengths,
            query_starts=self._batch.query_starts,
        )
        scoring = Scoring(scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap)
        new = NewTokens(positions=positions, slots=tables.slot_mapping, rotation=rotation_of(heads))
        count = spec.num_query_heads
        group = count // spec.num_kv_heads
        head_tiles = spec.num_kv_heads * cdiv(group, BLOCK_M) * len(self._batch.sequence_lengths)
        if self._fixed_order:
            return self._in_fixed_order(qkv, paged, scoring, new, count, head_tiles)
        attended = None
        if not self._one_each:
            query = rotate_and_write(
                qkv, positions, tables.slot_mapping, new.rotation, self._pool, layer, num_query_heads=count
            )
            attended = paged_prefill(query.flatten(1), paged, scoring, num_query_heads=count, skip_single=True)
        tile, split = by_shapes(head_tiles, group, self._pool.dtype, spec.head_dim, self._pool.shape[3])
        return paged_decode(qkv, paged, scoring, num_query_heads=count, new=new, out=attended, tile=tile, split=split)

    def _in_fixed_order(
        self,
        qkv: Float[Tensor, "T_total packed"],
        paged: PagedKeys,
        scoring: Scoring,
        new: NewTokens,
        count: int,
        head_tiles: int,
    ) -> Float[Tensor, "T_total attended"]:
        """A position has the same bits in a prompt as in a decode: its key is read from the pool like all others."""
        num_kv_heads, head_dim = self._pool.shape[4:]
        tiles = invariant_tiles(
            self._pool.dtype,
            head_dim,
            group=count // num_kv_heads,
            heads=head_tiles,
            soft_cap=scoring.soft_cap is not None,
            compute_capability=capability(self._pool.device),
        )
        decode = partial(
            paged_decode,
            paged=paged,
            scoring=scoring,
            num_query_heads=count,
            fixed_order=True,
            tile=tiles.decode,
            split=tiles.split,
        )
        if self._one_each and new.rotation.query_norm is None:  # a norm sums a head in an order of its own launch
            return decode(qkv, new=new)
        query = rotate_and_write(
            qkv, new.positions, new.slots, new.rotation, self._pool, paged.layer, num_query_heads=count
        ).flatten(1)
        if self._one_each:
            return decode(query)
        attended = paged_prefill(
            query, paged, scoring, num_query_heads=count, skip_single=True, tile=tiles.prefill, split=tiles.split
        )
        return decode(query, out=attended)


def rotation_of(heads: HeadTransform) -> HeadRotation:
    """What the kernels need of a head transform."""
    query_norm, key_norm = heads.query_norm, heads.key_norm
    return HeadRotation(
        cos=heads.rotary.cos,
        sin=heads.rotary.sin,
        query_norm=None if query_norm is None else query_norm.weight,
        key_norm=None if key_norm is None else key_norm.weight,
        query_epsilon=0.0 if query_norm is None else query_norm.epsilon,
        key_epsilon=0.0 if key_norm is None else key_norm.epsilon,
    )


class PagedTritonCache:
    """The pool, and nothing else: who owns which block is the allocator's to know."""

    capturable = True

    def __init__(self, pool: Tensor, specs: Sequence[AttentionSpec], *, fixed_order: bool = False) -> None:
        self.pool = pool
        self._specs = tuple(specs)
        self._fixed_order = fixed_order

    def prepare(self, batch: Batch) -> PagedTritonAttend:
        return PagedTritonAttend(self.pool, self._specs, batch, fixed_order=self._fixed_order)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pinned = torch.tensor(pairs, pin_memory=self.pool.is_cuda)  # so that the copy waits for nobody
        sources, targets = pinned.to(self.pool.device, non_blocking=True).unbind(1)
        self.pool[:, :, targets] = self.pool[:, :, sources]


class PagedTriton:
    """Blocks of `block_size` tokens, shared by whoever begins alike, on a GPU (or, for tests, in the interpreter)."""

    name = "paged_triton"

    def __init__(self, *, fixed_order: bool = False) -> None:
        self._fixed_order = fixed_order

    def in_fixed_order(self) -> "PagedTriton":
        return PagedTriton(fixed_order=True)

    def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        if spec.cache_group != 0:
            return "one pool holds one cache group"
        if not HAS_TRITON:
            return "Triton is not installed"
        if not runs_on(device):
            return f"Triton kernels run on CUDA, not on {device.type}, except in their interpreter (TRITON_INTERPRET=1)"
        if interpreting() and dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly"
        return refusal(
            num_query_heads=spec.num_query_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype
        )

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
    ) -> PagedTritonCache:
        spec = shared_geometry(specs)
        shape = (2, len(specs), geometry.num_blocks + 1, geometry.block_size, spec.num_kv_heads, spec.head_dim)
        pool = torch.empty(shape, dtype=dtype, device=device)
        return PagedTritonCache(pool, specs, fixed_order=self._fixed_order)


BACKEND = PagedTriton()
