import pytest
import torch

from tests.kernels.accuracy import SINGLE, assert_by_the_rule, assert_within
from weft.errors import KernelError
from weft.kernels.silu_multiply import reference, silu_multiply

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def roundings(gate_up: torch.Tensor) -> torch.Tensor:
    """Of single precision: six operations, and an exponential off by four half units or the least normal number."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return 10 * SINGLE * reference(gate_up.double()).abs() + 2.0**-126 * (gate * up).abs()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 1536), (4, 1000), (2, 1025), (0, 8)])
@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_products_lie_within_their_roundings(
    count: int, width: int, magnitude: float, dtype: torch.dtype, device: torch.device
) -> None:
    wide = torch.full((count, 2 * width + 24), torch.nan)
    wide[:, 8:-16] = torch.randn(count, 2 * width) * magnitude
    gate_up = wide.to(dtype)[:, 8:-16]
    found = silu_multiply(gate_up.to(device)).cpu()
    assert found.shape == (count, width)
    exact = reference(gate_up.double())
    assert_within(found, exact, roundings(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_products_are_as_accurate_as_torchs(magnitude: float, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (torch.randn(8, 2 * 2048) * magnitude).to(dtype)
    assert_by_the_rule(silu_multiply(gate_up.to(device)).cpu(), reference(gate_up), reference(gate_up.double()))


def test_gates_of_any_size_stay_finite(device: torch.device) -> None:
    gates = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4], device=device)
    found = silu_multiply(torch.cat([gates, torch.ones_like(gates)])[None])
    torch.testing.assert_close(found[0], torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-30)


def test_swapping_gate_and_up_would_show(device: torch.device) -> None:
    gate_up = torch.randn(2, 16)
    swapped = silu_multiply(gate_up.roll(8, dims=1).to(device)).cpu()
    exact = reference(gate_up.double())
    with pytest.raises(AssertionError):
        assert_within(swapped, exact, roundings(gate_up))


@pytest.mark.parametrize("gate_up", [torch.zeros(2, 7), torch.zeros(2, 8).T, torch.zeros(8), torch.zeros(2, 8).int()])
def test_bad_input_is_refused(gate_up: torch.Tensor, device: torch.device) -> None:
    with pytest.raises(KernelError, match="gate_up"):
        silu_multiply(gate_up.to(device) if gate_up.is_contiguous() else gate_up)
