"""Seconds that this process spends waiting for a GPU: the calls of torch that wait, timed from outside while watched.

What waits: events, streams and the device itself being synchronised, and `tolist`, `item` and `cpu` of a tensor on a
GPU. Any other wait is not seen and counts as work, so host time may be told too high by it, never too low.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

_ALWAYS: tuple[tuple[Any, str], ...] = (
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda, "synchronize"),
)
_OF_GPU_TENSORS = ("tolist", "item", "cpu")


class DeviceWaits:
    """seconds: spent in waiting calls so far, each of them once however they call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waiting = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Time every waiting call inside."""
        with ExitStack() as undo:
            for owner, name in _ALWAYS:
                _replace(undo, owner, name, self._timed(getattr(owner, name), lambda *arguments: True))
            for name in _OF_GPU_TENSORS:
                _replace(undo, Tensor, name, self._timed(getattr(Tensor, name), _on_gpu))
            yield

    def _timed(self, call: Callable[..., Any], waits: Callable[..., bool]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._waiting or not waits(*arguments):
                return call(*arguments, **options)
            self._waiting = True
            start = perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += perf_counter() - start
                self._waiting = False

        return timed


def _on_gpu(tensor: Tensor, *arguments: Any) -> bool:
    return tensor.is_cuda


def _replace(undo: ExitStack, owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Until `undo` is closed. What a class only inherits is taken away again, not left as its own."""
    own = vars(owner).get(name)
    setattr(owner, name, by)
    undo.callback(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))
