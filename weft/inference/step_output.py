"""What one step gave one request, in token ids: what the engine hands out. No torch."""

from typing import NamedTuple

from weft.inference.request import FinishReason
from weft.inference.token_logprobs import TokenLogprobs


class StepOutput(NamedTuple):
    """What one step gave one request.

    stop_reason: the stop token that ended it, if one did.   num_cached_tokens: of its prompt, found in the cache.
    logprobs: one for each new token, or none if the request asks for none.
    prompt_logprobs: with the first token, one for each token of the prompt, None for the first, which nothing precedes.
    error: why it ended with finish_reason "error".
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
