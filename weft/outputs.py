"""What a caller gets: requests and their answers, in vLLM's form. Plain values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.inference.request import FinishReason
from weft.inference.token_logprobs import TokenLogprobs

LEAST_LOGPROB = -9999.0  # what the OpenAI API says of a token that could not be


class Logprob(NamedTuple):
    """How likely a token was in its place.

    logprob: natural logarithm of its probability.   rank: 1 is the most likely; as likely ones do not count as better.
    decoded_token: what it shows in mid-text; None where there is no text.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


# By token id, the token in its place first, then the most likely ones, best first.
PlaceLogprobs = dict[int, Logprob]


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer, or of a stream what it has gained.

    token_ids: up to the one that ended it, a stop token or the one that completed a stop string.
    text: of these tokens, without the stop token or string unless `include_stop_str_in_output`; None without tokenizer
        or with `detokenize=False`. In a stream it may come later than its tokens.
    logprobs: one for each of `token_ids`; None if not asked for.   cumulative_logprob: sum over all its tokens so far.
    finish_reason: "stop" (EOS, stop token, stop string), "length" (max_tokens or the context), "abort", "error"; None
        while it goes on.
    stop_reason: the stop token or stop string, if one ended it.
    error: with finish_reason "error", why: a sentence for whoever asked.
    """

    index: int
    text: str | None
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PlaceLogprobs] | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request and its answers, in order of their index; of a stream those that have gained something.

    prompt: None for a prompt of token ids.
    prompt_logprobs: one for each token of the prompt, None for the first; None if not asked for. In a stream once.
    finished: all answers have ended.
    num_cached_tokens: tokens of the prompt that the prefix cache held when the request was admitted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PlaceLogprobs | None] | None = None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int


def place_logprobs(place: TokenLogprobs, text_of: Callable[[int], str] | None) -> PlaceLogprobs:
    """text_of: what a token shows.

    >>> place_logprobs(TokenLogprobs(7, -2.0, 3, ((5, -0.5), (6, -1.0))), None)[6]
    Logprob(logprob=-1.0, rank=2, decoded_token=None)
    """
    entries = {place.token_id: _logprob(place.token_id, place.logprob, place.rank, text_of)}
    better, last = 0, float("inf")
    for count, (token_id, logprob) in enumerate(place.top):
        if logprob < last:
            better, last = count, logprob
        if token_id not in entries:
            entries[token_id] = _logprob(token_id, logprob, better + 1, text_of)
    return entries


def _logprob(token_id: int, logprob: float, rank: int, text_of: Callable[[int], str] | None) -> Logprob:
    return Logprob(logprob, rank, None if text_of is None else text_of(token_id))


def as_json(output: RequestOutput) -> dict[str, Any]:
    """Plain dictionaries, as `json.dumps` takes them; what JSON has no number for, -inf, is LEAST_LOGPROB."""
    fields = vars(output) | {
        "prompt_logprobs": _places_as_json(output.prompt_logprobs),
        "outputs": [vars(answer) | {"logprobs": _places_as_json(answer.logprobs)} for answer in output.outputs],
    }
    return dict(fields)


def _places_as_json(places: Sequence[PlaceLogprobs | None] | None) -> list[dict[int, Any] | None] | None:
    if places is None:
        return None
    return [
        None
        if place is None
        else {
            token: entry._replace(logprob=max(entry.logprob, LEAST_LOGPROB))._asdict() for token, entry in place.items()
        }
        for place in places
    ]
