"""`weft bench kernels` without a GPU: its arithmetic, rows by a made-up clock, wrong kernels without a speed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.benchmark.experiments.kernels import KernelsOptions
from weft.benchmark.kernels import decode_attention, prefill_attention, small_operations, training_attention
from weft.benchmark.kernels.arithmetic import (
    backward_flops,
    causal_flops,
    copies_beyond_cache,
    keys_and_values_bytes,
)
from weft.benchmark.kernels.contender import Contender, Measured, Place, measure, ratio, skipped, worst_error
from weft.benchmark.kernels.training_attention import TrainingAttention, TrainingShape
from weft.benchmark.row import Row, Target
from weft.cli import main
from weft.errors import ConfigError
from weft.kernels.flash_attention import attention_reference

GIB = 2**30


class FakeMeter:
    """Every call takes 2 ms in the median and holds 5 MiB at its peak."""

    def __init__(self) -> None:
        self.timed = 0

    def seconds(self, calls: Sequence[Callable[[], object]], *, graph: bool) -> list[float]:
        self.timed += 1
        for call in calls:
            call()
        return [1e-3, 2e-3, 3e-3]

    def peak_bytes(self, call: Callable[[], object]) -> int:
        call()
        return 5 << 20


@pytest.fixture
def place() -> Place:
    row = Row(experiment="kernels", dtype="float32", seed=0)
    return Place(device=torch.device("cpu"), dtype=torch.float32, meter=FakeMeter(), row=row)


def contender(found: list[Tensor], **options: Any) -> Contender:
    return Contender(
        **{"system": "s", "version": "1", "operation": "op", "calls": [lambda: None], "result": lambda: found} | options
    )


def named(rows: list[Row], system: str, metric: str) -> Row:
    (found,) = [row for row in rows if (row.system, row.metric) == (system, metric)]
    return found


def test_operations_and_bytes_are_those_counted_by_hand() -> None:
    # 4 operations x 1 x 16 heads x 128 x (16,384^2 / 2) scores, twice for the batch: 2.2 TFLOP
    assert causal_flops(batch=2, num_queries=16_384, prefix=0, heads=16, head_dim=128) == 4 * 2 * 16 * 128 * 2**27
    assert causal_flops(batch=1, num_queries=2048, prefix=14_336, heads=32, head_dim=128) == 4 * 32 * 128 * (
        2048 * 14_336 + 2048 * 1024
    )
    assert backward_flops(2.0) == 5.0
    assert keys_and_values_bytes(batch=1, length=131_072, kv_heads=8, head_dim=128, itemsize=2) == 512 << 20
    assert all(shape.batch * shape.length == 32_768 for shape in training_attention.SHAPES)
    assert copies_beyond_cache(100 << 20) == 3


def test_rows_hold_time_rate_and_memory_of_the_median(place: Place) -> None:
    result = [torch.randn(40, 3)]
    measured = measure(
        contender(result, amount=4e9, rate_unit="TFLOP/s", needed_bytes=4 << 20),
        result,
        place,
        rate_target=Target(relation=">=", value=2.5),
        memory_target=Target(relation="<=", value=2),
    )
    rows = {row.metric: row for row in measured.rows}
    assert rows["op time"].value == pytest.approx(2.0)
    assert rows["op time"].spread == pytest.approx(1.0)
    assert (rows["op rate"].value, rows["op rate"].verdict) == (pytest.approx(2.0), "missed")
    assert (rows["op extra memory"].value, rows["op extra memory"].verdict) == (1.0, "met")
    assert rows["op error"].verdict == "met"


@pytest.mark.parametrize("fault", ["a row", "nan", "shape", "count"])
def test_a_wrong_kernel_gets_no_speed(fault: str, place: Place) -> None:
    right = torch.randn(160, 3)
    wrong = right.clone()
    if fault == "a row":
        wrong[159] = 0.5 * wrong[159] + 1
    elif fault == "nan":
        wrong[0, 0] = torch.nan
    elif fault == "shape":
        wrong = wrong[:-1]
    measured = measure(contender([wrong] * (2 if fault == "count" else 1)), [right], place)
    assert not measured.seconds
    assert not any("time" in row.metric for row in measured.rows)
    assert isinstance(place.meter, FakeMeter)
    assert place.meter.timed == 0
    assert measured.rows[0].metric == ("op not measured" if fault == "count" else "op error")
    assert fault == "count" or measured.rows[0].verdict == "missed"


def test_integers_must_be_equal() -> None:
    assert worst_error([torch.tensor([100_000])], [torch.tensor([100_001])]) == 1
    assert worst_error([torch.tensor([7])], [torch.tensor([7])]) == 0


def test_what_raises_is_a_row_with_its_reason_and_has_no_ratio(place: Place) -> None:
    def broken() -> list[Tensor]:
        raise RuntimeError("no such backend")

    measured = measure(contender([], result=broken), [], place)
    assert "no such backend" in measured.rows[0].notes
    timed = Measured(rows=[], seconds=[2.0, 4.0, 3.0])
    assert ratio(place.row, "r", timed, measured) == []
    assert ratio(place.row, "r", timed, None) == []
    assert ratio(place.row, "r", timed, Measured(rows=[], seconds=[1.5]))[0].value == 2.0
    assert "because" in skipped(place.row, "op", "because").rows[0].notes


SHAPE = TrainingShape(batch=2, length=33, heads=2, head_dim=16)


def test_training_attention_beside_its_peers(place: Place) -> None:
    attention = TrainingAttention(
        place, naive_limit=GIB, compile_seconds=0, weft=lambda *qkv: attention_reference(*qkv, causal=True)[0]
    )
    rows = attention.rows(SHAPE)
    for operation, factor in (("forward", 1), ("backward", 2.5)):
        for system in ("weft", "naive"):
            rate = named(rows, system, f"{operation} rate")
            assert rate.value == pytest.approx(factor * 4 * 2 * 2 * 16 * 33**2 / 2 / 2e-3 / 1e12)
    assert "compiling is spent" in named(rows, "torch.compile of naive", "forward not measured").notes
    assert named(rows, "weft", "forward extra memory").verdict == "missed"
    assert len({row.case for row in rows}) == 1


def test_all_scores_past_the_limit_are_left_out_with_a_reason(place: Place) -> None:
    attention = TrainingAttention(
        place, naive_limit=60_000, compile_seconds=9, weft=lambda *qkv: attention_reference(*qkv, causal=True)[0]
    )
    rows = attention.rows(TrainingShape(batch=2, length=64, heads=2, head_dim=16))
    for system, operation in (("naive", "forward"), ("naive", "backward"), ("torch.compile of naive", "forward")):
        assert "the limit is" in named(rows, system, f"{operation} not measured").notes


def test_attention_that_is_not_causal_gets_no_speed(place: Place) -> None:
    attention = TrainingAttention(
        place, naive_limit=1, compile_seconds=0, weft=lambda *qkv: attention_reference(*qkv, causal=False)[0]
    )
    rows = [row for row in attention.rows(SHAPE) if row.system == "weft"]
    assert {row.metric for row in rows} == {"forward error", "backward error"}
    assert {row.verdict for row in rows} == {"missed"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_paged_decode_is_right_and_is_laid_beside_the_bandwidth(place: Place) -> None:
    shape = decode_attention.DecodeShape(batch=2, length=70, head_dim=64, query_heads=2, kv_heads=1)
    read, bandwidth = decode_attention.read_rows(place, num_bytes=1 << 16)
    assert bandwidth == pytest.approx(65536 / 2e-3)
    assert {row.system for row in read} == {"torch sum", "torch matrix times vector", "weft gemv"}
    rows = decode_attention.decode_rows(shape, place, 2 * shape.read_bytes(4) / 2e-3)
    part = named(rows, "weft over a peer", "part of the read bandwidth")
    assert (part.value, part.verdict) == (pytest.approx(50), "missed")
    small = named(rows, "weft over a peer", "time of P=16 over P=64")
    assert (small.value, small.verdict) == (1.0, "met")
    assert named(rows, "weft P=16", "decode error").verdict == "met"
    assert named(rows, "weft P=64", "decode error").verdict == "met"


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_paged_prefill_is_right_and_is_laid_beside_training(place: Place) -> None:
    shape = prefill_attention.PrefillShape(
        prefix=40, chunk=30, head_dim=16, training_batch=1, training_heads=2, query_heads=2, kv_heads=1
    )
    rows = prefill_attention.prefill_rows(shape, place)
    assert named(rows, "weft", "prefill error").verdict == "met"
    part = named(rows, "weft over a peer", "rate over that of training forward")
    assert part.value == pytest.approx(100 * (30 * 40 + 30 * 15) / (70 * 35))
    assert part.verdict == "met" if part.value >= 70 else part.verdict == "missed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_small_operations_are_right(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_operations, "copies_beyond_cache", lambda size: 2)
    widths = small_operations.Widths(name="tiny", hidden=32, inner=48, packed=64, vocab_size=50, loss_tokens=5)
    seen = []
    for operation in small_operations.small_operations(widths):
        if operation.inputs[0][0] > 8:  # up to 64 rows are in tests/kernels/test_smallest.py
            continue
        rows = small_operations.small_rows(operation, widths, place)
        assert named(rows, "weft", f"{operation.name} error").verdict == "met", operation.name
        assert named(rows, "torch", f"{operation.name} time").unit == "µs"
        assert named(rows, "weft over torch", f"{operation.name} as fast as torch").target is None
        seen.append(operation.name.split(",")[0])
    assert {"add_norm", "silu_multiply", "gemv", "few_rows_gemm", "sample", "truncate"} <= set(seen)
    assert any(name.startswith("cross_entropy") for name in seen)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"part": "decode,nothing"}, "unknown part"),
        ({"part": ""}, "unknown part"),
        ({"device": "cpu"}, "measured on a GPU"),
        ({"repetitions": 0}, "repetitions"),
        ({"naive_gib": 0}, "naive_gib"),
        ({"compile_seconds": -1}, "compile_seconds"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KernelsOptions(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    seen = capsys.readouterr()
    assert "needs a GPU" in seen.err
    assert not seen.out
