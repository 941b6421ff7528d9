"""What continuous batching is worth: policy `static` against `fcfs`, the same engine, requests and process.

A static batch waits for its longest member; here one request in eight answers twenty times as long as the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.benchmark.experiments import Experiment
from weft.benchmark.measure import Outcome, quantile, rows_of, spread
from weft.benchmark.options import ModelOptions, option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row, Target
from weft.benchmark.workload import Lengths, Workload, num_equal, skewed_workload
from weft.options import positive

if TYPE_CHECKING:
    from weft.benchmark.served_model import ServedModel

_STATIC, _CONTINUOUS = "static", "fcfs"
_SOONER = Target(relation=">=", value=1.5)
_FIRST_TOKEN = Target(relation=">=", value=3.0)
_NOTE = (
    "all requests are there at time 0, so a time to the first token holds the wait for a place; warm-up and loading "
    "are left out; prefix caching off"
)


@dataclass(frozen=True, kw_only=True)
class ContinuousOptions(ModelOptions):
    requests: int = option(48, "requests, all there at the start")
    in_flight: int = option(8, "requests that run at once")
    prompts: str = option("8,32", "prompt lengths: one of 8,32 or uniform 8:32")
    short: int = option(8, "output length of most requests")
    long: int = option(160, "output length of the others")
    one_in: int = option(8, "one request in this many is long")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(
            "ContinuousOptions",
            requests=self.requests,
            in_flight=self.in_flight,
            short=self.short,
            long=self.long,
            one_in=self.one_in,
        )
        Lengths.parse(self.prompts)


def run(options: ContinuousOptions, progress: Progress) -> Iterator[Row]:
    """Both engines loaded and warmed up, then measured in turn.

    Raises: ConfigError, CheckpointError at once for what cannot be served.
    """
    from weft.benchmark.served_model import open_model
    from weft.benchmark.systems.weft import WeftSystem

    model = open_model(
        model=options.model, shape=options.shape, dtype=options.dtype, device=options.device, seed=options.seed
    )
    model.check_prompts(Lengths.parse(options.prompts).longest)
    workload = skewed_workload(
        requests=options.requests,
        in_flight=options.in_flight,
        prompts=Lengths.parse(options.prompts),
        short=options.short,
        long=options.long,
        one_in=options.one_in,
        vocab_size=model.vocab_size,
        seed=options.seed,
    )
    for policy in (_STATIC, _CONTINUOUS):
        WeftSystem.check(model, workload, {"policy": policy})
    return _rows(model, workload, options, progress)


def _rows(model: "ServedModel", workload: Workload, options: ContinuousOptions, progress: Progress) -> Iterator[Row]:
    from weft.benchmark.systems.weft import WeftSystem

    systems = {policy: WeftSystem(model, workload, policy=policy) for policy in (_STATIC, _CONTINUOUS)}
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in systems}
    warm_up = workload.warm_up()
    for policy, system in systems.items():
        system.run(warm_up, progress(f"{policy}, warm-up", len(warm_up.jobs)))
    for repetition in range(1, options.repetitions + 1):
        for policy, system in systems.items():
            advance = progress(f"{policy}, run {repetition} of {options.repetitions}", len(workload.jobs))
            outcomes[policy].append(system.run(workload, advance))
    case = (
        f"{options.requests} requests, {options.in_flight} in flight, prompts {options.prompts}, "
        f"outputs {options.short}, one in {options.one_in} {options.long}"
    )
    base = model.row("continuous", case=case, seed=options.seed, notes=_NOTE)
    yield from compare(outcomes[_STATIC], outcomes[_CONTINUOUS], base.by("weft", WeftSystem.version))


def compare(static: list[Outcome], continuous: list[Outcome], base: Row) -> list[Row]:
    """Rows of both policies and their ratios, above 1 where continuous batching is better."""
    pairs = list(zip(static, continuous, strict=True))
    elapsed = [before.elapsed_s / after.elapsed_s for before, after in pairs]
    waits = [quantile(before.first_token_s, 0.5) / quantile(after.first_token_s, 0.5) for before, after in pairs]
    equal = min(num_equal(before.token_ids, after.token_ids) for before, after in pairs)
    total = len(continuous[0].answers)
    all_equal = Target(relation="==", value=total) if base.dtype == "float32" else None
    both = base.by(f"weft {_CONTINUOUS} over {_STATIC}", base.system_version)
    rows = []
    for policy, outcomes in ((_STATIC, static), (_CONTINUOUS, continuous)):
        row = base.by(f"weft {policy}", base.system_version)
        seconds = [outcome.elapsed_s for outcome in outcomes]
        rows += [row.of("time of the workload", seconds, "s", spread=spread(seconds)), *rows_of(outcomes, row)]
    return [
        *rows,
        both.of("requests equal", [equal], f"of {total}", target=all_equal),
        both.of("sooner done", elapsed, "x", spread=spread(elapsed), target=_SOONER),
        both.of("time to first token p50 lower", waits, "x", spread=spread(waits), target=_FIRST_TOKEN),
    ]


EXPERIMENT = Experiment(
    summary="continuous batching against static batches: time of a skewed workload, and the wait for a first token",
    examples=("continuous", "continuous --repetitions 3 --json results/continuous.jsonl", "continuous --long 640"),
    options=ContinuousOptions,
    run=run,
    collected={"cpu": {}, "cuda": {"shape": "llama-1b", "dtype": "bfloat16", "device": "cuda"}},
)
