"""Why a row has no token: what a step says in place of one, and what its request is told. No torch."""

from weft.inference.sampling_params import SamplingParams

NOTHING_TO_DRAW = -1  # by samplers, on any device
SAMPLING_RAISED = -2  # by the runner, in a sampler's place


def reason(token: int, params: SamplingParams) -> str:
    """One sentence, for whoever asked.

    >>> reason(-1, SamplingParams())
    'the logits hold NaN or infinity'
    """
    if token == SAMPLING_RAISED:
        return "sampling a token raised an exception, which the log shows"
    if not (params.bad_words or params.min_tokens):
        return "the logits hold NaN or infinity"
    return "the logits hold NaN or infinity, or what the request rules out is every token"
