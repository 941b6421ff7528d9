"""Between engine and caller: tokens are collected by request, and a stop token is a token but no text."""

import pytest

from weft.inference.request import FinishReason
from weft.inference.step_output import StepOutput
from weft.output_processor import CompletionOutput, OutputProcessor, RequestOutput


class Letters:
    """Token n is the n-th letter."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def step(name: str, *tokens: int, reason: FinishReason | None = None, stop_reason: int | None = None) -> StepOutput:
    return StepOutput(
        request_id=name,
        new_token_ids=tokens,
        finished=reason is not None,
        finish_reason=reason,
        stop_reason=stop_reason,
    )


@pytest.mark.parametrize(
    ("last", "token_ids", "text"),
    [
        (step("r", 2, reason="stop", stop_reason=2), [0, 1, 2], "ab"),
        (step("r", 1, reason="stop", stop_reason=1), [0, 1, 1], "ab"),
        (step("r", 2, reason="length"), [0, 1, 2], "abc"),
        (step("r", reason="error"), [0, 1], "ab"),
        (step("r", reason="abort"), [0, 1], "ab"),
    ],
    ids=["stop", "stop after its own kind", "length", "error", "abort"],
)
def test_token_ids_hold_the_stop_token_and_text_does_not(last: StepOutput, token_ids: list[int], text: str) -> None:
    processor = OutputProcessor(Letters())
    processor.add("r", "prompt", [7])
    assert processor.process(step("r", 0)) is None
    assert processor.process(step("r", 1)) is None
    assert processor.process(last) == RequestOutput(
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
            )
        ],
        finished=True,
        num_cached_tokens=0,
    )
    assert processor.open_requests == []


def test_interleaved_requests_keep_their_own_tokens() -> None:
    processor = OutputProcessor(Letters())
    for name in "xy":
        processor.add(name, None, [])
    for token in range(3):
        processor.process(step("x", token))
        processor.process(step("y", token + 10))
    assert processor.open_requests == ["x", "y"]
    first, second = (processor.process(step(name, 25, reason="length")) for name in "yx")
    assert first is not None
    assert second is not None
    assert (first.outputs[0].text, second.outputs[0].text) == ("klmz", "abcz")


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    processor = OutputProcessor(None)
    processor.add("r", None, [7])
    output = processor.process(step("r", 3, reason="length"))
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (None, [3])


def test_a_request_that_was_never_added_is_a_defect_of_the_caller() -> None:
    with pytest.raises(KeyError, match="stranger"):
        OutputProcessor(None).process(step("stranger", 0))
