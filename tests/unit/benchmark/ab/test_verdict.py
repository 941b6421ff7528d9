"""The verdict: quiet where nothing is slower, sure where something is, silent where the instrument is broken."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest

from weft.benchmark.ab import comparison, verdict
from weft.benchmark.ab.comparison import Comparison, compare
from weft.benchmark.ab.interval import Slowdown, slowdown
from weft.benchmark.ab.schedule import Arm, block_order
from weft.benchmark.ab.simulation import Machine, verdicts
from weft.benchmark.ab.verdict import PLANTED, Verdict, heaviest
from weft.benchmark.ab.worker import Turn
from weft.errors import WorkerError


class MadeUpWorker:
    """Takes `seconds` a turn, with noise; the machine, which all share, grows slower by the turn."""

    turns: Iterator[int] = count()
    random = np.random.default_rng(0)

    def __init__(self, seconds: float = 1.0, *, noise: float = 0.01, shows: float = 1.0, digest: str = "same") -> None:
        self.parts = ["decode"]
        self._seconds, self._noise, self._shows, self._digest = seconds, noise, shows, digest
        self.num_turns = 0

    def turn(self, *, planted: float = 0.0) -> Turn:
        self.num_turns += 1
        weather = 1 + next(self.turns) / 2000
        noise = float(np.exp(self.random.normal(0, self._noise)))
        return Turn({"decode": self._seconds * (1 + planted * self._shows) * weather * noise}, self._digest)


@pytest.fixture(autouse=True)
def _same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUpWorker, "turns", count())
    monkeypatch.setattr(MadeUpWorker, "random", np.random.default_rng(0))


def judged(head: float = 1.0, *, control: float = 1.0, noise: float = 0.01, shows: float = 1.0) -> Comparison:
    workers = {
        Arm.BASE: MadeUpWorker(noise=noise),
        Arm.HEAD: MadeUpWorker(head, noise=noise),
        Arm.CONTROL: MadeUpWorker(control, noise=noise, shows=shows),
    }
    return compare(workers, blocks=24, threshold=0.02, advance=lambda: None)


def test_every_block_runs_every_arm_twice_and_a_steady_drift_weighs_on_all_alike() -> None:
    firsts = Counter()
    for block in range(8):
        order = block_order(block)
        firsts[order[0]] += 1
        assert Counter(order) == dict.fromkeys(Arm, 2)
        assert {sum(place for place, arm in enumerate(order) if arm is wanted) for wanted in Arm} == {len(order) - 1}
    assert set(firsts.values()) == {2}


def test_the_slowdown_is_paired_robust_and_the_same_each_time() -> None:
    blocks = [{Arm.BASE: [day, day], Arm.HEAD: [1.05 * day, 1.05 * day]} for day in np.linspace(1.0, 20.0, 20)]
    blocks[3] = {Arm.BASE: [1.0, 1.0], Arm.HEAD: [9.0, 9.0]}
    found = slowdown(blocks, Arm.HEAD, Arm.BASE, level=0.99)
    assert found.estimate == pytest.approx(0.05)
    assert (found.low, found.high) == (pytest.approx(0.05), pytest.approx(0.05))
    assert found == slowdown(blocks, Arm.HEAD, Arm.BASE, level=0.99)


def test_an_interval_narrows_with_the_blocks() -> None:
    random = np.random.default_rng(1)
    blocks = [{arm: list(np.exp(random.normal(0, 0.05, 2))) for arm in Arm} for _ in range(64)]
    few, many = (slowdown(blocks[:size], Arm.HEAD, Arm.BASE, level=0.99) for size in (8, 64))
    assert few.low < many.low <= many.estimate <= many.high < few.high
    assert few == slowdown(blocks[:8], Arm.HEAD, Arm.BASE, level=0.99), "the same turns, the same verdict"


def law() -> None:
    """What a gate is for, in one function: faults of the gate below break it."""
    assert judged(1.0).verdict is Verdict.NOT_SLOWER
    assert judged(0.5).verdict is Verdict.NOT_SLOWER
    assert judged(1.05).verdict is Verdict.SLOWER
    assert judged(1.02, noise=0.02).verdict is Verdict.INCONCLUSIVE


def test_it_is_quiet_on_none_and_fires_on_a_slowdown() -> None:
    law()


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"control": 1.04}, "the base differs from itself"),
        ({"control": 0.96}, "the base differs from itself"),
        ({"shows": 0.0}, "does not show"),
        ({"shows": 0.4}, "shows as another number"),
        ({"shows": 3.0}, "shows as another number"),
        ({"noise": 0.5}, ""),
    ],
    ids=["control slower", "control faster", "nothing shows", "little shows", "too much shows", "only noise"],
)
def test_where_a_control_fails_nothing_is_said_of_the_head(broken: dict[str, float], why: str) -> None:
    for head in (1.0, 1.3):
        found = judged(head, **broken)
        assert found.verdict is Verdict.BROKEN
        assert why in found.findings["decode"].why


def the_base_alone(blocks: Sequence[Any], arm: str, over: str, *, level: float) -> Any:
    return slowdown(blocks, Arm.BASE if arm is Arm.HEAD else arm, over, level=level)


def upside_down(blocks: Sequence[Any], arm: str, over: str, *, level: float) -> Any:
    return slowdown(blocks, over, arm, level=level) if arm is Arm.HEAD else slowdown(blocks, arm, over, level=level)


def too_sure(blocks: Sequence[Any], arm: str, over: str, *, level: float) -> Any:
    return slowdown(blocks, arm, over, level=0.5)


def unpaired(blocks: Sequence[Any], arm: str, over: str, *, level: float) -> Any:
    moved = [block | {arm: after[arm]} for block, after in zip(blocks, [*blocks[12:], *blocks[:12]], strict=True)]
    return slowdown(moved, arm, over, level=level)


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (verdict, "slowdown", the_base_alone),
        (verdict, "slowdown", upside_down),
        (verdict, "slowdown", too_sure),
        (verdict, "slowdown", unpaired),
        (verdict, "PLANTED", 0.0),
        (comparison, "PLANTED", 0.0),
    ],
    ids=["base over base", "base over head", "bounds at a half", "other blocks' turns", "expects none", "plants none"],
)
def test_a_fault_of_the_gate_is_convicted(module: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        law()


def test_of_several_measures_the_heaviest_counts_and_each_may_err_less(monkeypatch: pytest.MonkeyPatch) -> None:
    order = [Verdict.NOT_SLOWER, Verdict.INCONCLUSIVE, Verdict.SLOWER, Verdict.BROKEN]
    found = judged(1.05).findings["decode"]
    for lighter, heavier in pairwise(order):
        findings = {str(name): _with(found, name) for name in (heavier, lighter)}
        assert heaviest(findings) is heavier
    levels = []

    def noted(blocks: Sequence[Any], *, threshold: float, level: float) -> Any:
        levels.append(level)
        return found

    monkeypatch.setattr(verdict, "judge", noted)
    verdict.judge_all(dict.fromkeys("abcd", ()), threshold=0.02)
    assert levels == [1 - verdict.ERRORS / 4] * 4
    assert len({name.exit_status for name in Verdict} | {2}) == 5
    assert Verdict.NOT_SLOWER.exit_status == 0


def _with(finding: Any, name: Verdict) -> Any:
    return replace(finding, verdict=name)


@pytest.mark.parametrize(
    ("low", "estimate", "high", "expected"),
    [
        (0.021, 0.03, 0.04, Verdict.SLOWER),
        (0.019, 0.03, 0.04, Verdict.INCONCLUSIVE),
        (-0.01, 0.00, 0.021, Verdict.INCONCLUSIVE),
        (-0.01, 0.00, 0.019, Verdict.NOT_SLOWER),
    ],
)
def test_bounds_decide_and_not_the_estimate(
    low: float, estimate: float, high: float, expected: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        Arm.HEAD: Slowdown(estimate=estimate, low=low, high=high),
        Arm.CONTROL: Slowdown(estimate=0.0, low=-0.01, high=0.01),
        Arm.PLANTED: Slowdown(estimate=0.1, low=0.09, high=0.11),
    }
    monkeypatch.setattr(verdict, "slowdown", lambda blocks, arm, over, *, level: found[arm])
    assert verdict.judge([], threshold=0.02, level=0.99).verdict is expected


def test_the_first_turns_of_a_worker_warm_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cold(MadeUpWorker):
        def turn(self, *, planted: float = 0.0) -> Turn:
            taken = super().turn(planted=planted)
            return taken if self.num_turns > 2 else taken._replace(seconds={"decode": 100.0})

    workers = {arm: Cold() for arm in (Arm.BASE, Arm.HEAD, Arm.CONTROL)}
    found = compare(workers, blocks=8, threshold=0.02, advance=lambda: None)
    assert max(seconds for block in found.measures["decode"] for taken in block.values() for seconds in taken) < 2
    assert [worker.num_turns for worker in workers.values()] == [2 + 16, 2 + 16, 2 + 32]


def test_unlike_work_is_told() -> None:
    workers = {arm: MadeUpWorker(digest=digest) for arm, digest in zip(Arm, ("a", "b", "a"), strict=False)}
    assert not compare(workers, blocks=8, threshold=0.02, advance=lambda: None).equal
    assert judged().equal


def test_unlike_measures_are_an_error() -> None:
    other = MadeUpWorker()
    other.parts = ["prefill"]
    workers = {Arm.BASE: MadeUpWorker(), Arm.HEAD: other, Arm.CONTROL: MadeUpWorker()}
    with pytest.raises(WorkerError, match="prefill"):
        compare(workers, blocks=8, threshold=0.02, advance=lambda: None)


def ended(slower: float, *, runs: int, blocks: int = 32, measures: int = 2) -> Counter[Verdict]:
    how = {"threshold": 0.02, "blocks": blocks, "measures": measures, "runs": runs, "seed": 1}
    return Counter(verdicts(Machine(), slowdown=slower, **how))


def test_a_sample_of_simulated_runs_raises_no_false_alarm_and_misses_no_tenth() -> None:
    assert ended(0.0, runs=8, measures=1)[Verdict.SLOWER] == 0
    assert ended(PLANTED, runs=8, measures=1)[Verdict.SLOWER] == 8


@pytest.mark.nightly
def test_two_hundred_simulated_runs() -> None:
    """The figures of docs/speed_gates.md."""
    assert ended(0.0, runs=200)[Verdict.SLOWER] <= 2
    assert ended(0.05, runs=200)[Verdict.SLOWER] >= 190
    assert ended(0.10, runs=200)[Verdict.SLOWER] >= 198
