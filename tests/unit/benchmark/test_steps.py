"""Decode steps alone: what is counted, at which context, and that waits for a device are no work of the host."""

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.benchmark import device_waits
from weft.benchmark.decode_steps import DecodeTimes, SteadyDecode
from weft.benchmark.device_waits import DeviceWaits
from weft.benchmark.experiments.steps import EXPERIMENT, StepsOptions, drawn_rows, step_rows
from weft.benchmark.progress import show_nothing
from weft.benchmark.row import Row
from weft.benchmark.served_model import open_model
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.inference.engine import Engine

EXTENT: dict[str, int] = {"steps": 6, "repetitions": 3}


def tiny_engine(**options: Any) -> Engine:
    model = open_model(model="llama-tiny", shape="llama-tiny", dtype="float32", device="cpu", seed=0)
    given = {"model": "-", "max_model_len": 128, "max_num_seqs": 4, "enable_prefix_caching": False}
    return Engine(EngineConfig.of(**(given | {"policy": "prefill_first"} | options)), model.checkpoint)


@pytest.mark.parametrize("budget", [2048, 16])
def test_the_context_is_reached_in_the_middle_of_the_repetitions(budget: int) -> None:
    engine = tiny_engine(max_num_batched_tokens=budget)
    for batch in (1, 4):
        decode = SteadyDecode(engine, batch=batch, context=50, seed=0, **EXTENT)
        advanced: list[int] = []
        times = decode.measure(lambda: advanced.append(1))  # noqa: B023
        assert len(times.step_s) == len(times.contexts) == len(advanced) == 3
        assert times.contexts[1] == pytest.approx(50, abs=3)
        assert times.contexts[2] - times.contexts[1] == 6, "a token a step"
        assert times.host_s == (), "on a CPU the host does the device's work"
        decode.close()
        assert not engine.has_unfinished_requests()


def test_a_step_late_counts_as_no_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time by tokens given out: an engine that gives nothing in half of its steps takes twice as long a step."""
    engine = tiny_engine()
    step, calls = engine.step, 0

    def every_other() -> Any:
        nonlocal calls
        calls += 1
        return [] if calls % 2 else step()

    monkeypatch.setattr(engine, "step", every_other)
    monkeypatch.setattr("weft.benchmark.decode_steps.perf_counter", lambda: float(calls))  # a second a call
    decode = SteadyDecode(engine, batch=2, context=50, seed=0, **EXTENT)
    assert decode.measure(lambda: None).step_s == (2.0, 2.0, 2.0)


def test_waits_are_timed_once_and_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of which every wait takes a second, and reading a tensor waits for the device."""
    now = 0.0

    def wait(*arguments: Any) -> None:
        nonlocal now
        now += 1.0

    def read(tensor: Tensor) -> Any:
        torch.cuda.synchronize()
        return tensor.numpy().tolist()

    monkeypatch.setattr("weft.benchmark.device_waits.perf_counter", lambda: now)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(Tensor, "tolist", read)
    monkeypatch.setattr(device_waits, "_on_gpu", lambda tensor, *arguments: True)
    before = Tensor.tolist, vars(Tensor).get("item"), torch.cuda.Event.synchronize, torch.cuda.synchronize
    waits = DeviceWaits()
    with waits.watch():
        torch.cuda.synchronize()
        assert waits.seconds == 1
        assert torch.ones(3).tolist() == [1, 1, 1]
        assert waits.seconds == 2, "a wait within a wait is one"
        assert torch.ones(()).item() == 1
        now += 10  # work
    assert waits.seconds == 2
    torch.cuda.synchronize()
    assert waits.seconds == 2
    after = Tensor.tolist, vars(Tensor).get("item"), torch.cuda.Event.synchronize, torch.cuda.synchronize
    assert after == before


def test_tensors_of_the_host_are_no_wait() -> None:
    waits = DeviceWaits()
    with waits.watch():
        assert torch.arange(1000).tolist()[-1] == 999
    assert waits.seconds == 0


def test_the_host_is_what_a_step_takes_without_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    decode = SteadyDecode(engine, batch=1, context=50, seed=0, **EXTENT)
    decode.measure(lambda: None)
    now, step = 0.0, engine.step

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def waiting() -> Any:
        passes(0.25)  # work
        torch.cuda.synchronize()
        return step()

    for module in ("decode_steps", "device_waits"):
        monkeypatch.setattr(f"weft.benchmark.{module}.perf_counter", lambda: now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *arguments: passes(8.0))
    monkeypatch.setattr(engine, "step", waiting)
    assert decode.host_seconds() == [0.25] * 6


def test_rows_stand_beside_the_prototype_and_the_limit() -> None:
    times = DecodeTimes(step_s=(0.0009, 0.0008, 0.00085), contexts=(412.0, 512.0, 612.0), host_s=(2e-4, 3.5e-4, 4e-4))
    row = Row(experiment="steps", dtype="bfloat16")
    rows = {row.metric: row for row in step_rows(row, times, shape="llama-190m", batch=64, context=512, itemsize=2)}
    assert rows["decode step"].value == pytest.approx(0.85)
    assert rows["tokens/s"].value == pytest.approx(64 / 0.00085)
    assert rows["mean context"].value == 512
    assert rows["limit over step"].value == pytest.approx(100 * 0.421 / 0.85, rel=0.01)
    over = rows["step over the prototype's 0.8 ms"]
    assert over.value == pytest.approx(0.85 / 0.8)
    assert (over.verdict, "another run" in over.notes) == ("missed", True)
    host = rows["host time of a step, median"]
    assert (host.value, host.verdict, host.repetitions) == (pytest.approx(350), "missed", 3)
    other = {row.metric for row in step_rows(row, times, shape="llama-190m", batch=3, context=512, itemsize=2)}
    assert not any("prototype" in metric for metric in other)


def test_a_drawn_step_stands_over_the_greedy_one() -> None:
    greedy, drawn = (DecodeTimes(step_s=times, contexts=(512.0,), host_s=()) for times in ((1e-3,), (1.2e-3,)))
    rows = {row.metric: row for row in drawn_rows(Row(experiment="steps"), greedy, drawn, batch=64)}
    assert rows["decode step, drawn"].value == pytest.approx(1.2)
    over = rows["drawn over greedy"]
    assert (over.value, over.verdict) == (pytest.approx(1.2), "missed")
    assert "top_k=50" in over.notes


def test_the_tokens_of_a_drawn_step_are_drawn_by_seed() -> None:
    engine = tiny_engine()
    decode = SteadyDecode(engine, batch=2, context=40, seed=0, draws=True, **EXTENT)
    params = [request.params for request in engine._scheduler.waiting]
    assert [(each.seed, each.top_k, each.top_p) for each in params] == [(0, 50, 0.9), (1, 50, 0.9)]
    decode.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": "0"}, "positive"),
        ({"batch": "many"}, "no list of numbers"),
        ({"context": "100"}, "context=100"),
        ({"steps": 0}, "steps"),
        ({"repetitions": 0}, "repetitions"),
        ({"engine": "x"}, "no name=value"),
        ({"sampling": "drawn"}, "sampling='drawn'"),
        ({"shape": "llama-tiny,llama-9b", "device": "cpu"}, "unknown shape='llama-9b'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(EXPERIMENT.run(StepsOptions(**options), show_nothing))
