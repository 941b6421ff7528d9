"""From logits to one token a row. Knows rows, not requests."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.batch import SamplingRows, Truncation
from weft.inference.noise import gumbel
from weft.kernels import truncate
from weft.kernels._jit import runs_on
from weft.kernels.sample import sample


@runtime_checkable
class Sampler(Protocol):
    """Chooses a token for each row; -1 says that the row has none to choose, and fails that request alone."""

    def __call__(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]: ...


class GumbelSampler:
    """Temperature 0 is argmax; above, argmax of `logits + temperature * noise` of what truncation leaves.

    That is Gumbel-max on `logits / temperature` without its overflow at tiny temperatures. A logit of -inf is a token
    that cannot be drawn; a row of nothing else has none.
    """

    def __call__(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]:
        logits = logits.float()
        highest = logits.amax(dim=-1)  # NaN where there is one
        if rows.truncation is not None:
            cut = _by_torch(logits, rows.temperatures, rows.truncation)
            logits = logits.masked_fill(logits < cut[:, None], -torch.inf)
        noisy = rows.temperatures > 0
        if rows.any_noise:
            noise = gumbel(rows.seeds, rows.positions, logits.shape[-1])
            logits = torch.where(noisy[:, None], logits + rows.temperatures[:, None] * noise, logits)
        return torch.where(torch.isfinite(highest), logits.argmax(dim=-1), -1)


class KernelSampler:
    """The same tokens by kernels that read nothing back, so that a step can be captured with its sampling."""

    def __call__(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]:
        cut = None if rows.truncation is None else _by_kernels(logits, rows.temperatures, rows.truncation)
        return sample(logits, rows.temperatures, rows.seeds, rows.positions, cut)


def cuts(logits: Float[Tensor, "R V"], rows: SamplingRows) -> Float[Tensor, "R"] | None:
    """The least logit of each row that may be drawn, whoever samples; None: all may."""
    if rows.truncation is None:
        return None
    cut = _by_kernels if logits.is_cuda and runs_on(logits.device) else _by_torch
    return cut(logits, rows.temperatures, rows.truncation)


def _by_torch(
    logits: Float[Tensor, "R V"], temperatures: Float[Tensor, "R"], truncation: Truncation
) -> Float[Tensor, "R"]:
    return truncate.reference(logits, temperatures, truncation.top_k, truncation.top_p, truncation.min_p)


def _by_kernels(
    logits: Float[Tensor, "R V"], temperatures: Float[Tensor, "R"], truncation: Truncation
) -> Float[Tensor, "R"]:
    return truncate.thresholds(logits, temperatures, truncation.top_k, truncation.top_p, truncation.min_p)
