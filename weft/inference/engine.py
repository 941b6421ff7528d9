"""The engine: token ids in, token ids out, one step at a time. Knows no text.

engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0))
while engine.has_unfinished_requests():
    for output in engine.step(): ...
"""

import logging
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from random import Random
from typing import SupportsIndex, cast, get_args

from weft.config import EngineConfig, is_duration
from weft.errors import (
    ContextLengthError,
    DuplicateRequestError,
    EmptyPromptError,
    QueueFullError,
    RequestError,
    SamplingParamsError,
    TokenOutOfRangeError,
    shown,
)
from weft.inference.pipeline import Pipeline
from weft.inference.policies import build_policy
from weft.inference.request import FinishReason, Request
from weft.inference.runner import Observer
from weft.inference.sampler import Sampler
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler
from weft.inference.startup import start
from weft.inference.step_output import StepOutput
from weft.models.checkpoint.interface import Checkpoint

logger = logging.getLogger("weft")

MAX_PRIORITY = 2**53  # whole numbers up to here are exact in a float, in which policies reckon


class Engine:
    """Everything between token ids and tokens: scheduler, runner, model, cache.

    limits, geometry, vocab_size, eos_token_ids, placement: what was chosen when it was built; description: in words.
    startup_seconds: what its parts took.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        sampler: Sampler | None = None,
        observe: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        show_progress: bool = False,
    ) -> None:
        """Load the model and allocate the cache.

        sampler: replaces the sampler, for tests that force tokens.   observe: sees every step's logits.
        clock: seconds, by which policies order arrivals.
        Raises: ConfigError, CheckpointError and their kinds, before the weights are read where that is possible.
        """
        policy = build_policy(config.scheduler)
        ready = start(config, checkpoint, sampler=sampler, observe=observe, show_progress=show_progress)
        self.placement, self.limits, self.geometry = ready.placement, ready.limits, ready.geometry
        self.vocab_size, self.model, self.description = ready.vocab_size, ready.model, ready.description
        self.startup_seconds = ready.seconds
        # Some checkpoints end at ids that no token has (-1, or of a larger tokenizer): nothing can sample those.
        eos = checkpoint.generation.eos_token_ids
        self.eos_token_ids = tuple(token for token in eos if 0 <= token < self.vocab_size)
        self._runner = ready.runner
        self._scheduler = Scheduler(
            config.scheduler, policy, self.geometry, prefix_caching=config.cache.enable_prefix_caching
        )
        self._pipeline = Pipeline(self._scheduler, self._runner, overlap=ready.overlap)
        self._clock = clock
        self._queue_limits = config.scheduler.max_num_queued_requests, config.scheduler.max_num_queued_tokens
        self._max_logprob_entries = config.model.max_logprob_entries
        self._seeds = Random(config.model.seed)
        self._num_calls = 0
        logger.info("%s", self.description)

    @property
    def num_steps(self) -> dict[str, int]:
        """Steps so far by how they reached the device: see `ModelRunner.num_steps`."""
        return dict(self._runner.num_steps)

    @property
    def num_calls(self) -> int:
        """Requests added and steps taken so far: by it whoever drives the engine sees that somebody else does too."""
        return self._num_calls

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the typed error that `add_request` would raise, and change nothing."""
        self._check(as_token_ids(prompt_token_ids), params)

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(f"params must be SamplingParams, got {shown(params)}")
        if not token_ids:
            raise EmptyPromptError("the prompt has no tokens", hint="give at least one token, a BOS for instance")
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            index = next(index for index, token in enumerate(token_ids) if not 0 <= token < self.vocab_size)
            raise TokenOutOfRangeError(
                f"prompt_token_ids[{index}]={shown(token_ids[index])} is outside the vocabulary "
                f"of {self.vocab_size} tokens"
            )
        if len(token_ids) >= self.limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for a new one in "
                f"max_model_len={self.limits.max_model_len}",
                hint="shorten the prompt or raise max_model_len",
            )
        longest = max(self._max_len(len(token_ids), params), len(token_ids) + 1)
        if self.geometry.blocks_for(longest - 1) > self.geometry.num_blocks:  # the last token is never read back
            raise ContextLengthError(
                f"the prompt of {len(token_ids)} tokens and max_tokens={shown(params.max_tokens)} make {longest} "
                f"tokens, and the pool holds {self.geometry.num_blocks * self.geometry.block_size}",
                hint="lower max_tokens or raise num_blocks",
            )
        num_new_tokens = self._max_len(len(token_ids), params) - len(token_ids)
        self._check_params(params, num_new_tokens=num_new_tokens)
        self._check_entries("prompt_logprobs", params.prompt_logprobs, len(token_ids) - 1)
        self._check_entries("logprobs", params.logprobs, num_new_tokens)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        user: str | None = None,
        ttft_deadline_s: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        priority: smaller is sooner, for the policy priority.   user: whose share it is, for the policy fair.
        ttft_deadline_s: seconds from now to its first token, for the policy deadline.
        cache_salt: only requests of the same salt share cached prefixes.
        Raises: RequestError and its kinds; the engine is then as it was.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {shown(request_id)}")
        if request_id in self._scheduler:
            raise DuplicateRequestError(f"request_id={request_id!r} is still in use")
        token_ids = as_token_ids(prompt_token_ids)
        self._check(token_ids, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {shown(priority)}")
        if abs(priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority, a number of {priority.bit_length()} bits, is beyond what can be ordered",
                hint=f"a number from -{MAX_PRIORITY} to {MAX_PRIORITY}",
            )
        if ttft_deadline_s is not None and not is_duration(ttft_deadline_s):
            raise RequestError(f"ttft_deadline_s must be a number of seconds above 0, got {shown(ttft_deadline_s)}")
        for name, text in (("user", user), ("cache_salt", cache_salt)):
            if text is not None and not isinstance(text, str):
                raise RequestError(f"{name} must be a string or None, got {shown(text)}")
        self._check_queue(len(token_ids))
        self._num_calls += 1
        self._pipeline.add(
            Request(
                request_id=request_id,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                params=params,
                seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
                stop_token_ids=self._stop_token_ids(params),
                max_len=self._max_len(len(token_ids), params),
                cache_salt=cache_salt,
                arrival_s=self._clock(),
                priority=priority,
                user=user,
                ttft_deadline_s=None if ttft_deadline_s is None else float(ttft_deadline_s),
            )
        )

    @property
    def overlaps(self) -> bool:
        """Whether a step is planned while the one before runs, whose tokens then come one step late."""
        return self._pipeline.overlap

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_requests

    def step(self) -> list[StepOutput]:
        """One step of every request that the scheduler picks: what each gained, and whether it ended.

        With overlap these are the gains of the step before, which ran meanwhile; the first step gives nothing.
        If it raises, out of memory or interrupted, every request is still there and the next step goes on from the
        tokens given out so far; an interrupt while they are given out may take those of this step with it.
        """
        self._num_calls += 1
        return self._pipeline.step()

    def finish(self, request_id: str, reason: FinishReason, *, error: str | None = None) -> StepOutput | None:
        """End a request from outside, in any state; its memory is free at once.

        error: with the reason "error", why: a sentence for whoever asked.
        Returns its last output, or None if it has ended already or never was: finishing twice is finishing once.
        Raises: RequestError for a reason that is none. If it is interrupted, it can be called again.
        """
        if reason not in get_args(FinishReason):
            raise RequestError(f"unknown reason={shown(reason)}", hint="one of " + ", ".join(get_args(FinishReason)))
        if error is not None and (reason != "error" or not isinstance(error, str)):
            raise RequestError(f"error={shown(error)} says why an answer breaks off, and reason={shown(reason)}")
        output = self._pipeline.finish(request_id, reason)
        if output is None or reason != "error":
            return output
        return output._replace(error=error or "whoever drives the engine has ended it")

    def abort(self, request_id: str) -> StepOutput | None:
        """`finish` for a caller who no longer wants the answer."""
        return self.finish(request_id, "abort")

    def _check_params(self, params: SamplingParams, *, num_new_tokens: int) -> None:
        """What params cannot know by themselves: the vocabulary, how many new tokens there will be at most."""
        if params.n != 1 or params.stop:  # what is only about showing the text has nothing to show here
            name, value = ("n", params.n) if params.n != 1 else ("stop", params.stop)
            raise SamplingParamsError(
                f"{name}={value!r}: the engine gives the tokens of one answer, and knows no text",
                hint="LLM and TextEngine take it",
            )
        token_ids_by_name: list[tuple[str, Iterable[int]]] = [
            ("stop_token_ids", params.stop_token_ids or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", dict(params.logit_bias or ())),
        ]
        for word in params.bad_words or ():
            if isinstance(word, str):
                raise SamplingParamsError(
                    f"bad_words holds {word!r}, and the engine knows no text", hint="give lists of token ids"
                )
            token_ids_by_name.append(("bad_words", word))
        for name, token_ids in token_ids_by_name:
            for token in token_ids:
                if token >= self.vocab_size:
                    raise SamplingParamsError(
                        f"{name} holds {shown(token)}, outside the vocabulary of {self.vocab_size} tokens"
                    )
        if params.min_tokens > num_new_tokens:
            raise SamplingParamsError(
                f"min_tokens={shown(params.min_tokens)} is more than the {num_new_tokens} "
                "that the prompt leaves room for",
                hint="lower min_tokens, shorten the prompt, or raise max_model_len",
            )
        if params.allowed_token_ids is not None:
            ruled_out = {word[0] for word in params.bad_words or () if len(word) == 1}
            if params.min_tokens:
                ruled_out |= self._stop_token_ids(params)
            if ruled_out.issuperset(params.allowed_token_ids):
                raise SamplingParamsError(
                    f"allowed_token_ids={params.allowed_token_ids!r} leaves no first token: bad_words, or "
                    f"min_tokens={params.min_tokens} with the ids that stop, rule out all of them"
                )

    def _check_entries(self, name: str, num_top: int | None, num_places: int) -> None:
        """All logprobs of a long text would take more memory than there is, and every other request with it."""
        most, entries = self._max_logprob_entries, num_places * self.vocab_size
        if num_top == -1 and most is not None and entries > most:
            raise SamplingParamsError(
                f"{name}=-1 of up to {num_places} tokens, each among {self.vocab_size}, are {entries} logprobs, "
                f"and max_logprob_entries={most}",
                hint=f"{name}=20, fewer tokens, or raise max_logprob_entries, at 300 bytes each",
            )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Every id that ends a request."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return frozenset((*eos, *(params.stop_token_ids or ())))

    def _max_len(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Total tokens at which a request ends by length: asked for, or as many as context and pool hold."""
        room = self.limits.max_model_len
        if params.max_tokens is None:
            return min(room, self.geometry.num_blocks * self.geometry.block_size + 1)
        return min(room, num_prompt_tokens + params.max_tokens)

    def _check_queue(self, num_tokens: int) -> None:
        requests, tokens = self._queue_limits
        if requests is not None and self._scheduler.num_waiting >= requests:
            raise QueueFullError(
                f"{self._scheduler.num_waiting} requests wait, max_num_queued_requests={requests}",
                hint="try again when some have started, or raise max_num_queued_requests",
            )
        if tokens is not None and self._scheduler.num_waiting_tokens + num_tokens > tokens:
            raise QueueFullError(
                f"{self._scheduler.num_waiting_tokens} tokens wait and {num_tokens} more would exceed "
                f"max_num_queued_tokens={tokens}",
                hint="try again when some have started, or raise max_num_queued_tokens",
            )


def as_token_ids(prompt: Iterable[object]) -> list[int]:
    """Plain integers from whatever holds integers (NumPy's and torch's too). Raises: RequestError."""
    # A tensor without an axis calls itself iterable.
    if (
        isinstance(prompt, str | bytes | Mapping | Set)
        or not isinstance(prompt, Iterable)
        or getattr(prompt, "ndim", 1) == 0
    ):
        raise RequestError(f"prompt_token_ids must be a list of token ids, got {shown(prompt)}")
    if isinstance(prompt, list | tuple) and set(map(type, prompt)) == {int}:
        return list(prompt)  # a step's worth of tokens one by one would take longer than the step
    token_ids: list[int] = []
    for index, token in enumerate(prompt):
        try:
            # Those of torch have an index as well, and so has an array of a single element.
            if isinstance(token, bool) or getattr(token, "ndim", False) or "bool" in str(getattr(token, "dtype", "")):
                raise TypeError("neither a truth value nor an array is a token")
            token_ids.append(operator.index(cast("SupportsIndex", token)))
        except TypeError as error:  # a text, a float, a tensor of several elements
            raise RequestError(f"prompt_token_ids[{index}] must be an integer, got {shown(token)}") from error
    return token_ids
