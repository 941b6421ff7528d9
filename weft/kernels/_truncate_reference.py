"""The cut of min_p, top_k and top_p in plain torch, and the numbers it is made of, which the kernels compute alike.

Everything that decides is made of float64 additions, multiplications and divisions in a written order, none of them
fused, and of integers: so a CPU, a GPU and the kernels agree to the bit.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

MASS_BITS = 40  # the likeliest token weighs 2**40
SHARE_BITS = 30  # top_p is taken in units of 2**-30
FAR = 60.0  # octaves below the likeliest from which nothing is left of a mass

LOG2_E = 1.4426950408889634
LOG_2 = 0.6931471805599453
# (-log 2)**n / n!, of the tenth power first: 2**-x for x in [-1/2, 1/2], to 2**-42 of it.
EXPONENTIAL = (
    7.054911620801123e-09,
    -1.01780860092397e-07,
    1.321548679014431e-06,
    -1.5252733804059841e-05,
    0.0001540353039338161,
    -0.0013333558146428443,
    0.009618129107628477,
    -0.05550410866482158,
    0.24022650695910072,
    -0.6931471805599453,
    1.0,
)
LOGARITHM_TERMS = 18  # of artanh on [0, 1/3], to the last bit of float64

KEY_BITS, DIGITS = 32, (11, 11, 10)  # of a float32 number; those from the highest that are told apart at a time


def reference(
    logits: Float[Tensor, "R V"],
    temperatures: Float[Tensor, "R"],
    top_k: Int[Tensor, "R"],
    top_p: Float[Tensor, "R"],
    min_p: Float[Tensor, "R"],
) -> Float[Tensor, "R"]:
    """As `thresholds`, in plain torch; quick on a CPU, where it looks at the rows that are cut alone."""
    found = torch.full_like(temperatures, -torch.inf)
    vocab_size = logits.shape[1]
    by_rank = (top_k > 0) & (top_k < vocab_size)
    for row in ((temperatures > 0) & (by_rank | (top_p < 1) | (min_p > 0))).nonzero()[:, 0].tolist():
        values = logits[row].float()
        highest = values.max()
        if not torch.isfinite(highest):
            continue
        if min_p[row] > 0:
            found[row] = highest.double() + temperatures[row].double() * logarithm(min_p[row].double())
        if by_rank[row]:
            # All that are left for top_p, but for equals of the last.
            largest = values.topk(int(top_k[row])).values
            found[row] = torch.maximum(found[row], largest[-1])
        if top_p[row] < 1:
            left = values[values >= found[row]]
            found[row] = _cut(left, highest, temperatures[row], top_p[row])
    return found


def _cut(
    values: Float[Tensor, "N"], highest: Float[Tensor, ""], temperature: Float[Tensor, ""], top_p: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """The largest of the values such that it and all above weigh `top_p` of the whole.

    Masses are summed by the digits of keys that order as the values do: one pass a digit, where a sort takes many.
    """
    masses = mass(values, highest, temperature)
    needed = share(masses.sum(), top_p)
    bits = values.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) + 2**31
    shift = KEY_BITS
    for size in DIGITS:
        shift -= size
        digits = (keys >> shift) & ((1 << size) - 1)
        cells = masses.new_zeros(1 << size).index_add_(0, digits, masses)
        from_above = cells.sum() - cells.cumsum(0) + cells
        digit = (from_above >= needed).nonzero()[-1, 0]
        needed = needed - from_above[digit] + cells[digit]
        inside = digits == digit
        keys, masses, values = keys[inside], masses[inside], values[inside]
    return values[0]


def mass(
    values: Float[Tensor, "*shape"], highest: Float[Tensor, "*#shape"], temperature: Float[Tensor, "*#shape"]
) -> Int[Tensor, "*shape"]:
    """`exp((value - highest) / temperature)` in units of 2**-40, to one unit; sums of it are exact in any order."""
    octaves = highest.double() - values.double()
    octaves = octaves.mul_(LOG2_E / temperature.double()).clamp_(max=FAR)
    whole = octaves.add(0.5).to(torch.int64)
    part = octaves.sub_(whole)
    power = torch.full_like(part, EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        power.mul_(part).add_(coefficient)
    units = power.mul_(2.0**MASS_BITS).add_(0.5).to(torch.int64)
    return units.add_(torch.ones_like(whole).bitwise_left_shift_(whole) >> 1).bitwise_right_shift_(whole)


def share(total: Int[Tensor, "*shape"], top_p: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The smallest mass that is `top_p` of a total, at least 1. Their product has more than 64 bits, so in halves."""
    units = (top_p.double() * 2.0**SHARE_BITS).to(torch.int64)
    below = (1 << SHARE_BITS) - 1
    needed = (total >> SHARE_BITS) * units + (((total & below) * units + below) >> SHARE_BITS)
    return needed.clamp(min=1)


def logarithm(number: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Natural, of positive float64 numbers: of the power of two, and 2 artanh((m - 1) / (m + 1)) of the mantissa."""
    bits = number.view(torch.int64)
    exponent = ((bits >> 52) - 1023).double()
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.zeros_like(ratio)
    for term in range(LOGARITHM_TERMS - 1, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return exponent * LOG_2 + 2.0 * ratio * series
