"""Where a model runs, in which dtype and by which linear layers, and why: decided once, said once."""

from dataclasses import dataclass

import torch

from weft.config import DTYPE_ALIASES, ModelConfig
from weft.errors import ConfigError
from weft.layers.prepacked import reason_against_prepacking


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device and a dtype; `reason` says in words where each came from.

    prepacked: linear layers are oneDNN's (`weft/layers/prepacked.py`), not plain ones.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str
    prepacked: bool


def place(config: ModelConfig, stored_dtype: str | None) -> Placement:
    """Resolve `device`, `dtype` and `cpu_linear`. `stored_dtype` is the checkpoint's own, None if it was quantised.

    Raises: ConfigError for a device that is not there, a stored dtype that is no weight dtype, or `prepacked` where
        it cannot be.
    """
    device, device_reason = find_device(config.device)
    dtype, dtype_reason = _dtype_for(config.dtype, device, stored_dtype)
    return Placement(
        device=device,
        dtype=dtype,
        reason=f"{device_reason}; {dtype_reason}",
        prepacked=_prepacked(config.cpu_linear, device, dtype),
    )


def find_device(name: str) -> tuple[torch.device, str]:
    """The device of this name, and why it is that one. Raises: ConfigError for one that is not there."""
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


def _dtype_for(asked: str, device: torch.device, stored_dtype: str | None) -> tuple[torch.dtype, str]:
    name = DTYPE_ALIASES.get(asked, asked)
    if name != "auto":
        return _dtype(name), "dtype as asked"
    if device.type == "cpu":
        return torch.float32, "float32, since it is a CPU"
    if stored_dtype is None:
        return torch.float32, "float32 after dequantising"
    return _dtype(stored_dtype), "the checkpoint's dtype"


def _prepacked(asked: str, device: torch.device, dtype: torch.dtype) -> bool:
    if asked == "plain":
        return False
    reason = reason_against_prepacking(device, dtype)
    if asked == "prepacked" and reason is not None:
        raise ConfigError(f"cpu_linear='prepacked' cannot be: {reason}", hint="'plain' runs anywhere; 'auto' chooses")
    return reason is None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"the checkpoint's dtype {name!r} cannot be computed in", hint="pass dtype='float32'")
    assert isinstance(dtype, torch.dtype)
    return dtype
