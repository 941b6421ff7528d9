"""How often the gate of `weft bench ab` errs: runs on a made-up machine, of heads that are slower by known parts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from weft import __version__
from weft.benchmark.experiments import ANYWHERE, Experiment
from weft.benchmark.options import numbers, option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row, Target
from weft.errors import ConfigError
from weft.options import positive

_FALSE_ALARMS = Target(relation="<=", value=1.0)  # per cent: the errors that a bound is allowed
_POWER = {5: Target(relation=">=", value=95.0), 10: Target(relation=">=", value=99.0)}


@dataclass(frozen=True, kw_only=True)
class GatesOptions:
    slower: str = option("0,3,5,10", "per cent by which the head is slower")
    runs: int = option(200, "simulated runs of each")
    blocks: int = option(32, "blocks of a run")
    measures: int = option(2, "parts of the workload, each with a verdict")
    threshold: float = option(2.0, "per cent that may go unnoticed")
    noise: float = option(2.0, "per cent: deviation of a turn")
    process: float = option(0.3, "per cent: deviation between processes of one commit")
    seed: int = option(0, "of the noise")

    def __post_init__(self) -> None:
        positive("GatesOptions", runs=self.runs, blocks=self.blocks, measures=self.measures)
        if not (0 <= self.noise <= 100 and 0 <= self.process <= 100 and 0 < self.threshold < 5):
            raise ConfigError(
                f"noise={self.noise:g} and process={self.process:g} must be from 0 to 100 per cent, "
                f"threshold={self.threshold:g} between 0 and 5"
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")
        slower = [part for part in self.slower.split(",") if part != "0"]
        if slower:  # each but 0, which is a head that is not slower
            numbers("slower", ",".join(slower))

    @property
    def parts(self) -> list[int]:
        return [int(part) for part in self.slower.split(",")]


def run(options: GatesOptions, progress: Progress) -> Iterator[Row]:
    from weft.benchmark.ab.simulation import Machine, verdicts
    from weft.benchmark.ab.verdict import Verdict

    machine = Machine(noise=options.noise / 100, process=options.process / 100)
    for part in options.parts:
        advance = progress(f"{part} % slower", options.runs)
        ended: Counter[Verdict] = Counter()
        for verdict in verdicts(
            machine,
            slowdown=part / 100,
            threshold=options.threshold / 100,
            blocks=options.blocks,
            measures=options.measures,
            runs=options.runs,
            seed=options.seed,
        ):
            ended[verdict] += 1
            advance()
        row = Row(
            experiment="gates",
            case=f"head {part} % slower, threshold {options.threshold:g} %, {options.blocks} blocks, "
            f"{options.measures} measures",
            system="weft bench ab",
            system_version=__version__,
            seed=options.seed,
            notes=f"simulated: {machine}",
        )
        for verdict in Verdict:
            target = None
            if verdict is Verdict.SLOWER:
                target = _FALSE_ALARMS if part == 0 else _POWER.get(part)
            share = 100 * ended[verdict] / options.runs
            yield row.of(verdict, [share], "% of runs", target=target).over(options.runs)


EXPERIMENT = Experiment(
    summary="how often the speed gate errs, over simulated runs",
    examples=("gates", "gates --noise 5 --blocks 64", "gates --slower 0 --process 1 --runs 1000"),
    options=GatesOptions,
    run=run,
    collected=ANYWHERE,
)
