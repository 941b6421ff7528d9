"""Whether a ratio has shifted for good, from its values night by night. Pure: reads no file, and knows no device.

The values are ranked, so that a wild night counts as one night. Of every cut of the last nights into before and after,
the rank sums are compared (Mann and Whitney's statistic, standardised); the largest of them is held against its own
distribution over shuffled nights, as Pettitt does for one statistic of that kind (Applied Statistics 28, 1979).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import numpy as np

WINDOW = 30  # nights that are looked at
LASTING = 5  # nights at least on each side of a shift
ERRORS = 0.0005  # how often one look at nights of one kind finds a shift all the same
LEAST = 0.02  # of the value, as the threshold of `weft bench ab`: no more is not told, however sure

_UNITS = ("x", "%")  # of what stands in a ratio already; seconds of one night are not held against those of another
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
        part = f" ({(self.after - self.before) / abs(self.before):+.1%})" if self.before else ""
        return f"{self.before:.4g} -> {self.after:.4g}{part}"


class Look(NamedTuple):
    """What a look at one case leaves to the next.   rows: how many have been seen.   since: place of the first one of
    this level, which is where the last shift that was told begins.
    """

    rows: int
    since: int


UNSEEN = Look(rows=0, since=0)


class Case(NamedTuple):
    """What was measured, and where."""

    device: str
    experiment: str
    case: str
    system: str
    model: str
    dtype: str
    metric: str


def series(records: Iterable[Mapping[str, Any]]) -> dict[Case, list[tuple[str, float]]]:
    """Dates and values by what was measured, in the order of dates. records: lines of a `--json` file; others than
    ratios are passed over.
    """
    ratios = [record for record in records if record["unit"] in _UNITS]
    keyed = [(Case(*(record[name] for name in Case._fields)), record["date"], record["value"]) for record in ratios]
    keyed.sort(key=itemgetter(0, 1))
    return {case: [(date, value) for _, date, value in nights] for case, nights in groupby(keyed, key=itemgetter(0))}


def news(values: Sequence[float], look: Look = UNSEEN) -> tuple[list[Shift], Look]:
    """The shifts that have come to be seen since that look, and what is left to the next.

    Every value is looked at as if it were the last, so that it makes no difference how many came at once. What lies
    before a shift that has been told is not looked at again: it would be told twice, and hide the next.
    Fewer values than have been seen are other values, and looked at anew.
    """
    if len(values) < look.rows:
        look = UNSEEN
    shifts, since = [], look.since
    for rows in range(look.rows + 1, len(values) + 1):
        shift = shift_of(values[:rows], since)
        if shift is not None:
            shifts.append(shift)
            since = shift.first
    return shifts, Look(rows=len(values), since=since)


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
    before, after = float(median(last[:first])), float(median(last[first:]))
    if abs(after - before) <= LEAST * abs(before):
        return None
    return Shift(before=before, after=after, first=begin + first, shown=len(values) - 1)


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
