"""A chunk of a prompt behind a prefix that is in the paged cache already, beside weft's own attention for training."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft import __version__
from weft.benchmark.kernels.arithmetic import causal_flops, copies_beyond_cache
from weft.benchmark.kernels.contender import Contender, Place, measure, ratio
from weft.benchmark.row import Row, Target
from weft.kernels import paged_prefill
from weft.kernels.flash_attention import attention_reference, flash_attention
from weft.kernels.paged import PagedKeys, Scoring

NOTE = "paged prefill: keys are in the pool already; weft's training forward at the prompt's full length is beside it"
_PART = Target(relation=">=", value=70)
_BLOCK_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """training_batch, training_heads: of the forward pass that it is compared with, at the length of the prompt."""

    prefix: int
    chunk: int
    head_dim: int
    training_batch: int
    training_heads: int
    query_heads: int = 32
    kv_heads: int = 8

    @property
    def length(self) -> int:
        return self.prefix + self.chunk


SHAPES = (
    PrefillShape(prefix=14_336, chunk=2048, head_dim=128, training_batch=2, training_heads=16),
    PrefillShape(prefix=14_336, chunk=2048, head_dim=64, training_batch=2, training_heads=32),
)


def prefill_rows(shape: PrefillShape, place: Place) -> list[Row]:
    """Rates of both and their ratio."""
    place = place.case(
        f"paged prefill, {shape.chunk} behind {shape.prefix}, {shape.query_heads} heads over {shape.kv_heads} of "
        f"{shape.head_dim}"
    )
    chunk, expected = _chunk(shape, place)
    paged = measure(chunk, expected, place)
    training, expected = _training(shape, place)
    beside = measure(training, expected, place)
    row = place.row.by("weft over a peer", "")
    per_flop = chunk.amount / training.amount
    rows = [
        line.of(line.metric, [100 * per_flop * line.value], "%", target=_PART)
        for line in ratio(row, "rate over that of training forward", beside, paged)
    ]
    return [*paged.rows, *beside.rows, *rows]


def _normal(place: Place, *sizes: int) -> Tensor:
    generator = torch.Generator(device=place.device).manual_seed(place.row.seed or 0)
    return torch.randn(sizes, generator=generator, dtype=place.dtype, device=place.device)


def _chunk(shape: PrefillShape, place: Place) -> tuple[Contender, list[Tensor]]:
    device = place.device
    columns = -(-shape.length // _BLOCK_SIZE)
    size = 2 * columns * _BLOCK_SIZE * shape.kv_heads * shape.head_dim * place.dtype.itemsize
    pool = _normal(place, 2, copies_beyond_cache(size), columns, _BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    query = _normal(place, shape.chunk, shape.query_heads * shape.head_dim)
    scoring = Scoring(scale=shape.head_dim**-0.5)
    generator = torch.Generator(device=device).manual_seed(place.row.seed or 0)
    tables = torch.randperm(columns, generator=generator, device=device)[None]
    lengths = torch.tensor([shape.length], device=device)
    starts = torch.tensor([0, shape.chunk], device=device)

    def paged(given: Tensor, layer: int) -> PagedKeys:
        return PagedKeys(pool=given, layer=layer, block_tables=tables, sequence_lengths=lengths, query_starts=starts)

    def attend(layer: PagedKeys) -> Tensor:
        return paged_prefill.paged_prefill(query, layer, scoring, num_query_heads=shape.query_heads)

    layers = [paged(pool, layer) for layer in range(pool.shape[1])]
    heads = query.float().unflatten(1, (shape.query_heads, shape.head_dim))
    expected = [paged_prefill.reference(heads, paged(pool[:, :1].float(), 0), scoring)]
    contender = Contender(
        system="weft",
        version=__version__,
        operation="prefill",
        calls=[partial(attend, layer) for layer in layers],
        result=lambda: [attend(layers[0])],
        amount=causal_flops(
            batch=1, num_queries=shape.chunk, prefix=shape.prefix, heads=shape.query_heads, head_dim=shape.head_dim
        ),
        rate_unit="TFLOP/s",
    )
    return contender, expected


def _training(shape: PrefillShape, place: Place) -> tuple[Contender, list[Tensor]]:
    """Compared in one head."""
    sizes = (shape.training_batch, shape.length, shape.training_heads, shape.head_dim)
    inputs = _normal(place, 3, *sizes).unbind()
    expected = attention_reference(*(tensor[:1, :, :1].double() for tensor in inputs), causal=True)[0]

    def attend() -> Tensor:
        with torch.no_grad():
            return flash_attention(*inputs, causal=True)[0]

    contender = Contender(
        system="weft training attention",
        version=__version__,
        operation="forward",
        calls=[attend],
        result=lambda: [attend()[:1, :, :1]],
        amount=causal_flops(
            batch=shape.training_batch,
            num_queries=shape.length,
            prefix=0,
            heads=shape.training_heads,
            head_dim=shape.head_dim,
        ),
        rate_unit="TFLOP/s",
    )
    return contender, [expected]
