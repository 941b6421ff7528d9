"""What is known of how likely a token was, as plain values: what steps hand over and outputs are made of. No torch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """A token in its place, among those that could have stood there.

    logprob: its natural logarithm of probability; -inf for one that `processed_logprobs` rule out.
    rank: 1 is the most likely; as likely ones do not count as better.
    top: (token id, logprob) of the most likely ones, as many as asked for, best first; of equal ones the smaller id is
        first. They hold the token itself only if it is one of them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class StepLogprobs(NamedTuple):
    """Those of one step.

    sampled: by the column of the plan, one for each logit row of a request that asks for them.
    prompt: one sequence for each of the plan's `prompt_rows`, an entry a row.
    """

    sampled: Mapping[int, Sequence[TokenLogprobs]]
    prompt: Sequence[Sequence[TokenLogprobs]] = ()
