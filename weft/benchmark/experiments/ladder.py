"""What each part of weft is worth: the same workload on every rung from one request at a time to graphs and overlap."""

from collections.abc import Iterator
from dataclasses import dataclass

from weft.benchmark.engine_options import parse_engine_options
from weft.benchmark.experiments import Experiment
from weft.benchmark.options import numbers, option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row
from weft.benchmark.rungs import RUNGS, Rung
from weft.benchmark.suites import chosen_suites
from weft.errors import ConfigError
from weft.options import positive


@dataclass(frozen=True, kw_only=True)
class LadderOptions:
    shape: str = option("llama-190m", "llama-190m, llama-1b, llama-8b")
    in_flight: str = option("64,1", "cases of the suite ladder, by requests in flight")
    rungs: str | None = option(None, f"some of 1 to {len(RUNGS)}, from the lowest; all if not given")
    slow_requests: int = option(128, "requests of a case that eager rungs answer at most, but a full batch; 0 is all")
    repetitions: int = option(2, "measured runs of the quick rungs, of which the better is told")
    engine: str | None = option(None, "fields of weft's engine over those of every rung: max_num_batched_tokens=4096")
    dtype: str = option("bfloat16", "of weights and cache")
    device: str = option("cuda", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "of weights and workload")

    def __post_init__(self) -> None:
        positive("LadderOptions", repetitions=self.repetitions, slow_requests=self.slow_requests or None)
        chosen_suites("ladder", numbers("in_flight", self.in_flight))
        parse_engine_options(self.engine)
        assert self.chosen_rungs, "numbers gives at least one"

    @property
    def chosen_rungs(self) -> tuple[Rung, ...]:
        """Raises: ConfigError for a rung that is not there."""
        if self.rungs is None:
            return RUNGS
        places = numbers("rungs", self.rungs)
        for place in places:
            if place > len(RUNGS):
                raise ConfigError(f"rungs={self.rungs!r} names rung {place}", hint=f"1 to {len(RUNGS)}")
        return tuple(rung for place, rung in enumerate(RUNGS, start=1) if place in places)


def run(options: LadderOptions, progress: Progress) -> Iterator[Row]:
    """Rung by rung, each with an engine of its own. Raises: ConfigError at once if none of them can be."""
    from weft.benchmark.ladder_run import Climb
    from weft.benchmark.served_model import open_model

    (suite,) = chosen_suites("ladder", numbers("in_flight", options.in_flight))
    climb = Climb(
        model=open_model(
            model=options.shape,
            shape=options.shape,
            dtype=options.dtype,
            device=options.device,
            seed=options.seed,
        ),
        cases=suite.cases,
        seed=options.seed,
        repetitions=options.repetitions,
        slow_requests=options.slow_requests or None,
        engine=parse_engine_options(options.engine),
    )
    return climb.rows(options.chosen_rungs, progress)


EXPERIMENT = Experiment(
    summary="tokens/s from one request at a time, rung by rung, to graphs, fused operations and overlap",
    examples=(
        "ladder --json results/h200.jsonl",
        "ladder --rungs 5,6,7,8 --in-flight 64",
        "ladder --shape llama-tiny --device cpu --dtype float32 --in-flight 8 --rungs 1,2,3,4",
    ),
    options=LadderOptions,
    run=run,
    collected={"cuda": {}},
)
