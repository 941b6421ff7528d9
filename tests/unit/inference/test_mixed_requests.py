"""Requests of all kinds in one batch: each says what it says alone, whatever its neighbours, chunks or memory."""

from collections.abc import Callable
from typing import Any

import pytest

from weft.inference.engine import Engine
from weft.inference.sampling_params import SamplingParams

Build = Callable[..., Engine]

EOS = (1, 5)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.6},
    {"seed": 2**64 - 1, "top_k": 4, "temperature": 1.5},
    {"seed": 4, "min_p": 0.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.6},
    {"seed": 5, "frequency_penalty": 1.2, "presence_penalty": 0.4, "top_k": 30},
    {"temperature": 0, "logit_bias": {1: 100}, "min_tokens": 4},
    {"seed": 7, "logit_bias": {5: 100}, "min_tokens": 6, "temperature": 0.7},
    {"seed": 8, "allowed_token_ids": [*range(10, 40)], "bad_words": [[10], [11, 12]]},
    {"temperature": 0, "allowed_token_ids": [7, 8], "bad_words": [[89, 7], [89, 8]]},  # nothing to say after its prompt
    {"seed": 9, "repetition_penalty": 0.7, "presence_penalty": -1, "top_p": 0.8},
]
PROMPTS = [[(7 * place + step) % 90 + 6 for step in range(1 + 3 * place % 17)] for place in range(len(KINDS))]


def run(engine: Engine, kinds: list[int]) -> dict[int, tuple[list[int], str | None]]:
    """Tokens and finish reason of each."""
    said: dict[int, list[int]] = {kind: [] for kind in kinds}
    ends: dict[int, str | None] = {}
    for kind in kinds:
        engine.add_request(str(kind), PROMPTS[kind], SamplingParams(**{"max_tokens": 12} | KINDS[kind]))
    while engine.has_unfinished_requests():
        for output in engine.step():
            said[int(output.request_id)] += output.new_token_ids
            if output.finished:
                ends[int(output.request_id)] = output.finish_reason
    return {kind: (said[kind], ends[kind]) for kind in kinds}


@pytest.fixture(scope="module")
def alone(build: Build) -> dict[int, tuple[list[int], str | None]]:
    engine = build()
    return {kind: run(engine, [kind])[kind] for kind in range(len(KINDS))}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True, "max_num_seqs": 5},
        {"max_chunk_tokens": 2, "max_num_batched_tokens": 13, "max_num_seqs": 4, "overlap": True},
        {"attention_backend": "paged_gather", "block_size": 4, "num_blocks": 14, "overlap": True},
        {"attention_backend": "contiguous", "policy": "static", "max_num_seqs": 3},
    ],
    ids=["one batch", "overlap", "chunks", "preempted", "contiguous"],
)
@pytest.mark.parametrize("turn", [1, 5])
def test_each_request_says_what_it_says_alone(
    options: dict[str, Any], turn: int, alone: dict[int, tuple[list[int], str | None]], build: Build
) -> None:
    order = [turn * place % len(KINDS) for place in range(len(KINDS))]  # 1 and 5 have no factor in common with 12
    assert run(build(**options), order) == alone


def test_stop_tokens_are_held_back_to_the_token(alone: dict[int, tuple[list[int], str | None]]) -> None:
    """Either EOS, wanted as much as can be: so many other tokens come first, and not one more. (K06-3, K06-5.)"""
    assert (len(alone[7][0]), alone[7][0][-1], alone[7][1]) == (5, 1, "stop")
    assert (len(alone[8][0]), alone[8][0][-1], alone[8][1]) == (7, 5, "stop")


@pytest.mark.parametrize("least", range(5))
@pytest.mark.parametrize("eos", EOS)
def test_min_tokens_gives_so_many_and_the_eos(least: int, eos: int, build: Build) -> None:
    engine = build()
    params = SamplingParams(temperature=0, logit_bias={eos: 100}, min_tokens=least)
    engine.add_request("a", [8, 9], params)
    outputs = [output for _ in range(16) for output in engine.step()]
    assert len(outputs) == least + 1
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", eos)


def test_a_request_with_nothing_to_say_fails_alone(alone: dict[int, tuple[list[int], str | None]]) -> None:
    assert alone[10] == ([], "error")
    assert all(end != "error" for kind, (_, end) in alone.items() if kind != 10)
