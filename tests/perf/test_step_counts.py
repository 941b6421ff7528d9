"""What a steady decode step costs in calls, counted: launches, copies and waits are numbers that noise does not move.

Snapshots at tolerance 0, one folder a GPU: a change is a decision, taken with `--snapshot-update` on that GPU. Tests
fill unset memory with NaN, which counts: a tensor that a step makes for itself is a kernel here and none in a server.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch.profiler import ProfilerActivity, profile

from weft.config import EngineConfig
from weft.inference.engine import Engine
from weft.inference.plan import StepPlan
from weft.inference.runner import StepHandle
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.snapshots import DeviceCountSnapshot
from weft.testing.tiny import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.perf]

STEPS = 10
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def counted(engine: Engine, batch: int) -> dict[str, float]:
    """Calls a step, over steps in which nobody joins, leaves or needs a block."""
    for place in range(batch):
        engine.add_request(
            str(place), [3, 4, place % 90], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        )
    full = 0
    while full < 3:
        full = full + 1 if len(engine.step()) == batch else 0
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiled:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    for event in profiled.events():
        name = event.name
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls["copies" if name.startswith("Memcpy") else "fills" if name.startswith("Memset") else "kernels"] += 1
        elif name.startswith(("cudaLaunchKernel", "cuLaunchKernel")):
            calls["launches outside of graphs"] += 1
        elif name == "cudaGraphLaunch":
            calls["graph launches"] += 1
        elif name in _WAITS:
            calls[f"{name} calls"] += 1
    calls["cudaDeviceSynchronize calls"] -= 1  # this test's own, and the profiler's
    return {name: count / STEPS for name, count in sorted(calls.items()) if count > 1}


def assert_nothing_waits(calls: dict[str, float]) -> None:
    assert calls.get("copies", 0) <= 1, "a step in which nothing changes copies more than new block ids"
    assert calls.get("cudaStreamSynchronize calls", 0) == 0, "the host waits for the device"
    assert calls.get("cudaEventSynchronize calls", 0) <= 1, "the host waits for more than its tokens"


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_what_a_steady_step_asks_of_the_device(batch: int, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    folder = str(save_tiny_model(tmp_path, "llama", num_hidden_layers=2))
    options = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 64}
    graph, launched = (
        counted(
            Engine(
                EngineConfig.of(model=folder, enforce_eager=eager, graph_batch_sizes=(1, 8, 64), **options),
                open_checkpoint(folder),
            ),
            batch,
        )
        for eager in (False, True)
    )
    for calls in (graph, launched):
        assert_nothing_waits(calls)
    assert graph["graph launches"] == 1
    assert graph.get("launches outside of graphs", 0) == 0
    assert graph["kernels"] == launched["kernels"], "a graph holds what is launched without it"
    assert launched == snapshot.use_extension(DeviceCountSnapshot)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (lambda steps: steps.item(), "the host waits"),
        (lambda steps: [steps.copy_(steps.clone()), steps.to("cpu", non_blocking=True), steps + 0], "copies more"),
    ],
    ids=["a number read back", "copies in every step"],
)
def test_a_step_that_waits_or_copies_is_convicted(
    fault: Callable[[torch.Tensor], object], complaint: str, tmp_path: Path
) -> None:
    folder = str(save_tiny_model(tmp_path, "llama", num_hidden_layers=2))
    options = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 8, "graph_batch_sizes": (8,)}
    engine = Engine(EngineConfig.of(model=folder, **options), open_checkpoint(folder))
    assert_nothing_waits(counted(engine, 8))
    runner = engine._runner
    execute = runner.execute

    def faulty(plan: StepPlan) -> StepHandle:
        handle = execute(plan)
        fault(runner._state.num_steps)
        return handle

    runner.execute = faulty  # type: ignore[method-assign]
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(AssertionError, match=complaint):
        assert_nothing_waits(counted(engine, 8))
