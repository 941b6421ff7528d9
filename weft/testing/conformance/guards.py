"""Memory around a kernel: what it is given and what it asks for lie between bands, and what nobody wrote is NaN."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

BAND = 256  # elements on either side
_SENTINEL = 77.0
_MAKERS: tuple[Any, ...] = (torch.empty, torch.empty_like, Tensor.new_empty)


class Guarded(TorchFunctionMode):
    """While it is entered, `torch.empty` and its like give memory of NaN between two bands of a constant.

    Integers are left as torch makes them; so is what is given its place by `out` or a memory format.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bands: list[tuple[str, Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS and isinstance(made, Tensor) and made.is_floating_point() and made.is_contiguous():
            return self.place(made.fill_(torch.nan), "what the kernel allocated")
        return made

    def place(self, tensor: Tensor, name: str) -> Tensor:
        """A copy of these values, dense, between two bands."""
        count = tensor.numel()
        with torch._C.DisableTorchFunction():
            memory = torch.full((count + 2 * BAND,), _SENTINEL, dtype=tensor.dtype, device=tensor.device)
            inside = memory[BAND : BAND + count].view(tensor.shape)
            inside.copy_(tensor)
        self._bands += [(f"before {name}", memory[:BAND]), (f"behind {name}", memory[BAND + count :])]
        return inside

    def check(self) -> None:
        """Assert that nobody wrote into a band."""
        for where, band in self._bands:
            assert (band == _SENTINEL).all(), f"something is written {where}"


def strided(tensor: Tensor) -> Tensor:
    """The same values as a slice of wider rows, all else NaN; one axis alone has other values on either side only."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 24), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., 8:-16] = tensor
    return wide[..., 8:-16]
