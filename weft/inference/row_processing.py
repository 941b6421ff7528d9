"""Which processors one request asked for, with its token ids as tensors; none of a request that asked for none."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.inference.plan import Admission


@dataclass(frozen=True, kw_only=True, eq=False)
class RowProcessing:
    """What one request asked for, in tensors of the host: made once, when it takes a row.

    held_back: its stop tokens, until it has `least_length` tokens, prompt included.
    words: its bad words, each as (its last token, the tokens before it).
    """

    prompt_length: int
    allowed: Int[Tensor, "A"] | None
    words: tuple[tuple[int, tuple[int, ...]], ...]
    held_back: Int[Tensor, "H"]
    least_length: int
    biased: Int[Tensor, "N"]
    biases: Float[Tensor, "N"]
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, admission: Admission) -> "RowProcessing | None":
        """None for a request whose logits are sampled from as they are."""
        params = admission.params
        held_back = sorted(admission.stop_token_ids) if params.min_tokens else []
        is_penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
        if (
            not (held_back or is_penalised or params.bad_words or params.logit_bias)
            and params.allowed_token_ids is None
        ):
            return None
        biases = dict(params.logit_bias or ())
        bad_words = params.bad_words or ()
        words: list[Sequence[int]] = [word for word in bad_words if not isinstance(word, str)]
        assert len(words) == len(bad_words), "the engine refuses words that are no token ids"
        return cls(
            prompt_length=admission.num_prompt_tokens,
            allowed=None if params.allowed_token_ids is None else torch.tensor(sorted(set(params.allowed_token_ids))),
            words=tuple((word[-1], tuple(word[:-1])) for word in words),
            held_back=torch.tensor(held_back, dtype=torch.int64),
            least_length=admission.num_prompt_tokens + params.min_tokens,
            biased=torch.tensor(list(biases), dtype=torch.int64),
            biases=torch.tensor(list(biases.values()), dtype=torch.float32),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
