"""Kernels on a GPU beside their peers: attention for training, paged decode and prefill, and the small operations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from weft.benchmark.experiments import Experiment
from weft.benchmark.options import option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row
from weft.errors import ConfigError
from weft.options import positive

if TYPE_CHECKING:
    from weft.benchmark.kernels.contender import Place

Case = TypeVar("Case")

PARTS = ("training", "decode", "prefill", "small")


@dataclass(frozen=True, kw_only=True)
class KernelsOptions:
    """Building it raises ConfigError where there is no GPU."""

    part: str = option("all", "all, or some of " + ",".join(PARTS))
    device: str = option("cuda", "cuda or cuda:N")
    seed: int = option(0, "of the inputs")
    repetitions: int = option(7, "measured repetitions; medians are reported")
    naive_gib: int = option(80, "memory past which attention by way of all scores is left out")
    compile_seconds: int = option(60, "time for torch.compile in all; past it the rest is left out; 0 leaves all out")

    def __post_init__(self) -> None:
        positive("KernelsOptions", repetitions=self.repetitions, naive_gib=self.naive_gib)
        if self.compile_seconds < 0:
            raise ConfigError(f"compile_seconds={self.compile_seconds} is negative")
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ConfigError(f"unknown part={self.part!r}", hint="all, or some of " + ",".join(PARTS))
        if self.device.partition(":")[0] != "cuda":
            raise ConfigError(f"device={self.device!r}: kernels are measured on a GPU", hint="cuda or cuda:N")
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={self.device!r}: measuring kernels needs a GPU, and torch sees none",
                hint="`weft bench plan` needs none",
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS if self.part == "all" else tuple(filter(None, self.part.split(",")))


def run(options: KernelsOptions, progress: Progress) -> Iterator[Row]:
    """Every part that was asked for, in the order of PARTS."""
    import torch

    from weft.benchmark.kernels.contender import Place
    from weft.benchmark.kernels.meter import CudaMeter
    from weft.config import ModelConfig
    from weft.inference.placement import place as place_of

    device = place_of(ModelConfig(model="-", device=options.device), None).device
    if device.index is not None:
        torch.cuda.set_device(device)
    place = Place(
        device=device,
        dtype=torch.bfloat16,
        meter=CudaMeter(options.repetitions),
        row=Row(experiment="kernels", dtype="bfloat16", seed=options.seed),
    )
    for part in PARTS:
        if part in options.parts:
            yield from _MEASURED[part](options, place, progress)


def _training(options: KernelsOptions, place: "Place", progress: Progress) -> list[Row]:
    from weft.benchmark.kernels.training_attention import NOTE, SHAPES, TrainingAttention

    attention = TrainingAttention(place, naive_limit=options.naive_gib << 30, compile_seconds=options.compile_seconds)
    return _each(SHAPES, attention.rows, "training attention", NOTE, place, progress)


def _decode(options: KernelsOptions, place: "Place", progress: Progress) -> list[Row]:
    from weft.benchmark.kernels.decode_attention import NOTE, SHAPES, decode_rows, read_rows

    reading, bandwidth = read_rows(place)
    rows = _each(SHAPES, lambda shape: decode_rows(shape, place, bandwidth), "paged decode", NOTE, place, progress)
    return [*reading, *rows]


def _prefill(options: KernelsOptions, place: "Place", progress: Progress) -> list[Row]:
    from weft.benchmark.kernels.prefill_attention import NOTE, SHAPES, prefill_rows

    return _each(SHAPES, lambda shape: prefill_rows(shape, place), "paged prefill", NOTE, place, progress)


def _small(options: KernelsOptions, place: "Place", progress: Progress) -> list[Row]:
    from weft.benchmark.kernels.small_operations import MODELS, NOTE, small_operations, small_rows

    rows = []
    for widths in MODELS:
        operations = tuple(small_operations(widths))
        rows += _each(
            operations,
            partial(small_rows, widths=widths, place=place),
            f"small operations, {widths.name}",
            NOTE,
            place,
            progress,
        )
    return rows


def _each(
    cases: tuple[Case, ...],
    measured: Callable[[Case], list[Row]],
    stage: str,
    note: str,
    place: "Place",
    progress: Progress,
) -> list[Row]:
    """Rows of all cases, the part's note on each; memory is given back between them."""
    import gc

    import torch

    from weft.benchmark.kernels.contender import skipped

    advance = progress(stage, len(cases))
    rows: list[Row] = []
    for case in cases:
        try:
            found = measured(case)
        except Exception as error:  # the rows of other cases stand already: say what happened and go on
            reason = f"{type(error).__name__}: {error}"[:300]
            said = skipped(place.case(f"{stage}, {case}").row.by("weft", ""), stage, reason).rows
            found = [replace(row, failed=True) for row in said]
        rows += [row if row.notes else replace(row, notes=note) for row in found]
        gc.collect()
        torch.cuda.empty_cache()
        advance()
    return rows


_MEASURED = {"training": _training, "decode": _decode, "prefill": _prefill, "small": _small}

EXPERIMENT = Experiment(
    summary="kernels beside their peers, on a GPU",
    examples=("kernels", "kernels --part decode,prefill", "kernels --json results/kernels.jsonl"),
    options=KernelsOptions,
    run=run,
    collected={"cuda": {}},
)
