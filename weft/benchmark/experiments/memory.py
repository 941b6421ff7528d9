"""What paging wastes: the keys and values held at the fullest moment, against the tokens that are in flight then.

Each request may leave its last block partly empty; nothing else may be held that no token fills.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.benchmark.experiments import Experiment
from weft.benchmark.options import ModelOptions, option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row, Target
from weft.benchmark.workload import Lengths, Workload, mixed_workload
from weft.options import positive

if TYPE_CHECKING:
    from weft.benchmark.served_model import ServedModel

_BOUND = Target(relation="<=", value=1.05)
_NOTE = "at the step that owns most blocks; prefix caching off; the pool itself is allocated at the start"


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(ModelOptions):
    requests: int = option(16, "requests, all there at the start")
    in_flight: int = option(8, "requests that run at once")
    prompts: str = option("8,32,128,512", "prompt lengths: one of 8,32,128 or uniform 64:256")
    outputs: str = option("16:64", "output lengths, as prompts")
    block_size: int = option(16, "tokens of a block")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("MemoryOptions", requests=self.requests, in_flight=self.in_flight, block_size=self.block_size)
        Lengths.parse(self.prompts)
        Lengths.parse(self.outputs)


def run(options: MemoryOptions, progress: Progress) -> Iterator[Row]:
    """One run; nothing in it is timed. Raises: ConfigError, CheckpointError at once for what cannot be served."""
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
    engine = {"block_size": options.block_size}
    WeftSystem.check(model, workload, engine)
    return _rows(model, workload, engine, options, progress)


def _rows(
    model: "ServedModel", workload: Workload, engine: Mapping[str, Any], options: MemoryOptions, progress: Progress
) -> Iterator[Row]:
    from weft.benchmark.cache_watch import CacheWatch, bytes_per_token
    from weft.benchmark.systems.weft import WeftSystem

    watch = CacheWatch(workload)
    system = WeftSystem(model, workload, observe=watch, **engine)
    watch.attach(system.engine)
    system.run(workload, progress("weft", len(workload.jobs)))
    token = bytes_per_token(system.engine.model.attention_specs, itemsize=model.dtype.itemsize)
    block = token * system.engine.geometry.block_size
    case = (
        f"{options.requests} requests, {options.in_flight} in flight, prompts {options.prompts}, "
        f"outputs {options.outputs}, blocks of {system.engine.geometry.block_size}"
    )
    base = model.row("memory", case=case, seed=options.seed, notes=_NOTE).by("weft", WeftSystem.version)
    peak = watch.peak_blocks * block
    filled = watch.peak_tokens * token
    allowance = watch.peak_requests * block
    yield from (
        base.of("peak keys and values", [peak / 2**20], "MiB"),
        base.of("tokens in flight", [watch.peak_tokens], "tokens"),
        base.of("bytes of a token", [token], "bytes"),
        base.of("requests in flight", [watch.peak_requests], "requests"),
        base.of("peak over tokens in flight", [peak / filled], "x"),
        base.of("peak over tokens and a block a request", [peak / (filled + allowance)], "x", target=_BOUND),
    )


EXPERIMENT = Experiment(
    summary="peak keys and values against the tokens in flight",
    examples=("memory", "memory --block-size 64 --in-flight 16 --json results/memory.jsonl"),
    options=MemoryOptions,
    run=run,
    collected={"cpu": {}, "cuda": {"dtype": "bfloat16", "device": "cuda"}},
)
