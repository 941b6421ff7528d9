"""Operations in fixed order: a few numbers of rows a call, which give the same bits, or the machine is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import ConfigError
from weft.layers.fixed_order import ROWS, SIZES, FixedOrderOperations, block_sizes, blocks_of, by_blocks
from weft.layers.linear import Linear
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm
from weft.layers.operations import PlainOperations
from weft.layers.prepacked import PrepackedLinear, prepack, reason_against_prepacking

HERE = {"dtype": torch.float32, "device": torch.device("cpu")}


def nowhere(*_: object) -> Tensor:
    raise AssertionError("no attention here")


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17])
def test_a_function_sees_eight_rows_and_their_results_come_back_in_order(count: int) -> None:
    seen: list[int] = []

    def doubled(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return rows[:, :2] * 2

    rows = torch.arange(count * 3.0).view(count, 3)
    assert torch.equal(by_blocks(doubled, rows), rows[:, :2] * 2)
    assert seen == ([ROWS] * -(-count // ROWS) or [0])


@pytest.mark.parametrize("sizes", [SIZES, (4, 16), (8, 64), (ROWS,)], ids=str)
def test_blocks_hold_all_rows_and_are_filled_up_by_less_than_another_block_costs(sizes: tuple[int, ...]) -> None:
    for count in range(300):
        blocks = blocks_of(count, sizes)
        assert set(blocks) <= set(sizes)
        assert sorted(blocks, reverse=True) == blocks
        spare = sum(blocks) - count
        assert 0 <= spare <= max(8, sizes[0] - 1)
        assert not blocks or spare < blocks[-1], "a block of nothing"
        rows = torch.arange(count * 2.0).view(count, 2)
        assert torch.equal(by_blocks(lambda block: block * 2, rows, sizes), rows * 2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["norm_linear", "linear_add", "norm_mlp_add", "logits"])
@pytest.mark.parametrize("width", [33, 64])
def test_every_product_sees_eight_rows_and_a_rows_place_shows_nowhere(name: str, width: int) -> None:
    seen: set[int] = set()

    class Watched(Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(len(x))
            return super().forward(x)

    norm, mlp = filled(RMSNorm(width, 1e-5, **HERE)), filled(GatedMLP(width, 1001, **HERE))
    linear = filled(Watched(width, (width,), **HERE))
    mlp.gate_up.__class__ = mlp.down.__class__ = Watched
    hidden = torch.randn(1, width, generator=torch.Generator().manual_seed(2)).expand(19, -1).contiguous()
    calls: dict[str, Callable[[PlainOperations], Tensor]] = {
        "norm_linear": lambda ops: ops.norm_linear(hidden, norm, linear),
        "linear_add": lambda ops: ops.linear_add(hidden, linear, hidden),
        "norm_mlp_add": lambda ops: ops.norm_mlp_add(hidden, norm, mlp),
        "logits": lambda ops: ops.logits(hidden, torch.arange(3, 15), norm, linear),
    }
    found = calls[name](FixedOrderOperations(nowhere))
    assert seen == {ROWS}
    assert torch.equal(found, found[:1].expand_as(found))
    seen.clear()
    calls[name](FixedOrderOperations(nowhere, sizes=(4, 16)))
    assert seen == ({16} if name == "logits" else {4, 16})
    # Sums of up to 1001 products in another order: within the bound of a sum's error, n units of its largest part.
    expected = calls[name](PlainOperations(nowhere))
    assert torch.allclose(found, expected, rtol=0, atol=1001 * 2.0**-24 * float(expected.abs().max()))


plain_silu = functional.silu


def silu_with_a_tail(x: Tensor) -> Tensor:
    """As on CPUs that take sixteen numbers at a time: what is left at the end goes through another exp."""
    found = plain_silu(x).flatten()
    tail = found[len(found) - len(found) % 16 :]
    tail.copy_(torch.nextafter(tail, tail + 1))
    return found.view(x.shape)


@torch.no_grad()
@pytest.mark.parametrize("silu", [plain_silu, silu_with_a_tail], ids=["this machine's", "with a tail"])
def test_of_silu_not_even_the_last_columns_depend_on_the_rows_place(
    silu: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of odd width has one tail for all rows, where torch's exp is the scalar one, which rounds otherwise."""
    monkeypatch.setattr(functional, "silu", silu)
    norm, mlp = filled(RMSNorm(64, 1e-5, **HERE)), filled(GatedMLP(64, 1001, **HERE))
    blocks = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(3)).expand(-1, ROWS, -1)
    gates = [mlp.gate_up(block).chunk(2, dim=-1)[0] for block in blocks]
    shown = sum(not torch.equal(*functional.silu(gate.contiguous())[[0, -1]]) for gate in gates)
    assert shown or silu is plain_silu, "there is nothing to see"
    for block in blocks:
        found = FixedOrderOperations(nowhere).norm_mlp_add(block.contiguous(), norm, mlp)
        assert torch.equal(found, found[:1].expand_as(found))


@torch.no_grad()
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_that_are_found_give_each_row_the_bits_it_has_among_eight(dtype: torch.dtype, packs: bool) -> None:
    here = {"dtype": dtype, "device": torch.device("cpu")}
    if packs and (reason := reason_against_prepacking(here["device"], dtype)) is not None:
        pytest.skip(reason)
    norm, mlp, linear = RMSNorm(72, 1e-5, **here), GatedMLP(72, 200, **here), Linear(72, (40, 8), bias=True, **here)
    model = filled(nn.ModuleList([norm, mlp, linear]))
    if packs:
        prepack(model)
        linear = model[2]
    sizes = block_sizes(model, **here)
    assert ROWS in sizes
    for count in (1, 3, 5, 13, 33, 70, 130):
        hidden = torch.randn(count, 72, generator=torch.Generator().manual_seed(count)).to(dtype)
        found, expected = FixedOrderOperations(nowhere, sizes), FixedOrderOperations(nowhere)
        assert torch.equal(found.norm_linear(hidden, norm, linear), expected.norm_linear(hidden, norm, linear))
        assert torch.equal(found.norm_mlp_add(hidden, norm, mlp), expected.norm_mlp_add(hidden, norm, mlp))


class DependsOnPlace(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * torch.arange(len(x)))[:, None]


class PackedDependsOnPlace(PrepackedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * torch.arange(len(x)))[:, None]


@pytest.mark.parametrize("packs", [False, True])
def test_a_product_in_which_a_rows_place_shows_is_refused_before_anyone_is_served(packs: bool) -> None:
    linear = filled(Linear(8, (16,), **HERE))
    good = PrepackedLinear(linear) if packs else linear
    assert ROWS in block_sizes(nn.ModuleList([good]), **HERE)
    bad = PackedDependsOnPlace(filled(Linear(8, (24,), **HERE))) if packs else filled(DependsOnPlace(8, (24,), **HERE))
    with pytest.raises(ConfigError, match=r"products of equal rows by 1 \[24, 8\] differ") as caught:
        block_sizes(nn.ModuleList([good, bad]), **HERE)
    assert "batch_invariant=False" in str(caught.value.hint)


class DependsOnCount(Linear):
    """The fault: sixteen rows and more are summed otherwise, by a last bit."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        return torch.nextafter(product, product + 1) if len(x) >= 16 else product


def test_a_size_in_which_a_row_has_other_bits_is_left_out() -> None:
    model = nn.ModuleList([filled(Linear(8, (16,), **HERE)), filled(DependsOnCount(8, (24,), **HERE))])
    assert set(block_sizes(model, **HERE)) <= {4, 8}


def test_a_size_in_which_a_norm_has_other_bits_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_count(x: Tensor, norm: RMSNorm) -> Tensor:
        return x * (1 + 1e-6 * (len(x) == 4))

    monkeypatch.setattr("weft.layers.fixed_order.rms_norm", by_count)
    sizes = block_sizes(nn.ModuleList([RMSNorm(8, 1e-5, **HERE)]), **HERE)
    assert sizes == tuple(size for size in SIZES if size != 4)
