"""Tier C: in bfloat16 HuggingFace does not equal itself, and an engine may differ from it only as it itself does.

The reference's tokens are forced, so that every position is judged and none hides behind an earlier difference. All
tolerances come from HuggingFace against HuggingFace (one pass against token by token) on the same tokens: the engine's
own error is never its tolerance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# HuggingFace in bfloat16 flips 2 to 3 % of its own argmaxes on SmolLM2; few positions may show fewer by chance. Each
# bit of mantissa more halves the noise, and with it the positions that lie within it.
EXPECTED_FLIP_RATE = {torch.bfloat16: 0.02, torch.float16: 0.02 / 2**3, torch.float32: 0.02 / 2**16}
# How much further from the reference than itself an engine may be.
FLIP_RATE_FACTOR = 2.0
KL_FACTOR = 3.0
NOISE_QUANTILE = 0.999
# Float32 logits differ by about 1e-9 nats between two of HuggingFace's computations; below this, nothing is said.
KL_FLOOR = 1e-6
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}


# A report names so many flips; the rest are counted.
MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A position whose best token is another than the reference's, beyond what may be excused.

    position: the step, counted in the answer.   margin: what the reference loses by `token`, in logits; allowed: how
    much could have been excused.
    """

    prompt: int
    position: int
    token: int
    reference_token: int
    margin: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}, step {self.position}: token {self.token}, the reference has "
            f"{self.reference_token}; margin {self.margin:.3g}, {self.allowed:.3g} would be excused"
        )


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Every position of every prompt, judged against one reference.

    num_flips: positions where the best token differs; num_excused: those of them within the reference's own noise.
    num_unexcused: those beyond it, and positions with a logit that is not finite.
    max_flips: how many may be excused, from the reference's own rate.
    own_*: the same quantities of the reference against itself.
    tolerance: the reference's own pair noise, 99.9 % quantile, in logits; a position adds one unit in the last place.
    unexcused: the first of the flips that count against the engine.
    """

    num_positions: int
    num_flips: int
    num_excused: int
    num_unexcused: int
    max_flips: int
    own_flips: int
    mean_kl: float
    own_mean_kl: float
    tolerance: float
    worst_margin: float
    unexcused: tuple[Flip, ...]

    @property
    def report(self) -> str:
        """What was counted, what may be, and the flips that nothing excuses."""
        lines = [
            f"{self.num_flips} of {self.num_positions} positions flip, at most {self.max_flips}; the reference against "
            f"itself {self.own_flips}",
            f"{self.num_unexcused} beyond its own noise of {self.tolerance:.3g} and one unit in the last place; "
            f"largest margin {self.worst_margin:.3g}",
            f"mean KL {self.mean_kl:.2e} nats, at most {KL_FACTOR * max(self.own_mean_kl, KL_FLOOR):.2e}; its own "
            f"{self.own_mean_kl:.2e}",
        ]
        return "\n".join([*lines, *map(str, self.unexcused)])

    @property
    def passed(self) -> bool:
        few = self.num_unexcused == 0 and self.num_flips <= self.max_flips
        return few and self.mean_kl <= KL_FACTOR * max(self.own_mean_kl, KL_FLOOR)


def audit_near_ties(
    reference: Sequence[Float[Tensor, "_ V"]],
    reference_again: Sequence[Float[Tensor, "_ V"]],
    actual: Sequence[Float[Tensor, "_ V"]],
    *,
    dtype: torch.dtype,
    record: Callable[[str, int], None] | None = None,
) -> Audit:
    """Judge teacher-forced logits, one tensor a prompt, all over the same tokens.

    reference_again: the reference's logits computed another way: the measure of its own noise.
    dtype: what both compute in; it gives the unit in the last place at a logit's magnitude.
    record: told the number of positions, and of flips that were excused and that were not, by name.
    """
    assert len(reference) == len(reference_again) == len(actual), "one tensor a prompt"
    prompts = [_Prompt.of(*logits, dtype=dtype) for logits in zip(reference, reference_again, actual, strict=True)]
    num_positions = sum(len(prompt.flipped) for prompt in prompts)
    tolerance = float(torch.cat([prompt.noise for prompt in prompts]).quantile(NOISE_QUANTILE))
    flipped = torch.cat([prompt.flipped for prompt in prompts])
    margins = torch.cat([prompt.margins for prompt in prompts])
    own_flips = sum(prompt.own_flips for prompt in prompts)
    unexcused = [flip for index, prompt in enumerate(prompts) for flip in prompt.unexcused(index, tolerance)]
    audit = Audit(
        num_positions=num_positions,
        num_flips=int(flipped.sum()),
        num_excused=sum(prompt.num_excused(tolerance) for prompt in prompts),
        num_unexcused=len(unexcused),
        max_flips=allowed_flips(own_flips, num_positions, dtype),
        own_flips=own_flips,
        mean_kl=sum(prompt.kl for prompt in prompts) / num_positions,
        own_mean_kl=sum(prompt.own_kl for prompt in prompts) / num_positions,
        tolerance=tolerance,
        worst_margin=float(margins[flipped].max()) if flipped.any() else 0.0,
        unexcused=tuple(unexcused[:MOST_SHOWN]),
    )
    if record is not None:
        record("positions", num_positions)
        record("excused_flips", audit.num_excused)
        record("unexcused_flips", audit.num_unexcused)
    return audit


def allowed_flips(own_flips: int, num_positions: int, dtype: torch.dtype) -> int:
    """How many flips a run may excuse, from those of the reference against itself."""
    return int(FLIP_RATE_FACTOR * max(own_flips, EXPECTED_FLIP_RATE[dtype] * num_positions))


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """One prompt reduced to a few numbers a position, so that no run holds every prompt's logits several times over."""

    best: Int[Tensor, "T"]
    chosen: Int[Tensor, "T"]
    flipped: Bool[Tensor, "T"]
    margins: Float[Tensor, "T"]  # what the reference loses by the engine's choice
    noise: Float[Tensor, "T"]
    units: Float[Tensor, "T"]
    broken: Bool[Tensor, "T"]
    own_flips: int
    kl: float
    own_kl: float

    @classmethod
    def of(
        cls, base: Float[Tensor, "T V"], again: Float[Tensor, "T V"], judged: Float[Tensor, "T V"], dtype: torch.dtype
    ) -> "_Prompt":
        best, chosen = base.argmax(dim=-1), judged.argmax(dim=-1)
        return cls(
            best=best,
            chosen=chosen,
            flipped=best != chosen,
            margins=_at(base, best) - _at(base, chosen),
            noise=pair_noise(base, again),
            units=unit_in_last_place(_at(base, best), dtype),
            broken=~judged.isfinite().all(dim=-1),
            own_flips=int((best != again.argmax(dim=-1)).sum()),
            kl=_kl(base, judged),
            own_kl=_kl(base, again),
        )

    def num_excused(self, tolerance: float) -> int:
        return int((self.flipped & ~self._beyond(tolerance)).sum())

    def _beyond(self, tolerance: float) -> Bool[Tensor, "T"]:
        """Flips beyond what the reference shows of itself, and every position with a logit that is not finite."""
        return self.broken | self.flipped & (self.margins > tolerance + self.units)

    def unexcused(self, index: int, tolerance: float) -> list[Flip]:
        return [
            Flip(
                prompt=index,
                position=place,
                token=int(self.chosen[place]),
                reference_token=int(self.best[place]),
                margin=float(self.margins[place]),
                allowed=tolerance + float(self.units[place]),
            )
            for place in self._beyond(tolerance).nonzero()[:, 0].tolist()
        ]


def pair_noise(base: Float[Tensor, "T V"], other: Float[Tensor, "T V"]) -> Float[Tensor, "T"]:
    """How much the gap between the reference's two best tokens moves between two of its own computations."""
    first, second = base.topk(2, dim=-1).indices.unbind(dim=-1)
    return ((_at(base, first) - _at(base, second)) - (_at(other, first) - _at(other, second))).abs()


def unit_in_last_place(values: Float[Tensor, "T"], dtype: torch.dtype) -> Float[Tensor, "T"]:
    """Spacing of `dtype` at each value: 0.125 for bfloat16 in [16, 32)."""
    exponents = values.abs().clamp(min=torch.finfo(torch.float32).tiny).log2().floor()
    return torch.exp2(exponents - MANTISSA_BITS[dtype])


def _kl(base: Float[Tensor, "T V"], other: Float[Tensor, "T V"]) -> float:
    """Kullback-Leibler divergence from the reference's distribution, in nats, summed over positions."""
    base_log, other_log = base.log_softmax(dim=-1), other.log_softmax(dim=-1)
    return float((base_log.exp() * (base_log - other_log)).sum())


def _at(logits: Float[Tensor, "T V"], tokens: Tensor) -> Float[Tensor, "T"]:
    return logits.gather(-1, tokens[:, None])[:, 0]
