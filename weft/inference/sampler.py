"""From logits to one token a row. Knows rows, not requests."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.batch import SamplingRows
from weft.inference.noise import gumbel
from weft.kernels.sample import sample


@runtime_checkable
class Sampler(Protocol):
    """Chooses a token for each row; -1 says that the row's logits are not finite, and fails that request alone."""

    def __call__(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]: ...


class GumbelSampler:
    """Temperature 0 is argmax; above, argmax of `logits + temperature * noise`.

    That is Gumbel-max on `logits / temperature` without its overflow at tiny temperatures.
    """

    def __call__(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]:
        logits = logits.float()
        # A NaN is both the largest and the smallest, so the two ends speak for a row: a twentieth of the time on a CPU.
        finite = torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))
        noisy = rows.temperatures > 0
        if rows.any_noise:
            noise = gumbel(rows.seeds, rows.positions, logits.shape[-1])
            logits = torch.where(noisy[:, None], logits + rows.temperatures[:, None] * noise, logits)
        return torch.where(finite, logits.argmax(dim=-1), -1)


class KernelSampler:
    """The same tokens in two kernels that read nothing back, so that a step can be captured with its sampling."""

    def __call__(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]:
        return sample(logits, rows.temperatures, rows.seeds, rows.positions)
