"""Tier C: in bfloat16 HuggingFace does not equal itself, and an engine may differ from it only as it itself does.

The reference's tokens are forced, so that every position is judged and none hides behind an earlier difference. All
tolerances come from HuggingFace against HuggingFace (one pass against token by token) on the same tokens: the engine's
own error is never its tolerance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
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


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Every position of every prompt, judged against one reference.

    num_flips: positions where the best token differs; all but `num_unexcused` lie within the reference's own noise.
    max_flips: how many may be excused, from the reference's own rate.
    own_*: the same quantities of the reference against itself.
    tolerance: the reference's own pair noise, 99.9 % quantile, in logits; a position adds one unit in the last place.
    """

    num_positions: int
    num_flips: int
    num_unexcused: int
    max_flips: int
    own_flips: int
    mean_kl: float
    own_mean_kl: float
    tolerance: float
    worst_margin: float

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
) -> Audit:
    """Judge teacher-forced logits, one tensor a prompt, all over the same tokens.

    reference_again: the reference's logits computed another way: the measure of its own noise.
    dtype: what both compute in; it gives the unit in the last place at a logit's magnitude.
    """
    assert len(reference) == len(reference_again) == len(actual), "one tensor a prompt"
    prompts = [_Prompt.of(*logits, dtype=dtype) for logits in zip(reference, reference_again, actual, strict=True)]
    num_positions = sum(len(prompt.flipped) for prompt in prompts)
    tolerance = float(torch.cat([prompt.noise for prompt in prompts]).quantile(NOISE_QUANTILE))
    flipped = torch.cat([prompt.flipped for prompt in prompts])
    margins = torch.cat([prompt.margins for prompt in prompts])
    units = torch.cat([prompt.units for prompt in prompts])
    broken = torch.cat([prompt.broken for prompt in prompts])
    own_flips = sum(prompt.own_flips for prompt in prompts)
    return Audit(
        num_positions=num_positions,
        num_flips=int(flipped.sum()),
        num_unexcused=int((broken | flipped & (margins > tolerance + units)).sum()),
        max_flips=int(FLIP_RATE_FACTOR * max(own_flips, EXPECTED_FLIP_RATE[dtype] * num_positions)),
        own_flips=own_flips,
        mean_kl=sum(prompt.kl for prompt in prompts) / num_positions,
        own_mean_kl=sum(prompt.own_kl for prompt in prompts) / num_positions,
        tolerance=tolerance,
        worst_margin=float(margins[flipped].max()) if flipped.any() else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """One prompt reduced to a few numbers a position, so that no run holds every prompt's logits several times over."""

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
            flipped=best != chosen,
            margins=_at(base, best) - _at(base, chosen),
            noise=_pair_noise(base, again),
            units=_unit_in_last_place(_at(base, best), dtype),
            broken=~judged.isfinite().all(dim=-1),
            own_flips=int((best != again.argmax(dim=-1)).sum()),
            kl=_kl(base, judged),
            own_kl=_kl(base, again),
        )


def _pair_noise(base: Float[Tensor, "T V"], other: Float[Tensor, "T V"]) -> Float[Tensor, "T"]:
    """How much the gap between the reference's two best tokens moves between two of its own computations."""
    first, second = base.topk(2, dim=-1).indices.unbind(dim=-1)
    return ((_at(base, first) - _at(base, second)) - (_at(other, first) - _at(other, second))).abs()


def _unit_in_last_place(values: Float[Tensor, "T"], dtype: torch.dtype) -> Float[Tensor, "T"]:
    """Spacing of `dtype` at each value: 0.125 for bfloat16 in [16, 32)."""
    exponents = values.abs().clamp(min=torch.finfo(torch.float32).tiny).log2().floor()
    return torch.exp2(exponents - MANTISSA_BITS[dtype])


def _kl(base: Float[Tensor, "T V"], other: Float[Tensor, "T V"]) -> float:
    """Kullback-Leibler divergence from the reference's distribution, in nats, summed over positions."""
    base_log, other_log = base.log_softmax(dim=-1), other.log_softmax(dim=-1)
    return float((base_log.exp() * (base_log - other_log)).sum())


def _at(logits: Float[Tensor, "T V"], tokens: Tensor) -> Float[Tensor, "T"]:
    return logits.gather(-1, tokens[:, None])[:, 0]
