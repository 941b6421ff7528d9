"""Histories of nights that are made up: how often the watch over them errs, and how soon it finds a shift."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.benchmark.history import shifts_in


@dataclass(frozen=True, kw_only=True)
class Nights:
    """noise: deviation of the logarithm of a night's value.   wander: from one night to the next, for good.

    wild: the part of the nights in which something else happens, which moves a value by `by`.
    """

    nights: int = 120
    noise: float = 0.02
    wander: float = 0.0
    wild: float = 0.05
    by: float = 0.3


def told(nights: Nights, *, shift: float, histories: int, seed: int) -> Iterator[list[int]]:
    """Of each history the nights on which a shift was told, counted from the first after the middle, where the value
    falls by the part `shift` and stays: 1 is that night, 0 and less are before it.
    """
    random = np.random.default_rng(seed)
    middle = nights.nights // 2
    for _ in range(histories):
        logs = random.normal(0, nights.noise, nights.nights) + random.normal(0, nights.wander, nights.nights).cumsum()
        logs += np.where(random.random(nights.nights) < nights.wild, np.log1p(nights.by), 0.0)
        logs[middle:] += np.log1p(-shift)
        yield [shift.shown + 1 - middle for shift in shifts_in(np.exp(logs).tolist())]
