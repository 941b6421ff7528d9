"""What flash attention allocates and what it writes: its results, and nothing beside them."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import DESCRIPTORS, POINTERS, UNEVEN, Case, check, packed, results
from weft.kernels import _flash_launch
from weft.kernels._jit import HAS_TRITON
from weft.kernels.flash_attention import flash_attention

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

HALF = torch.float16

Allocations = list[tuple[Tensor, Callable[[], None]]]


@pytest.fixture
def allocations(
    guarded: Callable[..., tuple[Tensor, Callable[[], None]]], monkeypatch: pytest.MonkeyPatch
) -> Allocations:
    """What the launchers allocate from here on: full of NaN, between guards."""
    made: Allocations = []

    def allocate(shape: tuple[int, ...] | Tensor, dtype: torch.dtype | None = None, **_: object) -> Tensor:
        like = shape if isinstance(shape, Tensor) else None
        made.append(guarded(tuple(like.shape) if like is not None else shape, dtype or like.dtype))
        return made[-1][0]

    fake = ModuleType("torch")
    fake.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    fake.empty = fake.empty_like = allocate  # type: ignore[attr-defined]
    monkeypatch.setattr(_flash_launch, "torch", fake)
    return made


def test_nothing_is_written_beside_the_results(allocations: Allocations, device: torch.device) -> None:
    for head_dim in (20, 64):
        check(Case(37, 21, 2, 1, head_dim, dtype=HALF), device, UNEVEN)
    tensors, starts = packed(device, HALF)
    results(flash_attention, tensors, query_starts=starts, choice=DESCRIPTORS)
    for _, untouched in allocations:
        untouched()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "beside"), [(20, HALF, 2 * 48), (64, HALF, 0), (96, HALF, 0), (32, torch.float32, 0)], ids=str
)
def test_backward_holds_nothing_beside_its_results(
    head_dim: int, dtype: torch.dtype, beside: int, allocations: Allocations, device: torch.device
) -> None:
    """Beyond output, lse and gradients, rows too short to hold them apart: two numbers a row, rows in groups of 16."""
    case = Case(37, 37, 2, 1, head_dim, dtype=dtype)
    found = results(flash_attention, case.tensors(device), choice=POINTERS)
    sizes = [tensor.nbytes for tensor, _ in allocations]
    assert sum(sizes) == sum(tensor.nbytes for tensor in found) + 4 * beside * case.num_heads


def test_a_graph_that_is_kept_gives_the_same_gradients_again(device: torch.device) -> None:
    query, key, value, gradient = Case(40, 40, 2, 1, 64, dtype=HALF).tensors(device)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = flash_attention(*leaves, choice=POINTERS)[0]
    first, second = (torch.autograd.grad(output, leaves, gradient, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
