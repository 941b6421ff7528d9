"""One system at one operation: its result is compared with the truth first, and a wrong one gets no speed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from weft.benchmark.kernels.meter import Call, Meter
from weft.benchmark.measure import spread
from weft.benchmark.row import Row, Target

# bfloat16 rounds by up to 0.4 %, and the longest way to a gradient rounds about five times; a kernel that leaves out a
# key block, a head or a rotation is off by tens of per cent.
RIGHT = Target(relation="<=", value=3.0)
_PIECES = 16
_WRONG = 1e6  # per cent, in place of what is no number


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and by what is measured; `row` says what is common to all rows."""

    device: torch.device
    dtype: torch.dtype
    meter: Meter
    row: Row

    def case(self, case: str) -> "Place":
        """The same place, rows under this heading."""
        return replace(self, row=replace(self.row, case=case))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """operation: what metrics begin with.   calls: the same work over inputs that lie apart.

    result: what is compared, in the form of the expected tensors.   graph: whether the calls can be captured.
    amount: operations or bytes of one call, whose rate is given in 1e12 of `rate_unit`; 0 for none.
    needed_bytes: of one call, results included; what it allocates beyond them is reported. None for no such row.
    """

    system: str
    version: str
    operation: str
    calls: Sequence[Call]
    result: Callable[[], Sequence[Tensor]]
    graph: bool = True
    amount: int | float = 0.0
    rate_unit: str = ""
    time_unit: str = "ms"
    memory_call: Call | None = None
    needed_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`seconds` of a call in each repetition: none where there was nothing to measure."""

    rows: list[Row]
    seconds: list[float]

    @property
    def median_s(self) -> float | None:
        return median(self.seconds) if self.seconds else None


def measure(
    contender: Contender,
    expected: Sequence[Tensor],
    place: Place,
    *,
    rate_target: Target | None = None,
    memory_target: Target | None = None,
) -> Measured:
    """Rows of the error, time, rate and memory. What raises is reported as not measured, with its reason."""
    row = place.row.by(contender.system, contender.version)
    name = contender.operation
    try:
        error = 100 * worst_error(contender.result(), expected)
        wrong = row.of(f"{name} error", [error], "%", target=RIGHT)
        if not RIGHT.met(error):
            return Measured(rows=[wrong], seconds=[])
        times = place.meter.seconds(contender.calls, graph=contender.graph)
        rows = [wrong, _time_row(row, name, times, contender.time_unit)]
        if contender.amount:
            rates = [contender.amount / time / 1e12 for time in times]
            rows.append(row.of(f"{name} rate", rates, contender.rate_unit, spread=spread(rates), target=rate_target))
        if contender.needed_bytes is not None:
            call = contender.memory_call or contender.calls[0]
            extra = max(0, place.meter.peak_bytes(call) - contender.needed_bytes) / 2**20
            rows.append(row.of(f"{name} extra memory", [extra], "MiB", target=memory_target))
    except Exception as error:  # whatever a peer or a compiler raises: the other systems are still worth a row
        return skipped(row, name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
    return Measured(rows=rows, seconds=times)


def skipped(row: Row, operation: str, reason: str) -> Measured:
    """A row that says why there is no number."""
    note = f"{row.system}, {operation}, not measured ({row.case}): {reason}"
    return Measured(rows=[row.of(f"{operation} not measured", [1], "", notes=note)], seconds=[])


def ratio(
    row: Row, metric: str, numerator: Measured | None, denominator: Measured | None, target: Target | None = None
) -> list[Row]:
    """Seconds over seconds as a row; nothing where either was not measured."""
    above, below = (None if one is None else one.median_s for one in (numerator, denominator))
    return [row.of(metric, [above / below], "x", target=target)] if above and below else []


def worst_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest part that an error is of what it is an error of: root mean squares, in sixteenths of the rows, so
    that a fault in a few rows is not hidden by many. Integers must be equal: 0 or 1.
    """
    assert len(found) == len(expected), f"{len(found)} results, {len(expected)} expected"
    return max(_error(*pair) for pair in zip(found, expected, strict=True))


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return _WRONG / 100
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else 1.0
    pieces = (tensor.reshape(-1).tensor_split(_PIECES) for tensor in (found, expected))
    errors = [
        ((mine.double() - true.double()).square().mean().sqrt() / true.double().square().mean().sqrt())
        for mine, true in zip(*pieces, strict=True)
        if len(true)
    ]
    return min(torch.stack(errors).nan_to_num(nan=_WRONG, posinf=_WRONG).max().item(), _WRONG / 100)


def _time_row(row: Row, name: str, times: Sequence[float], unit: str) -> Row:
    scale = {"ms": 1e3, "µs": 1e6}[unit]
    return row.of(f"{name} time", [time * scale for time in times], unit, spread=spread(times))
