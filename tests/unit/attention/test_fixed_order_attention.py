"""Attention in fixed order: the formula, the same bits however a sequence is cut, and gradients through packed ones."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.attention.test_sdpa import naive, random_inputs, spec
from weft.attention import fixed_order
from weft.attention.fixed_order import TILE, Masks, check_places
from weft.attention.interface import AttentionSpec
from weft.attention.packed import packed
from weft.errors import ConfigError
from weft.layers.fixed_order import ROWS
from weft.layers.heads import HeadTransform
from weft.layers.norm import RMSNorm
from weft.layers.rope import RopeConfig, RotaryTable

CPU = torch.device("cpu")
GROUPS = [(2, 2), (6, 2), (8, 1)]


def attend(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, first_key: int = 0) -> Tensor:
    masks = Masks(len(query), first_key, first_key + keys.shape[1], spec, CPU)
    return fixed_order.attend(query, keys, values, spec, masks, careful=True)


def attended(inputs: tuple[Tensor, Tensor, Tensor], attention: AttentionSpec, first_key: int = 0) -> Tensor:
    query, keys, values = (part[0] for part in inputs)
    return attend(query.transpose(0, 1), keys, values, attention, first_key=first_key)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 300), (9, 9), (8, 129), (40, 257)])
@pytest.mark.parametrize("window", [None, 3, 140])
@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), GROUPS)
def test_it_equals_the_formula_in_float64(
    num_query_heads: int, num_kv_heads: int, window: int | None, num_queries: int, num_keys: int
) -> None:
    attention = spec(num_query_heads, num_kv_heads, window)
    inputs = random_inputs(num_queries, num_keys, attention)
    found = attended(inputs, attention).transpose(0, 1)[None]
    torch.testing.assert_close(found.double(), naive(*inputs, attention), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 50, 200])
@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), GROUPS)
def test_a_querys_bits_are_those_of_its_sequence_however_it_is_cut(
    num_query_heads: int, num_kv_heads: int, window: int | None
) -> None:
    attention = spec(num_query_heads, num_kv_heads, window)
    length = 2 * TILE + 20
    query, keys, values = (part[0] for part in random_inputs(length, length, attention))
    query = query.transpose(0, 1)
    whole = attend(query, keys, values, attention)
    for count, end in [(1, end) for end in range(1, length, 7)] + [(7, 130), (8, TILE), (63, 200), (TILE, 2 * TILE)]:
        first = 0 if window is None else max(0, end - count + 1 - window)
        part = attend(query[end - count : end], keys[:, first:end], values[:, first:end], attention, first_key=first)
        assert torch.equal(part, whole[end - count : end]), (count, end)


@pytest.mark.parametrize("head_dim", [6, 10, 16, 40])
def test_no_product_with_values_ends_within_a_vector_whatever_the_width_of_heads(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL's product of 6 or 10 columns sums odd rows in another order than even ones."""
    attention = replace(spec(2, 2, None), head_dim=head_dim)
    query, keys, values = (torch.randn(2, 9, head_dim, generator=torch.Generator().manual_seed(n)) for n in range(3))
    product, widths = Tensor.__matmul__, set()

    def watched(rows: Tensor, other: Tensor) -> Tensor:
        widths.add(other.shape[-1])
        return product(rows, other)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "__matmul__", watched)
        check_places([attention], CPU)
        found = attend(query.transpose(0, 1), keys, values, attention)
    assert widths == {TILE, -(-head_dim // 16) * 16}
    expected = naive(query[None], keys[None], values[None], attention)[0].transpose(0, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_overflowed_shows_where_it_is_seen_and_nowhere_else(window: int | None, poison: float, part: str) -> None:
    """A key beside it in its tile, before it or past its window, must not say how the sequence was cut."""
    attention = spec(2, 1, window)
    query, keys, values = (part[0] for part in random_inputs(20, 20, attention))
    query = query.transpose(0, 1)
    {"keys": keys, "values": values}[part][0, 5, 3] = poison
    whole = attend(query, keys, values, attention)
    for end in range(1, 21):
        first = 0 if window is None else max(0, end - window)
        alone = attend(query[end - 1 : end], keys[:, first:end], values[:, first:end], attention, first_key=first)[0]
        torch.testing.assert_close(alone, whole[end - 1], rtol=0, atol=0, equal_nan=True)
        if part == "values":
            assert alone.isfinite().all().item() == (not first <= 5 < end)


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
@pytest.mark.parametrize("lengths", [[30, 20], [1, 6], [12, 8, 7]], ids=str)
def test_an_overflow_in_one_sequence_changes_no_bit_of_what_does_not_see_it(lengths: list[int], poison: float) -> None:
    """In a prompt's blocks and in a lone one, whose mask is kept for all layers."""
    rotary = RotaryTable(RopeConfig.of({"max_position_embeddings": 64}, 8), 64, dtype=torch.float32, device=CPU)
    heads, specs = HeadTransform(4, 2, 8, rotary), [spec(4, 2, None), spec(4, 2, 3), spec(4, 2, None)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    qkv = torch.randn(sum(lengths), 64, generator=torch.Generator().manual_seed(0))
    attend, spoilt = packed(specs, lengths, fixed_order=True), qkv.clone()
    place = lengths[0] + 4  # of the second sequence
    spoilt[place, -1] = poison
    for layer, attention in enumerate(specs):
        clean, found = (attend(layer, rows, positions, heads) for rows in (qkv, spoilt))
        end = lengths[0] + lengths[1] if attention.window is None else min(place + 3, lengths[0] + lengths[1])
        sees = torch.zeros(len(qkv), dtype=torch.bool)
        sees[place:end] = True
        assert torch.equal(found[~sees], clean[~sees])
        assert found[sees].isnan().any(dim=1).all()


def test_gradients_through_packed_sequences_are_those_of_plain_attention() -> None:
    rotary = RotaryTable(RopeConfig.of({"max_position_embeddings": 64}, 8), 64, dtype=torch.float32, device=CPU)
    heads = HeadTransform(4, 2, 8, rotary)
    specs, lengths = [spec(4, 2, None)] * 2, [5, 1, 30]
    positions = torch.cat([torch.arange(length) for length in lengths])

    def gradient(*, in_order: bool) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(sum(lengths), 64, generator=generator, requires_grad=True)
        attend = packed(specs, lengths, fixed_order=in_order)
        first = attend(0, qkv, positions, heads)
        (attend(1, torch.cat([first, qkv[:, 32:]], dim=1), positions, heads) ** 2).sum().backward()
        assert qkv.grad is not None
        return qkv.grad

    found, expected = gradient(in_order=True), gradient(in_order=False)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # two orders of float32 sums, through two layers


def test_a_layer_reads_what_it_wrote_itself() -> None:
    rotary = RotaryTable(RopeConfig.of({"max_position_embeddings": 64}, 8), 64, dtype=torch.float32, device=CPU)
    store = packed([spec(4, 2, None)] * 2, [3])
    store(0, torch.ones(3, 64), torch.arange(3), HeadTransform(4, 2, 8, rotary))
    with pytest.raises(AssertionError, match="layer 1 reads what layer 0 wrote"):
        next(iter(store._store.read(1, None)))  # type: ignore[attr-defined]


def test_a_machine_on_which_a_rows_place_shows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [spec(6, 2, None), spec(6, 2, 5)]
    check_places(specs, CPU)
    softmax = Tensor.softmax

    def by_width(scores: Tensor, dim: int) -> Tensor:
        return softmax(scores, dim) * (1 + 1e-6 * (scores.shape[-1] > TILE))

    monkeypatch.setattr(fixed_order.torch.Tensor, "softmax", by_width)
    with pytest.raises(ConfigError, match="cannot be kept on this machine: attention of 6 heads"):
        check_places(specs, CPU)


@pytest.mark.parametrize("width", [TILE, 16], ids=["scores", "attended"])
def test_a_machine_whose_products_show_a_rows_place_is_refused(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    product = Tensor.__matmul__

    def by_place(rows: Tensor, other: Tensor) -> Tensor:
        found = product(rows, other)
        return found * (1 + 1e-6 * torch.arange(found.shape[1]))[:, None] if found.shape[-1] == width else found

    monkeypatch.setattr(Tensor, "__matmul__", by_place)
    with pytest.raises(ConfigError, match="cannot be kept on this machine: attention of 6 heads"):
        check_places([spec(6, 2, None)], CPU)


def test_heads_with_norms_are_made_eight_rows_at_a_time() -> None:
    seen: list[int] = []

    class Watched(HeadTransform):
        def forward(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            seen.append(len(qkv))
            query, key, value = super().forward(qkv, positions)
            return query, key, value

    rotary = RotaryTable(RopeConfig.of({"max_position_embeddings": 64}, 8), 64, dtype=torch.float32, device=CPU)
    norm = RMSNorm(8, 1e-5, dtype=torch.float32, device=CPU)
    torch.nn.init.ones_(norm.weight)
    qkv = torch.randn(11, 64, generator=torch.Generator().manual_seed(0))
    packed([spec(4, 2, None)], [4, 7], fixed_order=True)(0, qkv, torch.arange(11), Watched(4, 2, 8, rotary, norm, norm))
    assert seen == [ROWS, ROWS]


def test_a_packed_sequence_is_what_it_is_alone() -> None:
    rotary = RotaryTable(RopeConfig.of({"max_position_embeddings": 64}, 8), 64, dtype=torch.float32, device=CPU)
    heads, lengths = HeadTransform(4, 2, 8, rotary), [5, 1, 30]
    pieces = torch.randn(sum(lengths), 64, generator=torch.Generator().manual_seed(0)).split(lengths)
    positions = [torch.arange(length) for length in lengths]
    together = packed([spec(4, 2, 3)], lengths, fixed_order=True)(0, torch.cat(pieces), torch.cat(positions), heads)
    alone = [
        packed([spec(4, 2, 3)], [length], fixed_order=True)(0, qkv, places, heads)
        for length, qkv, places in zip(lengths, pieces, positions, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))
