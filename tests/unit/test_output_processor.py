"""Between engine and caller: streams and whole outputs are one path, and tokens, logprobs and text end together."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.inference.request import FinishReason
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_output import StepOutput
from weft.inference.token_logprobs import TokenLogprobs
from weft.output_processor import OutputProcessor
from weft.outputs import CompletionOutput, Logprob, RequestOutput

WORDS = ["a", "b", "ab", "ba", "", "c"]


class Words:
    """Token n is the n-th word; 9 is special."""

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> "WordByWord":
        return WordByWord(skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"


class WordByWord:
    """The last character is held back, as one of several bytes would be, until the next word."""

    def __init__(self, skip: bool) -> None:
        self.skip, self.held = skip, ""

    def push(self, token_id: int) -> str:
        text = self.held + (WORDS[token_id] if token_id != 9 else "" if self.skip else "<end>")
        self.held = text[-1:] if text.endswith("c") else ""
        return text.removesuffix("c") if self.held else text

    def finish(self) -> str:
        return self.held


def step(
    name: str, *tokens: int, reason: FinishReason | None = None, stop: int | None = None, **more: Any
) -> StepOutput:
    return StepOutput(name, tokens, reason is not None, reason, stop, **more)


class Caller:
    """A processor, what it gave out and what it ended."""

    def __init__(self, params: SamplingParams | None = None, *, streams: bool = False, **options: Any) -> None:
        self.ended: list[tuple[str, str]] = []
        self.outputs: list[RequestOutput] = []
        self.processor = OutputProcessor(options.pop("tokenizer", Words()), lambda *end: self.ended.append(end))
        self.processor.add("r", "prompt", [7], params or SamplingParams(), streams=streams, **options)

    def give(self, *steps: StepOutput) -> list[CompletionOutput]:
        """Until it has ended, as the engine does."""
        for gained in steps:
            if "r" not in self.processor.open_requests:
                break
            output = self.processor.process(gained)
            if output is not None:
                self.outputs.append(output)
        return [answer for output in self.outputs for answer in output.outputs]


@pytest.mark.parametrize(
    ("last", "token_ids", "text"),
    [
        (step("r", 2, reason="stop", stop=2), [0, 1, 2], "ab"),
        (step("r", 1, reason="stop", stop=1), [0, 1, 1], "ab"),
        (step("r", 2, reason="length"), [0, 1, 2], "abab"),
        (step("r", reason="error", error="why"), [0, 1], "ab"),
        (step("r", reason="abort"), [0, 1], "ab"),
    ],
    ids=["stop", "stop after its own kind", "length", "error", "abort"],
)
def test_token_ids_hold_the_stop_token_and_text_does_not(last: StepOutput, token_ids: list[int], text: str) -> None:
    caller = Caller()
    caller.give(step("r", 0), step("r", 1), last)
    assert caller.outputs == [
        RequestOutput(
            request_id="r",
            prompt="prompt",
            prompt_token_ids=[7],
            outputs=[
                CompletionOutput(
                    index=0,
                    text=text,
                    token_ids=token_ids,
                    finish_reason=last.finish_reason,
                    stop_reason=last.stop_reason,
                    error=last.error,
                )
            ],
            finished=True,
            num_cached_tokens=0,
        )
    ]
    assert caller.processor.open_requests == []
    assert caller.ended == []  # the engine knows


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "a<end>")])
def test_a_stop_token_is_shown_if_asked_for_unless_special_tokens_are_skipped(skip: bool, text: str) -> None:
    params = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=skip)
    (answer,) = Caller(params).give(step("r", 0), step("r", 9, reason="stop", stop=9))
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, [0, 9], 9)


def expected(tokens: list[int], stops: list[str], min_tokens: int, include: bool) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string, by looking at the whole text after every character."""
    ends = list(accumulate(len(WORDS[token]) for token in tokens))
    text = "".join(WORDS[token] for token in tokens)
    for count, end in enumerate(ends, start=1):
        for place in range(end - len(WORDS[tokens[count - 1]]) + 1, end + 1):
            found = [stop for stop in stops if text[:place].endswith(stop)]
            if found and count > min_tokens:
                stop = max(found, key=len)
                return text[: place if include else place - len(stop)], count, stop
    return text, len(tokens), None


@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 3), min_size=10, max_size=10),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
    reason=st.sampled_from(["length", "stop", "abort"]),
)
def test_text_tokens_and_logprobs_end_together_streamed_or_whole(
    tokens: list[int], stops: list[str], sizes: list[int], min_tokens: int, include: bool, reason: Any
) -> None:
    params = SamplingParams(
        stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include, logprobs=0, max_tokens=None
    )
    steps, left = [], [(token, TokenLogprobs(token, -float(place), 1)) for place, token in enumerate(tokens)]
    for size in sizes:  # several tokens a step, too
        part, left = left[:size], left[size:]
        if part:
            steps.append(step("r", *(token for token, _ in part), logprobs=tuple(logprob for _, logprob in part)))
    steps.append(step("r", reason=reason))
    text, count, stop = expected(tokens, stops, min_tokens, include)
    whole, stream = Caller(params), Caller(params, streams=True)
    (answer,), parts = whole.give(*steps), stream.give(*steps)
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, tokens[:count], stop)
    assert answer.finish_reason == ("stop" if stop else reason)
    assert answer.logprobs is not None
    assert [place[token].logprob for place, token in zip(answer.logprobs, tokens[:count], strict=True)] == [
        -float(place) for place in range(count)
    ]
    assert answer.cumulative_logprob == parts[-1].cumulative_logprob == -float(sum(range(count)))
    assert "".join(part.text or "" for part in parts) == text
    assert [token for part in parts for token in part.token_ids] == answer.token_ids
    assert [place for part in parts for place in part.logprobs or ()] == answer.logprobs
    ends = [(part.finish_reason, part.stop_reason) for part in parts]
    assert ends == [(None, None)] * (len(parts) - 1) + [(answer.finish_reason, answer.stop_reason)]
    assert whole.ended == stream.ended == ([("r", "stop")] if stop else [])


def test_a_stop_string_in_what_was_held_back_counts_at_the_end() -> None:
    """The last characters may be known only when no token follows; the engine has ended it by then."""
    for stop_token in (None, 3):
        caller = Caller(SamplingParams(stop="bc"))
        reason: FinishReason = "length" if stop_token is None else "stop"
        last = (
            [step("r", 5, reason=reason)] if stop_token is None else [step("r", 5), step("r", 3, reason=reason, stop=3)]
        )
        (answer,) = caller.give(step("r", 2), *last)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a", "stop", "bc")
        assert answer.token_ids == [2, 5, *([] if stop_token is None else [3])]
        assert caller.ended == []


def test_what_could_become_a_stop_string_is_given_out_at_the_end() -> None:
    parts = Caller(SamplingParams(stop="abb"), streams=True).give(step("r", 2), step("r", 1, reason="stop", stop=1))
    assert [part.text for part in parts] == ["", "ab"]


@pytest.mark.parametrize(
    ("tokenizer", "params"), [(None, SamplingParams()), (Words(), SamplingParams(detokenize=False))]
)
def test_without_a_tokenizer_there_are_tokens_and_no_text(tokenizer: Words | None, params: SamplingParams) -> None:
    (answer,) = Caller(params, tokenizer=tokenizer).give(step("r", 3, reason="length"))
    assert (answer.text, answer.token_ids) == (None, [3])


def test_logprobs_name_the_token_itself_first_and_each_by_rank() -> None:
    place = TokenLogprobs(4, -3.0, 9, ((0, -0.5), (1, -1.0), (2, -1.0), (3, -2.0)))
    (answer,) = Caller(SamplingParams(logprobs=4)).give(step("r", 4, reason="length", logprobs=(place,)))
    assert answer.logprobs == [
        {
            4: Logprob(-3.0, 9, "<4>"),
            0: Logprob(-0.5, 1, "<0>"),
            1: Logprob(-1.0, 2, "<1>"),
            2: Logprob(-1.0, 2, "<2>"),  # as likely as the one before: none better than both
            3: Logprob(-2.0, 4, "<3>"),
        }
    ]
    assert list(answer.logprobs[0]) == [4, 0, 1, 2, 3]
    (answer,) = Caller(SamplingParams(logprobs=4), tokenizer=None).give(
        step("r", 0, reason="length", logprobs=(place._replace(token_id=0, rank=1, logprob=-0.5),))
    )
    assert answer.logprobs is not None
    assert answer.logprobs[0][0] == Logprob(-0.5, 1, None)
    assert len(answer.logprobs[0]) == 4


@pytest.mark.parametrize("streams", [False, True])
def test_prompt_logprobs_come_once(streams: bool) -> None:
    caller = Caller(SamplingParams(prompt_logprobs=0), streams=streams)
    scored = step("r", 0, prompt_logprobs=(None, TokenLogprobs(7, -1.0, 1)))
    caller.give(scored, step("r", 0, reason="length"))
    found = [output.prompt_logprobs for output in caller.outputs]
    assert found == [[None, {7: Logprob(-1.0, 1, "<7>")}], *([None] if streams else [])]


def test_answers_come_in_the_order_of_their_index_when_the_last_has_ended() -> None:
    caller = Caller(SamplingParams(n=3, stop="b"), engine_ids=["x", "y", "z"])
    caller.give(step("z", 2), step("x", 0, num_cached_tokens=4), step("y", 0, reason="length"))
    assert caller.outputs == []
    assert caller.processor.engine_ids("r") == ["x"]
    caller.give(step("x", 3))
    (output,) = caller.outputs
    assert [(answer.index, answer.text, answer.stop_reason) for answer in output.outputs] == [
        (0, "a", "b"),
        (1, "a", None),
        (2, "a", "b"),
    ]
    assert (output.finished, output.num_cached_tokens) == (True, 4)
    assert caller.ended == [("z", "stop"), ("x", "stop")]
    assert caller.processor.engine_ids("r") == []


def test_a_stream_of_several_answers_says_whose_text_it_is_and_ends_with_the_last() -> None:
    caller = Caller(SamplingParams(n=2), streams=True, engine_ids=["x", "y"])
    caller.give(step("y", 1), step("x", 0), step("y", 1, reason="length"), step("x", 0, reason="length"))
    assert [(output.outputs[0].index, output.outputs[0].text, output.finished) for output in caller.outputs] == [
        (1, "b", False),
        (0, "a", False),
        (1, "b", False),
        (0, "a", True),
    ]


def test_interleaved_requests_keep_their_own_tokens() -> None:
    processor = OutputProcessor(Words(), lambda *end: None)
    for name in "xy":
        processor.add(name, None, [], SamplingParams(stop="abab"))
    for token in (0, 1, 0):
        processor.process(step("x", token))
        processor.process(step("y", 0))
    assert processor.open_requests == ["x", "y"]
    first, second = (processor.process(step(name, 0, reason="length")) for name in "yx")
    assert first is not None
    assert second is not None
    assert (first.outputs[0].text, second.outputs[0].text) == ("aaaa", "abaa")


def test_a_request_that_was_never_added_or_has_ended_is_a_defect_of_the_caller() -> None:
    processor = OutputProcessor(None, lambda *end: None)
    with pytest.raises(KeyError, match="stranger"):
        processor.process(step("stranger", 0))
    processor.add("r", None, [], SamplingParams())
    processor.forget("r")
    with pytest.raises(KeyError, match="r"):
        processor.process(step("r", 0))
