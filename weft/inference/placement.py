"""Where a model runs and in which dtype, and why: decided once, said once."""

from dataclasses import dataclass

import torch

from weft.config import DTYPE_ALIASES, ModelConfig
from weft.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device and a dtype; `reason` says in words where each came from."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def place(config: ModelConfig, stored_dtype: str | None) -> Placement:
    """Resolve `device` and `dtype`. `stored_dtype` is the checkpoint's own, None if it was quantised.

    Raises: ConfigError for a device that is not there or a stored dtype that is no weight dtype.
    """
    device, device_reason = _device(config.device)
    name = DTYPE_ALIASES.get(config.dtype, config.dtype)
    if name != "auto":
        return Placement(device=device, dtype=_dtype(name), reason=f"{device_reason}; dtype as asked")
    if device.type == "cpu":
        return Placement(device=device, dtype=torch.float32, reason=f"{device_reason}; float32, since it is a CPU")
    if stored_dtype is None:
        return Placement(device=device, dtype=torch.float32, reason=f"{device_reason}; float32 after dequantising")
    return Placement(device=device, dtype=_dtype(stored_dtype), reason=f"{device_reason}; the checkpoint's dtype")


def _device(name: str) -> tuple[torch.device, str]:
    if name == "auto":
        there = torch.cuda.is_available()
        return torch.device("cuda" if there else "cpu"), "a GPU is there" if there else "no GPU is there"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device={name!r}", hint="auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported", hint="auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (device.index or 0) >= count:
            raise ConfigError(f"device={name!r} but torch sees {count} CUDA devices", hint="device='cpu' runs anywhere")
    return device, "device as asked"


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"the checkpoint's dtype {name!r} cannot be computed in", hint="pass dtype='float32'")
    assert isinstance(dtype, torch.dtype)
    return dtype
