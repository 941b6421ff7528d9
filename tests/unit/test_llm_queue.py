"""A call owns its prompts: limits on what may wait make it feed the engine as there is room, and change no answer."""

from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.unit.inference.interrupts import interrupted_at
from tests.unit.test_llm import GREEDY, save_text_model
from weft import LLM, RequestOutput, SamplingParams, llm, output_processor, text_engine
from weft.errors import ContextLengthError, InvalidPromptsError, QueueFullError, RequestError
from weft.inference import engine, pipeline, scheduler
from weft.text_engine import TextEngine

FILES = {module.__file__ for module in (llm, output_processor, text_engine, engine, pipeline, scheduler)}
PROMPTS = [[9, 8, 7], [40] * 12, [61, 33], [5] * 20, [70], [12, 13, 14, 15], [30] * 16, [2, 3]]
PARAMS = [
    SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True),  # without seeds: who draws which must not change
    SamplingParams(temperature=1.0, n=3, max_tokens=4, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1.0, n=2, seed=3, max_tokens=3, ignore_eos=True, prompt_logprobs=0),
    *[SamplingParams(temperature=1.0, n=2, max_tokens=2 + place, ignore_eos=True) for place in range(4)],
]
LIMITS = [
    {"max_num_queued_requests": 1},
    {"max_num_queued_requests": 3, "max_num_seqs": 1},
    {"max_num_queued_tokens": 20},
    {"max_num_queued_requests": 2, "max_num_queued_tokens": 21, "policy": "shortest_first"},
    {"max_num_queued_requests": 1, "policy": "static"},
    {"max_num_queued_requests": 1, "overlap": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("queue"), bos=False)


@pytest.fixture(scope="module")
def small(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=2, max_num_queued_requests=1, max_num_queued_tokens=20)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "small" in request.fixturenames:
        engine = request.getfixturevalue("small").engine
        assert not engine.has_unfinished_requests()
        engine._scheduler.check_idle()


def said(outputs: list[RequestOutput]) -> list[Any]:
    """Everything, of logprobs which tokens: their last bits may depend on who runs beside a request."""
    return [
        (
            output.prompt_token_ids,
            [list(place or ()) for place in output.prompt_logprobs or ()],
            [
                (answer.text, answer.token_ids, answer.finish_reason, [list(place) for place in answer.logprobs or ()])
                for answer in output.outputs
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_limits_on_what_may_wait_change_no_answer_and_lose_none(limits: dict[str, Any], folder: Path) -> None:
    options = {"max_num_seqs": 2} | limits
    free = {name: value for name, value in options.items() if not name.startswith("max_num_queued")}
    expected, found = (LLM(str(folder), **given).generate(PROMPTS, PARAMS, use_tqdm=False) for given in (free, options))
    assert said(found) == said(expected)
    assert [output.prompt_token_ids for output in found] == PROMPTS


def test_no_more_wait_than_may(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, waited = TextEngine.step, []

    def noted(self: TextEngine) -> list[RequestOutput]:
        scheduler = small.engine._scheduler
        waited.append((scheduler.num_waiting, scheduler.num_waiting_tokens))
        return step(self)

    monkeypatch.setattr(TextEngine, "step", noted)
    assert len(small.generate(PROMPTS, GREEDY, use_tqdm=False)) == len(PROMPTS)
    assert max(requests for requests, _ in waited) == 1
    assert max(tokens for _, tokens in waited) == 20


def test_answers_that_wait_for_room_are_not_overtaken_by_prompts_that_would_find_some(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds the blocks of the one before, if nobody takes them meanwhile."""
    model = LLM(str(folder), max_num_seqs=1, max_num_queued_tokens=20)
    added, add = [], model.engine.add_request

    def noted(name: str, *rest: Any) -> int:
        seed = add(name, *rest)
        added.append(name)
        return seed

    monkeypatch.setattr(model.engine, "add_request", noted)
    several = SamplingParams(temperature=1.0, n=3, max_tokens=2, ignore_eos=True)
    model.generate([[5] * 12, [1] * 8, [2] * 8, [3]], [several, GREEDY, GREEDY, GREEDY], use_tqdm=False)
    assert added == ["0/0", "1/0", "0/1", "0/2", "2/0", "3/0"]


def test_a_prompt_that_could_never_wait_is_refused_before_any_work(small: LLM) -> None:
    calls = small.engine.num_calls
    said = r"^prompts\[1\]: the prompt has 21 tokens, .*max_num_queued_tokens=20"
    with pytest.raises(RequestError, match=said) as caught:
        small.generate([[5], [5] * 21, [6]], GREEDY, use_tqdm=False)
    assert not isinstance(caught.value, QueueFullError), "no later time would do"
    assert "max_num_queued_tokens" in str(caught.value.hint)
    with pytest.raises(InvalidPromptsError) as several:
        small.generate([[5] * 21, [6], [5] * 64], GREEDY, use_tqdm=False)
    assert {place: type(error) for place, error in several.value.errors.items()} == {
        0: RequestError,
        2: ContextLengthError,
    }
    assert small.engine.num_calls == calls


def test_an_interrupt_among_prompts_that_wait_leaves_the_next_call_as_it_would_be(small: LLM) -> None:
    params = [SamplingParams(temperature=0.9, n=2, seed=place, max_tokens=2, ignore_eos=True) for place in range(4)]

    def decides(code: CodeType) -> bool:
        return code.co_filename in FILES

    def answers() -> list[Any]:
        return said(small.generate(PROMPTS[:4], params, use_tqdm=False))

    expected, line = answers(), 1
    while interrupted_at(line, answers, counts=decides):
        assert answers() == expected
        small.engine._scheduler.check_idle()
        line += 397  # every line in the end, as no two calls are alike
    assert line > 4 * 397
