"""What the recorder of accesses says of a tensor: every touch of its memory, and of no other's."""

from collections.abc import Callable

import numpy
import torch

from tests.kernels.conftest import Accesses


def test_memory_of_another_tensor_is_never_taken_for_its_edges() -> None:
    """Where the allocator puts a neighbour is chance: a kernel that rightly reads it has not left its own tensor."""
    tensor = torch.zeros(35, dtype=torch.int32)
    first = tensor.data_ptr()
    beside = Accesses(loads=[numpy.array([first - 32, first - 4, first, first + 34 * 4, first + tensor.nbytes])])
    assert beside.elements(tensor, "loads") == {0, 34}


def test_a_touch_of_the_bands_around_a_tensor_is_told(fenced: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = torch.arange(6, dtype=torch.int64).view(2, 3)
    inside = fenced(tensor)
    assert torch.equal(inside, tensor)
    first = inside.data_ptr()
    touched = Accesses(stores=[numpy.array([first - 8, first + 5 * 8, first + 6 * 8])])
    assert touched.elements(inside, "stores") == {-1, 5, 6}
