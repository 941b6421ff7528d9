"""The two judges of a kernel's numbers, each with its origin; no kernel.

The rule (docs of the design, section 3) compares errors with torch's own over a pool. Over the few values of one small
case chance moves such a ratio by more than the rule allows, so a small case is held to what rounding can do at most:
a bound that follows from the order of operations alone and that no seed crosses.
"""

import torch
from torch import Tensor

RMS, MOST = 1.05, 2.0  # errors against float64 as multiples of torch's own in the same dtype
POOL = 10_000  # elements, below which the rule is a matter of chance
SINGLE = 2.0**-24  # the largest relative error of one rounding in float32


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding.

    >>> unit(torch.float32) == SINGLE
    True
    """
    return torch.finfo(dtype).eps / 2


def assert_by_the_rule(found: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """RMS within 1.05 and maximum within 2 of torch's own; or of the exact result rounded, which none can better.

    The RMS of n independent errors of uniform spread has a relative deviation of 0.45 / sqrt(n), so that of a ratio of
    two is below 0.0064 from POOL elements on: a kernel that is exactly as good as torch's fails by chance at 7 sigma,
    less than once in 10^11, and at 4 sigma, once in 3e4, if only a third of the elements are independent. An error that
    a whole row shares counts once: a pool of such has as many elements as it has rows.
    """
    found, torchs, exact = (tensor.flatten() for tensor in (found, torchs, exact))
    assert found.numel() >= POOL, f"{found.numel()} elements are no pool"
    assert not found.isnan().any(), "a value that nobody wrote was read"
    ideal = exact.to(found.dtype).double() - exact
    ours, theirs = found.double() - exact, torchs.double() - exact
    means = [error.pow(2).mean().sqrt().item() for error in (ours, theirs, ideal)]
    most = [error.abs().max().item() for error in (ours, theirs, ideal)]
    assert means[0] <= RMS * max(means[1:]), f"RMS error {means[0]:.4g}, torch's {means[1]:.4g}, least {means[2]:.4g}"
    assert most[0] <= MOST * max(most[1:]), f"largest {most[0]:.4g}, torch's {most[1]:.4g}, least {most[2]:.4g}"


def assert_within(found: Tensor, exact: Tensor, inside: Tensor | float) -> None:
    """Each value within `inside` (an absolute error from roundings on the way) and the rounding of the result."""
    assert not found.isnan().any(), "a value that nobody wrote was read"
    limits = torch.finfo(found.dtype)
    bound = inside + unit(found.dtype) * (exact.abs() + inside) + 8 * limits.tiny * limits.eps
    excess = (found.double() - exact).abs() - bound
    assert excess.numel() == 0 or excess.max() <= 0, f"{excess.max():.3g} beyond what rounding can do"
