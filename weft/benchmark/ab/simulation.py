"""Runs of a comparison on a machine that is made up: how often the verdict errs, and how small a slowdown it finds.

Noise of a turn, a few turns in which the machine does something else, a speed that wanders, and for each process a
speed of its own, which no number of turns averages out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weft.benchmark.ab.interval import Block
from weft.benchmark.ab.schedule import Arm, block_order
from weft.benchmark.ab.verdict import PLANTED, Verdict, heaviest, judge_all


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Deviations of the logarithm of a turn's seconds.

    noise: of each turn.   process: between processes of one commit.   wander: from one turn to the next, of all.
    spikes: the part of the turns that take `spike` longer.   drift: of the whole run, steadily.
    """

    noise: float = 0.02
    process: float = 0.003
    wander: float = 0.003
    spikes: float = 0.05
    spike: float = 0.3
    drift: float = 0.05


def simulated(
    machine: Machine, *, slowdown: float, blocks: int, measures: int, random: np.random.Generator
) -> dict[str, list[Block]]:
    """The turns of one run by measure, of a head that is slower by this part."""
    own = {arm: random.normal(0, machine.process) for arm in (Arm.BASE, Arm.HEAD, Arm.CONTROL)}
    own[Arm.HEAD] += np.log1p(slowdown)
    own[Arm.PLANTED] = own[Arm.CONTROL] + np.log1p(PLANTED)  # the same process
    found: dict[str, list[Block]] = {str(measure): [] for measure in range(measures)}
    wandered, turns = 0.0, blocks * len(block_order(0))
    turn = 0
    for block in range(blocks):
        seconds: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in Arm} for name in found}
        for arm in block_order(block):
            wandered += random.normal(0, machine.wander)
            turn += 1
            for by_arm in seconds.values():
                spike = np.log1p(machine.spike) if random.random() < machine.spikes else 0.0
                noise = random.normal(0, machine.noise)
                by_arm[arm].append(float(np.exp(own[arm] + wandered + machine.drift * turn / turns + spike + noise)))
        for name, by_arm in seconds.items():
            found[name].append(by_arm)
    return found


def verdicts(
    machine: Machine, *, slowdown: float, threshold: float, blocks: int, measures: int, runs: int, seed: int
) -> Iterator[Verdict]:
    """Of so many simulated runs."""
    random = np.random.default_rng(seed)
    for _ in range(runs):
        found = simulated(machine, slowdown=slowdown, blocks=blocks, measures=measures, random=random)
        yield heaviest(judge_all(found, threshold=threshold))
