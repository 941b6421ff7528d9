"""Seconds and bytes of calls on a GPU: CUDA events around replays of a graph, or around calls one by one."""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Protocol, runtime_checkable

import torch

Call = Callable[[], object]

_LEAST_SECONDS = 2e-3  # of one replay, so that starting it does not count
_LOOP_SECONDS = 60e-3  # of all calls of a loop together
_MOST_ROUNDS = 64


@runtime_checkable
class Meter(Protocol):
    """What measures; tests have one that makes its numbers up."""

    def seconds(self, calls: Sequence[Call], *, graph: bool) -> list[float]:
        """Of one call, in each repetition. `calls` do the same work on inputs that lie apart; warm-up is left out."""
        ...

    def peak_bytes(self, call: Call) -> int:
        """The most that is allocated at once during the call beyond what was before it, its result included."""
        ...


class CudaMeter:
    """Measures on the current CUDA device."""

    def __init__(self, repetitions: int) -> None:
        self._repetitions = repetitions

    def seconds(self, calls: Sequence[Call], *, graph: bool) -> list[float]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # inputs may still be in the making
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        once = self._timed(lambda: _each(calls))
        if not graph:
            rounds = max(1, min(5, int(_LOOP_SECONDS / (self._repetitions * once))))
            return [
                self._timed(partial(_repeated, partial(_each, calls), rounds)) / (rounds * len(calls))
                for _ in range(self._repetitions)
            ]
        rounds = max(1, min(_MOST_ROUNDS, ceil(_LEAST_SECONDS / once)))
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(rounds):
                _each(calls)
        captured.replay()
        replays = max(1, min(_MOST_ROUNDS, ceil(_LEAST_SECONDS / self._timed(captured.replay))))
        return [
            self._timed(partial(_repeated, captured.replay, replays)) / (replays * rounds * len(calls))
            for _ in range(self._repetitions)
        ]

    def peak_bytes(self, call: Call) -> int:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _timed(self, work: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def _each(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _repeated(call: Call, times: int) -> None:
    for _ in range(times):
        call()
