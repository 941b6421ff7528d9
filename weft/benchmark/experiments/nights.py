"""How often the watch over nights errs: made-up histories of a ratio, in which it falls by known parts and stays."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from weft import __version__
from weft.benchmark.experiments import ANYWHERE, Experiment
from weft.benchmark.options import option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row, Target
from weft.errors import ConfigError
from weft.options import positive

SOON = 14  # nights within which a shift is to be found
_FALSE_ALARMS = Target(relation="<=", value=5.0)  # per cent of histories
_AGAIN = Target(relation="<=", value=5.0)
_POWER = {5: Target(relation=">=", value=80.0), 10: Target(relation=">=", value=95.0)}


@dataclass(frozen=True, kw_only=True)
class NightsOptions:
    lower: str = option("0,3,5,10", "per cent by which the ratio falls in the middle")
    histories: int = option(200, "simulated histories of each")
    nights: int = option(120, "nights of a history")
    noise: float = option(2.0, "per cent: deviation of a night")
    wander: float = option(0.0, "per cent: deviation from one night to the next, for good")
    seed: int = option(0, "of the noise")

    def __post_init__(self) -> None:
        positive("NightsOptions", histories=self.histories, nights=self.nights)
        if not (0 <= self.noise <= 100 and 0 <= self.wander <= 100):
            raise ConfigError(
                f"noise={self.noise:g} and wander={self.wander:g} must be from 0 to 100 per cent",
                hint="a night deviates by 2 per cent",
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")
        assert self.parts, "a list of numbers has one"

    @property
    def parts(self) -> list[int]:
        """Raises: ConfigError for what is no list of parts."""
        try:
            parts = [int(part) for part in self.lower.split(",")]
        except ValueError as error:
            raise ConfigError(f"lower={self.lower!r} is no list of numbers", hint="0,3,5,10") from error
        if not all(0 <= part < 100 for part in parts):
            raise ConfigError(f"lower={self.lower!r}: a ratio falls by 0 to 99 per cent")
        return parts


def run(options: NightsOptions, progress: Progress) -> Iterator[Row]:
    from weft.benchmark.history_simulation import Nights, told

    nights = Nights(nights=options.nights, noise=options.noise / 100, wander=options.wander / 100)
    for part in options.parts:
        advance = progress(f"{part} % lower", options.histories)
        alarms, again, found = 0, 0, []
        for telling in told(nights, shift=part / 100, histories=options.histories, seed=options.seed):
            after = [night for night in telling if night >= 1 and part]
            alarms += len(telling) > len(after)
            again += len(after) > 1
            found += after[:1]
            advance()
        row = Row(
            experiment="nights",
            case=f"{part} % lower in the middle of {options.nights} nights",
            system="weft bench changes",
            system_version=__version__,
            seed=options.seed,
            notes=f"simulated: {nights}",
        )
        shares: list[tuple[str, int, Target | None]] = [("false alarms", alarms, _FALSE_ALARMS)]
        if part:
            shares.append((f"found within {SOON} nights", sum(night <= SOON for night in found), _POWER.get(part)))
            shares.append(("told again", again, _AGAIN))
        for metric, count, target in shares:
            share = 100 * count / options.histories
            yield row.of(metric, [share], "% of histories", target=target).over(options.histories)
        if found:
            yield row.of("nights until found, median", [median(found)], "nights").over(len(found))


EXPERIMENT = Experiment(
    summary="how often the watch over nights errs, over simulated histories",
    examples=("nights", "nights --noise 5", "nights --lower 0 --wander 0.3 --histories 1000"),
    options=NightsOptions,
    run=run,
    collected=ANYWHERE,
)
