"""What fixed traces cost in steps, tokens and blocks, as snapshots at tolerance 0; any machine must find the same.

Each fault below leaves every answer right: nothing but its cost convicts it. A change is a decision, taken with
`pytest tests/perf/test_trace_counts.py -n0 --snapshot-update` and read in the diff.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.unit.inference.toy_bench import Bench, BenchHandle, planted
from weft.config import EngineConfig
from weft.inference import scheduler as real
from weft.inference.engine import Engine
from weft.inference.plan import StepPlan
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.snapshots import CountSnapshot, differences
from weft.testing.step_counts import StepCounts
from weft.testing.tiny import save_tiny_model

_BASELINES = Path(__file__).parent / "baselines" / "any" / Path(__file__).stem


@dataclass
class CountedBench(Bench):
    """A scheduler over the toy model that counts what it is made to do."""

    counts: StepCounts = field(default_factory=StepCounts)

    def execute(self, plan: StepPlan) -> BenchHandle:
        self.counts.see(plan, self.scheduler.num_blocks_in_use)
        return super().execute(plan)


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + place * 7) % 50 for place in range(length)]


def arrivals(bench: Bench) -> None:
    """Ten requests of every length, four at a time, some of which arrive while others run."""
    for number in range(10):
        bench.add(str(number), prompt(3 + 5 * (number % 4), number), max_tokens=4 + 3 * (number % 5))
        if number > 5:
            bench.step()
            bench.step()


def continuous_batching(module: ModuleType) -> CountedBench:
    bench = CountedBench(module, num_blocks=64, block_size=4, prefix_caching=False)
    arrivals(bench)
    return bench


def overlap(module: ModuleType) -> CountedBench:
    bench = CountedBench(module, num_blocks=64, block_size=4, prefix_caching=False, overlap=True)
    arrivals(bench)
    return bench


def preemption(module: ModuleType) -> CountedBench:
    """Four requests that end with seven to ten blocks each, in a pool of fourteen."""
    bench = CountedBench(module, num_blocks=14, block_size=4)
    for number in range(4):
        bench.add(str(number), prompt(5 + 4 * number, number), max_tokens=22)
    return bench


def shared_prefixes(module: ModuleType) -> CountedBench:
    """One request fills the cache; of five more each shares its first twelve tokens, and the last one all of it."""
    bench = CountedBench(module, num_blocks=40, block_size=4)
    bench.add("first", prompt(12, 0), max_tokens=3)
    while bench.scheduler.has_requests:
        bench.step()
    for number in range(5):
        bench.add(str(number), [*prompt(12, 0), *prompt(3 + number, number + 1)], max_tokens=5)
    bench.add("same", prompt(12, 0), max_tokens=5)
    return bench


def chunked_prefill(module: ModuleType) -> CountedBench:
    """Long prompts in chunks of at most seven tokens, beside requests that decode."""
    bench = CountedBench(module, num_blocks=64, block_size=4, chunk=7)
    for number in range(2):
        bench.add(f"short {number}", prompt(3, number), max_tokens=4)
    for number in range(2):
        bench.add(f"long {number}", prompt(40 + number, number + 5), max_tokens=3)
    return bench


TRACES = (continuous_batching, overlap, preemption, shared_prefixes, chunked_prefill)


def counted(trace: Callable[[ModuleType], CountedBench], module: ModuleType = real) -> dict[str, int]:
    """The counts of a trace whose every answer is right."""
    bench = trace(module)
    bench.run()
    return bench.counts.record


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
def test_what_a_trace_costs(trace: Callable[[ModuleType], CountedBench], snapshot: SnapshotAssertion) -> None:
    assert counted(trace) == snapshot.use_extension(CountSnapshot)


def test_every_baseline_belongs_to_a_trace() -> None:
    stems = {f"test_what_a_trace_costs[{trace.__name__}]" for trace in TRACES}
    assert {path.stem for path in _BASELINES.iterdir()} == stems


def stored(trace: Callable[[ModuleType], CountedBench]) -> dict[str, int]:
    path = _BASELINES / f"test_what_a_trace_costs[{trace.__name__}].json"
    counts: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return counts


FAULTS = {
    "a request joins only an empty batch": (
        continuous_batching,
        "steps",
        ("scheduler", "open_door = True  #", "open_door = not running  #"),
    ),
    "a request holds a block more than it fills": (
        continuous_batching,
        "peak_blocks",
        ("scheduler", "self._geometry.blocks_for(end) - held)", "self._geometry.blocks_for(end) - held + 1)"),
    ),
    "a request whose end is sampled runs one step more": (
        overlap,
        "scheduled_tokens",
        ("scheduler", "if len(request.token_ids) + unread >= request.max_len:", "if False:"),
    ),
    "who has run longest is preempted": (
        preemption,
        "recomputed_tokens",
        ("scheduler", "self._policy.victim(self.running)", "self.running[0]"),
    ),
    "what a preempted request leaves is forgotten": (
        preemption,
        "prefix_hit_tokens",
        ("scheduler", "or request.needs_scores:", "or request.has_started:"),
    ),
    "the last block that is found is not taken": (
        shared_prefixes,
        "prefix_hit_tokens",
        ("scheduler", "hits = self._hits(request)", "hits = self._hits(request)[:-1]"),
    ),
    "a whole prompt that is found is computed for its last block": (
        shared_prefixes,
        "copied_blocks",
        ("scheduler", "if is_copied and self._allocator.num_available == 0:", "if is_copied:"),
    ),
    "a chunk is half as long as it may be": (
        chunked_prefill,
        "steps",
        ("scheduler", " count = min(chunk, left)\n", " count = (min(chunk, left) + 1) // 2\n"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_leaves_every_answer_right_is_convicted(fault: str) -> None:
    trace, moved, edit = FAULTS[fault]
    with planted([edit]) as module:
        found = counted(trace, module)
    changed = [line.partition(":")[0] for line in differences(stored(trace), found)]
    assert moved in changed


def test_the_engine_counts_what_the_toy_model_counts(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path, "llama", num_hidden_layers=1))
    config = EngineConfig.of(
        model=folder, device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64,
        num_blocks=14, block_size=4, enable_prefix_caching=False,
    )  # fmt: skip
    counts = StepCounts()
    engine = Engine(
        config,
        open_checkpoint(folder),
        observe=lambda plan, logits: counts.see(plan, engine._scheduler.num_blocks_in_use),
    )
    for number in range(4):
        params = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
        engine.add_request(str(number), prompt(9, number), params)
    while engine.has_unfinished_requests():
        engine.step()
    bench = CountedBench(real, num_blocks=14, block_size=4, prefix_caching=False, overlap=engine.overlaps)
    for number in range(4):
        bench.add(str(number), prompt(9, number), max_tokens=22)
    bench.run()
    assert counts.record == bench.counts.record
    assert counts.recomputed_tokens > 0
