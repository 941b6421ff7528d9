"""One sequence in a pool, and any of its rows by prefill or by decode, with the tiles that make both the same bits.

In the interpreter a matrix product is the library's, whose order of summation may follow from how many rows there are.
So its numbers there are such that no product's sum is rounded: queries and keys are small whole numbers, and each
column of values is nonzero in one key of a tile. What softmax and the merge of parts do is rounded as ever. A GPU gets
random numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.kernels._invariant_tiles import InvariantTiles
from weft.kernels.paged import PagedKeys, Scoring
from weft.kernels.paged_decode import paged_decode
from weft.kernels.paged_prefill import paged_prefill


@dataclass(frozen=True)
class OneSequence:
    """query: rotated, `[length, H_q * D]`, a row for each position.   table: `[1, columns]`.   pool: as `PagedKeys`."""

    query: Tensor
    pool: Tensor
    table: Tensor
    scoring: Scoring
    num_query_heads: int

    def keys(self, lengths: Sequence[int], counts: Sequence[int]) -> PagedKeys:
        """The sequence as so many requests, of which each has `lengths` keys and asks with the last `counts`."""
        device = self.pool.device
        return PagedKeys(
            pool=self.pool,
            layer=0,
            block_tables=self.table.expand(len(lengths), -1).contiguous(),
            sequence_lengths=torch.tensor(lengths, device=device),
            query_starts=torch.tensor([0, *counts], device=device).cumsum(0),
        )

    def prefilled(
        self, lengths: Sequence[int], counts: Sequence[int], tiles: InvariantTiles, *, split: int | None = 0
    ) -> Tensor:
        """The rows of all these requests.   split: None cuts nothing, 0 is the tiles' own."""
        pairs = zip(lengths, counts, strict=True)
        rows = torch.cat([self.query[length - count : length] for length, count in pairs])
        return paged_prefill(
            rows,
            self.keys(lengths, counts),
            self.scoring,
            num_query_heads=self.num_query_heads,
            tile=tiles.prefill,
            split=tiles.split if split == 0 else split,
        )

    def decoded(self, lengths: Sequence[int], tiles: InvariantTiles, **options: int | bool) -> Tensor:
        """The last row of each of these requests; as `paged_decode` takes them."""
        rows = self.query[[length - 1 for length in lengths]]
        counts = [1] * len(lengths)
        given = {"tile": tiles.decode, "split": tiles.split, "fixed_order": True} | options
        return paged_decode(
            rows, self.keys(lengths, counts), self.scoring, num_query_heads=self.num_query_heads, **given
        )

    def in_blocks_of(self, size: int) -> "OneSequence":
        """The same keys in blocks of another size."""
        both, layers, _, _, heads, columns = self.pool.shape
        dense = self.pool[:, :, self.table[0]].reshape(both, layers, -1, heads, columns)
        pool, table = _in_blocks(dense[:, :, : len(self.query)], size)
        return replace(self, pool=pool, table=table)


def _in_blocks(dense: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Dense keys and values `[2, 1, length, H_kv, D]` as a pool in random order and a table; NaN where nothing lies."""
    columns = -(-dense.shape[2] // size)
    table = torch.randperm(columns + 2)[:columns]
    pool = dense.new_full((2, 1, columns + 2, size, *dense.shape[3:]), torch.nan)
    blocks = dense.new_full((2, 1, columns * size, *dense.shape[3:]), torch.nan)
    blocks[:, :, : dense.shape[2]] = dense
    pool[:, :, table.to(dense.device)] = blocks.unflatten(2, (columns, size))
    return pool, table[None].to(dense.device)


def make_sequence(
    length: int,
    *,
    device: torch.device,
    heads: tuple[int, int] = (3, 1),
    head_dim: int = 16,
    block_size: int = 16,
    block_n: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
) -> OneSequence:
    """block_n: keys of a tile, in which each column of values has one that is not 0; on a GPU all are random."""
    num_query_heads, num_kv_heads = heads
    if device.type == "cuda":
        query = torch.randn(length, num_query_heads * head_dim)
        dense = torch.randn(2, 1, length, num_kv_heads, head_dim)
    else:
        query = torch.randint(-3, 4, (length, num_query_heads * head_dim)).float()
        dense = torch.randint(-3, 4, (2, 1, length, num_kv_heads, head_dim)).float()
        own = torch.arange(length)[:, None] % block_n == torch.arange(head_dim) % block_n
        dense[1] = torch.randn(1, length, num_kv_heads, head_dim) * own[:, None]
    pool, table = _in_blocks(dense.to(device, dtype), block_size)
    return OneSequence(
        query=query.to(device, dtype),
        pool=pool,
        table=table,
        scoring=Scoring(scale=0.3 * head_dim**-0.5, window=window, soft_cap=soft_cap),
        num_query_heads=num_query_heads,
    )
