"""Whether a ratio has shifted for good, from its values night by night. Pure: reads no file, and knows no device.

The values are ranked, so that a wild night counts as one night. Of every cut of the last nights into before and after,
the rank sums are compared (Mann and Whitney's statistic, standardised); the largest of them is held against its own
distribution over shuffled nights, as Pettitt does for one statistic of that kind (Applied Statistics 28, 1979).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np

WINDOW = 30  # nights that are looked at
LASTING = 5  # nights at least on each side of a shift
ERRORS = 0.0005  # how often one look at nights of one kind finds a shift all the same
LEAST = 0.02  # of the value, as the threshold of `weft bench ab`: no more is not told, however sure

_UNITS = ("x", "%")  # of what stands in a ratio already; seconds of one night are not held against those of another
_MOST_TOLD = 1000  # times the value: a larger part says less than the two values beside it
_SHUFFLES = 40_000
_SEED = 0  # of the shuffles: the same nights, the same verdict


@dataclass(frozen=True, kw_only=True)
class Shift:
    """before, after: medians on both sides.   first, shown: places among the values, from 0: of the first one of the
    second side, and of the one with which the shift can be seen.
    """

    before: float
    after: float
    first: int
    shown: int

    def __str__(self) -> str:
        part = (Fraction(self.after) - Fraction(self.before)) / abs(Fraction(self.before)) if self.before else None
        told = "" if part is None or abs(part) > _MOST_TOLD else f" ({float(part):+.1%})"
        return f"{self.before:.4g} -> {self.after:.4g}{told}"


class Night(NamedTuple):
    """A value, and when it was measured, as ISO 8601 writes it."""

    date: str
    value: float


class Look(NamedTuple):
    """What a look at one case leaves to the next, the last shift told: as nights, since merged rows move places.

    since: its first night, with which the present level begins.   shown: the one with which it was seen.
    """

    since: Night
    shown: Night


class Case(NamedTuple):
    """What was measured, and where."""

    device: str
    experiment: str
    case: str
    system: str
    model: str
    dtype: str
    metric: str


def instant(date: str) -> datetime:
    """Of a date of ISO 8601, without an offset in UTC. Raises: ValueError for another text."""
    when = datetime.fromisoformat(date)
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def series(records: Iterable[Mapping[str, Any]]) -> dict[Case, list[Night]]:
    """Nights by what was measured, in the order of their dates. records: lines of a `--json` file; others than ratios
    are passed over, and one that stands there twice, where files were merged, is one.
    """
    found: dict[Case, dict[Night, None]] = {}
    for record in records:
        if record["unit"] in _UNITS:
            nights = found.setdefault(Case(*(record[name] for name in Case._fields)), {})
            nights[Night(record["date"], float(record["value"]))] = None
    # Of one moment the smaller value first, so that the order of rows in their files says nothing.
    return {case: sorted(found[case], key=lambda night: (instant(night.date), night.value)) for case in sorted(found)}


def news(nights: Sequence[Night], look: Look | None = None) -> tuple[list[Shift], Look | None]:
    """The shifts that can be seen and have not been told, and what is left to the next look; None: none was told ever.

    What lies before a shift that has been told is not looked at again: it would be told twice, and hide the next.
    Nights without those of the last look are another history, and looked at anew.
    """
    since = seen = 0
    if look is not None and look.since in nights and look.shown in nights:
        since, seen = nights.index(look.since), nights.index(look.shown) + 1
    else:
        look = None
    shifts = shifts_in([night.value for night in nights], since=since, seen=seen)
    if shifts:
        look = Look(since=nights[shifts[-1].first], shown=nights[shifts[-1].shown])
    return shifts, look


def shifts_in(values: Sequence[float], *, since: int = 0, seen: int = 0) -> list[Shift]:
    """Every shift, each with the value with which it is first seen. since: place of the first value that counts.
    seen: how many have been looked at.

    Every value is looked at as if it were the last, so that it makes no difference how many came at once.
    """
    shifts = []
    for rows in range(seen + 1, len(values) + 1):
        shift = shift_of(values[:rows], since)
        if shift is not None:
            shifts.append(shift)
            since = shift.first
    return shifts


def shift_of(values: Sequence[float], since: int = 0) -> Shift | None:
    """The shift among the last nights, if there is one. values: finite, the latest last.   since: place of the first
    that counts.
    """
    begin = max(since, len(values) - WINDOW)
    last = np.array(values[begin:], dtype=float)
    if len(last) < 2 * LASTING:
        return None
    statistics = _statistics(_ranks(last)[None])[0]
    cut = int(statistics.argmax())
    if statistics[cut] <= _critical(len(last)):
        return None
    first = LASTING + cut
    before, after = (median(map(Fraction, part)) for part in (last[:first], last[first:]))  # of what no float overflows
    if abs(after - before) <= Fraction(LEAST) * abs(before):
        return None
    return Shift(before=float(before), after=float(after), first=begin + first, shown=len(values) - 1)


def _ranks(values: Any) -> Any:
    """From 1 on; equal values share the middle of theirs."""
    smaller = (values[:, None] > values).sum(axis=1)
    equal = (values[:, None] == values).sum(axis=1)
    return smaller + (equal + 1) / 2


def _statistics(ranks: Any) -> Any:
    """Of each row of ranks, at each cut: how far the rank sum of the first part lies from its mean, in deviations."""
    nights = ranks.shape[1]
    first = np.arange(LASTING, nights - LASTING + 1)
    sums = ranks.cumsum(axis=1)[:, first - 1]
    deviations = np.sqrt(first * (nights - first) * (nights + 1) / 12)
    return np.abs(sums - first * (nights + 1) / 2) / deviations


@cache
def _critical(nights: int) -> float:
    """What the largest statistic of so many shuffled nights exceeds in the part `ERRORS` of cases."""
    shuffled = np.random.default_rng(_SEED).permuted(np.tile(np.arange(1.0, nights + 1), (_SHUFFLES, 1)), axis=1)
    return float(np.quantile(_statistics(shuffled).max(axis=1), 1 - ERRORS))
