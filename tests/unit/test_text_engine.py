"""The engine with text around it: n answers, stop strings one step behind, streams, aborts; nothing is left behind."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_llm import save_text_model
from weft import LLM, RequestOutput, SamplingParams
from weft.errors import DuplicateRequestError, RequestError, SamplingParamsError
from weft.output_processor import OutputProcessor
from weft.text_engine import TextEngine

FREE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WARM = SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True)
PROMPT = list(range(20, 60))  # two full blocks and a part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("text_engine"), bos=False)


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "one step behind"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=3, overlap=request.param)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        assert not engine.has_unfinished_requests()
        engine._scheduler.check_idle()


@pytest.fixture
def added(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, SamplingParams]]:
    """What the engine is asked for."""
    asked: list[tuple[str, SamplingParams]] = []
    plain = llm.engine.add_request

    def noted(request_id: str, prompt: Any, params: SamplingParams, **options: Any) -> int:
        seed = plain(request_id, prompt, params, **options)
        asked.append((request_id, params))
        return seed

    monkeypatch.setattr(llm.engine, "add_request", noted)
    return asked


def run(llm: LLM, prompt: list[int], params: SamplingParams, *, streams: bool = False) -> list[RequestOutput]:
    text = TextEngine(llm.engine, llm.tokenizer)
    text.add_request("r", None, prompt, params, streams=streams)
    outputs = []
    while text.has_unfinished_requests():
        outputs += text.step()
    assert llm.engine.step() == []  # a step that was under way when the last one ended
    return outputs


@pytest.mark.parametrize("seed", [5, 2**64 - 2])
def test_each_of_n_answers_is_what_its_seed_says_alone(llm: LLM, seed: int) -> None:
    (together,) = run(llm, PROMPT, replace(WARM, n=4, seed=seed))
    assert [answer.index for answer in together.outputs] == [0, 1, 2, 3]
    for index, answer in enumerate(together.outputs):
        (alone,) = run(llm, PROMPT, replace(WARM, seed=(seed + index) % 2**64))
        assert (answer.token_ids, answer.text) == (alone.outputs[0].token_ids, alone.outputs[0].text)
    assert len({tuple(answer.token_ids) for answer in together.outputs}) == 4


@pytest.mark.parametrize("has_entered", [False, True])
def test_an_interrupted_request_is_gone_and_can_come_again(
    has_entered: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other answers follow from the seed that the engine returns: without it the first would stand alone."""
    enter = llm.engine.add_request

    def interrupted(*arguments: Any) -> int:
        if has_entered:
            enter(*arguments)
        raise KeyboardInterrupt

    text = TextEngine(llm.engine, llm.tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text.add_request("r", None, PROMPT, replace(WARM, n=3))
    assert not text.has_unfinished_requests()
    assert not llm.engine.has_unfinished_requests()
    text.add_request("r", None, PROMPT, replace(WARM, n=3))
    outputs = []
    while text.has_unfinished_requests():
        outputs += text.step()
    assert llm.engine.step() == []
    assert [[answer.finish_reason for answer in output.outputs] for output in outputs] == [["length"] * 3]


def test_without_a_seed_n_answers_differ(llm: LLM, added: list[tuple[str, SamplingParams]]) -> None:
    (output,) = run(llm, PROMPT, replace(WARM, n=3, seed=None))
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    first, second, third = [params.seed for _, params in added]
    assert first is None, "the engine draws it, for all of them"
    assert second is not None
    assert third == (second + 1) % 2**64


def test_the_others_follow_when_the_first_has_a_token_and_find_its_blocks(
    llm: LLM, added: list[tuple[str, SamplingParams]]
) -> None:
    prompt, text, cached = [token + 100 for token in PROMPT], TextEngine(llm.engine, llm.tokenizer), {}
    plain = llm.engine.step

    def noted() -> list[Any]:
        outputs = plain()
        cached.update({step.request_id: step.num_cached_tokens for step in outputs})
        return outputs

    llm.engine.step = noted  # type: ignore[method-assign]
    try:
        text.add_request("r", None, prompt, replace(WARM, n=3, max_tokens=1))
        assert [name for name, _ in added] == ["r/0"]
        while text.has_unfinished_requests():
            text.step()
    finally:
        llm.engine.step = plain  # type: ignore[method-assign]
    assert [name for name, _ in added] == ["r/0", "r/1", "r/2"]
    assert cached == {"r/0": 0, "r/1": 32, "r/2": 32}


def test_a_full_queue_makes_the_others_wait_and_loses_none(folder: Path) -> None:
    small = LLM(str(folder), max_num_seqs=1, max_num_queued_requests=1)
    (output,) = run(small, PROMPT, replace(WARM, n=4))
    assert [len(answer.token_ids) for answer in output.outputs] == [8] * 4


def test_those_who_wait_for_a_full_queue_are_aborted_with_their_request(folder: Path) -> None:
    small = LLM(str(folder), max_num_seqs=1, max_num_queued_requests=1)
    text = TextEngine(small.engine, small.tokenizer)
    text.add_request("r", None, PROMPT, replace(WARM, n=4))
    while not text._due:
        text.step()
    (output,) = text.abort("r")
    assert [answer.finish_reason for answer in output.outputs] == ["abort"] * 4
    text.add_request("s", None, PROMPT, WARM)  # whoever came now would come out of nowhere
    outputs = []
    while text.has_unfinished_requests():
        outputs += text.step()
    assert [output.request_id for output in outputs] == ["s"]
    assert not small.engine.has_unfinished_requests()


def stop_in(text: str) -> str:
    """Three characters from the middle of the text that stand there for the first time."""
    return next(
        text[place : place + 3]
        for place in range(len(text) // 2 - 1, len(text) - 3)
        if text.index(text[place : place + 3]) == place
    )


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_tokens_and_text_streamed_or_whole(llm: LLM, include: bool) -> None:
    (free,) = run(llm, PROMPT, FREE)
    text = free.outputs[0].text or ""
    stop = stop_in(text)
    params = replace(FREE, stop=stop, include_stop_str_in_output=include)
    (whole,), parts = run(llm, PROMPT, params), run(llm, PROMPT, params, streams=True)
    (answer,) = whole.outputs
    assert answer.text == text[: text.index(stop) + (len(stop) if include else 0)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    count = len(answer.token_ids)
    assert answer.token_ids == free.outputs[0].token_ids[:count]
    assert llm.tokenizer is not None
    shown = [llm.tokenizer.decode(answer.token_ids[:size]) for size in (count - 1, count)]
    assert [stop in text for text in shown] == [False, True]
    assert "".join(part.outputs[0].text or "" for part in parts) == answer.text
    assert [token for part in parts for token in part.outputs[0].token_ids] == answer.token_ids
    assert parts[-1].outputs[0].stop_reason == stop


def test_min_tokens_gates_a_stop_string(llm: LLM) -> None:
    (free,) = run(llm, PROMPT, FREE)
    stop = stop_in(free.outputs[0].text or "")
    count = len(run(llm, PROMPT, replace(FREE, stop=stop))[0].outputs[0].token_ids)
    for least, reason in ((count - 1, "stop"), (count, "length")):
        (output,) = run(llm, PROMPT, replace(FREE, stop=stop, min_tokens=least))
        assert output.outputs[0].finish_reason == reason


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_ends_all_answers_wherever_they_are(llm: LLM, steps: int) -> None:
    text = TextEngine(llm.engine, llm.tokenizer)
    text.add_request("r", None, PROMPT, replace(WARM, n=5))
    text.add_request("other", None, PROMPT, FREE)
    for _ in range(steps):
        text.step()
    (output,) = text.abort("r")
    assert [answer.finish_reason for answer in output.outputs] == ["abort"] * 5
    assert output.finished
    assert text.abort("r") == []
    assert text.open_requests == ["other"]
    outputs: list[RequestOutput] = []
    while text.has_unfinished_requests():
        outputs += text.step()
    llm.engine.step()
    assert [output.request_id for output in outputs] == ["other"]
    assert outputs[0].outputs[0].token_ids == run(llm, PROMPT, FREE)[0].outputs[0].token_ids


def test_many_requests_cost_no_more_each_than_few(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: nobody walks through those who are there already."""
    monkeypatch.setattr(llm.engine, "add_request", lambda *request: None)
    monkeypatch.setattr(llm.engine, "step", list)
    text, walks = TextEngine(llm.engine, llm.tokenizer), []
    monkeypatch.setattr(llm.engine, "has_unfinished_requests", text.has_unfinished_requests)
    monkeypatch.setattr(OutputProcessor, "open_requests", property(walks.append))
    for place in range(50):
        text.add_request(str(place), None, PROMPT, FREE)
        text.step()
        assert text.has_unfinished_requests()
    assert walks == []


def test_the_engine_is_asked_for_tokens_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SamplingParams] = []
    monkeypatch.setattr(llm.engine, "add_request", lambda name, prompt, params: asked.append(params) or 0)
    text = TextEngine(llm.engine, llm.tokenizer)
    params = replace(
        WARM, n=2, stop=["x"], include_stop_str_in_output=True, skip_special_tokens=False, bad_words=["row", (7, 8)]
    )
    text.add_request("r", None, PROMPT, params)
    assert llm.tokenizer is not None
    words = [llm.tokenizer.encode(word, add_special_tokens=False) for word in ("row", " row")]
    assert asked == [replace(params, n=1, stop=(), bad_words=[*words, [7, 8]])]


def test_an_engine_without_text_refuses_what_is_about_text_or_several_answers(llm: LLM) -> None:
    for params in (replace(WARM, n=2), replace(WARM, stop="x")):
        with pytest.raises(SamplingParamsError, match="knows no text") as caught:
            llm.engine.add_request("direct", PROMPT, params)
        assert caught.value.hint == "LLM and TextEngine take it"


def test_bad_words_do_not_occur_in_mid_text_or_at_its_beginning(llm: LLM) -> None:
    (free,) = run(llm, PROMPT, FREE)
    token = free.outputs[0].token_ids[0]
    assert llm.tokenizer is not None
    word = next(text for text in map(llm.tokenizer.token_text, free.outputs[0].token_ids) if text.isascii())
    (output,) = run(llm, PROMPT, replace(FREE, bad_words=[word, [token]]))
    banned = {tuple(llm.tokenizer.encode(spelled, add_special_tokens=False)) for spelled in (word, f" {word}")}
    said = output.outputs[0].token_ids
    assert token not in said
    for words in banned:
        assert not any(tuple(said[place : place + len(words)]) == words for place in range(len(said)))


def test_a_bad_word_that_is_no_text_is_refused_by_name(llm: LLM) -> None:
    text = TextEngine(llm.engine, llm.tokenizer)
    with pytest.raises(SamplingParamsError, match=r"^bad_words holds 'a\\ud800'.*is no Unicode"):
        text.validate(PROMPT, replace(FREE, bad_words=["a\ud800"]))


def test_logprobs_and_prompt_logprobs_come_with_what_their_tokens_show(llm: LLM) -> None:
    params = replace(WARM, n=2, logprobs=2, prompt_logprobs=1)
    (output,) = run(llm, PROMPT, params)
    assert llm.tokenizer is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token, place in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True):
        assert place is not None
        assert next(iter(place)) == token
    for answer in output.outputs:
        assert answer.logprobs is not None
        for token, place in zip(answer.token_ids, answer.logprobs, strict=True):
            assert next(iter(place)) == token
            assert place[token].decoded_token == llm.tokenizer.token_text(token)
            assert len(place) in (2, 3)
        assert answer.cumulative_logprob == pytest.approx(
            sum(place[token].logprob for token, place in zip(answer.token_ids, answer.logprobs, strict=True)),
            rel=1e-12,  # the same sum in float64, in the same order but for a first 0.0
        )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (replace(FREE, stop=["\n", "x"]), r"stop=\('\\n', 'x'\) is looked for in the text"),
        (replace(FREE, bad_words=["row"]), "bad_words holds 'row'"),
    ],
    ids=["stop", "bad_words"],
)
def test_what_needs_a_text_is_refused_without_a_tokenizer(llm: LLM, params: SamplingParams, message: str) -> None:
    text = TextEngine(llm.engine, None)
    for call in (text.validate, lambda *prompt: text.add_request("r", None, *prompt)):
        with pytest.raises(SamplingParamsError, match=message) as caught:
            call(PROMPT, params)
        assert caught.value.hint is not None
    assert text.open_requests == []


@pytest.mark.parametrize("requests", [{"r": 3, "r/0": 1, "r/1": 2}, {"r/0": 1, "r/1": 1, "r": 3}], ids=list)
def test_a_request_may_be_called_as_another_ones_answer_would_be(requests: dict[str, int], llm: LLM) -> None:
    text = TextEngine(llm.engine, llm.tokenizer)
    for request_id, n in requests.items():
        text.add_request(request_id, None, PROMPT, replace(WARM, n=n))
    counts = {}
    while text.has_unfinished_requests():
        counts.update({output.request_id: len(output.outputs) for output in text.step()})
    assert counts == requests


def test_a_refused_request_leaves_nothing(llm: LLM) -> None:
    text = TextEngine(llm.engine, llm.tokenizer)
    add: Callable[..., None] = text.add_request
    with pytest.raises(SamplingParamsError, match="outside the vocabulary"):
        add("r", None, PROMPT, replace(WARM, n=3, stop_token_ids=[10**6]))
    assert text.open_requests == []
    add("r", None, PROMPT, replace(WARM, n=3))
    with pytest.raises(DuplicateRequestError, match="'r'"):
        add("r", None, PROMPT, FREE)
    text.abort("r")


@pytest.mark.parametrize("meddles", ["adds", "steps"])
def test_a_step_that_would_lose_tokens_is_not_taken(meddles: str, llm: LLM) -> None:
    """Whoever steps is given what everybody gained: two who do so lose each other's tokens in silence."""
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def by_hand() -> list[int]:
        said: list[int] = []
        while engine.has_unfinished_requests():
            said += [token for output in engine.step() for token in output.new_token_ids]
        return said

    engine.add_request("mine", PROMPT, params)
    expected = by_hand()
    stream = llm.stream(PROMPT, params)
    next(stream)
    if meddles == "adds":
        engine.add_request("mine", PROMPT, params)
    else:
        engine.step()
    with pytest.raises(RequestError, match="somebody else has added requests to the engine, or taken steps") as caught:
        next(stream)
    assert "close the stream" in str(caught.value.hint)
    assert by_hand() == (expected if meddles == "adds" else [])

    engine.add_request("mine", PROMPT, params)
    text = TextEngine(engine, llm.tokenizer)
    for call in (text.step, lambda: text.add_request("theirs", None, PROMPT, params)):
        with pytest.raises(RequestError, match="somebody else has added requests"):
            call()
    assert by_hand() == expected
    assert not text.open_requests
    assert [output.outputs[0].token_ids for output in run(llm, PROMPT, params)] == [expected]
