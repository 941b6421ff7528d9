"""Attention whose sums run in one order, by plain torch: neither batch, nor chunks, nor a cached prefix show in a bit.

Queries come in blocks of eight tokens and keys in tiles at absolute positions, filled up with zeros, so that every
product has one shape. A row's weights are one softmax over all its tiles, and what they make of the values is summed
tile by tile. Computed in float32 throughout and rounded once, where `sdpa` rounds as HuggingFace does.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from weft.attention.interface import AttentionSpec
from weft.attention.ragged import Span, Store
from weft.errors import ConfigError
from weft.layers.fixed_order import ROWS
from weft.layers.heads import HeadTransform

TILE = 128  # keys
# Columns of a product with values come in whole vectors, of at most 16 floats, filled up with zeros: where 6 or 10 are
# left over, MKL sums odd rows in another order than even ones.
VECTOR = 16


class FixedOrderAttend:
    """Stands in the place of `RaggedAttend`, over the same stores."""

    def __init__(self, store: Store, specs: Sequence[AttentionSpec], spans: Sequence[Span]) -> None:
        self._store = store
        self._specs = specs
        self._spans = spans
        self._masks: dict[tuple[int | None, int], list[Masks]] = {}

    def __call__(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]:
        spec = self._specs[layer]
        query, key, value = _transformed(qkv, positions, heads)
        self._store.write(layer, key, value)
        attended = self._over_all(layer, spec, query, careful=False)
        if not attended.isfinite().all():
            attended = self._over_all(layer, spec, query, careful=True)
        return attended.flatten(1)

    def _over_all(
        self, layer: int, spec: AttentionSpec, query: Float[Tensor, "T_total H_q D"], *, careful: bool
    ) -> Float[Tensor, "T_total H_q D"]:
        own = zip(self._spans, self._masks_of(spec, query.device), self._store.read(layer, spec.window), strict=True)
        return torch.cat(
            [
                attend(query[span.first : span.last], keys[0], values[0], spec, masks, careful=careful)
                for span, masks, (keys, values) in own
            ]
        )

    def _masks_of(self, spec: AttentionSpec, device: torch.device) -> list["Masks"]:
        """Each span's masks, shared by all layers of a kind."""
        kind = spec.window, spec.num_query_heads // spec.num_kv_heads
        if kind not in self._masks:
            self._masks[kind] = [
                Masks(span.last - span.first, span.oldest(spec.window), span.end, spec, device) for span in self._spans
            ]
        return self._masks[kind]


class Masks:
    """Which keys each block of a span's queries must not see. A decode's one mask is kept, a prompt's are not."""

    def __init__(self, count: int, first_key: int, after: int, spec: AttentionSpec, device: torch.device) -> None:
        """count: queries, the last of them at the last key.   first_key, after: positions of the keys."""
        self.front, self.back = first_key % TILE, -after % TILE  # places of the first and the last tile without a key
        self._window, self._group = spec.window, spec.num_query_heads // spec.num_kv_heads
        self._first_place = first_key - self.front
        self._places = torch.arange(self._first_place, after + self.back, device=device)
        self._starts = range(after - count, after, ROWS)
        self._kept = [self._of(start) for start in self._starts] if len(self._starts) == 1 else None

    def __iter__(self) -> Iterator[Bool[Tensor, "rows S"]]:
        return map(self._of, self._starts) if self._kept is None else iter(self._kept)

    def _of(self, start: int) -> Bool[Tensor, "rows S"]:
        """For a block whose first query is at this position: keys in tiles up to its last one's."""
        used = min(len(self._places), ((start + ROWS - 1) // TILE + 1) * TILE - self._first_place)
        places = self._places[:used]
        asking = torch.arange(start, start + ROWS, device=places.device).repeat(self._group)[:, None]
        hidden = places > asking
        return hidden if self._window is None else hidden | (places <= asking - self._window)


def attend(
    query: Float[Tensor, "T H_q D"],
    keys: Float[Tensor, "H_kv S D"],
    values: Float[Tensor, "H_kv S D"],
    spec: AttentionSpec,
    masks: Masks,
    *,
    careful: bool,
) -> Float[Tensor, "T H_q D"]:
    """Attention of T queries over S keys, the last query at the last key.

    careful: look at each block for values that are not finite; blocks without any are computed alike. A query that sees
        one then gives nan, and one that does not see it shares a tile with it unharmed.
    """
    count, group = len(query), spec.num_query_heads // spec.num_kv_heads
    tiles, of_values = (
        functional.pad(part.float(), (0, columns, masks.front, masks.back))
        .contiguous()
        .unflatten(1, (-1, TILE))
        .unbind(1)
        for part, columns in ((keys, 0), (values, -values.shape[-1] % VECTOR))
    )
    blocks = functional.pad(query.float(), (0, 0, 0, 0, 0, -count % ROWS)).split(ROWS)
    attended = []
    for block, hidden in zip(blocks, masks, strict=True):
        # A key head's queries are the rows of one product, [H_kv, group * 8, D].
        rows = block.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
        used = hidden.shape[1] // TILE
        scores = torch.cat([rows @ tile.transpose(1, 2) for tile in tiles[:used]], dim=-1) * spec.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).split(TILE, dim=-1)
        seen = of_values[:used]
        total = _summed(weights, seen)
        if careful and not total.isfinite().all():
            total = _summed_of_finite(weights, seen, hidden)
        attended.append(total.unflatten(1, (group, ROWS)).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(attended)[:count, :, : query.shape[-1]].to(query.dtype)


def _summed(
    weights: Sequence[Float[Tensor, "H_kv rows TILE"]], values: Sequence[Float[Tensor, "H_kv TILE columns"]]
) -> Float[Tensor, "H_kv rows columns"]:
    total = weights[0] @ values[0]
    for part, tile in zip(weights[1:], values[1:], strict=True):
        total = total + part @ tile
    return total


def _summed_of_finite(
    weights: Sequence[Float[Tensor, "H_kv rows TILE"]],
    values: Sequence[Float[Tensor, "H_kv TILE columns"]],
    hidden: Bool[Tensor, "rows S"],
) -> Float[Tensor, "H_kv rows columns"]:
    """The same sums, of hidden values as if they were zeros; who sees one that is not finite gives nan.

    Infinity times a weight of 0 is nan, and how a sequence is cut says which hidden keys a tile holds.
    """
    spoilt = [~tile.isfinite().all(dim=-1) for tile in values]
    clean = [tile.masked_fill(rows[..., None], 0.0) for tile, rows in zip(values, spoilt, strict=True)]
    sees = (~hidden & torch.cat(spoilt, dim=-1)[:, None]).any(dim=-1, keepdim=True)
    return _summed(weights, clean).masked_fill(sees, torch.nan)


def check_places(specs: Sequence[AttentionSpec], device: torch.device) -> None:
    """Look whether a row's bits depend on its place in a block, or on keys that it does not see.

    Raises: ConfigError if they do, since nothing above could then promise that they do not depend on the batch.
    """
    generator = torch.Generator().manual_seed(0)
    for heads, kv_heads, head_dim in {(spec.num_query_heads, spec.num_kv_heads, spec.head_dim) for spec in specs}:
        query, tile = (torch.randn(kv_heads, size, head_dim, generator=generator) for size in (1, TILE))
        rows, tile = query.expand(-1, heads // kv_heads * ROWS, -1).contiguous().to(device), tile.to(device)
        scores = rows @ tile.transpose(1, 2)
        weights = scores.softmax(dim=-1)
        hidden = torch.full_like(scores, -torch.inf)
        among = torch.cat([hidden, scores, hidden, hidden], dim=-1).softmax(dim=-1)[..., TILE : 2 * TILE]
        attended = weights @ functional.pad(tile, (0, -head_dim % VECTOR))
        if not (torch.equal(weights, among) and torch.equal(attended, attended[:, :1].expand_as(attended))):
            raise ConfigError(
                f"batch_invariant=True cannot be kept on this machine: attention of {heads} heads of {head_dim} over "
                f"{kv_heads} gives equal queries different results",
                hint="batch_invariant=False",
            )


def _transformed(
    qkv: Float[Tensor, "T_total packed"], positions: Int[Tensor, "T_total"], heads: HeadTransform
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; without norms a head's transform has no sum, and any number of rows does."""
    if heads.query_norm is None and heads.key_norm is None:
        return heads(qkv, positions)
    count = len(qkv)
    filled, places = functional.pad(qkv, (0, 0, 0, -count % ROWS)), functional.pad(positions, (0, -count % ROWS))
    made = [heads(*block) for block in zip(filled.split(ROWS), places.split(ROWS), strict=True)]
    query, key, value = (torch.cat(parts)[:count] for parts in zip(*made, strict=True))
    return query, key, value
