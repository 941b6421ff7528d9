"""What any engine did with a prompt: the tokens it chose, the logits it chose them from, and why it stopped."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from weft.inference.request import FinishReason


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Row t of `logits` is what token t was chosen from: float32, on the CPU."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logits: Float[Tensor, "T V"]
    finish_reason: FinishReason

    @property
    def margins(self) -> Float[Tensor, "T"]:
        """How far the best logit of each row leads the second."""
        best = self.logits.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]
