"""The contiguous cache: rows that never touch, chunks that never show, memory that is what was said."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.attention import find_backend, known_backends
from weft.attention.contiguous import BACKEND, ContiguousCache
from weft.attention.interface import AttentionBackend, AttentionSpec, Cache
from weft.batch import Batch, GroupTables, SamplingRows
from weft.config import CacheConfig, Limits
from weft.errors import ConfigError
from weft.layers.heads import HeadTransform
from weft.layers.rope import RopeConfig, RotaryTable

CPU = torch.device("cpu")
HEAD_DIM, LAYERS, LENGTH = 16, 2, 8
LIMITS = Limits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=12)
GROUPS = [(2, 2), (3, 1), (8, 1)]
PREFILL, DECODE = [LENGTH], [1] * LENGTH
CHUNKINGS = [PREFILL, DECODE, [3, 5], [5, 3], [4, 1, 1, 1, 1], [1, 7], [2, 3, 3]]

# One step: the new tokens of some rows, as (row, first position, one past the last).
Step = list[tuple[int, int, int]]


def spec(num_query_heads: int = 6, num_kv_heads: int = 2, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        window=window,
    )


def heads_of(attention: AttentionSpec) -> HeadTransform:
    rope = RopeConfig.of({"max_position_embeddings": LIMITS.max_model_len}, HEAD_DIM)
    rotary = RotaryTable(rope, LIMITS.max_model_len, dtype=torch.float32, device=CPU)
    return HeadTransform(attention.num_query_heads, attention.num_kv_heads, HEAD_DIM, rotary)


def allocate(attention: AttentionSpec) -> ContiguousCache:
    return BACKEND.allocate([attention] * LAYERS, BACKEND.geometry(LIMITS, CacheConfig()), torch.float32, CPU)


def random_qkv(attention: AttentionSpec, seed: int = 0) -> Tensor:
    width = (attention.num_query_heads + 2 * attention.num_kv_heads) * HEAD_DIM
    return torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(seed))


def batch_of(step: Step) -> Batch:
    positions = torch.cat([torch.arange(first, last) for _, first, last in step])
    rows = torch.tensor([[row] for row, _, _ in step])
    counts = torch.tensor([last - first for _, first, last in step])
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        sequence_lengths=torch.tensor([last for _, _, last in step]),
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        groups=(GroupTables(block_tables=rows, slot_mapping=torch.full_like(positions, -1)),),
        logit_rows=nothing,
        sampling=SamplingRows(temperatures=torch.empty(0), seeds=nothing, positions=nothing, any_noise=False),
    )


def run(
    cache: ContiguousCache, attention: AttentionSpec, qkvs: dict[int, Tensor], step: Step, layer: int = 0
) -> Tensor:
    batch = batch_of(step)
    qkv = torch.cat([qkvs[row][first:last] for row, first, last in step])
    return cache.prepare(batch)(layer, qkv, batch.positions, heads_of(attention))


def run_chunked(attention: AttentionSpec, qkv: Tensor, chunks: list[int], row: int = 1) -> Tensor:
    cache, ends = allocate(attention), torch.tensor(chunks).cumsum(0).tolist()
    steps = zip([0, *ends], ends, strict=False)
    return torch.cat([run(cache, attention, {row: qkv}, [(row, first, last)]) for first, last in steps])


def naive(attention: AttentionSpec, qkv: Tensor) -> Tensor:
    """Softmax attention of a whole sequence in float64."""
    query, key, value = (part.double() for part in heads_of(attention)(qkv, torch.arange(LENGTH)))
    group = attention.num_query_heads // attention.num_kv_heads
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) & (distance < (attention.window or LENGTH))
    scores = torch.einsum("qhd,khd->hqk", query, key) * attention.scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


@pytest.mark.parametrize("chunks", CHUNKINGS, ids=str)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), GROUPS)
def test_chunks_never_change_attention(
    num_query_heads: int, num_kv_heads: int, window: int | None, chunks: list[int]
) -> None:
    attention = spec(num_query_heads, num_kv_heads, window)
    qkv = random_qkv(attention)
    attended = run_chunked(attention, qkv, chunks)
    torch.testing.assert_close(attended.double(), naive(attention, qkv), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", CHUNKINGS, ids=str)
@pytest.mark.parametrize("window", [1, 3, 4, 5, 7, 8, 9])
def test_a_window_counts_the_query_itself_however_the_tokens_come(window: int, chunks: list[int]) -> None:
    attention = spec(window=window)
    qkv = random_qkv(attention)
    one_hot = torch.eye(LENGTH, HEAD_DIM).repeat(1, attention.num_kv_heads)  # value of token i: 1 at place i
    qkv[:, -one_hot.shape[1] :] = one_hot
    attended = run_chunked(attention, qkv, chunks).unflatten(-1, (-1, HEAD_DIM))
    for position in range(LENGTH):
        seen = [place in range(position - window + 1, position + 1) for place in range(HEAD_DIM)]
        assert (attended[position] > 0).tolist() == [seen] * attention.num_query_heads


def test_a_request_never_sees_its_neighbours() -> None:
    attention = spec(window=4)
    qkvs = {row: random_qkv(attention, seed=row) for row in range(LIMITS.max_num_seqs)}
    cache = allocate(attention)
    steps: list[Step] = [[(2, 0, 5), (0, 0, 1)], [(0, 1, 8), (1, 0, 2), (2, 5, 6)], [(1, 2, 8), (2, 6, 8)]]
    together = dict.fromkeys(qkvs, torch.empty(0, attention.num_query_heads * HEAD_DIM))
    for step in steps:
        parts = run(cache, attention, qkvs, step).split([last - first for _, first, last in step])
        for (row, _, _), part in zip(step, parts, strict=True):
            together[row] = torch.cat((together[row], part))
    for row, qkv in qkvs.items():
        torch.testing.assert_close(together[row].double(), naive(attention, qkv), rtol=1e-5, atol=1e-6)


def test_memory_that_nobody_wrote_is_never_read() -> None:
    attention = spec()
    cache = allocate(attention)
    assert cache.slab.isnan().all(), "the test run fills unset memory"
    qkvs = {row: random_qkv(attention, seed=row) for row in (0, 2)}
    for step in ([(0, 0, 3), (2, 0, 8)], [(0, 3, 4)], [(0, 4, 8)]):
        assert run(cache, attention, qkvs, step).isfinite().all()


@pytest.mark.parametrize("last", [7, 8])
def test_a_step_reads_its_window_and_no_more(last: int) -> None:
    attention, first = spec(window=4), 6
    cache, qkvs = allocate(attention), {0: random_qkv(attention)}
    run(cache, attention, qkvs, [(0, 0, first)])
    oldest = first - 3  # the query at `first` sees itself and the 3 before
    cache.slab[:, :, 0, :, :oldest] = float("nan")
    assert run(cache, attention, qkvs, [(0, first, last)]).isfinite().all()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_step_writes_its_own_tokens_of_its_own_layer_and_nothing_else(layer: int) -> None:
    attention = spec()
    cache = allocate(attention)
    cache.slab.normal_(generator=torch.Generator().manual_seed(1))
    before = cache.slab.clone()
    qkv = random_qkv(attention)
    run(cache, attention, {0: qkv, 2: qkv}, [(2, 2, 5), (0, 7, 8)], layer)
    _, key, value = heads_of(attention)(qkv, torch.arange(LENGTH))
    for row, first, last in ((2, 2, 5), (0, 7, 8)):
        written = cache.slab[:, layer, row, :, first:last]
        assert torch.equal(written, torch.stack((key[first:last], value[first:last])).transpose(1, 2))
        written.copy_(before[:, layer, row, :, first:last])
    assert torch.equal(cache.slab, before)


def test_copied_blocks_are_equal_in_every_layer_and_leave_the_rest() -> None:
    cache = allocate(spec())
    cache.slab.normal_(generator=torch.Generator().manual_seed(1))
    before = cache.slab.clone()
    cache.copy_blocks([(0, 2), (1, 0)])
    assert torch.equal(cache.slab[:, :, 2], before[:, :, 0])
    assert torch.equal(cache.slab[:, :, 0], before[:, :, 1])
    assert torch.equal(cache.slab[:, :, [1, 3]], before[:, :, [1, 3]])


def test_geometry_is_one_whole_row_a_request() -> None:
    geometry = BACKEND.geometry(LIMITS, CacheConfig())
    assert (geometry.num_blocks, geometry.block_size, geometry.shareable) == (3, 12, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_a_block_are_those_allocated(dtype: torch.dtype) -> None:
    specs, geometry = [spec()] * 5, BACKEND.geometry(LIMITS, CacheConfig())
    cache = BACKEND.allocate(specs, geometry, dtype, CPU)
    scratch = 1
    assert cache.slab.nbytes == BACKEND.bytes_per_block(specs, geometry, dtype) * (geometry.num_blocks + scratch)


def test_supports_says_why_not() -> None:
    assert BACKEND.supports(spec(window=4), torch.float32, CPU) is None
    capped, grouped = replace(spec(), soft_cap=30.0), replace(spec(), cache_group=1)
    assert "soft_cap=30.0" in (BACKEND.supports(capped, torch.float32, CPU) or "")
    assert "group" in (BACKEND.supports(grouped, torch.float32, CPU) or "")


def test_lengths_known_to_the_host_alone_cannot_be_captured() -> None:
    assert not allocate(spec()).capturable


def test_backends_are_found_by_the_name_they_give_themselves() -> None:
    known = known_backends()
    assert known["contiguous"] is BACKEND
    assert all(find_backend(name) is backend and backend.name == name for name, backend in known.items())
    assert all(isinstance(backend, AttentionBackend) for backend in known.values())
    assert isinstance(allocate(spec()), Cache)


@pytest.mark.parametrize(
    ("name", "hint"), [("contigous", "did you mean 'contiguous'"), ("zzz", "known names: .*contiguous")]
)
def test_an_unknown_backend_is_refused_with_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown attention_backend='{name}'\nhint: {hint}"):
        find_backend(name)
