"""The kernel plan: which kernel multiplies by each matrix of a shape, at each batch size that is captured.

Nothing is measured: the choice is the engine's own, by shapes alone, and needs no GPU to be printed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from weft import __version__
from weft.benchmark.experiments import ANYWHERE, Experiment
from weft.benchmark.options import numbers, option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row
from weft.config import ModelConfig
from weft.errors import ConfigError
from weft.options import positive

if TYPE_CHECKING:
    from weft.layers.kernel_choice import ProductShape, Use

_MATRICES = ("qkv", "output", "gate-up", "down", "head")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    shape: str = option("llama-190m,llama-1b,llama-8b", "one of these, or several between commas")
    max_num_seqs: int = option(256, "the largest batch; the others are those that an engine would capture")
    batch: str | None = option(None, "batch sizes in place of those, 1,8,64 for instance")
    compute_capability: int = option(90, "of the GPU: 90 is a Hopper, 100 a Blackwell")
    dtype: str = option("bfloat16", "of weights and activations")

    def __post_init__(self) -> None:
        positive("PlanOptions", max_num_seqs=self.max_num_seqs, compute_capability=self.compute_capability)
        if self.batch is not None:
            numbers("batch", self.batch)
        if self.dtype == "auto":
            raise ConfigError("dtype='auto' is a checkpoint's to say, and a shape has none", hint="bfloat16 or float32")


def run(options: PlanOptions, progress: Progress) -> Iterator[Row]:
    """A row for each matrix and each run of batch sizes that one kernel serves. Raises: ConfigError for a shape."""
    from weft.benchmark.shapes import shape_config

    return _rows({name: shape_config(name) for name in options.shape.split(",")}, options, progress)


def _rows(shapes: Mapping[str, Any], options: PlanOptions, progress: Progress) -> Iterator[Row]:
    from weft.inference.step_sizes import decode_sizes

    chosen = None if options.batch is None else sorted(set(numbers("batch", options.batch)))
    batches = chosen or decode_sizes(options.max_num_seqs)
    advance = progress("shapes", len(shapes))
    for name, shape in shapes.items():
        row = Row(
            experiment="plan",
            case=f"{name}, compute capability {options.compute_capability}",
            system="weft",
            system_version=__version__,
            model=name,
            dtype=options.dtype,
            notes="the value is how many planes the product leaves to the next norm to sum; 1 is a whole product",
        )
        for matrix in _MATRICES:
            yield from _matrix_rows(row, matrix, shape, batches, options)
        advance()


def _matrix_rows(row: Row, matrix: str, shape: Any, batches: list[int], options: PlanOptions) -> Iterator[Row]:
    from weft.layers.kernel_choice import choose

    products = {batch: _product(matrix, shape, batch, options) for batch in batches}
    for choice, group in groupby(batches, key=lambda batch: choose(products[batch])):
        served = list(group)
        size = products[served[0]]
        span = f"{served[0]}" if len(served) == 1 else f"{served[0]} to {served[-1]}"
        yield row.of(
            f"{matrix} {size.outer:,} x {size.inner:,}, batch {span}", [choice.planes or 1], f"by {choice.product}"
        )


def _product(matrix: str, shape: Any, batch: int, options: PlanOptions) -> "ProductShape":
    """The product as the fused operations ask for it."""
    from weft.inference.placement import place
    from weft.layers.kernel_choice import ProductShape

    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    outer_inner_use: dict[str, tuple[int, int, Use]] = {
        "qkv": (queries + 2 * keys, hidden, "plain"),
        "output": (hidden, queries, "added"),
        "gate-up": (2 * inner, hidden, "swiglu"),
        "down": (hidden, inner, "added"),
        "head": (shape["vocab_size"], hidden, "plain"),
    }
    outer, width, use = outer_inner_use[matrix]
    return ProductShape(
        rows=batch,
        outer=outer,
        inner=width,
        use=use,
        has_bias=False,
        dtype=place(ModelConfig(model="-", dtype=options.dtype, device="cpu"), None).dtype,
        compute_capability=options.compute_capability,
    )


EXPERIMENT = Experiment(
    summary="which kernel multiplies by which matrix at which batch size; nothing is measured",
    examples=("plan", "plan --shape llama-1b --batch 1,8,64,128"),
    options=PlanOptions,
    run=run,
    collected=ANYWHERE,
)
