"""One comparison: workers take their turns by the schedule, and what they took becomes findings. Starts no process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from weft.benchmark.ab.interval import Block
from weft.benchmark.ab.schedule import Arm, block_order
from weft.benchmark.ab.verdict import PLANTED, Finding, Verdict, heaviest, judge_all
from weft.benchmark.ab.worker import Turn
from weft.errors import WorkerError

_WARM_UP = 2  # turns of each worker, the first of which reserves memory


@runtime_checkable
class TakesTurns(Protocol):
    parts: list[str]

    def turn(self, *, planted: float = 0.0) -> Turn: ...


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """measures: the seconds of every turn, by part of the workload.   equal: whether all computed the same."""

    measures: Mapping[str, Sequence[Block]]
    findings: Mapping[str, Finding]
    equal: bool

    @property
    def verdict(self) -> Verdict:
        return heaviest(self.findings)


def compare(
    workers: Mapping[Arm, TakesTurns], *, blocks: int, threshold: float, advance: Callable[[], None]
) -> Comparison:
    """workers: of BASE, HEAD and CONTROL; the control's takes the turns of PLANTED as well.   advance: after a block.

    Raises: WorkerError.
    """
    base, head, control = (workers[arm] for arm in (Arm.BASE, Arm.HEAD, Arm.CONTROL))
    takers = {Arm.BASE: base, Arm.HEAD: head, Arm.CONTROL: control, Arm.PLANTED: control}
    if len({tuple(worker.parts) for worker in workers.values()}) > 1:
        raise WorkerError(f"base measures {base.parts} and head {head.parts}")
    for worker in (base, head, control):
        for _ in range(_WARM_UP):
            worker.turn()
    measures: dict[str, list[Block]] = {part: [] for part in base.parts}
    digests: dict[Arm, set[str]] = {arm: set() for arm in Arm}
    for block in range(blocks):
        seconds: dict[str, dict[str, list[float]]] = {part: {arm: [] for arm in Arm} for part in measures}
        for arm in block_order(block):
            turn = takers[arm].turn(planted=PLANTED if arm is Arm.PLANTED else 0.0)
            digests[arm].add(turn.digest)
            for part, taken in turn.seconds.items():
                seconds[part][arm].append(taken)
        for part, by_arm in seconds.items():
            measures[part].append(by_arm)
        advance()
    return Comparison(
        measures=measures,
        findings=judge_all(measures, threshold=threshold),
        equal=digests[Arm.HEAD] == digests[Arm.BASE],
    )
