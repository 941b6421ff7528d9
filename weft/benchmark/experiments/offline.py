"""Tokens a second of a mixed batch: weft against HuggingFace, in one run, on the same requests.

Each repetition runs every system once, so that a machine that slows down slows all of them. A speed is only compared
between systems that said the same tokens. With `--suite` the standing workloads of GPUs run instead (`suite_run.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from weft.benchmark.engine_options import parse_engine_options
from weft.benchmark.experiments import Experiment
from weft.benchmark.measure import Outcome, rows_of, spread
from weft.benchmark.options import ModelOptions, numbers, option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row, Target
from weft.benchmark.suites import SUITES, chosen_suites
from weft.benchmark.systems import System, check_system, find_system
from weft.benchmark.workload import Lengths, Workload, mixed_workload, num_equal
from weft.errors import ConfigError, WeftError
from weft.options import positive

if TYPE_CHECKING:
    from weft.benchmark.served_model import ServedModel

# How many times as many tokens a second as these weft is to give, on two cores in float32.
_TARGETS = {"hf_generate": Target(relation=">=", value=8.0), "hf_continuous": Target(relation=">=", value=3.0)}
_SUBJECT = "weft"
_NOTE = (
    "tokens generated / wall time of the whole workload, prefill included; loading and one warm-up of the same width "
    "with short answers are not; prefix caching off; end-of-sequence ids ignored"
)


_SUITE_SYSTEMS = ("weft", "hf_static")
_SYSTEMS = "weft,hf_generate,hf_continuous"
_OWN = ("model", "requests", "in_flight", "prompts", "outputs")  # what a suite brings itself


@dataclass(frozen=True, kw_only=True)
class OfflineOptions(ModelOptions):
    """What is left open here ("", 0) is decided by whether there is a suite, before anybody sees it."""

    dtype: str = option("", "of the weights (float32; with --suite bfloat16)")
    device: str = option("", "auto, cpu, cuda or cuda:N (cpu; with --suite cuda)")
    repetitions: int = option(0, "measured runs, medians reported; 0 is one, with --suite two, of which the better is")
    requests: int = option(16, "requests, all there at the start")
    in_flight: int = option(16, "requests that run at once")
    prompts: str = option("8,32,128,512", "prompt lengths: one of 8,32,128 or uniform 64:256")
    outputs: str = option("16:128", "output lengths, as prompts; end-of-sequence ids are ignored")
    systems: str = option("", f"who is measured, in this order ({_SYSTEMS}; with --suite {','.join(_SUITE_SYSTEMS)})")
    suite: str | None = option(None, "standing workloads in place of the above: some of " + ",".join(SUITES))
    cases: str | None = option(None, "of the suites only the cases with so many in flight, 1,64 for instance")
    hf_requests: int = option(0, "requests of a suite's case that HuggingFace answers, but at least a batch; 0 is all")
    engine: str | None = option(None, "fields of weft's engine for a suite: enforce_eager=true,overlap=false")

    def __post_init__(self) -> None:
        usual = ("float32", "cpu", 1, _SYSTEMS) if self.suite is None else ("bfloat16", "cuda", 2, "weft,hf_static")
        for name, value in zip(("dtype", "device", "repetitions", "systems"), usual, strict=True):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        super().__post_init__()
        positive("OfflineOptions", requests=self.requests, in_flight=self.in_flight)
        Lengths.parse(self.prompts)
        Lengths.parse(self.outputs)
        for name in self.system_names:
            check_system(name)
        if len(set(self.system_names)) != len(self.system_names):
            raise ConfigError(f"systems={self.systems!r} names a system twice")
        if self.suite is None:
            hint = "one of --suite " + ",".join(sorted(SUITES))
            self._refuse({"cases": None, "hf_requests": 0, "engine": None}, "belongs to a suite", hint)
            return
        self._refuse({field.name: field.default for field in fields(self) if field.name in _OWN}, "is the suite's own")
        if not set(self.system_names) <= set(_SUITE_SYSTEMS):
            raise ConfigError(f"systems={self.systems!r} with a suite", hint="some of " + ",".join(_SUITE_SYSTEMS))
        positive("OfflineOptions", hf_requests=self.hf_requests or None)
        if "weft" not in self.system_names:
            self._refuse({"engine": None}, f"is weft's, systems={self.systems!r}")
        if "hf_static" not in self.system_names:
            self._refuse({"hf_requests": 0}, f"is hf_static's, systems={self.systems!r}")
        chosen_suites(self.suite, self.widths)
        parse_engine_options(self.engine)

    @property
    def system_names(self) -> list[str]:
        return self.systems.split(",")

    @property
    def widths(self) -> list[int]:
        return [] if self.cases is None else numbers("cases", self.cases)

    def _refuse(self, defaults: Mapping[str, Any], why: str, hint: str = "leave it out") -> None:
        """Raise ConfigError for an option that would be read by nobody."""
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise ConfigError(f"{name}={getattr(self, name)!r} {why}, suite={self.suite!r}", hint=hint)


def run(options: OfflineOptions, progress: Progress) -> Iterator[Row]:
    """All systems loaded and warmed up, then measured in turn; suites one by one.

    Raises: ConfigError, CheckpointError at once for what cannot be served.
    """
    if options.suite is not None:
        return _run_suites(options, options.suite, progress)
    return _run_mixed(options, progress)


def _run_suites(options: OfflineOptions, suites: str, progress: Progress) -> Iterator[Row]:
    from weft.benchmark.suite_run import SuiteSettings, run_suites

    settings = SuiteSettings(
        suites=chosen_suites(suites, options.widths),
        systems=tuple(options.system_names),
        shape=options.shape,
        dtype=options.dtype,
        device=options.device,
        seed=options.seed,
        repetitions=options.repetitions,
        hf_requests=options.hf_requests or None,
        engine=parse_engine_options(options.engine),
    )
    return run_suites(settings, progress)


def _run_mixed(options: OfflineOptions, progress: Progress) -> Iterator[Row]:
    from weft.benchmark.served_model import open_model
    from weft.benchmark.systems.weft import WeftSystem

    model = open_model(
        model=options.model, shape=options.shape, dtype=options.dtype, device=options.device, seed=options.seed
    )
    model.check_prompts(Lengths.parse(options.prompts).longest)
    workload = mixed_workload(
        requests=options.requests,
        in_flight=options.in_flight,
        prompts=Lengths.parse(options.prompts),
        outputs=Lengths.parse(options.outputs),
        vocab_size=model.vocab_size,
        seed=options.seed,
    )
    if _SUBJECT in options.system_names:
        WeftSystem.check(model, workload, {})
    return _mixed_rows(model, workload, options, progress)


def _mixed_rows(model: "ServedModel", workload: Workload, options: OfflineOptions, progress: Progress) -> Iterator[Row]:
    failures: dict[str, str] = {}
    with ExitStack() as opened:
        systems: dict[str, System] = {}
        for name in options.system_names:
            with _alone(name, failures):
                systems[name] = find_system(name)(model, workload)
                opened.callback(systems[name].close)
        outcomes = measure(systems, workload, repetitions=options.repetitions, progress=progress, failures=failures)
        versions = {name: system.version for name, system in systems.items()}
    base = model.row("offline", case=_case(options), seed=options.seed, notes=_NOTE)
    targets = _TARGETS if model.device.type == "cpu" and options.shape is None else {}
    for name, reason in failures.items():
        yield base.by(name, versions.get(name, "")).unmeasured(reason, failed=True)
    yield from compare(outcomes, workload, base, versions, targets)


@contextmanager
def _alone(name: str, failures: dict[str, str]) -> Iterator[None]:
    """What fails in here is the end of this system, and of no other one."""
    import logging

    from torch import OutOfMemoryError

    try:
        yield
    except (WeftError, OutOfMemoryError) as error:
        failures[name] = str(error).split("\n", maxsplit=1)[0]
        logging.getLogger("weft").warning("%s: not measured: %s", name, failures[name])


def measure(
    systems: Mapping[str, System],
    workload: Workload,
    *,
    repetitions: int,
    progress: Progress,
    failures: dict[str, str],
) -> dict[str, list[Outcome]]:
    """The outcomes of each system; its warm-up, the same widths with short answers, is not among them.

    failures: gets the reason of each system that fails, whose outcomes are left out.
    """
    warm_up = workload.warm_up()
    for name, system in systems.items():
        with _alone(name, failures):
            system.run(warm_up, progress(f"{name}, warm-up", len(warm_up.jobs)))
    outcomes: dict[str, list[Outcome]] = {name: [] for name in systems}
    for repetition in range(1, repetitions + 1):
        for name, system in systems.items():
            if name not in failures:
                advance = progress(f"{name}, run {repetition} of {repetitions}", len(workload.jobs))
                with _alone(name, failures):
                    outcomes[name].append(system.run(workload, advance))
    return {name: runs for name, runs in outcomes.items() if name not in failures}


def compare(
    outcomes: Mapping[str, Sequence[Outcome]],
    workload: Workload,
    base: Row,
    versions: Mapping[str, str],
    targets: Mapping[str, Target],
) -> list[Row]:
    """Rows of each system, how many requests it answered as the first HuggingFace system did, and weft's ratios."""
    reference = next((name for name in outcomes if name != _SUBJECT), None)
    rows: list[Row] = []
    equal: dict[str, bool] = {}
    for name, runs in outcomes.items():
        row = base.by(name, versions[name])
        complete = all(outcome.is_complete(workload) for outcome in runs)
        if complete:
            rows += rows_of(runs, row)
        equal[name] = complete
        if reference is not None and name != reference:
            counts = [
                num_equal(run.token_ids, other.token_ids) for run, other in zip(runs, outcomes[reference], strict=True)
            ]
            rows.append(_equality_row(row, min(counts), len(workload.jobs), reference))
            equal[name] = complete and min(counts) == len(workload.jobs)
    if _SUBJECT in outcomes:
        row = base.by(_SUBJECT, versions[_SUBJECT])
        for name in outcomes:
            if name == _SUBJECT:
                continue
            if base.dtype == "float32" and not (equal[_SUBJECT] and equal[name]):
                continue  # the row of unequal requests says why there is no ratio
            ratios = [
                mine.tokens_per_second / other.tokens_per_second
                for mine, other in zip(outcomes[_SUBJECT], outcomes[name], strict=True)
            ]
            rows.append(row.of(f"tokens/s over {name}", ratios, "x", spread=spread(ratios), target=targets.get(name)))
    return rows


def _case(options: OfflineOptions) -> str:
    return (
        f"{options.requests} requests, {options.in_flight} in flight, "
        f"prompts {options.prompts}, outputs {options.outputs}"
    )


def _equality_row(row: Row, count: int, total: int, reference: str) -> Row:
    """In float32 all must be equal; in less, near-ties fall either way, and the number only informs."""
    target = Target(relation="==", value=total) if row.dtype == "float32" else None
    return row.of(f"requests equal to {reference}", [count], f"of {total}", target=target)


EXPERIMENT = Experiment(
    summary="tokens/s of a mixed batch: weft, HuggingFace generate and HuggingFace's continuous batching",
    examples=(
        "offline",
        "offline --systems weft,hf_continuous --repetitions 3 --json results/offline.jsonl",
        "offline --suite ladder,mixed64,big --json results/h200.jsonl",
        "offline --suite big --cases 1,64 --hf-requests 64 --engine max_num_batched_tokens=8192",
        "offline --suite ladder --shape llama-tiny --device cpu --dtype float32",
    ),
    options=OfflineOptions,
    run=run,
    collected={"cpu": {}, "cuda": {"suite": "ladder,mixed64,big"}},
)
