"""Graphs x overlap x operations x kernel x batch size x chunk x preemption on a GPU: HuggingFace's tokens in float32.

The sample is pairwise, as in `test_paged.py`. Beside it: no slot changes that a step does not own, every batch size has
a graph, and nothing is captured or compiled once an engine serves. (Reported as K09-1, K09-3 and K09-6.)
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor

from weft.config import EngineConfig
from weft.inference.engine import Engine
from weft.inference.plan import StepPlan
from weft.inference.runner import StepHandle
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.continuation import Continuation
from weft.testing.exactness import assert_safe_margins, assert_token_exact
from weft.testing.oracle import Oracle
from weft.testing.subject import Subject
from weft.testing.tiny import save_tiny_model

pytestmark = pytest.mark.gpu

MAX_NEW_TOKENS = 10
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "qwen3-window": (
        "qwen3",
        {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "enforce_eager": (False, True),
    "overlap": (True, False),
    "kernel_choice": ("auto", "one_pass", "few_rows", "library", "plain operations"),
    "max_num_seqs": (1, 2, 3, 5, 12, 20, 64),
    "max_chunk_tokens": (None, 1, 7),
    "pool": ("ample", "tight"),
    "block_size": (16, 64),
    "arrival": ("together", "one by one"),
}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, config = MODELS[request.param]
    return save_tiny_model(tmp_path_factory.mktemp(request.param), model_type, seed=3, **config)


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder))


@pytest.fixture(scope="module")
def references(checkpoint: Checkpoint) -> list[Continuation]:
    """64 prompts, so that a batch grows to any size and shrinks again; their outputs end one after the other."""
    oracle = Oracle(checkpoint.tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(131, (24,), generator=generator).tolist()
    lengths = torch.randint(1, 24, (64,), generator=generator).tolist()
    found = [
        oracle.generate([*shared[:length], place], 2 + place % (MAX_NEW_TOKENS - 1))
        for place, length in enumerate(lengths)
    ]
    assert_safe_margins(found)
    return found


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.of(model=str(folder), device="cuda", dtype="float32", max_model_len=64, **options)


def run(subject: Subject, references: list[Continuation], arrivals: list[int] | None = None) -> list[Continuation]:
    params = [SamplingParams(temperature=0, max_tokens=len(reference.token_ids)) for reference in references]
    return subject.run([list(one.prompt_token_ids) for one in references], params, arrivals=arrivals)


def settings() -> Iterator[dict[str, Any]]:
    for values in AllPairs(list(FACTORS.values())):
        yield dict(zip(FACTORS, values, strict=True))


@pytest.mark.parametrize("setting", list(settings()), ids=lambda setting: "-".join(map(str, setting.values())))
def test_how_a_step_reaches_the_device_changes_no_token(
    folder: Path, checkpoint: Checkpoint, references: list[Continuation], setting: dict[str, Any]
) -> None:
    options = dict(setting)
    pool, arrival, kernel = options.pop("pool"), options.pop("arrival"), options.pop("kernel_choice")
    options |= {"operations": "plain"} if kernel == "plain operations" else {"kernel_choice": kernel}
    if pool == "tight":
        options["num_blocks"] = -(-(24 + MAX_NEW_TOKENS) // options["block_size"]) + 1
    subject = Subject(config_of(folder, **options), checkpoint)
    arrivals = list(range(len(references))) if arrival == "one by one" else None
    assert_token_exact(references, run(subject, references, arrivals))
    ways = subject.engine.num_steps
    assert set(ways) == ({"launched"} if options["enforce_eager"] else {"graph"}), ways


@pytest.mark.parametrize("max_num_seqs", [1, 3, 5, 12, 20, 64])
def test_every_batch_size_has_a_graph_and_later_nothing_is_captured(
    folder: Path, checkpoint: Checkpoint, references: list[Continuation], max_num_seqs: int
) -> None:
    subject = Subject(config_of(folder, max_num_seqs=max_num_seqs), checkpoint)
    run(subject, references)
    captured = torch.cuda.CUDAGraph.capture_begin
    try:
        torch.cuda.CUDAGraph.capture_begin = None  # type: ignore[assignment, method-assign]
        allocated = torch.cuda.memory_reserved()
        assert_token_exact(references, run(subject, references, list(range(0, 2 * len(references), 2))))
        assert torch.cuda.memory_reserved() == allocated
    finally:
        torch.cuda.CUDAGraph.capture_begin = captured  # type: ignore[method-assign]
    assert set(subject.engine.num_steps) == {"graph"}


class Slots:
    """Records, at each step of an engine, which slots the step owns, and compares the whole pool around it."""

    def __init__(self, engine: Engine) -> None:
        self._runner: Any = engine._runner
        self._pool: Tensor = self._runner._cache.pool
        self._pool.nan_to_num_(nan=0.0)
        self._execute = self._runner.execute
        self._runner.execute = self
        self.num_compared = 0

    def __call__(self, plan: StepPlan) -> StepHandle:
        before = self._pool.clone()
        handle: StepHandle = self._execute(plan)
        torch.cuda.synchronize()
        state, owned = self._runner._state, torch.zeros(self._pool.shape[2:4], dtype=torch.bool, device="cuda")
        owned[-1] = True  # scratch, for padding
        for row, count in zip(plan.rows, plan.num_new_tokens, strict=True):
            end = int(state.num_computed_tokens[row])
            places = torch.arange(end - count, end, device="cuda")
            size = self._pool.shape[3]
            owned[state.block_table[row, places // size], places % size] = True
        for _, target in plan.block_copies:
            owned[target] = True
        # Bits, not values: what is compared may be anything.
        changed = (before.view(torch.int32) != self._pool.view(torch.int32)).any(dim=(0, 1, 4, 5))
        assert not (changed & ~owned).any(), "a slot changed that nobody in this step owns"
        assert changed[:-1].any(), "the step wrote nothing"
        self.num_compared += 1
        return handle


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("max_num_seqs", [3, 20])
def test_no_slot_changes_that_the_step_does_not_own(
    folder: Path, checkpoint: Checkpoint, references: list[Continuation], enforce_eager: bool, max_num_seqs: int
) -> None:
    """With a pool that is full, so that a padding slot taken for the last one would hit somebody."""
    config = config_of(
        folder, max_num_seqs=max_num_seqs, num_blocks=3 * max_num_seqs, block_size=16, enforce_eager=enforce_eager
    )
    subject = Subject(config, checkpoint)
    slots = Slots(subject.engine)
    assert_token_exact(references, run(subject, references))
    assert slots.num_compared > 20


def test_a_slot_that_nobody_owns_would_be_seen(
    folder: Path, checkpoint: Checkpoint, references: list[Continuation]
) -> None:
    """The planted fault of K09-1: padding is written to the last live block."""
    options = {"max_num_seqs": 12, "num_blocks": 36, "block_size": 16, "graph_batch_sizes": (12,)}
    subject = Subject(config_of(folder, **options), checkpoint)
    subject.engine._runner._state.block_table[-1] = 35
    Slots(subject.engine)
    with pytest.raises(AssertionError, match="nobody in this step owns"):
        run(subject, references)


def test_seeded_noise_is_the_same_in_a_graph(folder: Path, checkpoint: Checkpoint) -> None:
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=9) for seed in range(12)]
    prompts = [[seed + 1, 5, 9] for seed in range(12)]
    said = []
    for options in ({"device": "cpu"}, {"enforce_eager": True}, {}, {"max_num_seqs": 5}):
        config = config_of(folder, **({"max_num_seqs": 12} | {k: v for k, v in options.items() if k != "device"}))
        if "device" in options:
            config = replace(config, model=replace(config.model, device="cpu"))
        said.append([answer.token_ids for answer in Subject(config, checkpoint).run(prompts, params)])
    assert said[0] == said[1] == said[2] == said[3]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_gpu_that_is_not_the_current_one(
    folder: Path, checkpoint: Checkpoint, references: list[Continuation], enforce_eager: bool
) -> None:
    config = config_of(folder, max_num_seqs=12, enforce_eager=enforce_eager)
    second = replace(config, model=replace(config.model, device="cuda:1"))
    assert_token_exact(references, run(Subject(second, checkpoint), references))
    assert torch.cuda.current_device() == 0
