"""Decode steps alone: B requests of one context, nobody joins or leaves; beside a prototype's and what reading takes.

Host time is what `Engine.step` takes without its waits for the GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.benchmark.engine_options import parse_engine_options
from weft.benchmark.experiments import Experiment
from weft.benchmark.measure import quantile, spread
from weft.benchmark.options import numbers, option
from weft.benchmark.progress import Progress
from weft.benchmark.published import (
    DRAWN_OVER_GREEDY,
    HOST_US,
    PROTOTYPE,
    PROTOTYPE_STEPS,
    READ_TB_PER_S,
    STEP_OVER_PROTOTYPE,
)
from weft.benchmark.row import Row
from weft.errors import ConfigError
from weft.options import positive

if TYPE_CHECKING:
    from weft.benchmark.decode_steps import DecodeTimes
    from weft.benchmark.served_model import ServedModel
    from weft.config import EngineConfig
    from weft.inference.engine import Engine

GREEDY = "greedy"
_NOTE = (
    "wall time of successive steps by tokens given out; greedy, prefix caching off; median of repetitions that follow "
    "one another, so that the context is reached in the middle of them"
)


@dataclass(frozen=True, kw_only=True)
class StepsOptions:
    shape: str = option("llama-190m", "llama-190m, llama-1b, llama-8b, or several between commas")
    batch: str = option("1,8,64", "requests that decode")
    context: str = option("512,2048", "tokens of each")
    steps: int = option(100, "steps of a repetition")
    repetitions: int = option(3, "medians are reported")
    sampling: str = option("greedy", "greedy, or greedy,drawn: also with top_k, top_p and a seed in every request")
    engine: str | None = option(None, "fields of weft's engine: enforce_eager=true,overlap=false")
    dtype: str = option("bfloat16", "of weights and cache")
    device: str = option("cuda", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "of weights and prompts")

    def __post_init__(self) -> None:
        positive("StepsOptions", steps=self.steps, repetitions=self.repetitions)
        if self.sampling not in (GREEDY, f"{GREEDY},drawn"):
            raise ConfigError(f"sampling={self.sampling!r} is none of these", hint="greedy, or greedy,drawn")
        most = parse_engine_options(self.engine).get("max_num_seqs")
        for batch in numbers("batch", self.batch):
            if most is not None and batch > most:
                raise ConfigError(
                    f"batch={batch} requests do not decode at once in an engine of max_num_seqs={most}",
                    hint="leave max_num_seqs out: it is the largest batch",
                )
        shortest = self.steps * self.repetitions // 2 + 16
        for context in numbers("context", self.context):
            if context < shortest:
                raise ConfigError(
                    f"context={context} is passed by {self.repetitions} repetitions of {self.steps} steps",
                    hint=f"a context of {shortest} or more, or fewer steps",
                )


def run(options: StepsOptions, progress: Progress) -> Iterator[Row]:
    """One engine a shape, for its largest batch and context.

    Raises: ConfigError at once for a shape or an engine that cannot be; nothing is measured then.
    """
    from weft.benchmark.served_model import by_shapes, open_shapes

    models = open_shapes(options.shape, dtype=options.dtype, device=options.device, seed=options.seed)
    return by_shapes(models, partial(_config, options), partial(_shape_rows, options, progress))


def _config(options: StepsOptions, model: "ServedModel") -> "EngineConfig":
    from weft.benchmark.decode_steps import SteadyDecode

    batches, contexts = numbers("batch", options.batch), numbers("context", options.context)
    extent = {"steps": options.steps, "repetitions": options.repetitions}
    longest = max(SteadyDecode.room(c, batch=b, **extent) for b in batches for c in contexts)
    implied = {
        "max_model_len": longest,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": max(2048, *batches),
        "enable_prefix_caching": False,
        "policy": "prefill_first",  # all prompts first: the contexts stay alike
    }
    config = model.engine_config(implied | parse_engine_options(options.engine))
    model.check(config, longest=longest, at_once=max(batches))
    return config


def _shape_rows(
    options: StepsOptions, progress: Progress, model: "ServedModel", config: "EngineConfig"
) -> Iterator[Row]:
    from weft import __version__
    from weft.inference.engine import Engine

    shape = model.name
    batches, contexts = numbers("batch", options.batch), numbers("context", options.context)
    extent = {"steps": options.steps, "repetitions": options.repetitions}
    engine = Engine(config, model.checkpoint)
    notes = "; ".join(filter(None, (_NOTE, options.engine)))
    base = model.row("steps", case="", seed=options.seed, notes=notes).by("weft", __version__)
    for context in contexts:
        for batch in batches:
            row = replace(base, case=f"{shape}: {batch} requests at a context of {context:,}")

            how = {"batch": batch, "context": context, "seed": options.seed, **extent}
            times = _measured(engine, progress(f"{shape}, {batch} x {context}", options.repetitions), **how)
            yield from step_rows(row, times, shape=shape, batch=batch, context=context, itemsize=model.dtype.itemsize)
            if options.sampling != GREEDY:
                advance = progress(f"{shape}, {batch} x {context}, drawn", options.repetitions)
                yield from drawn_rows(row, times, _measured(engine, advance, draws=True, **how), batch=batch)


def _measured(engine: "Engine", advance: Callable[[], None], **how: Any) -> "DecodeTimes":
    from weft.benchmark.decode_steps import SteadyDecode

    decode = SteadyDecode(engine, **how)
    times = decode.measure(advance)
    decode.close()
    return times


def drawn_rows(row: Row, greedy: "DecodeTimes", drawn: "DecodeTimes", *, batch: int) -> list[Row]:
    """The step whose tokens are drawn, and what that costs over the greedy step of the same run."""
    from statistics import median

    from weft.benchmark.decode_steps import DRAWN

    milliseconds = [seconds * 1e3 for seconds in drawn.step_s]
    ratio = median(drawn.step_s) / median(greedy.step_s)
    how = ", ".join(f"{name}={value}" for name, value in DRAWN.items()) + ", seeds"
    return [
        row.of("decode step, drawn", milliseconds, "ms", spread=spread(milliseconds), notes=how),
        row.of("drawn over greedy", [ratio], "x", target=DRAWN_OVER_GREEDY if batch == 64 else None, notes=how),
    ]


def step_rows(row: Row, times: "DecodeTimes", *, shape: str, batch: int, context: int, itemsize: int) -> list[Row]:
    """The step, what part of it reading alone would take, the prototype's best, and the host's part."""
    import logging
    from statistics import median

    from weft.benchmark.decode_steps import read_bytes
    from weft.benchmark.shapes import shape_config

    milliseconds = [seconds * 1e3 for seconds in times.step_s]
    step = median(milliseconds)
    rows = [
        row.of("decode step", milliseconds, "ms", spread=spread(milliseconds)),
        row.of("tokens/s", [batch / step * 1e3], "tokens/s").over(len(milliseconds)),
        row.of("mean context", times.contexts, "tokens"),
    ]
    logging.getLogger("weft").info("%s: %.3f ms a step", row.case, step)
    if times.host_s:
        host = row.of(
            "host time of a step, median", [quantile(times.host_s, 0.5) * 1e6], "µs", target=HOST_US.get(batch)
        )
        rows.append(host.over(len(times.host_s)))
        # Only a GPU has a bandwidth and a prototype to be read beside.
        bytes_read = read_bytes(shape_config(shape), itemsize=itemsize, batch=batch, context=context)
        limit = bytes_read / READ_TB_PER_S / 1e9
        rows.append(
            row.of("limit over step", [100 * limit / step], "%", notes=f"the limit reads at {READ_TB_PER_S} TB/s")
        )
        known = PROTOTYPE_STEPS.get((shape, batch, context))
        if known is not None and row.dtype == "bfloat16":
            rows.append(
                row.of(
                    f"step over the prototype's {known.best_ms:g} ms",
                    [step / known.best_ms],
                    "x",
                    target=STEP_OVER_PROTOTYPE,
                    notes=f"the prototype: {PROTOTYPE}",
                )
            )
    return rows


EXPERIMENT = Experiment(
    summary="milliseconds of a decode step at steady batch and context, and the host's part of it",
    examples=(
        "steps",
        "steps --shape llama-190m,llama-1b,llama-8b --batch 1,8,32,64 --json results/h200.jsonl",
        "steps --shape llama-1b --batch 64 --context 512 --sampling greedy,drawn",
        "steps --batch 64 --context 512 --engine enforce_eager=true",
        "steps --shape llama-tiny --device cpu --dtype float32 --batch 1,4 --context 64 --steps 10",
    ),
    options=StepsOptions,
    run=run,
    collected={"cuda": {"shape": "llama-190m,llama-1b,llama-8b", "batch": "1,8,32,64"}},
)
