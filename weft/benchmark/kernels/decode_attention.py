"""One new token a request over a paged cache, rotation and cache write included, beside SDPA on a contiguous cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft import __version__
from weft.benchmark.kernels.arithmetic import copies_beyond_cache, keys_and_values_bytes
from weft.benchmark.kernels.contender import Contender, Measured, Place, measure, ratio
from weft.benchmark.kernels.peers import BACKENDS, sdpa, version_of
from weft.benchmark.row import Row, Target
from weft.kernels import gemv, paged_decode
from weft.kernels.paged import HeadRotation, PagedKeys, Scoring
from weft.kernels.paged_decode import NewTokens

NOTE = (
    "paged decode: rates count keys and values alone; each call reads another layer, and all layers together are at "
    "least 1 GiB; SDPA reads a contiguous cache and neither rotates nor writes"
)
_LAYERS_BYTES = 1 << 30  # of all layers that are read in turn
_PARTS = {128: 0.85, 64: 0.82}  # of the read bandwidth
_BESIDE_CUDNN = Target(relation="<=", value=1.07)
_SMALL_BLOCKS = Target(relation="<=", value=1.10)
_READ_COLUMNS = 4096
BLOCK_SIZES = (64, 16)


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Requests of one length, the token that is new included."""

    batch: int
    length: int
    head_dim: int
    query_heads: int = 32
    kv_heads: int = 8

    def read_bytes(self, itemsize: int) -> int:
        return keys_and_values_bytes(
            batch=self.batch, length=self.length, kv_heads=self.kv_heads, head_dim=self.head_dim, itemsize=itemsize
        )


SHAPES = tuple(
    DecodeShape(batch=batch, length=length, head_dim=head_dim)
    for head_dim in (128, 64)
    for batch, length in ((64, 2048), (64, 4096), (1, 131_072))
)


def read_rows(place: Place, *, num_bytes: int = 1 << 31) -> tuple[list[Row], float]:
    """What reading alone reaches here by several ways, and the best of them in bytes a second."""
    place = place.case("read bandwidth")
    count = num_bytes // place.dtype.itemsize // _READ_COLUMNS
    matrix = torch.ones(count, _READ_COLUMNS, dtype=place.dtype, device=place.device)
    vector = torch.ones(_READ_COLUMNS, dtype=place.dtype, device=place.device)
    whole = torch.full((), float(count * _READ_COLUMNS), dtype=torch.float64, device=place.device)
    each = torch.full((count,), float(_READ_COLUMNS), dtype=torch.float64, device=place.device)
    ways: tuple[tuple[str, str, Callable[[], Tensor], Tensor], ...] = (
        ("torch sum", torch.__version__, lambda: matrix.sum(dtype=torch.float32), whole),
        ("torch matrix times vector", torch.__version__, lambda: torch.mv(matrix, vector), each),
        ("weft gemv", __version__, lambda: gemv.gemv(vector[None], matrix)[0], each),
    )
    rows: list[Row] = []
    best = 0.0
    for system, version, call, expected in ways:
        contender = Contender(
            system=system,
            version=version,
            operation="read",
            calls=[call],
            result=partial(_alone, call),
            amount=matrix.nbytes,
            rate_unit="TB/s",
        )
        measured = measure(contender, [expected], place)
        rows += measured.rows
        if measured.median_s:
            best = max(best, matrix.nbytes / measured.median_s)
    return rows, best


def decode_rows(shape: DecodeShape, place: Place, read_bandwidth: float) -> list[Row]:
    """read_bandwidth: bytes a second that reading alone reaches in this run; 0 if unknown."""
    place = place.case(
        f"paged decode, {shape.batch} x {shape.length}, {shape.query_heads} heads over {shape.kv_heads} of "
        f"{shape.head_dim}"
    )
    part = _PARTS.get(shape.head_dim)
    target = Target(relation=">=", value=round(part * read_bandwidth / 1e12, 3)) if part and read_bandwidth else None
    done: dict[str, Measured] = {}
    for block_size in BLOCK_SIZES:
        contender, expected = _paged(shape, place, block_size)
        done[contender.system] = measure(
            contender, expected, place, rate_target=target if block_size == BLOCK_SIZES[0] else None
        )
        del contender, expected
    peers, expected = _contiguous(shape, place)
    for contender in peers:
        done[contender.system] = measure(contender, expected, place)
    large, small = (done[f"weft P={block_size}"] for block_size in BLOCK_SIZES)
    row = place.row.by("weft over a peer", "")
    rows = [line for one in done.values() for line in one.rows]
    if large.median_s and read_bandwidth:
        reached = shape.read_bytes(place.dtype.itemsize) / large.median_s / read_bandwidth
        part_target = None if part is None else Target(relation=">=", value=100 * part)
        rows.append(row.of("part of the read bandwidth", [100 * reached], "%", target=part_target))
    return [
        *rows,
        *ratio(row, "time over sdpa cudnn", large, done["sdpa cudnn"], _BESIDE_CUDNN),
        *ratio(row, "time over sdpa flash", large, done["sdpa flash"]),
        *ratio(row, "time of P=16 over P=64", small, large, _SMALL_BLOCKS),
    ]


def _layers(shape: DecodeShape, place: Place) -> int:
    size = shape.read_bytes(place.dtype.itemsize)
    return copies_beyond_cache(size, cache_bytes=max(_LAYERS_BYTES, 2 * size), most=8)


def _paged(shape: DecodeShape, place: Place, block_size: int) -> tuple[Contender, list[Tensor]]:
    """Blocks in random order; every call writes its new token to the same slots of its own layer."""
    device, dtype = place.device, place.dtype
    generator = torch.Generator(device=device).manual_seed(place.row.seed or 0)
    columns = -(-shape.length // block_size)
    num_blocks = shape.batch * columns

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=dtype, device=device)

    pool = normal(2, _layers(shape, place), num_blocks, block_size, shape.kv_heads, shape.head_dim)
    tables = torch.randperm(num_blocks, generator=generator, device=device).view(shape.batch, columns)
    lengths = torch.full((shape.batch,), shape.length, device=device)
    positions = lengths - 1
    slots = tables[:, -1] * block_size + positions % block_size
    angles = normal(shape.length, shape.head_dim // 2).float()
    rotation = HeadRotation(cos=angles.cos().to(dtype), sin=angles.sin().to(dtype))
    new = NewTokens(positions=positions, slots=slots, rotation=rotation)
    packed = normal(shape.batch, (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim)
    scoring = Scoring(scale=shape.head_dim**-0.5)

    def paged(given: Tensor, layer: int) -> PagedKeys:
        return PagedKeys(
            pool=given,
            layer=layer,
            block_tables=tables,
            sequence_lengths=lengths,
            query_starts=torch.arange(shape.batch + 1, device=device),
        )

    layers = [paged(pool, layer) for layer in range(pool.shape[1])]
    wide = pool[:, :1].double()
    true = paged_decode.reference(
        packed.double(),
        paged(wide, 0),
        scoring,
        num_query_heads=shape.query_heads,
        new=NewTokens(
            positions=positions,
            slots=slots,
            rotation=HeadRotation(cos=rotation.cos.double(), sin=rotation.sin.double()),
        ),
    )
    expected = [true, wide[:, 0].flatten(1, 2)[:, slots]]

    def attend(layer: PagedKeys) -> Tensor:
        return paged_decode.paged_decode(packed, layer, scoring, num_query_heads=shape.query_heads, new=new)

    contender = Contender(
        system=f"weft P={block_size}",
        version=__version__,
        operation="decode",
        calls=[partial(attend, layer) for layer in layers],
        result=lambda: [attend(layers[0]), pool[:, 0].flatten(1, 2)[:, slots]],
        amount=shape.read_bytes(dtype.itemsize),
        rate_unit="TB/s",
        time_unit="µs",
    )
    return contender, expected


def _contiguous(shape: DecodeShape, place: Place) -> tuple[list[Contender], list[Tensor]]:
    """SDPA's backends over one cache `[B, H_kv, S, D]` a layer."""
    generator = torch.Generator(device=place.device).manual_seed(place.row.seed or 0)

    def normal(heads: int, length: int) -> Tensor:
        sizes = (shape.batch, heads, length, shape.head_dim)
        return torch.randn(sizes, generator=generator, dtype=place.dtype, device=place.device)

    query = normal(shape.query_heads, 1)
    caches = [
        (normal(shape.kv_heads, shape.length), normal(shape.kv_heads, shape.length))
        for _ in range(_layers(shape, place))
    ]
    contenders = []
    for system in BACKENDS:
        calls = [partial(sdpa, system, query, key, value, causal=False) for key, value in caches]
        contenders.append(
            Contender(
                system=system,
                version=version_of(system),
                operation="decode",
                calls=calls,
                result=partial(_alone, calls[0]),
                amount=shape.read_bytes(place.dtype.itemsize),
                rate_unit="TB/s",
                time_unit="µs",
            )
        )
    return contenders, [_plain(query, caches[0])]


def _alone(call: Callable[[], Tensor]) -> list[Tensor]:
    return [call()]


def _plain(query: Tensor, cache: Sequence[Tensor]) -> Tensor:
    """`[B, H_q, 1, D]` in float64."""
    key, value = (tensor.double() for tensor in cache)
    grouped = query.double().unflatten(1, (key.shape[1], -1))[:, :, :, 0]
    weights = (grouped @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
    return (weights @ value).flatten(1, 2)[:, :, None]
