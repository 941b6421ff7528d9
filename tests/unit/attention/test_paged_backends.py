"""Each backend over blocks, against attention in float64: what a layer declares reaches it, and copies are whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.attention import find_backend, paged_triton
from weft.attention.interface import AttentionSpec
from weft.attention.packed import packed_on
from weft.batch import Batch, GroupTables, SamplingRows
from weft.config import CacheConfig, Limits
from weft.errors import ConfigError
from weft.kernels._invariant_tiles import InvariantTiles, invariant_tiles
from weft.layers.heads import HeadTransform
from weft.layers.norm import RMSNorm
from weft.layers.rope import RopeConfig, RotaryTable

CPU = torch.device("cpu")
HEAD_DIM, LENGTH, P = 16, 21, 8
LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=24)
PLAIN = AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
TABLES = torch.tensor([[4, 0, 5], [2, 1, 3]])
CASES = {
    "gather": ("paged_gather", PLAIN),
    "gather-window": ("paged_gather", replace(PLAIN, window=5)),
    "triton": ("paged_triton", PLAIN),
    "triton-window": ("paged_triton", replace(PLAIN, window=5)),
    "triton-soft-cap": ("paged_triton", replace(PLAIN, soft_cap=0.5)),
}


def heads_of(spec: AttentionSpec) -> HeadTransform:
    rope = RopeConfig.of({"max_position_embeddings": LIMITS.max_model_len}, HEAD_DIM)
    norms = [RMSNorm(HEAD_DIM, epsilon, dtype=torch.float32, device=CPU) for epsilon in (1e-5, 1e-6)]
    for norm, low in zip(norms, (0.5, 2.5), strict=True):
        torch.nn.init.uniform_(norm.weight, low, low + 1.0, generator=torch.Generator().manual_seed(1))
        norm.weight.requires_grad_(False)
    rotary = RotaryTable(rope, LIMITS.max_model_len, dtype=torch.float32, device=CPU)
    return HeadTransform(spec.num_query_heads, spec.num_kv_heads, HEAD_DIM, rotary, *norms)


def batch_of(first: int, last: int) -> Batch:
    """Tokens `first : last` of both requests."""
    positions = torch.arange(first, last).repeat(2)
    owners = torch.tensor([0, 1]).repeat_interleave(last - first)
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        sequence_lengths=torch.tensor([last, last]),
        query_starts=torch.tensor([0, last - first, 2 * (last - first)]),
        groups=(GroupTables(block_tables=TABLES, slot_mapping=TABLES[owners, positions // P] * P + positions % P),),
        logit_rows=nothing,
        sampling=SamplingRows(temperatures=torch.empty(0), seeds=nothing, positions=nothing, any_noise=False),
    )


def naive(spec: AttentionSpec, qkv: Tensor) -> Tensor:
    """Of one whole sequence, in float64."""
    query, key, value = (part.double() for part in heads_of(spec)(qkv, torch.arange(LENGTH)))
    group = spec.num_query_heads // spec.num_kv_heads
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = (distance >= 0) & (distance < (spec.window or LENGTH))
    scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value).flatten(1)


@pytest.mark.parametrize("case", CASES)
def test_a_backend_does_what_its_layer_declares(case: str) -> None:
    name, spec = CASES[case]
    backend = find_backend(name)
    assert backend.supports(spec, torch.float32, CPU) is None
    geometry = backend.geometry(LIMITS, CacheConfig(block_size=P, num_blocks=6))
    cache = backend.allocate([spec, spec], geometry, torch.float32, CPU)
    width = (spec.num_query_heads + 2 * spec.num_kv_heads) * HEAD_DIM
    qkvs = torch.randn(2, LENGTH, width, generator=torch.Generator().manual_seed(0))
    for layer in (1, 0):
        pieces = []
        for first, last in ((0, 13), (13, 20), (20, LENGTH)):
            batch = batch_of(first, last)
            attended = cache.prepare(batch)(layer, qkvs[:, first:last].flatten(0, 1), batch.positions, heads_of(spec))
            pieces.append(attended.unflatten(0, (2, -1)))
        for found, qkv in zip(torch.cat(pieces, dim=1), qkvs, strict=True):
            torch.testing.assert_close(found.double(), naive(spec, qkv), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["paged_gather", "paged_triton"])
def test_copied_blocks_are_whole_and_leave_the_rest(name: str) -> None:
    backend = find_backend(name)
    geometry = backend.geometry(LIMITS, CacheConfig(block_size=P, num_blocks=6))
    cache = backend.allocate([PLAIN, PLAIN], geometry, torch.float32, CPU)
    cache.pool.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
    before = cache.pool.clone()  # type: ignore[attr-defined]
    cache.copy_blocks([(4, 1), (0, 3)])
    expected = before[:, :, [0, 4, 2, 0, 4, 5, 6]]
    assert torch.equal(cache.pool, expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("lengths", [[3, 1], [1, 1]], ids=str)
@pytest.mark.parametrize("norms", [False, True])
def test_in_fixed_order_all_launches_of_a_step_cut_alike(
    norms: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tiles are as right, and of the tiny shapes of other tests most are the same."""
    launched: list[tuple[str, dict[str, Any]]] = []
    for kernel in (paged_triton.paged_decode, paged_triton.paged_prefill):

        def recorded(*given: Any, kernel: Callable[..., Tensor] = kernel, **options: Any) -> Tensor:
            launched.append((kernel.__name__, options))
            return kernel(*given, **options)

        monkeypatch.setattr(paged_triton, kernel.__name__, recorded)
    heads = heads_of(PLAIN)
    if not norms:
        heads = HeadTransform(4, 2, HEAD_DIM, heads.rotary)
    backend = paged_triton.BACKEND.in_fixed_order()
    attend = packed_on(backend, [PLAIN], lengths, dtype=torch.float32, device=CPU)
    positions = torch.cat([torch.arange(length) for length in lengths])
    assert attend(0, torch.randn(len(positions), 8 * HEAD_DIM), positions, heads).isfinite().all()

    tiles = invariant_tiles(torch.float32, HEAD_DIM, compute_capability=0)
    expected = {"paged_decode": (tiles.decode, tiles.split, True), "paged_prefill": (tiles.prefill, tiles.split, None)}
    decodes = lengths == [1, 1]
    assert [name for name, _ in launched] == (["paged_decode"] if decodes else ["paged_prefill", "paged_decode"])
    for name, options in launched:
        assert (options.get("tile"), options.get("split"), options.get("fixed_order")) == expected[name]
    # A norm sums a head in an order of the launch that it is in, so that its keys are written by the usual one.
    assert ("new" in launched[-1][1]) == (decodes and not norms)


@pytest.mark.parametrize("change", [{"num_kv_heads": 4}, {"head_dim": 32}], ids=str)
@pytest.mark.parametrize("name", ["contiguous", "paged_gather", "paged_triton"])
def test_layers_that_one_cache_cannot_hold_are_refused_by_number(name: str, change: dict[str, int]) -> None:
    backend, specs = find_backend(name), [PLAIN, PLAIN, replace(PLAIN, **change)]
    geometry = backend.geometry(LIMITS, CacheConfig())
    for call in (
        lambda: backend.bytes_per_block(specs, geometry, torch.float32),
        lambda: backend.allocate(specs, geometry, torch.float32, CPU),
    ):
        with pytest.raises(ConfigError, match="layer 0 keeps 2 key heads of 16 and layer 2 "):
            call()


@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_tiles_of_fixed_order_follow_from_the_layer_the_step_and_the_gpu(
    soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of the tiny shapes of other tests have one tile, whatever else is asked for."""
    asked: list[tuple[Any, ...]] = []

    def noted(*given: Any, **options: Any) -> InvariantTiles:
        asked.append((*given, options))
        return invariant_tiles(*given, **options)

    monkeypatch.setattr(paged_triton, "invariant_tiles", noted)
    monkeypatch.setattr(paged_triton, "capability", lambda device: 89 if device == CPU else None)
    spec = AttentionSpec(num_query_heads=54, num_kv_heads=3, head_dim=HEAD_DIM, scale=1.0, soft_cap=soft_cap)
    lengths = [1, 2, 1, 1]
    attend = packed_on(paged_triton.BACKEND.in_fixed_order(), [spec], lengths, dtype=torch.float32, device=CPU)
    positions = torch.cat([torch.arange(length) for length in lengths])
    attend(0, torch.randn(len(positions), (54 + 2 * 3) * HEAD_DIM), positions, heads_of(spec))
    # 18 heads that share keys are two tiles of 16.
    options = {"group": 18, "heads": 3 * 2 * 4, "soft_cap": soft_cap is not None, "compute_capability": 89}
    assert asked == [(torch.float32, HEAD_DIM, options)]
