"""What judges ask of a reference: continuations, scores of given tokens, and how far it is from itself."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from weft.testing.continuation import Continuation


@runtime_checkable
class Reference(Protocol):
    """What `Oracle` does: greedy continuations, and scores of given tokens in one pass."""

    def generate(
        self, prompt_token_ids: Sequence[int], max_new_tokens: int, *, stop_token_ids: Sequence[int] = ()
    ) -> Continuation: ...

    def score(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Float[Tensor, "T V"]: ...


class Remembered:
    """A reference that computes each continuation once."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._said: dict[tuple[tuple[int, ...], int, tuple[int, ...]], Continuation] = {}

    def generate(
        self, prompt_token_ids: Sequence[int], max_new_tokens: int, *, stop_token_ids: Sequence[int] = ()
    ) -> Continuation:
        key = tuple(prompt_token_ids), max_new_tokens, tuple(stop_token_ids)
        if key not in self._said:
            self._said[key] = self._reference.generate(prompt_token_ids, max_new_tokens, stop_token_ids=stop_token_ids)
        return self._said[key]

    def score(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Float[Tensor, "T V"]:
        return self._reference.score(prompt_token_ids, token_ids)


def own_noise(reference: Reference, said: Continuation) -> float:
    """How far two of the reference's computations of the same logits lie apart: one pass against token by token."""
    once = reference.score(said.prompt_token_ids, said.token_ids)
    return float((once - said.logits).abs().max())
