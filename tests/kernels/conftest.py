"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter (switched on in /conftest.py)."""

from collections.abc import Callable

import pytest
import torch

GUARD_ELEMENTS = 64


@pytest.fixture
def device() -> torch.device:
    """The device kernels run on: the GPU, or the CPU for the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def guarded(device: torch.device) -> Callable[..., tuple[torch.Tensor, Callable[[], None]]]:
    """Make a tensor between two bands of a constant; the function beside it asserts that no kernel wrote into them."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], None]]:
        size = torch.Size(shape).numel()
        memory = torch.full((size + 2 * GUARD_ELEMENTS,), 77.0, dtype=dtype, device=device)
        inside = memory[GUARD_ELEMENTS : GUARD_ELEMENTS + size].view(shape)
        inside.fill_(float("nan"))

        def check() -> None:
            assert (memory[:GUARD_ELEMENTS] == 77).all(), "written before the tensor"
            assert (memory[GUARD_ELEMENTS + size :] == 77).all(), "written behind the tensor"

        return inside, check

    return make
