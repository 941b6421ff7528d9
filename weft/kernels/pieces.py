"""What several kernels compute alike, as functions inside a kernel. Knows no launcher."""

from weft.kernels._jit import jit, tl


@jit
def exponential(x):
    """The exponential of float32 values, as closely as exp2 is.

    Rounding x / ln 2 would cost |x| half units of the result, 40 of them at -80. So the whole powers of two are taken
    out of x first, by ln 2 in two parts, the first of which multiplies without rounding (Cody and Waite 1980, ch. 6).
    """
    x = tl.where(x < -200.0, -200.0, x)  # 0 already; NaN stays NaN
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - whole * 0.693359375) + whole * 2.1219444005469057e-4
    return tl.exp2(whole) * tl.exp2(rest * 1.4426950408889634)


@jit
def tanh(x):
    """The hyperbolic tangent of float32 values; near 0, where a quotient cancels, a series (next term below 2e-9)."""
    square = x * x
    series = -0.05396825396825397 + square * 0.021869488536155203
    series = 1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * series))
    magnitude = tl.abs(x)
    decay = exponential(-2.0 * magnitude)
    quotient = tl.div_rn(1.0 - decay, 1.0 + decay)
    return tl.where(magnitude < 0.25, x * series, tl.where(x < 0, -quotient, quotient))


@jit
def scored(products, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """Products of queries and keys to scores in units of log2, so that exp2 is the softmax's exponential.

    The cap comes before any mask: a masked key must weigh nothing, not `-cap`.
    """
    scores = products * scale
    if SOFT_CAP:
        scores = soft_cap * tanh(scores / soft_cap)
    return scores * 1.4426950408889634


@jit
def softmax_step(scores, maximum):
    """Take one tile of scores into a running softmax: weights, the factor on what was summed so far, and maximum.

    A row that has seen no key keeps maximum -inf; 0 stands for it in the exponents, since -inf - (-inf) is NaN.
    """
    highest = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.exp2(scores - shift[:, None]), tl.exp2(maximum - shift), highest


@jit
def no_weight(ROWS: tl.constexpr, FIXED: tl.constexpr):
    """The sum of no weights: a number a row or, in fixed order, a few equal columns (see `weigh`)."""
    if FIXED:
        total = tl.zeros([ROWS, 16], tl.float32)
    else:
        total = tl.zeros([ROWS], tl.float32)
    return total


@jit
def weigh(total, weights, factor, dtype: tl.constexpr, FIXED: tl.constexpr, PRECISION: tl.constexpr):
    """The running sum of each row's weights with one tile more.

    A sum over a row is taken in an order that follows from how threads share a tile, which no two tiles have in common.
    A product with ones is not: a matrix instruction adds up one way whatever the tile. So FIXED sums like that, of
    weights as rounded as those that meet the values.
    """
    if FIXED:
        ones = tl.full([weights.shape[1], 16], 1.0, dtype)
        total = tl.dot(weights.to(dtype), ones, acc=total * factor[:, None], input_precision=PRECISION)
    else:
        total = total * factor + tl.sum(weights, 1)
    return total


@jit
def weight_of(total, FIXED: tl.constexpr):
    """A number a row, of what `weigh` summed: its columns are equal, so that the largest of them is any."""
    return tl.max(total, 1) if FIXED else total


@jit
def merge_step(part, log_sum, merged, maximum, total):
    """Take one part `[R, C]` of attention into a running mean of parts: what was summed, maximum, total weight.

    log_sum: base 2, of what the part was divided by, `[R]`; -inf with a part of zeros changes no bit.
    Multiplied and added in a written order, so that every kernel that merges gets the same bits.
    """
    highest = tl.maximum(maximum, log_sum)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(log_sum - shift)
    factor = tl.exp2(maximum - shift)
    merged = tl.fma(merged, tl.broadcast_to(factor[:, None], merged.shape), part * weight[:, None])
    return merged, highest, tl.fma(total, factor, weight)


@jit
def mean_of(attended, total):
    """What was summed, by what it weighs; 0 where nothing was seen."""
    return attended / tl.where(total == 0.0, 1.0, total)[:, None]


@jit
def part_of(attended, maximum, total):
    """A running softmax as a part of attention: the mean of its values, and the base-2 logarithm of its sum."""
    return mean_of(attended, total), maximum + tl.log2(tl.where(total == 0.0, 1.0, total))


@jit
def blocks_of(table, start, low, high, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of a tile of keys that begins at `start`, a multiple of BLOCK_N; of `low : high` among them.

    One lookup where a tile lies in one block, one a key otherwise; columns of other keys are not read. Called a tile
    ahead of its use: a load that depends on another load of its own iteration leaves the compiler nothing to overlap.
    """
    if P % BLOCK_N == 0:
        blocks = tl.load(table + start // P, mask=start < high, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + keys // P, mask=(keys >= low) & (keys < high), other=0)
    return blocks.to(tl.int32)  # kept through an iteration, in half the registers


@jit
def slots_of(blocks, start, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of the tile whose blocks `blocks_of` found, in int64: a pool may have more than 2^31 elements."""
    if P % BLOCK_N == 0:
        slots = blocks.to(tl.int64) * P + (start % P + tl.arange(0, BLOCK_N))
    else:
        slots = blocks.to(tl.int64) * P + (start + tl.arange(0, BLOCK_N)) % P
    return slots


@jit
def cut(length, window, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Keys a split, the first split that holds a key which is seen, and how many there are up to the last.

    The size of a split is a multiple of SPLIT, so that no sequence has more than MOST_SPLITS.
    """
    span = SPLIT * tl.maximum(tl.cdiv(length, SPLIT * MOST_SPLITS), 1)
    oldest = length * 0
    if WINDOW:
        oldest = tl.maximum(length - window, 0)
    return span, oldest, oldest // span, tl.cdiv(length, span)


@jit
def rotated(heads, rows, weights, epsilon, cos, sin, D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr):
    """Heads `[R, BLOCK_D]` in float32: normalised if NORM, then each pair (i, i + D/2) turned by one position's angles.

    heads: pointers `[R, 1]` to the first element of each.   rows: which of them exist, `[R, 1]`.
    weights: pointers `[R, 1]` to the weights of each head's norm.   cos, sin: pointers to the position's D/2 values.
    Nothing is rounded in between, where the plain version rounds the norm, its product with the weight, and each
    product and sum of the rotation.
    """
    half: tl.constexpr = D // 2
    column = tl.arange(0, BLOCK_D)
    partner = tl.where(column < half, column + half, column - half)[None, :]
    angle = tl.where(column < half, column, column - half)
    inside = column < D
    mask = rows & inside[None, :]
    own = tl.load(heads + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(heads + partner, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(own * own, 1) / D + epsilon))[:, None]
        own *= inverse * tl.load(weights + column[None, :], mask=mask, other=0.0).to(tl.float32)
        other *= inverse * tl.load(weights + partner, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    return own * cosine[None, :] + other * tl.where(column < half, -sine, sine)[None, :]
