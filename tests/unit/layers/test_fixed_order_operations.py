"""Operations in fixed order: eight rows a call, whatever is asked for; a machine that breaks the promise is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import ConfigError
from weft.layers.fixed_order import ROWS, FixedOrderOperations, by_blocks, check_places
from weft.layers.linear import Linear
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm
from weft.layers.operations import PlainOperations
from weft.layers.prepacked import PrepackedLinear

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
    # Sums of up to 1001 products in another order: within the bound of a sum's error, n units of its largest part.
    expected = calls[name](PlainOperations(nowhere))
    assert torch.allclose(found, expected, rtol=0, atol=1001 * 2.0**-24 * float(expected.abs().max()))


@torch.no_grad()
def test_of_silu_not_even_the_last_columns_depend_on_the_rows_place() -> None:
    """A block of odd width has one tail for all rows, where torch's exp is the scalar one, which rounds otherwise."""
    norm, mlp = filled(RMSNorm(64, 1e-5, **HERE)), filled(GatedMLP(64, 1001, **HERE))
    blocks = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(3)).expand(-1, ROWS, -1)
    gates = [mlp.gate_up(block).chunk(2, dim=-1)[0] for block in blocks]
    shown = sum(not torch.equal(*functional.silu(gate.contiguous())[[0, -1]]) for gate in gates)
    assert shown, "on this machine there is nothing to see"
    for block in blocks:
        found = FixedOrderOperations(nowhere).norm_mlp_add(block.contiguous(), norm, mlp)
        assert torch.equal(found, found[:1].expand_as(found))


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
    check_places(nn.ModuleList([good]), **HERE)
    bad = PackedDependsOnPlace(filled(Linear(8, (24,), **HERE))) if packs else filled(DependsOnPlace(8, (24,), **HERE))
    with pytest.raises(ConfigError, match=r"products of equal rows by 1 \[24, 8\] differ") as caught:
        check_places(nn.ModuleList([good, bad]), **HERE)
    assert "batch_invariant=False" in str(caught.value.hint)
