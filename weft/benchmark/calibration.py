"""How fast this machine copies and multiplies right now: the measure that other numbers are read by.

The same machine may be a tenth slower tomorrow; a number beside its calibration can still be compared.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

_REPETITIONS = 5
_COLUMNS = 1024
_READS = 8  # in a row on a GPU, so that starting them does not count


def calibrate(device: Any, *, copied_bytes: int | None = None, width: int | None = None) -> dict[str, float]:
    """The best of a few tries on this `torch.device`.

    copy_gb_per_s: 1e9 bytes read and written.   read_gb_per_s: only read, as a sum and as a matrix times a vector.
    gemm_gflop_per_s: a square product in float32 on CPUs, in bfloat16 on GPUs, two operations a multiplication.
    copied_bytes, width: the sizes, if not large enough to leave every cache and to fill the device.
    """
    import torch

    on_gpu = device.type == "cuda"
    copied_bytes = copied_bytes or (2**31 if on_gpu else 2**27)
    width = width or (8192 if on_gpu else 1024)
    source = torch.ones(copied_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    matrix, vector = source.view(-1, _COLUMNS), source[:_COLUMNS]
    reads = _READS if on_gpu else 1
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    def seconds_to_read(work: Callable[[], object]) -> float:
        return _best(lambda: [work() for _ in range(reads)], wait) / reads

    reading = min(seconds_to_read(source.sum), seconds_to_read(lambda: matrix @ vector))
    return {
        "copy_gb_per_s": round(2 * source.nbytes / _best(lambda: target.copy_(source), wait) / 1e9, 1),
        "read_gb_per_s": round(source.nbytes / reading / 1e9, 1),
        "gemm_gflop_per_s": round(2 * width**3 / _best(lambda: left @ right, wait) / 1e9, 1),
    }


def _best(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of the fastest try; the first warms up and does not count."""
    times = []
    for _ in range(1 + _REPETITIONS):
        wait()
        start = perf_counter()
        work()
        wait()
        times.append(perf_counter() - start)
    return min(times[1:])
