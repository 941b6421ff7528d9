import pytest
import torch
from torch import Tensor

from tests.kernels.accuracy import SINGLE, assert_by_the_rule, assert_within
from weft.errors import KernelError
from weft.kernels._few_rows_tiles import (
    CANDIDATES,
    MOST_SPLITS,
    candidates,
    split_choices,
    splits_of,
)
from weft.kernels.add_norm import add_norm
from weft.kernels.few_rows_gemm import few_rows_gemm, reference
from weft.kernels.specialisation import SHARED_MEMORY_BYTES

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def roundings(x: Tensor, weight: Tensor, *, swiglu: bool = False) -> Tensor:
    """How far single precision may take a product, whatever the order of its sum; and its SwiGLU, which grows less than
    1.1 times as fast as the gate and takes ten roundings more.
    """
    x, weight = x.double(), weight.double()
    error = SINGLE * x.shape[1] * (x.abs() @ weight.abs().T)
    if not swiglu:
        return error
    gate, up = (x @ weight.T).chunk(2, dim=1)
    (gate_error, up_error), exact = error.chunk(2, dim=1), reference(x, weight, swiglu=True)
    return 1.1 * gate_error * (up.abs() + up_error) + gate.abs() * up_error + 10 * SINGLE * exact.abs()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "inner", "outer", "splits"),
    [(1, 64, 8, None), (5, 200, 70, None), (17, 328, 130, 3), (70, 64, 34, 1), (3, 1032, 20, 8), (0, 16, 4, None)],
)
def test_products_and_sums_of_planes_lie_within_their_roundings(
    count: int, inner: int, outer: int, splits: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = torch.randn(count, inner).to(dtype), (torch.randn(outer, inner) * inner**-0.5).to(dtype)
    exact = reference(x.double(), weight.double())
    found = few_rows_gemm(x.to(device), weight.to(device), splits=splits).cpu()
    assert found.shape == ((count, outer) if splits is None else (splits, count, outer))
    if count == 0:
        return
    if splits is not None:
        assert found.dtype == torch.float32
        found = found.sum(0).to(dtype)
    assert_within(found, exact, roundings(x, weight))
    if splits is None:
        gated = few_rows_gemm(x.to(device), weight.to(device), swiglu=True).cpu()
        assert_within(gated, reference(x.double(), weight.double(), swiglu=True), roundings(x, weight, swiglu=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [None, 2])
def test_products_are_as_accurate_as_torchs(splits: int | None, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(64, 328).to(dtype), (torch.randn(160, 328) * 328**-0.5).to(dtype)
    found = few_rows_gemm(x.to(device), weight.to(device), splits=splits).cpu()
    found = found if splits is None else found.sum(0).to(dtype)
    assert_by_the_rule(found, reference(x, weight), reference(x.double(), weight.double()))


def test_planes_go_into_the_next_norm(device: torch.device) -> None:
    x, weight, residual = torch.randn(4, 512), torch.randn(40, 512) * 0.05, torch.randn(4, 40)
    planes = few_rows_gemm(x.to(device), weight.to(device), splits=4)
    total, _ = add_norm(planes, residual.to(device), torch.ones(40, device=device), 1e-5)
    torch.testing.assert_close(total.cpu(), residual + x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("count", [8, 33])
def test_every_candidate_gives_the_products(count: int, swiglu: bool, device: torch.device) -> None:
    x, weight = torch.randn(count, 328).half(), (torch.randn(140, 328) * 328**-0.5).half()
    exact = reference(x.double(), weight.double(), swiglu=swiglu)
    for tile in candidates(count, 2, swiglu=swiglu):
        found = few_rows_gemm(x.to(device), weight.to(device), swiglu=swiglu, tile=tile).cpu()
        assert_within(found, exact, roundings(x, weight, swiglu=swiglu))


def test_every_number_of_parts_gives_the_products(device: torch.device) -> None:
    x, weight = torch.randn(3, 4096).half(), (torch.randn(24, 4096) * 2**-6).half()
    exact, inside = reference(x.double(), weight.double()), roundings(x, weight)
    assert split_choices(4096)[-1] == MOST_SPLITS
    for splits in split_choices(4096):
        planes = few_rows_gemm(x.to(device), weight.to(device), splits=splits).cpu()
        assert planes.shape[0] == splits
        assert_within(planes.sum(0).half(), exact, inside)


@pytest.mark.parametrize("count", [8, 16, 32, 64])
def test_candidates_fit_and_the_default_is_always_among_them(count: int) -> None:
    for itemsize, swiglu in ((2, False), (2, True), (4, True)):
        found = candidates(count, itemsize, swiglu=swiglu)
        assert found[0] == CANDIDATES[itemsize][0]
        for tile in found:
            rows = (2 if swiglu else 1) * tile.block_n + count
            assert rows * tile.block_k * tile.num_stages * itemsize < SHARED_MEMORY_BYTES[90]


@pytest.mark.parametrize(("outer", "inner"), [(1024, 2816), (2048, 2048), (2048, 8192), (4096, 14_336), (16, 64)])
def test_a_usual_number_of_parts_is_among_those_worth_timing(outer: int, inner: int) -> None:
    assert splits_of(outer, inner) in split_choices(inner)


@pytest.mark.parametrize("splits", [None, 2])
def test_batch_mates_never_change_a_bit(splits: int | None, device: torch.device) -> None:
    x, weight = torch.randn(40, 136, device=device).half(), torch.randn(24, 136, device=device).half()
    whole = few_rows_gemm(x, weight, splits=splits)
    for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
        assert torch.equal(few_rows_gemm(x[rows].contiguous(), weight, splits=splits), whole[..., rows, :])


def test_a_plane_left_out_and_halves_swapped_would_show(device: torch.device) -> None:
    x, weight = torch.randn(4, 256), torch.randn(32, 256) * 0.06
    planes = few_rows_gemm(x.to(device), weight.to(device), splits=2).cpu()
    with pytest.raises(AssertionError):
        assert_within(planes[0], reference(x.double(), weight.double()), roundings(x, weight))
    swapped = few_rows_gemm(x.to(device), weight.roll(16, dims=0).to(device), swiglu=True).cpu()
    with pytest.raises(AssertionError):
        assert_within(swapped, reference(x.double(), weight.double(), swiglu=True), roundings(x, weight, swiglu=True))


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    x, weight = torch.zeros(2, 16, device=device), torch.zeros(5, 16, device=device)
    for message, attempt in {
        "weight \\(5, 12\\)": lambda: few_rows_gemm(x, weight[:, :12]),
        "weight torch.float16": lambda: few_rows_gemm(x, weight.half()),
        "K=15": lambda: few_rows_gemm(x[:, :15].contiguous(), weight[:, :15].contiguous()),
        "contiguous": lambda: few_rows_gemm(x, torch.zeros(16, 5, device=device).T),
        "SwiGLU of 5 rows": lambda: few_rows_gemm(x, weight, swiglu=True),
        "splits=17": lambda: few_rows_gemm(x, weight, splits=17),
    }.items():
        with pytest.raises(KernelError, match=message):
            attempt()
