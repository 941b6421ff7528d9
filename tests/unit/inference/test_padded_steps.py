"""Steps in the sizes that graphs have, launched in Triton's interpreter: padding changes no token and no foreign slot.

A graph replays these launches; what it replays is right if they are. Requests join and leave, prompts come in chunks
and from the cache, somebody gives way, somebody is aborted while a step is under way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.config import EngineConfig
from weft.inference.engine import Engine
from weft.inference.plan import StepPlan
from weft.inference.runner import StepHandle
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_sizes import StepSize, StepSizes
from weft.kernels._jit import runs_on
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.tiny import save_tiny_model

Build = Callable[..., Engine]

pytestmark = pytest.mark.skipif(
    not runs_on(torch.device("cpu")), reason="Triton is Linux-only, and kernels run on CUDA"
)
SHARED = [10, 11, 12, 13, 14, 15, 16, 17]
# Of one name's second request the prompt is cached to its last token, so that its last block is copied.
JOBS: list[tuple[int, str, list[int], SamplingParams]] = [
    (0, "a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
    (0, "b", SHARED, SamplingParams(temperature=0.9, seed=2**64 - 3, max_tokens=2, ignore_eos=True)),
    (2, "c", [7], SamplingParams(temperature=0.05, seed=5, max_tokens=4, ignore_eos=True)),
    (6, "d", SHARED, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)),
    (7, "e", [21], SamplingParams(temperature=1.5, seed=7, max_tokens=2, ignore_eos=True)),
]
# What each asks for besides, in a second run: truncation is part of the program, processors run after it.
ASKED: dict[str, dict[str, Any]] = {
    "a": {"repetition_penalty": 1.7, "bad_words": [[31], [3, 4, 5], [5, 60]]},
    "b": {"top_p": 0.5, "min_p": 0.05},
    "c": {"temperature": 1.5, "top_k": 3, "min_tokens": 3, "stop_token_ids": [7, 8], "logit_bias": {40: 3, 50: -9}},
    "d": {},
    "e": {"allowed_token_ids": [*range(0, 97, 2)], "frequency_penalty": 1.5, "presence_penalty": 0.5},
}
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 9,
    "max_chunk_tokens": 5,
    "max_model_len": 16,
}


class Watch:
    """Compares the whole pool around each step: only slots of those who take part may change."""

    def __init__(self, engine: Engine) -> None:
        self.runner: Any = engine._runner
        self.sizes: list[StepSize] = []
        self.num_padded: list[int] = []
        self.num_copied = 0
        self.preempted: list[str] = []
        self._pool = self.runner._cache.pool
        self._pool.nan_to_num_(nan=0.0)
        self._execute, self._run = self.runner.execute, self.runner._program.run
        self.runner.execute, self.runner._program.run = self.execute, self.run

    def run(self, size: StepSize) -> Tensor:
        self.sizes.append(size)
        logits: Tensor = self._run(size)
        return logits

    def execute(self, plan: StepPlan) -> StepHandle:
        before = self._pool.clone()
        handle: StepHandle = self._execute(plan)
        state, size = self.runner._state, self._pool.shape[3]
        owned = torch.zeros(self._pool.shape[2:4], dtype=torch.bool)
        owned[-1] = True  # scratch, for padding
        for row, count in zip(plan.rows, plan.num_new_tokens, strict=True):
            places = torch.arange(int(state.num_computed_tokens[row]) - count, int(state.num_computed_tokens[row]))
            owned[state.block_table[row, places // size], places % size] = True
        for _, target in plan.block_copies:
            owned[target] = True
        changed = (before.view(torch.int32) != self._pool.view(torch.int32)).any(dim=(0, 1, 4, 5))
        assert not (changed & ~owned).any(), "a slot changed that nobody in this step owns"
        assert state.num_computed_tokens[-1] == 0, "padding left something in its row"
        assert not state.token_ids[-1].any(), "padding left something in its row"
        self.num_padded.append(self.sizes[-1].num_requests - len(plan.rows))
        self.num_copied += len(plan.block_copies)
        self.preempted += plan.preempted_ids
        return handle


def said_by(engine: Engine, *, asking: bool) -> dict[str, list[object]]:
    """What each request says; `a` is aborted after its sixth token. asking: for what is in ASKED too."""
    said: dict[str, list[object]] = {name: [] for _, name, _, _ in JOBS}
    left = [(at, name, prompt, replace(params, **ASKED[name] if asking else {})) for at, name, prompt, params in JOBS]
    now = 0
    while left or engine.has_unfinished_requests():
        while left and left[0][0] <= now:
            _, name, prompt, params = left.pop(0)
            engine.add_request(name, prompt, params)
        for output in engine.step():
            said[output.request_id] += [*output.new_token_ids, *([output.finish_reason] if output.finished else [])]
            if output.request_id == "a" and len(said["a"]) == 6:
                engine.abort("a")
        now += 1
    return said


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """One layer and one key head: a program of the interpreter takes a hundredth of a second."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_tiny_model(
        tmp_path_factory.mktemp("smaller"), "llama", vocab_size=97, initializer_range=0.5, eos_token_id=[1], **shape
    )

    def build(**options: Any) -> Engine:
        config = EngineConfig.of(model=str(folder), device="cpu", cpu_linear="plain", **OPTIONS, **options)
        return Engine(config, open_checkpoint(str(folder)))

    return build


@pytest.fixture(scope="module")
def expected(build: Build) -> dict[bool, dict[str, list[object]]]:
    """By whether requests ask for more."""
    found = {
        asking: said_by(build(operations="plain", attention_backend="paged_gather"), asking=asking)
        for asking in (False, True)
    }
    assert all(found[True][name] != found[False][name] for name, asked in ASKED.items() if asked)
    return found


@pytest.mark.parametrize("asking", [False, True], ids=["", "asking"])
@pytest.mark.parametrize(("batch_size", "num_blocks"), [(3, None), (2, 4)], ids=["", "preempted"])
def test_padding_changes_no_token_and_no_slot_of_others(
    batch_size: int, num_blocks: int | None, asking: bool, expected: dict[bool, dict[str, list[object]]], build: Build
) -> None:
    engine = build(operations="fused", attention_backend="paged_triton", overlap=True, num_blocks=num_blocks)
    watch = Watch(engine)
    watch.runner._sizes = StepSizes(engine.limits, batch_sizes=(batch_size,), most_tokens=8)
    assert said_by(engine, asking=asking) == expected[asking]
    assert watch.num_copied == 1
    assert bool(watch.preempted) == (num_blocks is not None)
    assert {size.is_decode for size in watch.sizes} == {True, False}
    assert any(size.is_decode and size.truncates for size in watch.sizes) == asking
    assert set(watch.num_padded) > {0}
