"""The engine on a tiny random Llama: a request's tokens are its own, whatever is refused, ends or fails beside it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from weft import SamplingParams
from weft.batch import SamplingRows
from weft.errors import (
    ContextLengthError,
    DuplicateRequestError,
    EmptyPromptError,
    RequestError,
    SamplingParamsError,
    TokenOutOfRangeError,
    WeftError,
)
from weft.inference.engine import Engine
from weft.inference.plan import StepPlan
from weft.inference.step_output import StepOutput

Build = Callable[..., Engine]

VOCAB, CONTEXT = 97, 64
PROMPTS = [[5, 9, 2], [40], [7, 61, 33, 7, 7, 80, 2, 54, 7, 11, 12], [96, 0], [3, 14, 15, 92, 65, 35, 8]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=2**63 + 11, max_tokens=8, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)


class Scripted:
    """Samples what the script says for each position, whatever the logits; token 2 elsewhere."""

    def __init__(self, script: dict[int, int]) -> None:
        self.script = script

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return torch.tensor([self.script.get(position, 2) for position in rows.positions.tolist()])


def drain(engine: Engine) -> Iterator[StepOutput]:
    while engine.has_unfinished_requests():
        yield from engine.step()


def tokens_of(request_id: str, outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.new_token_ids]


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    for place, prompt in enumerate(prompts):
        engine.add_request(str(place), prompt, params)
    outputs = list(drain(engine))
    return [tokens_of(str(place), outputs) for place in range(len(prompts))]


def test_the_prompts_leave_no_room_for_rounding(build: Build) -> None:
    margins: list[float] = []

    def note(plan: StepPlan, logits: Tensor) -> None:
        best, second = logits.topk(2).values.unbind(1)
        margins.extend((best - second).tolist())

    texts = run(build(observe=note), PROMPTS)
    assert min(margins) > 1e-3
    assert all(len(set(text)) > 3 for text in texts), "a text of one token shows little"


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], GREEDY, EmptyPromptError),
        ([5, VOCAB], GREEDY, TokenOutOfRangeError),
        ([5, -1], GREEDY, TokenOutOfRangeError),
        ([2**70], GREEDY, TokenOutOfRangeError),
        pytest.param([5, 10**5000], GREEDY, TokenOutOfRangeError, id="5000 digits"),
        ([5, True], GREEDY, RequestError),
        (["5"], GREEDY, RequestError),
        ("5", GREEDY, RequestError),
        ([5.0], GREEDY, RequestError),
        ([[5]], GREEDY, RequestError),
        ([5] * CONTEXT, GREEDY, ContextLengthError),
        ([5] * (CONTEXT + 1), GREEDY, ContextLengthError),
        ([5], SamplingParams(stop_token_ids=[VOCAB]), SamplingParamsError),
    ],
    ids=lambda value: f"{value!r:.12}" if isinstance(value, list | str) else None,
)
def test_a_refused_request_leaves_the_engine_as_it_was(
    prompt: Any, params: SamplingParams, error: type[WeftError], build: Build
) -> None:
    refusing = build(max_num_seqs=2)
    for _ in range(5):
        with pytest.raises(error) as caught:
            refusing.add_request("bad", prompt, params)
        assert type(caught.value) is error
    assert not refusing.has_unfinished_requests()
    assert run(refusing, PROMPTS[:3], UNSEEDED) == run(build(max_num_seqs=2), PROMPTS[:3], UNSEEDED)


def test_a_request_id_in_use_is_refused_and_free_again_when_it_ends(build: Build) -> None:
    engine = build()
    expected = run(engine, PROMPTS[:1])[0]
    for _ in range(2):
        engine.add_request("0", PROMPTS[0], GREEDY)
        outputs = []
        for _ in range(2):
            with pytest.raises(DuplicateRequestError, match="request_id='0' is still in use"):
                engine.add_request("0", PROMPTS[1], GREEDY)
            outputs += engine.step()
        assert tokens_of("0", [*outputs, *drain(engine)]) == expected


@pytest.mark.parametrize("steps", [0, 1, 4, 20], ids=["waiting", "in its prompt", "decoding", "ended"])
def test_finishing_a_request_frees_what_it_held_and_leaves_the_others(steps: int, build: Build) -> None:
    engine = build(max_num_seqs=2, max_num_batched_tokens=8, max_chunk_tokens=4)
    expected = run(engine, PROMPTS)
    engine.add_request("kept", PROMPTS[0], GREEDY)
    engine.add_request("dropped", PROMPTS[2], GREEDY)
    outputs = [output for _ in range(steps) for output in engine.step()]
    for _ in range(2):
        engine.abort("dropped")
    later = list(drain(engine))
    assert {output.request_id for output in later} <= {"kept"}
    assert tokens_of("kept", outputs + later) == expected[0]
    assert run(engine, PROMPTS) == expected


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(poison: float, build: Build) -> None:
    steps = count(1)

    def poison_one(plan: StepPlan, logits: Tensor) -> None:
        for column, request_id in enumerate(plan.request_ids):
            if request_id == "1" and next(steps) == 4:
                logits[column, 50] = poison

    expected = run(build(), PROMPTS)
    engine = build(observe=poison_one)
    for place, prompt in enumerate(PROMPTS):
        engine.add_request(str(place), prompt, GREEDY)
    outputs = list(drain(engine))
    ends = {output.request_id: output.finish_reason for output in outputs if output.finished}
    assert ends == {"0": "length", "1": "error", "2": "length", "3": "length", "4": "length"}
    errors = {output.request_id: output.error for output in outputs if output.error is not None}
    assert errors == {"1": "the logits hold NaN or infinity"}
    expected[1] = expected[1][:3]
    assert [tokens_of(str(place), outputs) for place in range(5)] == expected


@pytest.mark.parametrize("max_tokens", [None, 1000])
@pytest.mark.parametrize("length", [1, 62, 63])
def test_a_request_that_fills_the_context_ends_by_length_with_all_of_it(
    length: int, max_tokens: int | None, build: Build
) -> None:
    engine = build()
    engine.add_request("a", [5] * length, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    outputs = list(drain(engine))
    assert length + len(tokens_of("a", outputs)) == CONTEXT == engine.limits.max_model_len
    assert [output.finish_reason for output in outputs if output.finished] == ["length"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_chunk_tokens": 1},
        {"max_chunk_tokens": 3},
        {"max_chunk_tokens": 5},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 2},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"max_model_len": 32},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_how_steps_are_cut_never_changes_tokens(params: SamplingParams, options: dict[str, int], build: Build) -> None:
    engine = build()
    alone = [tokens for prompt in PROMPTS for tokens in run(engine, [prompt], params)]
    assert run(build(**options), PROMPTS, params) == alone


@pytest.mark.parametrize("place", range(4))
def test_seeded_request_draws_the_same_tokens_beside_any_neighbour(place: int, build: Build) -> None:
    (alone,) = run(build(), PROMPTS[:1], SEEDED)
    engine = build(seed=place, max_num_seqs=3)
    for index in range(4):
        seeded = index == place
        engine.add_request(str(index), PROMPTS[0 if seeded else index + 1], SEEDED if seeded else UNSEEDED)
    assert tokens_of(str(place), list(drain(engine))) == alone


def test_a_request_is_told_the_seed_by_which_its_tokens_come_again(build: Build) -> None:
    engine = build()
    drawn = engine.add_request("drawn", [40], UNSEEDED)
    tokens = tokens_of("drawn", list(drain(engine)))
    assert engine.add_request("again", [40], replace(UNSEEDED, seed=drawn)) == drawn
    assert tokens_of("again", list(drain(engine))) == tokens


def test_unseeded_requests_are_reproducible_from_the_engine_seed_and_differ_from_each_other(build: Build) -> None:
    first, again, other = (run(build(seed=seed), [PROMPTS[0]] * 4, UNSEEDED) for seed in (3, 3, 4))
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 8


@pytest.mark.parametrize(
    ("script", "params", "end", "length"),
    [
        ({4: 1}, {}, ("stop", 1), 2),
        ({4: 5}, {}, ("stop", 5), 2),
        ({4: 1}, {"ignore_eos": True}, ("length", None), 4),
        ({4: 1, 5: 6}, {"ignore_eos": True, "stop_token_ids": [6]}, ("stop", 6), 3),
        ({3: 0}, {"stop_token_ids": [0]}, ("stop", 0), 1),
        ({6: 5}, {}, ("stop", 5), 4),
        ({7: 5}, {}, ("length", None), 4),
    ],
    ids=["EOS", "second EOS", "ignored EOS", "own stop", "token 0", "stop wins over length", "past the end"],
)
def test_what_ends_a_request(
    script: dict[int, int], params: dict[str, Any], end: tuple[str, int | None], length: int, build: Build
) -> None:
    engine = build(sampler=Scripted(script))
    engine.add_request("a", [8, 1, 5], SamplingParams(max_tokens=4, **params))
    outputs = list(drain(engine))
    assert [output.finished for output in outputs] == [False] * (length - 1) + [True]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == end


def test_a_step_of_an_idle_engine_is_empty(build: Build) -> None:
    assert build().step() == []
