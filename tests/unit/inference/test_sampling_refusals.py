"""What an engine refuses of sampling parameters when a request is submitted, and that the others go on."""

from collections.abc import Callable
from typing import Any

import pytest

from weft.errors import SamplingParamsError
from weft.inference.engine import Engine
from weft.inference.sampling_params import SamplingParams

Build = Callable[..., Engine]

VOCAB, CONTEXT = 97, 64
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids holds 97, outside the vocabulary of 97 tokens"),
    ({"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids holds 97, outside"),
    ({"logit_bias": {3: 1, 2**70: 1}}, f"logit_bias holds {2**70}, outside"),
    ({"bad_words": [[3], [4, VOCAB]]}, "bad_words holds 97, outside"),
    ({"bad_words": [[3], "word"]}, "bad_words holds 'word', and the engine knows no text"),
    ({"stop_token_ids": [10**5000]}, "stop_token_ids holds a number of 16610 bits, outside"),
    ({"min_tokens": 10**5000, "max_tokens": None}, "min_tokens=a number of 16610 bits is more than the 61"),
    ({"allowed_token_ids": [6], "bad_words": [[3], [6]]}, r"allowed_token_ids=\(6,\) leaves no first token: bad_words"),
    ({"allowed_token_ids": [1, 6], "min_tokens": 1, "stop_token_ids": [6]}, r"allowed_token_ids=\(1, 6\) leaves no"),
    ({"min_tokens": CONTEXT, "max_tokens": None}, "min_tokens=64 is more than the 61 that the prompt leaves room for"),
]


@pytest.fixture(scope="module")
def engine(build: Build) -> Engine:
    return build()


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_what_only_the_engine_knows_is_refused_at_submission(
    given: dict[str, Any], message: str, engine: Engine
) -> None:
    engine.add_request("beside", [3, 4], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    with pytest.raises(SamplingParamsError, match=f"^{message}"):
        engine.add_request("bad", [3, 4, 5], SamplingParams(**given))
    ended = []
    while engine.has_unfinished_requests():
        ended += [(output.request_id, output.finish_reason) for output in engine.step() if output.finished]
    assert ended == [("beside", "length")]


def test_all_logprobs_are_refused_where_they_would_fill_the_memory(build: Build) -> None:
    """A prompt of 32,000 tokens and a vocabulary of 128,256 would make 4e9 tuples. (vllm#5907: the server is gone.)"""
    engine = build(max_logprob_entries=4 * VOCAB)
    for name, given, prompt in (
        ("prompt_logprobs", {"max_tokens": 9}, [3] * 6),
        ("logprobs", {"max_tokens": 5}, [3, 3]),
        ("logprobs", {"max_tokens": None}, [3] * (CONTEXT - 5)),
    ):
        message = rf"^{name}=-1 of up to 5 tokens, each among {VOCAB}, are {5 * VOCAB} logprobs, .*={4 * VOCAB}"
        with pytest.raises(SamplingParamsError, match=message) as caught:
            engine.add_request("a", prompt, SamplingParams(**{name: -1}, **given))
        assert "raise max_logprob_entries" in str(caught.value.hint)
        engine.validate(prompt, SamplingParams(**{name: 20}, **given))
        engine.validate(prompt[1:], SamplingParams(**{name: -1}, **(given | {"max_tokens": 4})))
        build(max_logprob_entries=None).validate(prompt, SamplingParams(**{name: -1}, **given))
    assert not engine.has_unfinished_requests()
