"""Requests of all kinds through CUDA graphs and launched steps: together each says what it says alone in plain torch.

In float32 a token is the same wherever it is computed, and its logprob nearly so. What weft's own tests say of the same
mix without a GPU, over a model whose logits are exact, is in `tests/unit/inference/test_mixed_machine.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.unit.inference.mixed_bench import Sizes
from weft.config import EngineConfig
from weft.inference.engine import Engine
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_sizes import StepSize, StepSizes
from weft.inference.token_logprobs import TokenLogprobs
from weft.kernels._jit import runs_on
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.tiny import save_tiny_model

# What a graph holds (truncation, noise), what comes after it (processors, logprobs), what keeps a step from being one
# (logprobs of the prompt), and requests of none of these.
MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_k": 5, "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.8, "prompt_logprobs": 1},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "logprobs": -1},
    {"seed": 3, "top_p": 0.5, "temperature": 1.5},
    {"temperature": 0, "logit_bias": {7: 100}, "stop_token_ids": [7], "min_tokens": 4},
    {"seed": 4, "min_p": 0.2, "repetition_penalty": 1.6, "logprobs": 0},
    {"temperature": 0, "logprobs": 5},
    {"seed": 5, "presence_penalty": 2.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 0, "allowed_token_ids": [*range(20, 60)], "bad_words": [[20], [21, 22]]},
    {"seed": 6, "logit_bias": {9: 100}, "stop_token_ids": [9], "min_tokens": 2, "logprobs": 3},
    {"temperature": 0},
    {"seed": 7, "allowed_token_ids": [*range(60, 90)], "top_k": 3, "prompt_logprobs": 0},
    {"seed": 2**64 - 1, "temperature": 0.5, "logit_bias": {5: -100, 6: 4}},
]
LOGPROB_TOLERANCE = 2e-3  # the 1e-3 of tier A for the logit, and for the logarithm of the sum as well


@dataclass
class Said:
    token_ids: list[int] = field(default_factory=list)
    ended: tuple[object, object] | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None


def mixed(engine: Engine, places: Sequence[int], arrivals: int) -> dict[int, Said]:
    """Requests of these kinds; so many come before each step."""
    left, said = list(places), {place: Said() for place in places}
    while left or engine.has_unfinished_requests():
        for place in left[:arrivals]:
            prompt = [(11 * place + 7 * step) % 131 for step in range(1 + 5 * place % 19)]
            engine.add_request(str(place), prompt, SamplingParams(max_tokens=9 + place % 4, **MIXED[place]))
        del left[:arrivals]
        for output in engine.step():
            one = said[int(output.request_id)]
            one.token_ids += output.new_token_ids
            one.logprobs += output.logprobs
            one.prompt_logprobs = output.prompt_logprobs or one.prompt_logprobs
            if output.finished:
                one.ended = output.finish_reason, output.stop_reason
    return said


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param(
            "cpu",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(not runs_on(torch.device("cpu")), reason="Triton is Linux-only"),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(device: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """In Triton's interpreter a smaller one: a program takes a hundredth of a second there."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"num_hidden_layers": 2} if device == "cuda" else small
    return open_checkpoint(str(save_tiny_model(tmp_path_factory.mktemp("mixed"), "llama", seed=3, **shape)))


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> dict[int, Said]:
    """In plain torch, one at a time."""
    engine = Engine(EngineConfig.of(model="mixed", device="cpu", max_num_seqs=1, max_model_len=64), checkpoint)
    return {place: mixed(engine, [place], 1)[place] for place in range(len(MIXED))}


def engine_of(checkpoint: Checkpoint, device: str, **options: Any) -> Engine:
    """On a CPU the same kernels in Triton's interpreter, and each size of a step bound once, as a capture binds it."""
    asked: dict[str, Any] = {"model": "mixed", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 8} | options
    if device == "cuda":
        return Engine(EngineConfig.of(device=device, **asked), checkpoint)
    asked = {"attention_backend": "paged_triton", "operations": "fused", "cpu_linear": "plain", "overlap": True} | asked
    engine = Engine(EngineConfig.of(device=device, **asked), checkpoint)
    if not asked.get("enforce_eager"):
        runner: Any = engine._runner
        runner._sizes = StepSizes(engine.limits, batch_sizes=asked.get("graph_batch_sizes"), most_tokens=64)
        runner._graphs = Sizes(runner._program, runner._sizes)
    return engine


def assert_same(found: Said, expected: Said) -> None:
    assert (found.token_ids, found.ended) == (expected.token_ids, expected.ended)
    assert (found.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    for one, other in (
        (found.logprobs, expected.logprobs),
        (found.prompt_logprobs or (), expected.prompt_logprobs or ()),
    ):
        for place, known in zip(one, other, strict=True):
            if place is None or known is None:
                assert place is known
                continue
            assert place.token_id == known.token_id
            values = [[entry.logprob, *(logprob for _, logprob in entry.top)] for entry in (place, known)]
            assert values[0] == pytest.approx(values[1], rel=0, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("arrivals", [2, len(MIXED)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"overlap": False, "graph_batch_sizes": (1, 8)},
        {"max_num_seqs": 3},
        {"max_chunk_tokens": 3, "max_num_batched_tokens": 16},
        {"num_blocks": 5, "block_size": 16},
    ],
    ids=["graphs", "eager", "padded", "few rows", "chunks", "preempted"],
)
def test_requests_of_all_kinds_say_together_what_each_says_alone(
    checkpoint: Checkpoint, device: str, alone: dict[int, Said], options: dict[str, Any], arrivals: int
) -> None:
    engine = engine_of(checkpoint, device, **options)
    runner: Any = engine._runner
    replayed: list[StepSize] = []
    if runner._graphs is not None:
        replay = runner._graphs.replay
        runner._graphs.replay = lambda size: (replayed.append(size), replay(size))[1]
    forwards, backwards = list(range(len(MIXED))), list(reversed(range(len(MIXED))))
    for places in (forwards, backwards) if device == "cuda" else (forwards,):
        said = mixed(engine, places, arrivals)
        for place in places:
            assert_same(said[place], alone[place])
    assert {"plain", "launched" if "enforce_eager" in options else "graph"} <= set(engine.num_steps)
    if runner._graphs is not None:
        assert {size.truncates for size in replayed if size.is_decode} == {False, True}
