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
LEAST = 0.02  # of the value, as the threshold of `weft bench ab`: less is not told, however sure

_UNITS = ("x", "%")  # of what stands in a ratio already; seconds of one night are not held against those of another
_SHUFFLES = 40_000
_SEED = 0  # of the shuffles: the same nights, the same verdict


@dataclass(frozen=True, kw_only=True)
class Shift:
    """before, after: medians on both sides.   nights: how many the second side has."""

    before: float
    after: float
    nights: int

    def __str__(self) -> str:
        part = self.after / self.before - 1
        return f"{self.before:.4g} -> {self.after:.4g} ({part:+.1%}) since {self.nights} nights"


class Case(NamedTuple):
    """What was measured, and where."""

    device: str
    experiment: str
    case: str
    system: str
    metric: str


def series(records: Iterable[Mapping[str, Any]]) -> dict[Case, list[float]]:
    """Values by what was measured, in the order of their dates. records: lines of a `--json` file; others than ratios
    are passed over.
    """
    ratios = [record for record in records if record["unit"] in _UNITS]
    keyed = [(Case(*(record[name] for name in Case._fields)), record["date"], record["value"]) for record in ratios]
    keyed.sort(key=itemgetter(0, 1))
    return {case: [value for *_, value in values] for case, values in groupby(keyed, key=itemgetter(0))}


def news(values: Sequence[float]) -> Shift | None:
    """A shift that can be seen since the last night and not before it: each is told once."""
    shift = shift_of(values)
    return shift if shift is not None and shift_of(values[:-1]) is None else None


def shift_of(values: Sequence[float]) -> Shift | None:
    """The shift among the last nights, if there is one. values: more than 0, the latest last."""
    last = np.array(values[-WINDOW:], dtype=float)
    if len(last) < 2 * LASTING or not (last > 0).all():
        return None
    statistics = _statistics(_ranks(last)[None])[0]
    cut = int(statistics.argmax())
    if statistics[cut] <= _critical(len(last)):
        return None
    first = LASTING + cut
    before, after = float(median(last[:first])), float(median(last[first:]))
    if abs(after / before - 1) < LEAST:
        return None
    return Shift(before=before, after=after, nights=len(last) - first)


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
