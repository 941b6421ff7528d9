"""How long something takes until it can serve, and whether Triton compiled anything for it."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Generic, TypeVar

import torch

Built = TypeVar("Built")


@dataclass(frozen=True, kw_only=True)
class Ready(Generic[Built]):
    """compiled: entries that Triton's cache gained meanwhile; 0: it was warm, or no kernel was needed."""

    built: Built
    seconds: float
    compiled: int


def time_to_ready(build: Callable[[], Built]) -> Ready[Built]:
    """Build it, and wait for the device."""
    before, start = _cached_kernels(), perf_counter()
    built = build()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = perf_counter() - start
    return Ready(built=built, seconds=seconds, compiled=_cached_kernels() - before)


def release_memory() -> None:
    """What nobody holds any more goes back to the device, so that the next one finds it free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _cached_kernels() -> int:
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
