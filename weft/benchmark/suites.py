"""The standing workloads for GPUs: named suites of cases over a shape, each a closed loop by seed. No torch.

A closed loop: at most `in_flight` requests are in the engine, a new one enters as one leaves, and every request runs
to its own output length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.benchmark.workload import Lengths, Workload, mixed_workload
from weft.errors import ConfigError, nearest

MAX_MODEL_LEN = 4096  # tokens, of every suite


@dataclass(frozen=True, kw_only=True)
class Case:
    """prompts, outputs: lengths as `Lengths.parse` reads them."""

    in_flight: int
    requests: int
    prompts: str
    outputs: str

    def workload(self, *, vocab_size: int, seed: int) -> Workload:
        return mixed_workload(
            requests=self.requests,
            in_flight=self.in_flight,
            prompts=Lengths.parse(self.prompts),
            outputs=Lengths.parse(self.outputs),
            vocab_size=vocab_size,
            seed=seed,
        )

    def __str__(self) -> str:
        return f"{self.in_flight} in flight, {self.requests} requests, prompts {self.prompts}, outputs {self.outputs}"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """shape: the one that published figures are about."""

    name: str
    shape: str
    cases: tuple[Case, ...]


def _ladder(in_flight: int, requests: int) -> Case:
    return Case(in_flight=in_flight, requests=requests, prompts="64:256", outputs="32:96")


def _big(in_flight: int, requests: int) -> Case:
    return Case(in_flight=in_flight, requests=requests, prompts="256:1024", outputs="64:192")


SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            name="ladder",
            shape="llama-190m",
            cases=(_ladder(1, 8), _ladder(8, 32), _ladder(32, 128), _ladder(64, 256)),
        ),
        Suite(
            name="mixed64",
            shape="llama-1b",
            cases=(
                Case(in_flight=1, requests=4, prompts="128", outputs="256"),
                Case(in_flight=64, requests=64, prompts="32:1024", outputs="32:256"),
                Case(in_flight=256, requests=512, prompts="128:512", outputs="128"),
            ),
        ),
        Suite(
            name="big",
            shape="llama-8b",
            cases=(
                Case(in_flight=1, requests=3, prompts="128", outputs="128"),
                _big(64, 128),
                _big(256, 512),
            ),
        ),
    )
}


def chosen_suites(names: str, in_flight: Sequence[int] = ()) -> tuple[Suite, ...]:
    """Suites by name, separated by commas; `in_flight` leaves only their cases of these widths.

    Raises: ConfigError for a name or a width that is not there.
    """
    suites: list[Suite] = []
    for name in names.split(","):
        if name not in SUITES:
            raise ConfigError(f"unknown suite={name!r}", hint=nearest(name, SUITES))
        if any(suite.name == name for suite in suites):
            raise ConfigError(f"suite={names!r} names a suite twice")
        suites.append(SUITES[name])
    if not in_flight:
        return tuple(suites)
    known = {case.in_flight for suite in suites for case in suite.cases}
    for width in in_flight:
        if width not in known:
            raise ConfigError(
                f"no case of suite={names!r} has {width} in flight", hint=", ".join(map(str, sorted(known)))
            )
    picked = (
        replace(suite, cases=tuple(case for case in suite.cases if case.in_flight in in_flight)) for suite in suites
    )
    return tuple(suite for suite in picked if suite.cases)
