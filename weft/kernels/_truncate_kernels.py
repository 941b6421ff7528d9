"""The cut as four kernels, digit by digit of integers that order as the logits do. A part of `truncate.py`.

A logit's key is 32 bits whose order is that of the numbers. From the highest digit down, a pass over the blocks of a
row fills one cell a digit with what lies there, tokens for top_k and masses for top_p, and a program a row takes the
digit in which the sum from above reaches what is needed. Cells are added to as whole numbers, so their order is free.
The numbers that decide are those of `_truncate_reference.py`, operation by operation.
"""

from weft.kernels._jit import jit, tl


@jit
def _key(value):
    """32 bits in the order of float32 numbers. Of two zeros, either is the threshold that the other is."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@jit
def _number(key, SHIFT: tl.constexpr):
    """Of a key whose lowest SHIFT bits are still zeros: they are ones in the keys of narrow negative numbers."""
    negative = key < 0x80000000
    bits = tl.where(negative, ~(key | ((1 << SHIFT) - 1)), key & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@jit
def _octaves(values, highest, temperature):
    """How many times a value weighs half of what the highest does, at most 60."""
    octaves = (highest.to(tl.float64) - values.to(tl.float64)) * (1.4426950408889634 / temperature.to(tl.float64))
    return tl.minimum(octaves, 60.0)


@jit
def _mass(octaves):
    """2**-octaves in units of 2**-40."""
    whole = (octaves + 0.5).to(tl.int32)
    part = octaves - whole.to(tl.float64)
    power = part * 7.054911620801123e-09 + -1.01780860092397e-07
    power = power * part + 1.321548679014431e-06
    power = power * part + -1.5252733804059841e-05
    power = power * part + 0.0001540353039338161
    power = power * part + -0.0013333558146428443
    power = power * part + 0.009618129107628477
    power = power * part + -0.05550410866482158
    power = power * part + 0.24022650695910072
    power = power * part + -0.6931471805599453
    power = power * part + 1.0
    units = (power * 1099511627776.0 + 0.5).to(tl.int64)
    places = whole.to(tl.int64)
    return (units + ((tl.full([], 1, tl.int64) << places) >> 1)) >> places


@jit
def _logarithm(number, TERMS: tl.constexpr):
    """Natural, of a positive float64 number."""
    bits = number.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) - 1023).to(tl.float64)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = ratio * 0.0
    for term in tl.static_range(TERMS):
        series = series * square + 1.0 / (2 * (TERMS - 1 - term) + 1)
    return exponent * 0.6931471805599453 + 2.0 * ratio * series


@jit
def _share(total, top_p):
    """The smallest mass that is `top_p` of a total."""
    units = (top_p.to(tl.float64) * 1073741824.0).to(tl.int64)
    needed = (total >> 30) * units + (((total & 0x3FFFFFFF) * units + 0x3FFFFFFF) >> 30)
    return tl.maximum(needed, 1)


@jit
def _depth(top_p, vocab_size):
    """Octaves such that all tokens of a row below them together are too few to matter to where `top_p` is reached.

    A row weighs 2**40 or more, so what may be missing from above weighs at least 1 - top_p of that, and a token below
    n octaves at most 2**(40 - n) + 1.
    """
    units = (top_p.to(tl.float64) * 1073741824.0).to(tl.int64)
    most = ((1073741824 - units) << 10) // vocab_size - 1
    exponent = (tl.maximum(most, 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    return tl.where(most >= 1, 40 - exponent, 64)


@jit
def _reached(cells, needed, SIZE: tl.constexpr):
    """The highest digit whose cell and those above hold what is needed, and what those above hold."""
    digit = tl.arange(0, SIZE)
    from_above = tl.sum(cells, 0) - tl.cumsum(cells, 0) + cells
    chosen = tl.max(tl.where(from_above >= needed, digit, 0), 0)
    return chosen, tl.sum(tl.where(digit > chosen, cells, 0), 0)


@jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p", "min_p"])
def count_kernel(
    logits,
    stride,
    temperatures,
    top_k,
    top_p,
    min_p,
    highest,
    counts,
    state,
    vocab_size,
    cells,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Tokens by a digit of their keys, of those that agree with the digits found; first of all the highest logits.

    highest: [R, blocks], written by the first pass; NaN counts as infinity.   counts: [R, cells], zeros.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rank = tl.load(top_k + row)
    ranked = (rank > 0) & (rank < vocab_size) & (tl.load(temperatures + row) > 0)
    place = row * tl.num_programs(1) + block
    if FIRST:
        cut = (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)
        if not (ranked | (cut & (tl.load(temperatures + row) > 0))):
            return
    else:
        if not ranked:
            return
        if _key(tl.load(highest + place)) < tl.load(state + 2 * row).to(tl.uint32):
            return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if FIRST:
        tl.store(highest + place, tl.max(tl.where(values == values, values, float("inf")), 0))
    if ranked:
        keys = _key(values)
        if not FIRST:
            inside = inside & ((keys >> (SHIFT + BITS)) == (tl.load(state + 2 * row).to(tl.uint32) >> (SHIFT + BITS)))
        digits = ((keys >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        found = tl.histogram(digits, 1 << BITS, mask=inside)
        cell = counts + row * cells + OFFSET + tl.arange(0, 1 << BITS)
        tl.atomic_add(cell, found, mask=found > 0, sem="relaxed")


@jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p", "min_p"])
def rank_kernel(
    temperatures,
    top_k,
    top_p,
    min_p,
    highest,
    counts,
    state,
    tops,
    thresholds,
    vocab_size,
    blocks,
    cells,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The digit of the k-th largest, and with the last digit the threshold of min_p and top_k, and the highest logit.

    state: [R, 2], the digits found and how much more is needed.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature, rank, least = tl.load(temperatures + row), tl.load(top_k + row), tl.load(min_p + row)
    ranked = (temperature > 0) & (rank > 0) & (rank < vocab_size)
    key = tl.full([], 0, tl.uint32)
    if ranked:
        if FIRST:
            needed = rank
        else:
            needed = tl.load(state + 2 * row + 1)
            key = tl.load(state + 2 * row).to(tl.uint32)
        found = tl.load(counts + row * cells + OFFSET + tl.arange(0, 1 << BITS))
        digit, above = _reached(found, needed, 1 << BITS)
        key = key | (digit.to(tl.uint32) << SHIFT)
        if not LAST:
            tl.store(state + 2 * row, key.to(tl.int64))
            tl.store(state + 2 * row + 1, needed - above)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if LAST:
        threshold = tl.full([], float("-inf"), tl.float32)
        if ranked | ((temperature > 0) & ((tl.load(top_p + row) < 1) | (least > 0))):
            block = tl.arange(0, BLOCKS)
            top = tl.max(tl.load(highest + row * blocks + block, mask=block < blocks, other=float("-inf")), 0)
            tl.store(tops + row, top)
            if tl.abs(top) < float("inf"):
                if least > 0:
                    depth = temperature.to(tl.float64) * _logarithm(least.to(tl.float64), TERMS)
                    threshold = (top.to(tl.float64) + depth).to(tl.float32)
                if ranked:
                    threshold = tl.maximum(threshold, _number(key, SHIFT))
        tl.store(thresholds + row, threshold)


@jit(do_not_specialize_on_alignment=["temperatures", "top_p"])
def weigh_kernel(
    logits,
    stride,
    temperatures,
    top_p,
    highest,
    tops,
    thresholds,
    masses,
    state,
    vocab_size,
    cells,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Masses by a digit of the keys, of what the threshold leaves and agrees with the digits found.

    masses: [R, cells], zeros.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if (temperature == 0) | (tl.load(top_p + row) >= 1):
        return
    top, threshold = tl.load(tops + row), tl.load(thresholds + row)
    most = tl.load(highest + row * tl.num_programs(1) + block)
    if (most < threshold) | (tl.abs(top) == float("inf")):
        return
    if not FIRST:
        prefix = tl.load(state + 2 * row).to(tl.uint32)
        if _key(most) < prefix:
            return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    keys = _key(values)
    inside = inside & (values >= threshold)
    if not FIRST:
        inside = inside & ((keys >> (SHIFT + BITS)) == (prefix >> (SHIFT + BITS)))
        if tl.max(inside.to(tl.int32), 0) == 0:
            return
    octaves = _octaves(values, top, temperature)
    found = tl.where(inside, _mass(octaves), 0)
    cell = masses + row * cells + OFFSET
    if FIRST:
        # Most of a vocabulary, as a rule: into the lowest cell, where nothing is and no sum from above gets to.
        below = octaves > _depth(tl.load(top_p + row), vocab_size).to(tl.float64)
        rest = tl.sum(tl.where(below, found, 0), 0)
        tl.atomic_add(cell, rest, mask=rest > 0, sem="relaxed")
        found = tl.where(below, 0, found)
    digits = ((keys >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
    tl.atomic_add(cell + digits, found, mask=found > 0, sem="relaxed")


@jit(do_not_specialize_on_alignment=["temperatures", "top_p"])
def share_kernel(
    temperatures,
    top_p,
    tops,
    masses,
    state,
    thresholds,
    cells,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The digit in which the masses from above reach `top_p` of all, and with the last digit the threshold."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperatures + row) == 0) | (tl.load(top_p + row) >= 1):
        return
    if tl.abs(tl.load(tops + row)) == float("inf"):
        return
    found = tl.load(masses + row * cells + OFFSET + tl.arange(0, 1 << BITS))
    key = tl.full([], 0, tl.uint32)
    if FIRST:
        needed = _share(tl.sum(found, 0), tl.load(top_p + row))
    else:
        needed = tl.load(state + 2 * row + 1)
        key = tl.load(state + 2 * row).to(tl.uint32)
    digit, above = _reached(found, needed, 1 << BITS)
    key = key | (digit.to(tl.uint32) << SHIFT)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if LAST:
        tl.store(thresholds + row, _number(key, SHIFT))
    else:
        tl.store(state + 2 * row, key.to(tl.int64))
        tl.store(state + 2 * row + 1, needed - above)
