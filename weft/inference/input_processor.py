"""What a request may ask of an engine: tokens of its vocabulary, no more than context and pool hold. Knows no text."""

import operator
from collections.abc import Iterable, Mapping, Set
from typing import SupportsIndex, cast

from weft.config import BlockGeometry, Limits
from weft.errors import (
    ContextLengthError,
    EmptyPromptError,
    RequestError,
    SamplingParamsError,
    TokenOutOfRangeError,
    shown,
)
from weft.inference.sampling_params import SamplingParams
from weft.options import is_duration

MAX_PRIORITY = 2**53  # whole numbers up to here are exact in a float, in which policies reckon


class InputProcessor:
    """Checks requests against one engine, and works out when they end."""

    def __init__(
        self,
        *,
        limits: Limits,
        geometry: BlockGeometry,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_queued_tokens: int | None = None,
        max_logprob_entries: int | None = None,
    ) -> None:
        """max_queued_tokens, max_logprob_entries: see `SchedulerConfig` and `ModelConfig`."""
        self._limits = limits
        self._geometry = geometry
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_queued_tokens = max_queued_tokens
        self._max_logprob_entries = max_logprob_entries

    def check(self, token_ids: list[int], params: SamplingParams) -> None:
        """Raises: RequestError and its kinds for what could never be served, beside whom or when ever it came."""
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(f"params must be SamplingParams, got {shown(params)}")
        if not token_ids:
            raise EmptyPromptError("the prompt has no tokens", hint="give at least one token, a BOS for instance")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            index = next(index for index, token in enumerate(token_ids) if not 0 <= token < self._vocab_size)
            raise TokenOutOfRangeError(
                f"prompt_token_ids[{index}]={shown(token_ids[index])} is outside the vocabulary "
                f"of {self._vocab_size} tokens"
            )
        if len(token_ids) >= self._limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for a new one in "
                f"max_model_len={self._limits.max_model_len}",
                hint="shorten the prompt or raise max_model_len",
            )
        longest = max(self.max_len(len(token_ids), params), len(token_ids) + 1)
        if self._geometry.blocks_for(longest - 1) > self._geometry.num_blocks:  # the last token is never read back
            raise ContextLengthError(
                f"the prompt of {len(token_ids)} tokens and max_tokens={shown(params.max_tokens)} make {longest} "
                f"tokens, and the pool holds {self._geometry.num_blocks * self._geometry.block_size}",
                hint="lower max_tokens or raise num_blocks",
            )
        if self._max_queued_tokens is not None and len(token_ids) > self._max_queued_tokens:  # no later time would do
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, and max_num_queued_tokens={self._max_queued_tokens} may wait "
                "at most",
                hint="shorten the prompt or raise max_num_queued_tokens",
            )
        num_new_tokens = self.max_len(len(token_ids), params) - len(token_ids)
        self._check_params(params, num_new_tokens=num_new_tokens)
        self._check_entries("prompt_logprobs", params.prompt_logprobs, len(token_ids) - 1)
        self._check_entries("logprobs", params.logprobs, num_new_tokens)

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
                if token >= self._vocab_size:
                    raise SamplingParamsError(
                        f"{name} holds {shown(token)}, outside the vocabulary of {self._vocab_size} tokens"
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
                ruled_out |= self.stop_token_ids(params)
            if ruled_out.issuperset(params.allowed_token_ids):
                raise SamplingParamsError(
                    f"allowed_token_ids={params.allowed_token_ids!r} leaves no first token: bad_words, or "
                    f"min_tokens={params.min_tokens} with the ids that stop, rule out all of them"
                )

    def _check_entries(self, name: str, num_top: int | None, num_places: int) -> None:
        """All logprobs of a long text would take more memory than there is, and every other request with it."""
        most, entries = self._max_logprob_entries, num_places * self._vocab_size
        if num_top == -1 and most is not None and entries > most:
            raise SamplingParamsError(
                f"{name}=-1 of up to {num_places} tokens, each among {self._vocab_size}, are {entries} logprobs, "
                f"and max_logprob_entries={most}",
                hint=f"{name}=20, fewer tokens, or raise max_logprob_entries, at 300 bytes each",
            )

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Every id that ends a request."""
        eos = () if params.ignore_eos else self._eos_token_ids
        return frozenset((*eos, *(params.stop_token_ids or ())))

    def max_len(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Total tokens at which a request ends by length: asked for, or as many as context and pool hold."""
        room = self._limits.max_model_len
        if params.max_tokens is None:
            return min(room, self._geometry.num_blocks * self._geometry.block_size + 1)
        return min(room, num_prompt_tokens + params.max_tokens)


def check_request_options(
    *, priority: int = 0, user: str | None = None, ttft_deadline_s: float | None = None, cache_salt: str | None = None
) -> None:
    """Raises: RequestError for what a request cannot be ordered, shared or cached by."""
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
