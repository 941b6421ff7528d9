"""Between the engine and its caller: collects each request's tokens and turns them into text.

Knows no scheduler and no device; the engine knows nothing of text.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from weft.inference.request import FinishReason
from weft.inference.step_output import StepOutput


@runtime_checkable
class Decoder(Protocol):
    """All that this file needs of a tokenizer."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer. `token_ids` include the stop token that ended it, `text` does not; without a tokenizer it is None.

    finish_reason: "stop" (EOS or a stop token), "length" (max_tokens or the context), "abort", "error".
    stop_reason: the stop token, if one ended it.
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request and its answers. `prompt` is None for a prompt of token ids.

    num_cached_tokens: tokens of the prompt that the prefix cache held when the request was admitted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int


@dataclass(kw_only=True)
class _Progress:
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)


class OutputProcessor:
    """Holds the requests of one caller until they end."""

    def __init__(self, decoder: Decoder | None) -> None:
        self._decoder = decoder
        self._open: dict[str, _Progress] = {}

    @property
    def open_requests(self) -> list[str]:
        return list(self._open)

    def add(self, request_id: str, prompt: str | None, prompt_token_ids: list[int]) -> None:
        self._open[request_id] = _Progress(prompt=prompt, prompt_token_ids=prompt_token_ids)

    def process(self, step: StepOutput) -> RequestOutput | None:
        """Take in one step's output; the whole request once it has ended."""
        progress = self._open[step.request_id]
        progress.token_ids.extend(step.new_token_ids)
        if not step.finished:
            return None
        del self._open[step.request_id]
        shown = progress.token_ids[:-1] if step.stop_reason is not None else progress.token_ids
        completion = CompletionOutput(
            index=0,
            text=None if self._decoder is None else self._decoder.decode(shown),
            token_ids=progress.token_ids,
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
        )
        return RequestOutput(
            request_id=step.request_id,
            prompt=progress.prompt,
            prompt_token_ids=progress.prompt_token_ids,
            outputs=[completion],
            finished=True,
            num_cached_tokens=step.num_cached_tokens,
        )
