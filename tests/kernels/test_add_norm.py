from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.accuracy import SINGLE, assert_by_the_rule, assert_within, unit
from weft.errors import KernelError
from weft.kernels.add_norm import add_norm, reference

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def roundings(
    addend: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """How far single precision may take the sum, and how far that and the rounding of the sum the norm.

    A sum costs an addition a plane and one more. Each column of the norm is off by its own column of the sum; all of
    them by the root of the mean square, which is off by at most the RMS of the sum's errors; half the sum of squares
    and eight operations are rounded.
    """
    terms = [*(addend if addend.ndim == 3 else [addend]), *([] if residual is None else [residual])]
    of_sum = SINGLE * len(terms) * sum(term.double().abs() for term in terms)
    exact = None if residual is None else residual.double()
    total = reference(addend.double(), exact, weight.double(), epsilon)[0]
    off = of_sum + unit(dtype) * (total.abs() + of_sum) + torch.finfo(dtype).smallest_normal * unit(dtype)
    root = (total.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    share = off.pow(2).mean(-1, keepdim=True).sqrt() / root
    scale = weight.double().abs() / (root * (1 - share))
    return of_sum, scale * (off + total.abs() * (share + SINGLE * (total.shape[-1] / 2 + 8)))


def made(count: int, columns: int, planes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    addend = torch.randn(planes, count, columns) if planes else torch.randn(count, columns).to(dtype)
    return addend, torch.randn(count, columns).to(dtype), (torch.rand(columns) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planes", [0, 1, 3])
@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 576), (5, 1000), (2, 4096), (0, 16)])
def test_sum_and_norm_lie_within_their_roundings(
    count: int, columns: int, planes: int, dtype: torch.dtype, device: torch.device
) -> None:
    addend, residual, weight = made(count, columns, planes, dtype)
    for given in (residual, None):
        found = add_norm(addend.to(device), None if given is None else given.to(device), weight.to(device), 1e-5)
        exact = reference(addend.double(), None if given is None else given.double(), weight.double(), 1e-5)
        for mine, true, inside in zip(found, exact, roundings(addend, given, weight, 1e-5, dtype), strict=True):
            assert mine.shape == (count, columns)
            assert_within(mine.cpu(), true, inside)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planes", [0, 3])
def test_sum_and_norm_are_as_accurate_as_torchs(planes: int, dtype: torch.dtype, device: torch.device) -> None:
    addend, residual, weight = made(400, 96, planes, dtype)
    found = add_norm(addend.to(device), residual.to(device), weight.to(device), 1e-5)
    low = reference(addend, residual, weight, 1e-5)
    exact = reference(addend.double(), residual.double(), weight.double(), 1e-5)
    for mine, torchs, true in zip(found, low, exact, strict=True):
        assert_by_the_rule(mine.cpu(), torchs, true)


def test_slices_of_wider_matrices_and_rows_alone_give_the_same_bits(device: torch.device) -> None:
    wide = torch.randn(2, 6, 200, device=device)
    weight = torch.ones(80, device=device)
    addend, residual = wide[0, ::2, 10:90], wide[1, ::2, 100:180]
    found = add_norm(addend, residual, weight, 1e-6)
    dense = add_norm(addend.contiguous(), residual.contiguous(), weight, 1e-6)
    alone = add_norm(addend[1:2], residual[1:2], weight, 1e-6)
    for mine, other, single in zip(found, dense, alone, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine[1:2], single)


@pytest.mark.parametrize("planes", [0, 3])
def test_the_norm_is_that_of_the_sum_as_it_is_kept(planes: int, device: torch.device) -> None:
    """To the bit: the next layer adds to the rounded sum, so the norm of an unrounded one would be of another."""
    addend, residual, weight = (tensor.to(device) for tensor in made(20, 96, planes, torch.float16))
    total, normed = add_norm(addend, residual, weight, 1e-5)
    assert torch.equal(add_norm(total, None, weight, 1e-5)[1], normed)


def test_a_forgotten_epsilon_plane_or_residual_would_show(device: torch.device) -> None:
    addend, residual, weight = torch.randn(3, 4, 64) * 1e-3, torch.randn(4, 64) * 1e-3, torch.ones(64)
    exact = reference(addend.double(), residual.double(), weight.double(), 1e-5)[1]
    inside = roundings(addend, residual, weight, 1e-5, torch.float32)[1]
    faults: list[tuple[Any, Any, float]] = [(addend, residual, 0.0), (addend[:2], residual, 1e-5), (addend, None, 1e-5)]
    for planes, given, epsilon in faults:
        given = None if given is None else given.to(device)
        wrong = add_norm(planes.to(device), given, weight.to(device), epsilon)[1].cpu()
        with pytest.raises(AssertionError):
            assert_within(wrong, exact, inside)


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    x, weight = torch.zeros(3, 8, device=device), torch.ones(8, device=device)
    for message, arguments in {
        "weight has shape": (x, None, weight[:7]),
        "addend is torch.float16": (x.half(), None, weight),
        r"residual is torch.float32 \(2, 8\)": (x, x[:2], weight),
        "side by side": (torch.zeros(8, 8, device=device).T, None, weight),
        "20000 columns": (torch.zeros(1, 20000, device=device), None, torch.zeros(20000, device=device)),
    }.items():
        with pytest.raises(KernelError, match=message):
            add_norm(*arguments, 1e-5)
