"""The plan that is printed is what the fused operations ask for, and each batch size is served once."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.benchmark.experiments.plan import EXPERIMENT, PlanOptions
from weft.benchmark.progress import show_nothing
from weft.benchmark.row import Row
from weft.benchmark.served_model import open_model
from weft.errors import ConfigError
from weft.layers.fused import FusedOperations
from weft.layers.kernel_choice import KernelChoice, ProductShape
from weft.models.checkpoint.load import load_model


def planned(**options: Any) -> list[Row]:
    return list(EXPERIMENT.run(PlanOptions(**({"shape": "llama-tiny"} | options)), show_nothing))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_it_is_what_the_fused_operations_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[ProductShape]] = {"operations": [], "plan": []}

    def record(who: str) -> Any:
        def choose(shape: ProductShape) -> KernelChoice:
            asked[who].append(shape)
            return KernelChoice(product="library")

        return choose

    served = open_model(model="llama-tiny", shape="llama-tiny", dtype="float32", device="cpu", seed=0)
    model = load_model(served.checkpoint, max_positions=16, dtype=torch.float32, device=torch.device("cpu"))

    def attend(layer: int, qkv: Tensor, positions: Tensor, heads: Any) -> Tensor:
        return qkv[:, :64]

    operations = FusedOperations(attend, record("operations"))
    rows = torch.arange(3)
    hidden = model.forward(rows, rows, operations)
    model.logits(hidden, rows, operations)
    monkeypatch.setattr("weft.layers.kernel_choice.choose", record("plan"))
    planned(batch="3", dtype="float32", compute_capability=asked["operations"][0].compute_capability or 1)
    for_layers = [asked["operations"][0:4], asked["operations"][4:8], asked["operations"][8:]]
    assert for_layers[0] == for_layers[1], "the layers are alike"

    def facts(shapes: list[ProductShape]) -> list[tuple[Any, ...]]:
        return [(s.rows, s.outer, s.inner, s.use, s.has_bias, s.dtype) for s in shapes]

    assert facts(asked["plan"]) == facts([*for_layers[0], *for_layers[2]])


def test_every_batch_size_is_served_once_by_each_matrix() -> None:
    rows = planned(max_num_seqs=200)
    for matrix in ("qkv", "output", "gate-up", "down", "head"):
        spans = [row.metric.rpartition("batch ")[2].split(" to ") for row in rows if row.metric.startswith(matrix)]
        assert (spans[0][0], spans[-1][-1]) == ("1", "200")
        assert all(int(one[-1]) < int(other[0]) for one, other in pairwise(spans))
        assert {row.unit for row in rows} <= {"by one_pass", "by few_rows", "by library"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": "llama-9b"}, "unknown shape"),
        ({"batch": "x"}, "no list of numbers"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"dtype": "float8"}, "dtype"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(**options)
