"""Plants faults, each in a copy of its own, several at a time. The unmutated copy has to pass first."""

import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.testing.planted.fault import Catalogue, Fault
from weft.testing.planted.tree import StaleFaultError, check, clone, copy_sources, plant
from weft.testing.planted.trial import Lane, Stem, Trial
from weft.testing.planted.verdict import Verdict, judge, sees
from weft.testing.signals import endings_raise, undisturbed

_BASELINE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """baseline: None if the tests pass without any fault; else what is wrong with them, and no verdict is given.

    seconds: of the whole run.   baseline_seconds: until the first fault.
    """

    verdicts: tuple[Verdict, ...]
    baseline: str | None
    seconds: float
    baseline_seconds: float

    @property
    def exit_status(self) -> int:
        """0 if every verdict is the expected one, 1 if the tests fell short, 2 if they could not be judged."""
        if self.baseline is not None or any(verdict.is_error for verdict in self.verdicts):
            return 2
        return int(not all(verdict.is_expected for verdict in self.verdicts))


def run(
    catalogue: Catalogue,
    faults: Sequence[Fault],
    root: Path,
    *,
    jobs: int = 2,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Run:
    """Judge these faults. on_verdict: told of each as it comes, one at a time.

    Whatever ends the run, SIGTERM included, neither copies nor tests are left.
    Raises: ConfigError if a source of the catalogue is not under `root`.
    """
    began = time.monotonic()
    verdicts: dict[str, Verdict] = {}
    with endings_raise(), _scratch() as folder:
        pristine = folder / "pristine"
        copy_sources(root, catalogue.sources, pristine)
        stem = Stem(catalogue.preload, catalogue.environment, jobs)
        with ThreadPoolExecutor(jobs) as pool:
            try:
                fresh = []
                for fault in faults:
                    try:
                        check(pristine, fault)
                        fresh.append(fault)
                    except StaleFaultError as error:  # told at once, and the others are judged nevertheless
                        verdicts[fault.name] = _stale(fault, error)
                        on_verdict(verdicts[fault.name])
                wrong = _baseline(catalogue, fresh, pristine, stem.lanes, pool)
                baseline_seconds = time.monotonic() - began
                if wrong is None:
                    _plant_all(catalogue, fresh, pristine, stem.lanes, pool, verdicts, on_verdict)
            finally:
                stem.close()
    return Run(
        verdicts=tuple(verdicts[fault.name] for fault in faults if fault.name in verdicts),
        baseline=wrong,
        seconds=time.monotonic() - began,
        baseline_seconds=baseline_seconds,
    )


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that is gone at the end, though a second signal come meanwhile."""
    folder = tempfile.TemporaryDirectory(prefix="planted-")
    try:
        yield Path(folder.name).resolve()
    finally:
        with undisturbed():
            folder.cleanup()


def _stale(fault: Fault, error: StaleFaultError) -> Verdict:
    return Verdict(fault=fault, kind="stale", seconds=0.0, detail=error.message)


def _baseline(
    catalogue: Catalogue, faults: Sequence[Fault], pristine: Path, lanes: Sequence[Lane], pool: ThreadPoolExecutor
) -> str | None:
    """None if every killer passes in the unmutated copy; else what is wrong."""
    killers = sorted({killer for fault in faults for killer in fault.killers})
    files = sorted({killer.partition("::")[0] for killer in killers})
    shares = [
        [killer for killer in killers if files.index(killer.partition("::")[0]) % len(lanes) == place]
        for place in range(len(lanes))
    ]

    def run_share(lane: Lane, tests: Sequence[str]) -> Trial | None:
        # In one folder, so that what they compile is there for every fault.
        return (
            lane.run(pristine, tests, timeout_s=_BASELINE_TIMEOUT_S, arguments=catalogue.arguments) if tests else None
        )

    trials = [trial for trial in pool.map(run_share, lanes, shares) if trial is not None]
    for trial in trials:
        if trial.exit_code != 0:
            return f"without a fault the tests end with exit status {trial.exit_code}:\n{trial.output}"
        if trial.strayed:
            return f"imported from outside the copy: {', '.join(trial.strayed[:5])}"
    passed = frozenset(node_id for trial in trials for node_id in trial.passed)
    idle = [killer for killer in killers if not sees(killer, passed)]
    return f"tests that do not run here can kill nothing: {', '.join(idle)}" if idle else None


def _plant_all(
    catalogue: Catalogue,
    faults: Sequence[Fault],
    pristine: Path,
    lanes: Sequence[Lane],
    pool: ThreadPoolExecutor,
    verdicts: dict[str, Verdict],
    on_verdict: Callable[[Verdict], None],
) -> None:
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        waiting.put(fault)
    told: queue.SimpleQueue[Verdict | None] = queue.SimpleQueue()

    def work(lane: Lane) -> None:
        try:
            while not waiting.empty():
                try:
                    fault = waiting.get_nowait()
                except queue.Empty:
                    return
                told.put(_try(catalogue, fault, pristine, lane))
        finally:
            told.put(None)

    workers = [pool.submit(work, lane) for lane in lanes]
    at_work = len(workers)
    while at_work:
        verdict = told.get()
        if verdict is None:
            at_work -= 1
        else:
            verdicts[verdict.fault.name] = verdict
            on_verdict(verdict)
    for worker in workers:
        worker.result()


def _try(catalogue: Catalogue, fault: Fault, pristine: Path, lane: Lane) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="fault-", dir=pristine.parent) as name:
        folder = Path(name) / "tree"
        clone(pristine, folder)
        plant(folder, fault)
        # Where one test is to see it, the first failure says all.
        arguments = (*catalogue.arguments, *(("-x",) if len(fault.killers) == 1 else ()))
        return judge(fault, lane.run(folder, fault.killers, timeout_s=catalogue.timeout_s, arguments=arguments))
