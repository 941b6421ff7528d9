"""Climbs the ladder: an engine a rung, the same workloads on each, and how many times the rung below it is as fast."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.benchmark.measure import Outcome, best_of, best_rows_of
from weft.benchmark.progress import Progress
from weft.benchmark.readiness import release_memory
from weft.benchmark.row import Row, Target
from weft.benchmark.rungs import Rung
from weft.benchmark.served_model import ServedModel
from weft.benchmark.suites import MAX_MODEL_LEN, Case
from weft.benchmark.systems.weft import WeftSystem
from weft.benchmark.workload import Workload, num_equal
from weft.errors import WeftError

logger = logging.getLogger("weft")

_NOTE = "closed loop, prefill included; the better repetition; one warm-up of the same width left out"


@dataclass(frozen=True, kw_only=True)
class Climb:
    """slow_requests: most that a slow rung answers of a case; None: all.   engine: over every rung's own options."""

    model: ServedModel
    cases: tuple[Case, ...]
    seed: int
    repetitions: int
    slow_requests: int | None
    engine: Mapping[str, Any]

    def rows(self, rungs: Sequence[Rung], progress: Progress) -> Iterator[Row]:
        """What a rung cannot run has a row that says why; the next is then compared with the last that did.

        Raises: at once what the first has against its engine, if none of them can be.
        """
        reasons = [self._reason_against(rung) for rung in rungs]
        against = [reason for reason in reasons if reason is not None]
        if len(against) == len(rungs):
            raise against[0]
        return self._climb(list(zip(rungs, reasons, strict=True)), progress)

    def _climb(self, rungs: Sequence[tuple[Rung, WeftError | None]], progress: Progress) -> Iterator[Row]:
        below: dict[Case, tuple[str, Outcome]] = {}
        for rung, reason in rungs:
            if reason is not None:
                yield from self._unmeasured(rung, self.cases, reason, failed=False)
                continue
            try:
                yield from self._rung(rung, below, progress)
            except (WeftError, torch.OutOfMemoryError) as error:
                left = [case for case in self.cases if case not in below or below[case][0] != rung.name]
                yield from self._unmeasured(rung, left, error, failed=True)
            release_memory()

    def _unmeasured(self, rung: Rung, cases: Sequence[Case], error: Exception, *, failed: bool) -> Iterator[Row]:
        reason = str(error).split("\n", maxsplit=1)[0]
        logger.warning("%s: not measured: %s", rung.name, reason)
        for case in cases:
            yield self._row(rung, case).unmeasured(reason, failed=failed)

    def _reason_against(self, rung: Rung) -> WeftError | None:
        """Why this rung's engine cannot be, as far as that shows before weights are read."""
        try:
            WeftSystem.check(self.model, self._room, self._options(rung))
        except WeftError as error:
            return error
        return None

    @property
    def _room(self) -> Workload:
        return Workload.together(case.workload(vocab_size=self.model.vocab_size, seed=self.seed) for case in self.cases)

    def _options(self, rung: Rung) -> dict[str, Any]:
        return {"max_model_len": MAX_MODEL_LEN, **rung.options, **self.engine}

    def _rung(self, rung: Rung, below: dict[Case, tuple[str, Outcome]], progress: Progress) -> Iterator[Row]:
        system = WeftSystem(self.model, self._room, closed_loop=True, **self._options(rung))
        repetitions = 1 if rung.slow else self.repetitions
        for case in self.cases:
            whole = case.workload(vocab_size=self.model.vocab_size, seed=self.seed)
            workload = replace(whole, jobs=whole.jobs[: self._requests(rung, case)])
            stage = f"{case.in_flight} in flight, {rung.name}"
            warm_up = workload.warm_up(4)
            system.run(warm_up, progress(f"{stage}, warm-up", len(warm_up.jobs)))
            runs = []
            for repetition in range(1, repetitions + 1):
                runs.append(system.run(workload, progress(f"{stage}, run {repetition}", len(workload.jobs))))
                logger.info("%s, run %d: %.1f tokens/s", stage, repetition, runs[-1].tokens_per_second)
            row, best = self._row(rung, case), best_of(runs)
            yield from best_rows_of(runs, row, {})
            if case in below:
                yield from _over(row, best, *below[case])
            below[case] = rung.name, best
        system.close()

    def _requests(self, rung: Rung, case: Case) -> int:
        most = [case.requests]
        if rung.slow and self.slow_requests is not None:
            most.append(max(self.slow_requests, case.in_flight))
        if rung.most is not None:
            most.append(rung.most)
        return min(most)

    def _row(self, rung: Rung, case: Case) -> Row:
        answered = self._requests(rung, case)
        notes = [_NOTE, ", ".join(f"{name}={value}" for name, value in self.engine.items())]
        if answered < case.requests:
            notes.append(f"{rung.name}: the first {answered} of {case.requests} requests")
        row = self.model.row("ladder", case=str(case), seed=self.seed, notes="; ".join(filter(None, notes)))
        return row.by(f"weft {rung.name}", WeftSystem.version)


def _over(row: Row, best: Outcome, name: str, below: Outcome) -> list[Row]:
    """Equal answers first: in float32 a rung that says anything else has no factor."""
    shared = min(len(best.answers), len(below.answers))
    equal = num_equal(best.token_ids[:shared], below.token_ids[:shared])
    exact = Target(relation="==", value=shared) if row.dtype == "float32" else None
    rows = [row.of("requests equal to the rung below", [equal], f"of {shared}", target=exact)]
    if exact is None or equal == shared:
        factor = best.tokens_per_second / below.tokens_per_second
        rows.append(row.of("tokens/s over the rung below", [factor], "x", notes=f"over weft {name}"))
    return rows
