"""The one place that imports Triton. Knows what the machine can run; knows no kernel.

Triton exists on Linux only, and nothing on a CPU needs it: where it is missing, kernels are still defined (their
decorator and their annotations are placeholders) and only launching one is an error. `TRITON_INTERPRET=1`, set before
this module is imported, makes every kernel run in Triton's interpreter, on CPU tensors: for tests, in fp32 and fp16
(the interpreter's bf16 is silently wrong).
"""

import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from weft.errors import KernelError

MODERN = (90, 100)  # compute capabilities with a copy engine and 227 KiB of shared memory
HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit = triton.jit
else:

    class _Absent:
        """Stands for a module of Triton while kernels are defined: any name in it is another such stand-in."""

        def __getattr__(self, name: str) -> "_Absent":
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __getitem__(self, index: object) -> "_Absent":
            return self

        def __call__(self, *_: object, **__: object) -> Any:
            require_triton()

    triton = tl = TensorDescriptor = _Absent()

    def jit(function: Callable[..., Any] | None = None, **_: object) -> Any:
        """In place of triton.jit: the kernel exists as a name, and launching it says why it cannot run."""
        return _Absent() if function is not None else jit


def require_triton() -> None:
    """Raise KernelError where Triton is not installed."""
    if not HAS_TRITON:
        raise KernelError(
            "this kernel needs Triton, which is not installed", hint="Triton runs on Linux: pip install triton"
        )


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "y", "yes")


@lru_cache
def capability(device: torch.device) -> int:
    """What instructions a device has, as one number: 80 is an A100, 90 an H100 or H200. 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the interpreter, which runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launches_early(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one ahead of it has ended, and wait for it on the device."""
    return capability(device) >= 90


def early_launch(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch that does not wait for the kernel ahead to end, where the device can do that.

    The kernel has to: with `EARLY` it calls `gdc_wait` before it reads what another kernel wrote and before it writes
    anything, and `gdc_launch_dependents` after that. Even one that reads nothing waits, so that whoever waits for it
    has waited for all before it. What is read before the wait must not be a result of the kernel directly ahead.
    """
    return {"EARLY": True, "launch_pdl": True} if launches_early(device) else {"EARLY": False}


def runs_on(device: torch.device) -> bool:
    """Whether a kernel can be launched on tensors of this device: CUDA, or a CPU in the interpreter."""
    if not HAS_TRITON:
        return False
    return interpreting() if device.type == "cpu" else device.type == "cuda" and not interpreting()


def cdiv(numerator: int, denominator: int) -> int:
    """Division rounded up.

    >>> cdiv(9, 4)
    3
    """
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number.

    >>> next_power_of_2(80)
    128
    """
    return 1 << (number - 1).bit_length()
