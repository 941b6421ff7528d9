"""The engine with text around it: what an offline call and a server both drive, step by step.

A request for n answers becomes n requests of the engine. The first goes ahead; the others follow when it has its first
token, and find the prompt's blocks in the prefix cache.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.errors import DuplicateRequestError, QueueFullError, RequestError, SamplingParamsError
from weft.inference.engine import Engine
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_output import StepOutput
from weft.output_processor import OutputProcessor
from weft.outputs import RequestOutput
from weft.tokenizer.hub import HubTokenizer


class _Answer(NamedTuple):
    """One answer as the engine is asked for it."""

    engine_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams


class TextEngine:
    """`add_request`, `step` and `abort` as of the engine, with texts in the outputs."""

    def __init__(self, engine: Engine, tokenizer: HubTokenizer | None) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._processor = OutputProcessor(tokenizer, engine.finish)
        self._following: dict[str, list[_Answer]] = {}  # by request, until its first answer has a token
        self._due: deque[_Answer] = deque()  # they may enter as soon as the queue has room
        self._num_calls = 0  # of the engine, when we last called it

    @property
    def open_requests(self) -> list[str]:
        return self._processor.open_requests

    def has_unfinished_requests(self) -> bool:
        return len(self._processor) > 0

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the typed error that `add_request` would raise, and change nothing."""
        self.engine.validate(prompt_token_ids, self._params_of_tokens(params))

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        streams: bool = False,
    ) -> None:
        """Queue a request.

        prompt: its text, if it has one, for the outputs.   streams: an output at every step, or one at the end.
        Raises: RequestError and its kinds; the engine is then as it was.
        """
        if request_id in self._processor:
            raise DuplicateRequestError(f"request_id={request_id!r} is still in use")
        self._check_alone()
        first = self._params_of_tokens(params)
        # They end in the answer's number, of a single one too: no two requests can have the same.
        engine_ids = [f"{request_id}/{index}" for index in range(params.n)]
        # First here, so that an interrupt between the two leaves nothing in the engine that nobody knows of.
        self._processor.add(request_id, prompt, prompt_token_ids, params, engine_ids=engine_ids, streams=streams)
        try:
            seed = self.engine.add_request(engine_ids[0], prompt_token_ids, first)
            if params.n > 1:
                self._following[engine_ids[0]] = _other_answers(engine_ids, prompt_token_ids, first, seed)
        except RequestError:
            self._processor.forget(request_id)
            raise
        except BaseException:  # interrupted: the other answers need the seed that only a call that returns has given
            self.abort(request_id)
            raise
        finally:
            self._num_calls = self.engine.num_calls

    def has_room_for(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the queue would take this prompt now: answers to those before it come first."""
        return not self._due and self.engine.has_room_for(len(prompt_token_ids))

    def step(self) -> list[RequestOutput]:
        """One step of the engine: outputs of streams that gained something, and of requests that ended.

        Raises: RequestError, and no step is taken, where somebody else drives the engine as well.
        """
        self._check_alone()
        try:
            return self._step()
        finally:
            self._num_calls = self.engine.num_calls

    def _step(self) -> list[RequestOutput]:
        outputs = []
        for step in self.engine.step():
            output = self._processor.process(step)
            if output is not None:
                outputs.append(output)
            if step.request_id in self._following:
                self._due += self._following.pop(step.request_id)
        while self._due:
            try:
                self.engine.add_request(*self._due[0])
            except QueueFullError:
                break  # those in the queue will start; the request itself was taken in when it had room
            self._due.popleft()
        if not self.engine.has_unfinished_requests():  # somebody has ended them there, and no step will say so
            outputs += [output for request_id in self.open_requests for output in self.abort(request_id)]
        return outputs

    def _check_alone(self) -> None:
        """A step gives whoever takes it what everybody gained: theirs would be lost here, or ours have been there."""
        if self.has_unfinished_requests():
            is_alone = self.engine.num_calls == self._num_calls
        else:
            is_alone = not self.engine.has_unfinished_requests()
        if not is_alone:
            raise RequestError(
                "somebody else has added requests to the engine, or taken steps of it, and both would lose tokens",
                hint="close the stream or end its requests first, and drive the engine from one place",
            )

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End all answers of a request that have not ended; its last outputs, none if it has ended or never was."""
        outputs = []
        for engine_id in self._processor.engine_ids(request_id):
            self._following.pop(engine_id, None)
            self._due = deque(answer for answer in self._due if answer.engine_id != engine_id)
            # Where the engine has not got it (yet), there is still an answer to be ended.
            step = self.engine.abort(engine_id) or StepOutput(engine_id, finished=True, finish_reason="abort")
            output = self._processor.process(step)
            if output is not None:
                outputs.append(output)
        return outputs

    def _params_of_tokens(self, params: SamplingParams) -> SamplingParams:
        """What is left for the engine, which knows neither text nor several answers.

        Raises: SamplingParamsError where a text is asked for and there is no tokenizer.
        """
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(f"params must be SamplingParams, got {params!r}")
        if self._tokenizer is None and params.stop:
            raise SamplingParamsError(
                f"stop={params.stop!r} is looked for in the text, and skip_tokenizer_init=True leaves none",
                hint="stop_token_ids stop without a text",
            )
        return replace(params, n=1, stop=(), bad_words=self._words(params.bad_words or ()))

    def _words(self, words: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
        """Every word as token ids, with a space before it and without, since it may stand in mid-text or begin one.

        vLLM leaves out the second where it has more or fewer tokens than the first; here no spelling is let through.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str):
                found[tuple(word)] = None
                continue
            if self._tokenizer is None:
                raise SamplingParamsError(
                    f"bad_words holds {word!r}, and skip_tokenizer_init=True leaves no tokenizer for it",
                    hint="give lists of token ids",
                )
            bare = word.lstrip() or word
            for spelled in (bare, f" {bare}"):
                try:
                    found[tuple(self._tokenizer.encode(spelled, add_special_tokens=False))] = None
                except RequestError as error:  # half of a surrogate pair
                    raise SamplingParamsError(f"bad_words holds {word!r}: {error.message}") from error
        found.pop((), None)
        return list(found)


def _other_answers(
    engine_ids: Sequence[str], prompt_token_ids: Sequence[int], first: SamplingParams, seed: int
) -> list[_Answer]:
    """All answers but the first, whose seed is given. When they enter is the queue's to say, and shows in no token."""
    return [
        # The prompt is scored once: a request that has it scored computes it all, and finds nothing cached.
        _Answer(engine_id, prompt_token_ids, replace(first, seed=(seed + index) % 2**64, prompt_logprobs=None))
        for index, engine_id in enumerate(engine_ids[1:], 1)
    ]
