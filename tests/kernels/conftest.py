"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter (switched on in /conftest.py)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch

GUARD_ELEMENTS = 64


@pytest.fixture(autouse=True)
def _inputs(record_property: Callable[[str, object], None]) -> None:
    """A GPU sees fresh inputs in every run, and the seed is recorded; a CPU the same ones, by the test's name."""
    if torch.cuda.is_available():
        record_property("seed", torch.seed())


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


@pytest.fixture
def fenced() -> Callable[[torch.Tensor], torch.Tensor]:
    """Copy a tensor between two bands of its own memory, so that what is touched beside it is nobody else's."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        bands = (GUARD_ELEMENTS, GUARD_ELEMENTS)
        return torch.nn.functional.pad(tensor.flatten(), bands)[GUARD_ELEMENTS:-GUARD_ELEMENTS].view(tensor.shape)

    return copy


@dataclass
class Accesses:
    """Addresses that kernels touched in the interpreter, by whether they loaded or stored; masked ones excepted."""

    loads: list[Any] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)

    def elements(self, tensor: torch.Tensor, kind: str) -> set[int]:
        """Which elements of a dense tensor were touched, and which of the bands that `fenced` put around it.

        Memory that is not the tensor's own says nothing: what lies there, and who may touch it, is chance.
        """
        memory = tensor.untyped_storage()
        touched = numpy.unique(numpy.concatenate(getattr(self, kind))).astype(numpy.int64)
        touched = touched[(touched >= memory.data_ptr()) & (touched < memory.data_ptr() + memory.nbytes())]
        return set(((touched - tensor.data_ptr()) // tensor.element_size()).tolist())


@pytest.fixture
def accesses(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Accesses]:
    """Begin to record what kernels touch; in the interpreter only."""

    def begin() -> Accesses:
        from triton.runtime import interpreter

        seen = Accesses()
        load, store = (getattr(interpreter.InterpreterBuilder, f"create_masked_{kind}") for kind in ("load", "store"))

        def recorded_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            seen.loads.append(pointers.data[numpy.broadcast_to(mask.data, pointers.data.shape)].ravel())
            return load(self, pointers, mask, *rest)

        def recorded_store(self: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
            seen.stores.append(pointers.data[numpy.broadcast_to(mask.data, pointers.data.shape)].ravel())
            return store(self, pointers, values, mask, *rest)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", recorded_load)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", recorded_store)
        return seen

    return begin


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Programs run from the last to the first in the interpreter, so that none finds what an earlier one left it.

    On a GPU they run as they come.
    """
    if device.type == "cuda":
        return
    from triton.runtime import interpreter

    place = interpreter.InterpreterBuilder.set_grid_idx

    def from_the_end(self: Any, *index: int) -> None:
        place(self, *(size - 1 - one for size, one in zip(self.grid_dim, index, strict=True)))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", from_the_end)
