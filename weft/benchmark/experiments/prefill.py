"""Prefill alone: prompts of one length that nothing decodes beside, in tokens a second and in what they multiply."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from weft.benchmark.engine_options import parse_engine_options
from weft.benchmark.experiments import Experiment
from weft.benchmark.measure import spread
from weft.benchmark.options import numbers, option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row
from weft.options import positive

if TYPE_CHECKING:
    from weft.benchmark.served_model import ServedModel
    from weft.config import EngineConfig

_NOTE = (
    "wall time from the first step to the last prompt's token, shared out; short prompts share a step of the budget, "
    "long ones come in chunks; random tokens, prefix caching off; two prompts before are left out"
)


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    shape: str = option("llama-1b", "llama-190m, llama-1b, llama-8b, or several between commas")
    prompts: str = option("512,2048,8192", "tokens of a prompt")
    budget: int = option(2048, "tokens of a step")
    tokens: int = option(65536, "tokens of a repetition, in as many prompts as that makes")
    repetitions: int = option(5, "medians are reported")
    engine: str | None = option(None, "fields of weft's engine: enforce_eager=true,overlap=false")
    dtype: str = option("bfloat16", "of weights and cache")
    device: str = option("cuda", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "of weights and prompts")

    def __post_init__(self) -> None:
        positive("PrefillOptions", budget=self.budget, tokens=self.tokens, repetitions=self.repetitions)
        numbers("prompts", self.prompts)
        parse_engine_options(self.engine)


def run(options: PrefillOptions, progress: Progress) -> Iterator[Row]:
    """One engine a shape, for its longest prompt.

    Raises: ConfigError at once for a shape or an engine that cannot be; nothing is measured then.
    """
    from weft.benchmark.served_model import by_shapes, open_shapes

    models = open_shapes(options.shape, dtype=options.dtype, device=options.device, seed=options.seed)
    return by_shapes(models, partial(_config, options), partial(_shape_rows, options, progress))


def _config(options: PrefillOptions, model: "ServedModel") -> "EngineConfig":
    lengths = numbers("prompts", options.prompts)
    longest = max(lengths) + 1
    implied = {
        "max_model_len": longest,
        "max_num_seqs": min(options.budget, -(-options.budget // min(lengths)) + 1),  # the next begins in a last chunk
        "max_num_batched_tokens": options.budget,
        "enable_prefix_caching": False,
        "policy": "prefill_first",
    }
    config = model.engine_config(implied | parse_engine_options(options.engine))
    model.check(config, longest=longest)
    return config


def _shape_rows(
    options: PrefillOptions, progress: Progress, model: "ServedModel", config: "EngineConfig"
) -> Iterator[Row]:
    import logging

    from weft import __version__
    from weft.benchmark.prefill_steps import PromptsAlone, prompt_flops
    from weft.benchmark.shapes import shape_config
    from weft.inference.engine import Engine

    engine = Engine(config, model.checkpoint)
    notes = "; ".join(filter(None, (_NOTE, options.engine)))
    base = model.row("prefill", case="", seed=options.seed, notes=notes).by("weft", __version__)
    for length in numbers("prompts", options.prompts):
        prompts = max(1, options.tokens // length)
        case = f"{model.name}: {prompts} prompts of {length:,} tokens, steps of {options.budget:,}"
        alone = PromptsAlone(engine, length=length, prompts=prompts, repetitions=options.repetitions, seed=options.seed)
        seconds = alone.measure(progress(f"{model.name}, prompts of {length}", options.repetitions))
        row = replace(base, case=case)
        milliseconds = [each * 1e3 for each in seconds]
        speeds = [length / each for each in seconds]
        yield row.of("a prompt", milliseconds, "ms", spread=spread(milliseconds))
        yield row.of("prompt tokens", speeds, "tokens/s", spread=spread(speeds))
        yield row.of("work of a prompt", [prompt_flops(shape_config(model.name), length) / 1e9], "GFLOP")
        logging.getLogger("weft").info("%s: %.3f ms a prompt", case, row.of("", milliseconds, "").value)


EXPERIMENT = Experiment(
    summary="tokens a second of prompts alone, and what they multiply",
    examples=(
        "prefill",
        "prefill --shape llama-1b --prompts 2048 --json results/h200.jsonl",
        "prefill --shape llama-tiny --device cpu --dtype float32 --prompts 32,96 --budget 64 --tokens 192",
    ),
    options=PrefillOptions,
    run=run,
    collected={"cuda": {"shape": "llama-190m,llama-1b,llama-8b"}},
)
