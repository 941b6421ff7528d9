"""The cut in four kernels, digit by digit of integers that order as the logits do. A part of `truncate.py`.

A logit's key is 32 bits whose order is that of the numbers. From the highest digit down, `fill_kernel` adds what lies
in a row to one cell a digit, tokens for top_k and masses for top_p, and `choose_kernel` takes the digit in which the
sum from above reaches what is needed. Cells are added to as whole numbers, so their order is free. As every token in
its cell would be slow, most are left out that cannot matter: for top_k, those below the k-th largest of the highest
logits of groups (`bound_kernel`), of which each stands for one token at least. The numbers that decide are those of
`_truncate_reference.py`, operation by operation.
"""

from weft.kernels._jit import jit, tl


@jit
def _key(value):
    """32 bits in the order of float32 numbers; both zeros, of which a maximum may be either, have the same."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@jit
def _number(key, SHIFT: tl.constexpr):
    """Of a key whose lowest SHIFT bits are still zeros: they are ones in the keys of narrow negative numbers."""
    negative = key < 0x80000000
    bits = tl.where(negative, (key | ((1 << SHIFT) - 1)) ^ 0xFFFFFFFF, key & 0x7FFFFFFF)
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
def _cuts(temperature, rank, top_p, min_p, vocab_size):
    """Whether anything is cut by rank, and whether at all."""
    warm = temperature > 0
    ranked = warm & (rank > 0) & (rank < vocab_size)
    return ranked, ranked | (warm & ((top_p < 1) | (min_p > 0)))


@jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p", "min_p"])
def highest_kernel(
    logits,
    stride,
    temperatures,
    top_k,
    top_p,
    min_p,
    highest,
    vocab_size,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The highest logit of each GROUP tokens, of rows that are cut; infinity where there is a NaN.

    highest: [R, blocks * BLOCK / GROUP].
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, cut = _cuts(
        tl.load(temperatures + row),
        tl.load(top_k + row),
        tl.load(top_p + row),
        tl.load(min_p + row),
        vocab_size,
    )
    if not cut:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("inf"))
    groups: tl.constexpr = BLOCK // GROUP
    found = tl.max(tl.reshape(values, [groups, GROUP]), 1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(highest + (row * tl.num_programs(1) + block) * groups + tl.arange(0, groups), found)


@jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p", "min_p"])
def bound_kernel(
    temperatures,
    top_k,
    top_p,
    min_p,
    highest,
    tops,
    thresholds,
    state,
    vocab_size,
    groups,
    TERMS: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A row's highest logit, the threshold of min_p, and a key that the k-th largest logit is not below.

    tops: infinity where nothing can be cut.   state: [R, 2], a key and how much more is needed.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature, rank, least = tl.load(temperatures + row), tl.load(top_k + row), tl.load(min_p + row)
    ranked, cut = _cuts(temperature, rank, tl.load(top_p + row), least, vocab_size)
    threshold = tl.full([], float("-inf"), tl.float32)
    if cut:
        group = tl.arange(0, GROUPS)
        found = tl.load(highest + row * groups + group, mask=group < groups, other=float("-inf"))
        top = tl.max(found, 0)
        tl.store(tops + row, top)
        if (least > 0) & (tl.abs(top) < float("inf")):
            depth = temperature.to(tl.float64) * _logarithm(least.to(tl.float64), TERMS)
            threshold = (top.to(tl.float64) + depth).to(tl.float32)
        if ranked:
            keys = tl.where(group < groups, _key(found), 0)
            bound = tl.full([], 0, tl.uint32)
            for bit in range(32):
                higher = bound | (tl.full([], 0x80000000, tl.uint32) >> bit)
                bound = tl.where(tl.sum((keys >= higher).to(tl.int32), 0) >= rank, higher, bound)
            tl.store(state + 2 * row, bound.to(tl.int64))
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(thresholds + row, threshold)


@jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p"])
def fill_kernel(
    logits,
    stride,
    temperatures,
    top_k,
    top_p,
    highest,
    tops,
    thresholds,
    cells,
    state,
    vocab_size,
    num_cells,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Tokens, or masses of what the threshold leaves, by a digit of their keys, where these agree with what is found.

    cells: [R, num_cells], zeros.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # All that decides whether there is anything to do is asked for at once, and waited for once.
    groups: tl.constexpr = BLOCK // GROUP
    temperature, share, rank = tl.load(temperatures + row), tl.load(top_p + row), tl.load(top_k + row)
    top = tl.load(tops + row)
    tops_of_groups = tl.load(highest + (row * tl.num_programs(1) + block) * groups + tl.arange(0, groups))
    most = tl.max(_key(tops_of_groups), 0)  # of rows that nothing cuts it is whatever lay there
    if MASS:
        threshold = tl.load(thresholds + row)
        needed = (temperature > 0) & (share < 1) & (most >= _key(threshold))
    else:
        needed, _ = _cuts(temperature, rank, share, 0.0, vocab_size)
    if not (MASS and FIRST):
        least = tl.load(state + 2 * row).to(tl.uint32)
        needed &= most >= least
    if not (needed & (tl.abs(top) != float("inf"))):
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    keys = _key(values)
    if MASS:
        inside = inside & (values >= threshold)
    if not FIRST:
        inside = inside & ((keys >> (SHIFT + BITS)) == (least >> (SHIFT + BITS)))
        if tl.max(inside.to(tl.int32), 0) == 0:
            return
    cell = cells + row * num_cells + OFFSET
    digits = ((keys >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
    if MASS:
        octaves = _octaves(values, top, temperature)
        found = tl.where(inside, _mass(octaves), 0)
        if FIRST:
            # Most of a vocabulary, as a rule: into the lowest cell, where nothing is and no sum from above gets to.
            below = octaves > _depth(share, vocab_size).to(tl.float64)
            rest = tl.sum(tl.where(below, found, 0), 0)
            tl.atomic_add(cell, rest, mask=rest > 0, sem="relaxed")
            found = tl.where(below, 0, found)
        tl.atomic_add(cell + digits, found, mask=found > 0, sem="relaxed")
    else:
        if FIRST:
            inside = inside & (keys >= least)
        tl.atomic_add(cell + digits, tl.full([BLOCK], 1, tl.int64), mask=inside, sem="relaxed")


@jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p"])
def choose_kernel(
    temperatures,
    top_k,
    top_p,
    tops,
    thresholds,
    cells,
    state,
    vocab_size,
    num_cells,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MASS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The digit in which the sum from above reaches what is needed, and with the last digit the threshold."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = 1 << BITS
    digit = tl.arange(0, size)
    temperature, rank, share = tl.load(temperatures + row), tl.load(top_k + row), tl.load(top_p + row)
    top = tl.load(tops + row)
    found = tl.load(cells + row * num_cells + OFFSET + digit)
    wanted, _ = _cuts(temperature, rank, share, 0.0, vocab_size)
    if MASS:
        wanted = (temperature > 0) & (share < 1)
    if not (wanted & (tl.abs(top) != float("inf"))):
        return
    key = tl.full([], 0, tl.uint32)
    if FIRST:
        needed = rank
        if MASS:
            needed = _share(tl.sum(found, 0), share)
    else:
        needed = tl.load(state + 2 * row + 1)
        key = tl.load(state + 2 * row).to(tl.uint32)
    from_above = tl.sum(found, 0) - tl.cumsum(found, 0) + found
    chosen = tl.max(tl.where(from_above >= needed, digit, 0), 0)
    above = tl.sum(tl.where(digit > chosen, found, 0), 0)
    key = key | (chosen.to(tl.uint32) << SHIFT)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if LAST:
        threshold = _number(key, SHIFT)
        if not MASS:
            threshold = tl.maximum(threshold, tl.load(thresholds + row))
        tl.store(thresholds + row, threshold)
    else:
        tl.store(state + 2 * row, key.to(tl.int64))
        tl.store(state + 2 * row + 1, needed - above)
