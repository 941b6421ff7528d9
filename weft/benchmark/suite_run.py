"""Runs suites: each system loads a shape once, runs all its cases and leaves, so that the next has the whole device.

Rows are given out as they are measured: whoever is stopped half-way keeps what there is.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from weft import __version__
from weft.benchmark.measure import FIRST_TOKEN, Outcome, best_of, best_rows_of
from weft.benchmark.progress import Progress
from weft.benchmark.published import PEERS, READY_S, VLLM, Peer
from weft.benchmark.readiness import Ready, release_memory, time_to_ready
from weft.benchmark.row import Row, Target
from weft.benchmark.served_model import open_model
from weft.benchmark.suites import MAX_MODEL_LEN, Case, Suite
from weft.benchmark.systems import System
from weft.benchmark.systems.hf_static import HuggingFaceStatic
from weft.benchmark.systems.weft import WeftSystem
from weft.benchmark.workload import Workload, num_equal
from weft.errors import WeftError

logger = logging.getLogger("weft")

SUBJECT, PEER = "weft", "hf_static"
_WARM_UP_TOKENS = 4  # of each answer
_NOTE = (
    "closed loop: a new request enters as one leaves; generated tokens / wall time, prefill included; the better "
    "repetition, all of them in the spread; loading and one warm-up of the same width are left out; prefix caching "
    "off; end-of-sequence ids ignored"
)


@dataclass(frozen=True, kw_only=True)
class SuiteSettings:
    """shape: in place of each suite's own, and then no target applies.   hf_requests: most that HuggingFace answers
    of a case, but at least one full batch; None: all.   engine: fields of `EngineConfig` over those that a suite
    implies.
    """

    suites: tuple[Suite, ...]
    systems: tuple[str, ...]
    shape: str | None
    dtype: str
    device: str
    seed: int
    repetitions: int
    hf_requests: int | None
    engine: Mapping[str, Any]


def run_suites(settings: SuiteSettings, progress: Progress) -> Iterator[Row]:
    """Rows of every system on every case; then weft over HuggingFace.

    Raises: ConfigError at once for whatever one of the suites cannot be run with; nothing is measured then.
    """
    runs = [SuiteRun(suite, settings, progress) for suite in settings.suites]
    return chain.from_iterable(run.rows() for run in runs)


class SuiteRun:
    """One suite on one shape. Building it reads no weights, and raises ConfigError for an engine that cannot be."""

    def __init__(self, suite: Suite, settings: SuiteSettings, progress: Progress) -> None:
        self._suite = suite
        self._settings = settings
        self._progress = progress
        shape = settings.shape or suite.shape
        self._model = open_model(
            model=shape, shape=shape, dtype=settings.dtype, device=settings.device, seed=settings.seed
        )
        self._workloads = {
            case: case.workload(vocab_size=self._model.vocab_size, seed=settings.seed) for case in suite.cases
        }
        self._room = Workload.together(self._workloads.values())
        self._engine = {"max_model_len": MAX_MODEL_LEN} | dict(settings.engine)
        if SUBJECT in settings.systems:
            WeftSystem.check(self._model, self._room, self._engine)
        as_published = (
            shape == suite.shape and self._model.device.type == "cuda" and self._model.dtype_name == "bfloat16"
        )
        self._peers: dict[Case, Peer] = (
            {case: PEERS[suite.name, case.in_flight] for case in suite.cases} if as_published else {}
        )
        self._outcomes: dict[str, dict[Case, list[Outcome]]] = {name: {} for name in settings.systems}
        self._versions = {SUBJECT: __version__}

    def rows(self) -> Iterator[Row]:
        openers: dict[str, Callable[[], System]] = {SUBJECT: self._open_weft, PEER: self._open_huggingface}
        for name in self._settings.systems:
            yield from self._measure(name, openers[name])
            release_memory()
        if {SUBJECT, PEER} <= set(self._settings.systems):
            for case in self._suite.cases:
                yield from self._over_huggingface(case)

    def _measure(self, name: str, open_system: Callable[[], System]) -> Iterator[Row]:
        """Until ready, then each case. What fails ends this system's part with a row that says why."""
        row = self._row(name, None)
        try:
            ready = time_to_ready(open_system)
        except (WeftError, torch.OutOfMemoryError) as error:
            yield _not_measured(row, error)
            return
        system = ready.built
        self._versions[name] = system.version
        yield from self._ready_rows(self._row(name, None), ready)
        try:
            for case in self._suite.cases:
                row = self._row(name, case)
                yield from self._measure_case(row, name, system, case)
        except (WeftError, torch.OutOfMemoryError) as error:
            yield _not_measured(row, error)
        finally:
            system.close()

    def _measure_case(self, row: Row, name: str, system: System, case: Case) -> Iterator[Row]:
        workload = self._workload(name, case)
        warm_up = workload.warm_up(_WARM_UP_TOKENS)
        stage = f"{self._suite.name}, {case.in_flight} in flight, {name}"
        system.run(warm_up, self._progress(f"{stage}, warm-up", len(warm_up.jobs)))
        runs = self._outcomes[name].setdefault(case, [])
        steps = system.engine.num_steps if isinstance(system, WeftSystem) else {}
        for repetition in range(1, self._settings.repetitions + 1):
            advance = self._progress(f"{stage}, run {repetition}", len(workload.jobs))
            runs.append(system.run(workload, advance))
            logger.info("%s, run %d: %.1f tokens/s", stage, repetition, runs[-1].tokens_per_second)
        if not all(outcome.is_complete(workload) for outcome in runs):
            del self._outcomes[name][case]
            yield row.of("requests answered in full", [0], f"of {len(workload.jobs)}", notes="so there is no speed")
            return
        if isinstance(system, WeftSystem):
            taken = Counter(system.engine.num_steps)
            taken.subtract(steps)
            without = taken.total() - taken["graph"]
            yield row.of("steps without a graph", [without], f"of {taken.total():,}", notes="of all repetitions")
        peer = self._peers.get(case) if name == SUBJECT else None
        yield from best_rows_of(runs, row, {} if peer is None else {FIRST_TOKEN: peer.first_target})
        if peer is not None:
            speed = best_of(runs).tokens_per_second
            yield row.of(
                f"tokens/s over vLLM's {peer.tokens_per_s:,.0f}",
                [speed / peer.tokens_per_s],
                "x",
                target=peer.target,
                notes=f"vLLM's figures are of {VLLM}",
            ).over(len(runs))

    def _over_huggingface(self, case: Case) -> Iterator[Row]:
        """How many requests both answered alike, and weft's ratio; no ratio in float32 where they are not equal."""
        if not all(case in self._outcomes[name] for name in (SUBJECT, PEER)):
            return
        mine, other = (self._outcomes[name][case] for name in (SUBJECT, PEER))
        row = self._row(SUBJECT, case)
        total = len(other[0].answers)
        equal = min(num_equal(a.token_ids[:total], b.token_ids) for a, b in zip(mine, other, strict=True))
        exact = Target(relation="==", value=total) if row.dtype == "float32" else None
        yield row.of(f"requests equal to {PEER}", [equal], f"of {total}", target=exact)
        if exact is not None and equal != total:
            return
        peer = self._peers.get(case)
        ratio = best_of(mine).tokens_per_second / best_of(other).tokens_per_second
        target = None if peer is None else peer.huggingface_target
        yield row.of(f"tokens/s over {PEER}", [ratio], "x", target=target, notes=self._cap_note(case))

    def _ready_rows(self, row: Row, ready: Ready[System]) -> Iterator[Row]:
        """How long loading took, and weft's parts of it."""
        is_weft = isinstance(ready.built, WeftSystem)
        targets = READY_S.get(row.model) if is_weft and self._model.device.type == "cuda" else None
        notes = ["random weights drawn on the device, not read from a file"]
        if ready.compiled:
            notes.append(f"Triton compiled {ready.compiled} kernels for {row.system} meanwhile")
        parts: Mapping[str, float] = {}
        if isinstance(ready.built, WeftSystem):
            notes.append(ready.built.engine.description)
            parts = ready.built.engine.startup_seconds
        target = None if targets is None else targets[1 if ready.compiled else 0]
        logger.info("%s ready after %.1f s", row.system, ready.seconds)
        yield row.of("until ready", [ready.seconds], "s", target=target, notes="; ".join(notes))
        for part, seconds in parts.items():
            yield row.of(f"until ready, {part}", [seconds], "s")

    def _row(self, name: str, case: Case | None) -> Row:
        """`case` None: of the suite as a whole."""
        text = self._suite.name if case is None else f"{self._suite.name}: {case}"
        notes = [] if case is None else [_NOTE]
        if name == PEER and case is not None and self._cap_note(case):
            notes.append(self._cap_note(case))
        row = self._model.row("offline", case=text, seed=self._settings.seed, notes="; ".join(notes))
        return row.by(self._label(name), self._versions.get(name, ""))

    def _label(self, name: str) -> str:
        """Of a system in rows: an engine with options of its own is not the one without, and no history of it."""
        options = self._settings.engine if name == SUBJECT else {}
        return ", ".join((name, *(f"{option}={value}" for option, value in options.items())))

    def _workload(self, name: str, case: Case) -> Workload:
        whole = self._workloads[case]
        return replace(whole, jobs=whole.jobs[: self._huggingface_requests(case)]) if name == PEER else whole

    def _huggingface_requests(self, case: Case) -> int:
        cap = self._settings.hf_requests
        return case.requests if cap is None else min(case.requests, max(cap, case.in_flight))

    def _cap_note(self, case: Case) -> str:
        count = self._huggingface_requests(case)
        return f"{PEER} answered the first {count} of {case.requests}" if count < case.requests else ""

    def _open_weft(self) -> System:
        return WeftSystem(self._model, self._room, closed_loop=True, **self._engine)

    def _open_huggingface(self) -> System:
        return HuggingFaceStatic(self._model, next(iter(self._workloads.values())))


def _not_measured(row: Row, error: Exception) -> Row:
    reason = str(error).split("\n", maxsplit=1)[0]
    logger.warning("%s, %s: not measured: %s", row.case, row.system, reason)
    return row.unmeasured(reason, failed=True)
