"""What a request asks of its output. Names and defaults are vLLM's; a field that does nothing does not exist."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from weft.config import strict
from weft.errors import SamplingParamsError

MAX_TEMPERATURE = 1e37  # times the largest noise, 17.4, it is finite in float32


@strict
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """SamplingParams(temperature=0)                              greedy, 16 tokens
    SamplingParams(temperature=0.8, seed=7, max_tokens=100)       the same tokens in any batch

    temperature: 0 is argmax; above, Gumbel-max noise scaled by it.
    seed: of the noise, in [0, 2**64); None draws one from the engine's.
    max_tokens: new tokens at most; None is all that the context holds.
    stop_token_ids: ids that end the output, beside the model's EOS ids; the id itself is part of the output.
    ignore_eos: do not stop at the model's EOS ids (stop_token_ids still stop).

    Raises: SamplingParamsError for a value out of range, UnknownArgumentError for a name that nothing reads.
    """

    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        temperature = self.temperature
        if isinstance(temperature, bool) or not isinstance(temperature, Real):
            raise SamplingParamsError(f"temperature must be a number, got {temperature!r}")
        if not 0 <= temperature <= MAX_TEMPERATURE:
            raise SamplingParamsError(f"temperature must be in [0, {MAX_TEMPERATURE}], got {temperature!r}")
        if self.seed is not None and not (_is_integer(self.seed) and 0 <= self.seed < 2**64):
            raise SamplingParamsError(f"seed must be an integer in [0, 2**64) or None, got {self.seed!r}")
        if self.max_tokens is not None and not (_is_integer(self.max_tokens) and self.max_tokens >= 1):
            raise SamplingParamsError(
                f"max_tokens must be a positive integer or None, got {self.max_tokens!r}",
                hint="None generates until the context is full",
            )
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(self.stop_token_ids, Sequence):
            raise SamplingParamsError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            if not _is_integer(token) or token < 0:
                raise SamplingParamsError(f"stop_token_ids must hold token ids, got {token!r}")
        if not isinstance(self.ignore_eos, bool):
            raise SamplingParamsError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        # Plain Python values, whatever NumPy gave; and a list given would stay mutable.
        object.__setattr__(self, "temperature", float(temperature))
        for name in ("seed", "max_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
