"""What the turns say: slower, not slower, inconclusive, or that the instrument is broken. Pure.

The instrument is judged first, by what is known of its controls: the base against itself must not fire, and work added
to it must. Where either fails, nothing is said of the head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weft.benchmark.ab.interval import Block, Slowdown, slowdown
from weft.benchmark.ab.schedule import Arm

ERRORS = 0.01  # how often a bound may be wrong, over all measures of a run
PLANTED = 0.10  # the part of its own time that the planted arm works longer


class Verdict(StrEnum):
    """In the order of weight: of several measures the heaviest is the run's."""

    BROKEN = "instrument broken"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"
    NOT_SLOWER = "not slower"

    @property
    def exit_status(self) -> int:
        """2 is left to arguments that are wrong and to workers that fail."""
        return {Verdict.NOT_SLOWER: 0, Verdict.SLOWER: 1, Verdict.INCONCLUSIVE: 3, Verdict.BROKEN: 4}[self]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known of one measure. why: of a broken instrument, which control failed and how; else empty."""

    head: Slowdown
    control: Slowdown
    planted: Slowdown
    verdict: Verdict
    why: str = ""


def judge(blocks: Sequence[Block], *, threshold: float, level: float) -> Finding:
    """Of one measure. threshold: slower by more than this is slower: 0.02 is 2 %."""
    head, control, planted = (
        slowdown(blocks, arm, Arm.BASE, level=level) for arm in (Arm.HEAD, Arm.CONTROL, Arm.PLANTED)
    )
    why = _defect(control, planted, threshold)
    if why:
        verdict = Verdict.BROKEN
    elif head.low > threshold:
        verdict = Verdict.SLOWER
    elif head.high < threshold:
        verdict = Verdict.NOT_SLOWER
    else:
        verdict = Verdict.INCONCLUSIVE
    return Finding(head=head, control=control, planted=planted, verdict=verdict, why=why)


def judge_all(measures: Mapping[str, Sequence[Block]], *, threshold: float) -> dict[str, Finding]:
    """Of each measure of a run; the more there are, the less each may err."""
    level = 1 - ERRORS / len(measures)
    return {name: judge(blocks, threshold=threshold, level=level) for name, blocks in measures.items()}


def heaviest(findings: Mapping[str, Finding]) -> Verdict:
    verdicts = {finding.verdict for finding in findings.values()}
    return next(verdict for verdict in Verdict if verdict in verdicts)


def _defect(control: Slowdown, planted: Slowdown, threshold: float) -> str:
    """Nothing, or which of the controls says that no difference of this size can be measured."""
    if control.low > threshold or control.high < -threshold:
        return f"the base differs from itself: {control}"
    if planted.low <= threshold:
        return f"work of {PLANTED:+.0%} does not show: {planted}"
    if not PLANTED / 2 < planted.estimate < 2 * PLANTED:
        return f"work of {PLANTED:+.0%} shows as another number: {planted}"
    return ""
