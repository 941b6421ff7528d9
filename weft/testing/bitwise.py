"""Tier B: two computations that are said to be the same give the same bits. No tolerance, and a NaN equals nothing."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.testing.difference import units_apart


def assert_bitwise(
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    *,
    names: Sequence[str] | None = None,
    record: Callable[[str, int], None] | None = None,
) -> None:
    """Fail unless each pair of tensors of floating point has one shape, one dtype, the same bits and no NaN.

    names: what the report calls each pair.   record: told the number of values compared.
    Raises: AssertionError with the first difference of each pair, both values, and how many units in the last place.
    """
    assert len(expected) == len(actual), f"{len(actual)} tensors, expected {len(expected)}"
    called = names or [f"tensor {index}" for index in range(len(expected))]
    if record is not None:
        record("values", sum(tensor.numel() for tensor in expected))
    wrong = [
        f"{name}: {reason}"
        for name, left, right in zip(called, expected, actual, strict=True)
        if (reason := _difference(left.cpu(), right.cpu())) is not None
    ]
    assert not wrong, f"not bitwise equal, {len(wrong)} of {len(expected)}:\n" + "\n".join(wrong)


def _difference(left: Tensor, right: Tensor) -> str | None:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        shapes = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (right, left)]
        return "{}, expected {}".format(*shapes)
    different = _bits(left) != _bits(right)
    broken = different | left.isnan() | right.isnan()
    if not broken.any():
        return None
    flat = int(broken.flatten().to(torch.uint8).argmax())
    index = [int(place) for place in torch.unravel_index(torch.tensor(flat), left.shape)]
    units = units_apart(left, right)
    largest = float(units.masked_fill(left.isnan() | right.isnan(), float("inf")).max())
    return (
        f"{int(broken.sum())} of {broken.numel()} values differ, by {largest:,.0f} ULPs at most; first at {index}: "
        f"{right[tuple(index)].item():.9g}, expected {left[tuple(index)].item():.9g} "
        f"({float(units[tuple(index)]):,.0f} ULPs)"
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
