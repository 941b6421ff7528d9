from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.accuracy import SINGLE, assert_by_the_rule, assert_within, unit
from weft.errors import KernelError
from weft.kernels.gemv import MOST_COLUMNS, MOST_ROWS, Norm, Tile, candidates, gemv, reference, refusal

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def arguments(count: int, inner: int, outer: int, dtype: torch.dtype, **wanted: bool) -> dict[str, Any]:
    """Random inputs, x and residual sliced from something wider."""
    width = outer // 2 if wanted.get("swiglu") else outer
    made: dict[str, Any] = {
        "x": torch.randn(count, inner + 9).to(dtype)[:, 5:-4],
        "weight": (torch.randn(outer, inner) * inner**-0.5).to(dtype),
    }
    if wanted.get("norm"):
        made["norm"] = Norm(weight=(torch.rand(inner) + 0.5).to(dtype), epsilon=1e-3)
    if wanted.get("bias"):
        made["bias"] = torch.randn(outer).to(dtype)
    if wanted.get("residual"):
        made["residual"] = torch.randn(count, width + 3).to(dtype)[:, 3:]
    return made | {"swiglu": wanted.get("swiglu", False)}


def moved(made: dict[str, Any], change: Any) -> dict[str, Any]:
    """Every tensor of the arguments, changed."""
    found = {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in made.items()}
    if "norm" in made:
        found["norm"] = Norm(weight=change(made["norm"].weight), epsilon=made["norm"].epsilon)
    return found


def roundings(made: dict[str, Any]) -> Tensor:
    """How far single precision may take each result, whatever the order of its sums.

    A norm costs half its sum, six operations, and two roundings to the input's dtype; a SwiGLU grows less than 1.1
    times as fast as its gate and takes ten roundings; bias and residual two each.
    """
    exact = moved(made, Tensor.double)
    rows, inner, terms = exact["x"], made["x"].shape[1], float(made["x"].shape[1])
    if "norm" in made:
        rows = functional.rms_norm(rows, (inner,), exact["norm"].weight, made["norm"].epsilon)
        terms += inner / 2 + 6 + 2 * unit(made["x"].dtype) / SINGLE
    error = SINGLE * terms * (rows.abs() @ exact["weight"].abs().T)
    value = rows @ exact["weight"].T
    if "bias" in made:
        value = value + exact["bias"]
        error = error + 2 * SINGLE * (value.abs() + exact["bias"].abs())
    if made["swiglu"]:
        (gate, up), (gate_error, up_error) = value.chunk(2, dim=1), error.chunk(2, dim=1)
        value = functional.silu(gate) * up
        error = 1.1 * gate_error * (up.abs() + up_error) + gate.abs() * up_error + 10 * SINGLE * value.abs()
    if "residual" in made:
        error = error + 2 * SINGLE * (value.abs() + exact["residual"].abs())
    return error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "wanted", [(), ("norm",), ("bias", "residual"), ("swiglu", "bias"), ("norm", "swiglu")], ids=str
)
@pytest.mark.parametrize(("count", "inner", "outer"), [(1, 576, 50), (3, 1000, 38), (8, 40, 64), (2, 2100, 6)])
def test_products_lie_within_their_roundings(
    count: int, inner: int, outer: int, wanted: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    made = arguments(count, inner, outer, dtype, **dict.fromkeys(wanted, True))
    found = gemv(**moved(made, lambda tensor: tensor.to(device))).cpu()
    assert_within(found, reference(**moved(made, Tensor.double)), roundings(made))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [(), ("norm", "swiglu"), ("bias", "residual")], ids=str)
def test_products_are_as_accurate_as_torchs(wanted: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
    made = arguments(8, 576, 2560 if "swiglu" in wanted else 1280, dtype, **dict.fromkeys(wanted, True))
    wide = None if device.type == "cuda" else Tile(block_n=64, num_warps=4)  # fewer programs to interpret
    found = gemv(**moved(made, lambda tensor: tensor.to(device)), tile=wide).cpu()
    assert_by_the_rule(found, reference(**made), reference(**moved(made, Tensor.double)))


def test_a_row_gets_the_same_bits_whatever_lies_in_the_rows_beside_it(device: torch.device) -> None:
    made = moved(arguments(3, 300, 20, torch.float32, norm=True), lambda tensor: tensor.to(device))
    other = made | {"x": torch.cat([made["x"][:1], torch.randn(2, 300, device=device)])}
    assert torch.equal(gemv(**made)[0], gemv(**other)[0])


@pytest.mark.parametrize("wanted", [("norm",), ("bias", "residual"), ("norm", "swiglu")], ids=str)
def test_a_row_alone_gets_the_bits_it_gets_among_others(wanted: tuple[str, ...], device: torch.device) -> None:
    made = moved(arguments(8, 300, 20, torch.float32, **dict.fromkeys(wanted, True)), lambda tensor: tensor.to(device))
    whole = gemv(**made)
    for row in (0, 7):
        single = {name: made[name][row : row + 1] for name in ("x", "residual") if name in made}
        assert torch.equal(gemv(**made | single)[0], whole[row])


@pytest.mark.parametrize("swiglu", [False, True])
def test_every_candidate_gives_the_products(swiglu: bool, device: torch.device) -> None:
    made = arguments(2, 2048, 12, torch.float32, norm=True, swiglu=swiglu)
    exact, inside = reference(**moved(made, Tensor.double)), roundings(made)
    tiles = candidates(2048, 4, swiglu=swiglu)
    assert len(tiles) == len(set(tiles)) > 3
    for tile in tiles:
        assert_within(gemv(**moved(made, lambda tensor: tensor.to(device)), tile=tile).cpu(), exact, inside)


def test_what_is_refused_can_be_asked_beforehand(device: torch.device) -> None:
    assert refusal(MOST_ROWS, MOST_COLUMNS) is None
    for count, inner in ((MOST_ROWS + 1, 8), (1, MOST_COLUMNS + 1)):
        reason = refusal(count, inner)
        assert reason is not None
        with pytest.raises(KernelError, match=reason.split(",")[0]):
            gemv(torch.zeros(count, inner, device=device), torch.zeros(1, inner, device=device))


@pytest.mark.parametrize("fault", ["norm", "bias", "residual", "halves"])
def test_what_is_forgotten_would_show(fault: str, device: torch.device) -> None:
    made = arguments(2, 64, 24, torch.float32, norm=True, bias=True, residual=True, swiglu=True)
    wrong = {name: value for name, value in made.items() if name != fault}
    if fault == "halves":
        wrong["weight"] = made["weight"].roll(12, dims=0)
    found = gemv(**moved(wrong, lambda tensor: tensor.to(device))).cpu()
    with pytest.raises(AssertionError):
        assert_within(found, reference(**moved(made, Tensor.double)), roundings(made))


def test_nothing_times_a_matrix_is_nothing(device: torch.device) -> None:
    assert gemv(torch.zeros(0, 8, device=device), torch.zeros(4, 8, device=device)).shape == (0, 4)


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(5, 8, device=device)
    for message, attempt in {
        "9 rows": lambda: gemv(torch.zeros(9, 8, device=device), weight),
        r"weight \(5, 7\)": lambda: gemv(x, weight[:, :7]),
        "weight is torch.float16": lambda: gemv(x, weight.half()),
        "no two halves": lambda: gemv(x, weight, swiglu=True),
        r"bias is torch.float32 \(4,\)": lambda: gemv(x, weight, bias=weight[0, :4]),
        "norm.weight is": lambda: gemv(x, weight, norm=Norm(weight=weight[0, :4], epsilon=0.0)),
        "residual is": lambda: gemv(x, weight, residual=x),
    }.items():
        with pytest.raises(KernelError, match=message):
            attempt()
