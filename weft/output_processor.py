"""Between the engine and its caller: collects each request's tokens, makes text of them, ends it at a stop string.

One path for streams and whole outputs: what an answer gains is gathered, and given out at every step or at the end.
Knows no scheduler and no device; the engine knows nothing of text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from weft.inference.request import FinishReason
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_output import StepOutput
from weft.outputs import CompletionOutput, PlaceLogprobs, RequestOutput, place_logprobs
from weft.stop_strings import StopStrings
from weft.tokenizer.detokenizer import Detokenizer


@runtime_checkable
class Tokenizer(Protocol):
    """All that this file needs of a tokenizer."""

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """For the text of one answer."""
        ...

    def token_text(self, token_id: int) -> str:
        """What a token shows in mid-text."""
        ...


class _Answer:
    """One answer under way. Tokens, logprobs and text end at the same place: with the token that ended it.

    finish_reason: None while it goes on.
    """

    def __init__(
        self, index: int, prompt_token_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._min_tokens, self._shows_stop = params.min_tokens, params.include_stop_str_in_output
        self._text_of = None if tokenizer is None else tokenizer.token_text
        self._detokenizer: Detokenizer | None = None
        self._stop_strings: StopStrings | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.stop:
                self._stop_strings = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._num_tokens = 0
        self._cumulative_logprob = None if params.logprobs is None else 0.0
        # Gained and not given out yet.
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[PlaceLogprobs] | None = None if params.logprobs is None else []

    def take(self, step: StepOutput) -> None:
        """What a step gave it, up to the token that completes a stop string."""
        last = len(step.new_token_ids) - 1
        for place, token in enumerate(step.new_token_ids):
            self._token_ids.append(token)
            self._num_tokens += 1
            if self._logprobs is not None:
                known = step.logprobs[place]
                self._logprobs.append(place_logprobs(known, self._text_of))
                self._cumulative_logprob = (self._cumulative_logprob or 0.0) + known.logprob
            is_hidden = place == last and step.stop_reason is not None and not self._shows_stop
            if self._detokenizer is not None and not is_hidden and self._show(self._detokenizer.push(token)):
                return
        if step.finished:
            self.finish_reason, self._stop_reason, self._error = step.finish_reason, step.stop_reason, step.error
            if self._detokenizer is not None and not self._show(self._detokenizer.finish()) and self._stop_strings:
                self._pieces.append(self._stop_strings.finish())

    def give(self) -> CompletionOutput:
        """All that it has gained since it was last asked."""
        output = CompletionOutput(
            index=self.index,
            text=None if self._detokenizer is None else "".join(self._pieces),
            token_ids=self._token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )
        self._token_ids, self._pieces = [], []
        self._logprobs = None if self._logprobs is None else []
        return output

    def _show(self, piece: str) -> bool:
        """Text that is certain, as far as no stop string may begin in it. Whether one ended the answer."""
        if self._stop_strings is None:
            self._pieces.append(piece)
            return False
        # As in vLLM, a stop string ends an answer as an EOS does: after `min_tokens` others at the earliest.
        self._pieces.append(self._stop_strings.push(piece, may_stop=self._num_tokens > self._min_tokens))
        if self._stop_strings.match is None:
            return False
        self.finish_reason, self._stop_reason = "stop", self._stop_strings.match
        return True


@dataclass(kw_only=True)
class _Request:
    """A request and its answers, by the ids under which the engine knows them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    streams: bool
    answers: dict[str, _Answer]
    text_of: Callable[[int], str] | None
    prompt_logprobs: list[PlaceLogprobs | None] | None = None
    num_cached_tokens: int = 0

    def take(self, answer: _Answer, step: StepOutput) -> RequestOutput | None:
        answer.take(step)
        if answer.index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, step.num_cached_tokens)
            if step.prompt_logprobs is not None:
                self.prompt_logprobs = [
                    None if place is None else place_logprobs(place, self.text_of) for place in step.prompt_logprobs
                ]
        if self.streams:
            return self._give([answer])
        return self._give(list(self.answers.values())) if self.finished else None

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers.values())

    def _give(self, answers: list[_Answer]) -> RequestOutput:
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[answer.give() for answer in answers],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
        )


class OutputProcessor:
    """Holds the requests of one caller until they end."""

    def __init__(self, tokenizer: Tokenizer | None, finish: Callable[[str, FinishReason], object]) -> None:
        """finish: ends a request of the engine at once, so that it gives no output any more."""
        self._tokenizer = tokenizer
        self._finish = finish
        self._requests: dict[str, _Request] = {}
        self._request_of: dict[str, _Request] = {}  # by the engine's ids, of answers that have not ended

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def open_requests(self) -> list[str]:
        return list(self._requests)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        engine_ids: Sequence[str] | None = None,
        streams: bool = False,
    ) -> None:
        """engine_ids: those of its answers in the engine, in order; the request's own, if it has one answer.

        streams: whether every step gives an output with what is new, or the last one with all.
        """
        tokenizer = self._tokenizer if params.detokenize else None
        engine_ids = [request_id] if engine_ids is None else engine_ids
        request = _Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            streams=streams,
            answers={
                engine_id: _Answer(index, prompt_token_ids, params, tokenizer)
                for index, engine_id in enumerate(engine_ids)
            },
            text_of=None if tokenizer is None else tokenizer.token_text,
        )
        self._requests[request_id] = request
        self._request_of.update(dict.fromkeys(engine_ids, request))

    def process(self, step: StepOutput) -> RequestOutput | None:
        """Take in what one step gave one answer; an output if its request is a stream or has ended."""
        request = self._request_of[step.request_id]
        answer = request.answers[step.request_id]
        output = request.take(answer, step)
        if answer.finish_reason is not None:
            if not step.finished:
                self._finish(step.request_id, "stop")
            del self._request_of[step.request_id]  # last: whoever is interrupted finds it, and can end it
            if request.finished:
                del self._requests[request.request_id]
        return output

    def engine_ids(self, request_id: str) -> list[str]:
        """Those of its answers that have not ended."""
        request = self._requests.get(request_id)
        answers = {} if request is None else request.answers
        return [engine_id for engine_id in answers if engine_id in self._request_of]

    def forget(self, request_id: str) -> None:
        """As if it had never been added."""
        for engine_id in self._requests.pop(request_id).answers:
            del self._request_of[engine_id]
