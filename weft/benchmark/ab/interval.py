"""How much slower one arm is than another, with an interval: a paired bootstrap on logarithms of ratios. Pure.

A ratio is formed within a block, so that what weighs on a whole block is not in it; the median over the blocks does not
see a few turns in which the machine did something else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

Block = Mapping[str, Sequence[float]]  # seconds of each turn, by arm

_RESAMPLES = 4000
_SEED = 0  # of the resamples: the same turns give the same verdict


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Seconds of one arm over those of another, less 1: 0.03 is 3 % slower. low, high: the bounds."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


def slowdown(blocks: Sequence[Block], arm: str, over: str, *, level: float) -> Slowdown:
    """Of `arm` over another arm; each of the two bounds is wrong with the probability `1 - level`."""
    ratios = np.array([_mean_log(block[arm]) - _mean_log(block[over]) for block in blocks])
    draws = np.random.default_rng(_SEED).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [1 - level, level])
    return Slowdown(estimate=exp(np.median(ratios)) - 1, low=exp(low) - 1, high=exp(high) - 1)


def _mean_log(seconds: Sequence[float]) -> float:
    return float(np.log(seconds).mean())
