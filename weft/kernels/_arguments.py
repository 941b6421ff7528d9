"""What every launcher asks of its arguments before anything is launched, in one wording. Knows no kernel."""

import itertools
import math
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from weft.errors import KernelError, shown
from weft.kernels._jit import interpreting, runs_on

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what is computed in float32 and rounded to


def debugging(debug: bool | None = None) -> bool:
    """Whether values that lie on the device are read back and checked, which waits for it; None asks WEFT_DEBUG=1."""
    return os.environ.get("WEFT_DEBUG") == "1" if debug is None else debug


def check_device(name: str, tensor: Tensor, *, others: Mapping[str, Tensor | None] | None = None) -> None:
    """Raises: KernelError where kernels do not run on the tensor's device, or one of `others` lies on another."""
    if not runs_on(tensor.device):
        raise KernelError(f"{name} lies on {tensor.device}", hint="CUDA, or TRITON_INTERPRET=1 on a CPU")
    for other, beside in (others or {}).items():
        if beside is not None and beside.device != tensor.device:
            raise KernelError(f"{other} lies on {beside.device} and {name} on {tensor.device}")


def check_floats(name: str, tensor: Tensor) -> None:
    """Raises: KernelError for a dtype that kernels would compute with less precision than it has, or not at all."""
    if tensor.dtype not in DTYPES:
        raise KernelError(f"{name} is {tensor.dtype}", hint=f"one of {', '.join(map(str, DTYPES))}")
    if tensor.dtype == torch.bfloat16 and interpreting():
        raise KernelError(
            f"{name} is {tensor.dtype}, which Triton's interpreter computes wrongly", hint="float32 or float16"
        )


def check_epsilon(name: str, epsilon: float) -> None:
    """Raises: KernelError for what is not added to a mean square: a negative number, infinity, NaN."""
    if not is_number(epsilon) or not 0.0 <= epsilon < math.inf:
        raise KernelError(f"{name}={shown(epsilon)} is no number from 0 on")


def is_number(value: object) -> bool:
    """Whether this is a real number, which a truth value is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raises: KernelError unless `value` is a whole number from `least` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise KernelError(f"{name}={shown(value)} is no whole number from {least} on")


def check_size(name: str, value: int) -> None:
    """Raises: KernelError for a size of a tile that is no power of two."""
    check_count(name, value)
    if value & (value - 1):
        raise KernelError(f"{name}={value} is no power of two")


def check_range(name: str, values: Tensor, least: int, most: int) -> None:
    """Reads values back. Raises: KernelError naming the first of a vector that lies outside `least..most`."""
    outside = ((values < least) | (values > most)).nonzero()
    if len(outside):
        place = int(outside[0, 0])
        raise KernelError(f"{name}[{place}]={int(values[place])} is outside {least}..{most}")


def check_starts(name: str, starts: Tensor, most: int) -> None:
    """Reads running counts back. Raises: KernelError unless they begin at 0, never fall and end by `most`."""
    values = starts.tolist()
    if values[0] != 0:
        raise KernelError(f"{name}[0]={values[0]} is not 0")
    for place, (before, after) in enumerate(itertools.pairwise(values)):
        if after < before:
            raise KernelError(f"{name} falls from {before} to {after} at {place}")
    if values[-1] > most:
        raise KernelError(f"{name}[{len(values) - 1}]={values[-1]} is beyond the step's {most} tokens")
