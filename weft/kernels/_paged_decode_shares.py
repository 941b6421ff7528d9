"""Which requests of a batch are so long that several programs share each of their heads, and who takes which splits.

Decided on the device from the lengths alone, so that a grid follows from shapes. The work of all requests (the keys of
their splits) is cut into SHARES runs; a request of no more than one run is short, and a program takes it whole. A long
one is more than one SHARES-th of the work, so there are fewer than SHARES of them, and their runs, rounded up, are at
most twice as many. Who takes a split changes no bit. A part of paged decode; knows no launcher.

All requests are looked at together, without a loop: behind one, Triton 3.9 does not overlap the loads of the kernel's.
"""

from weft.kernels._jit import jit, tl
from weft.kernels.pieces import cut


@jit
def cuts_of(
    lengths,
    query_starts,
    batch,
    window,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    ONE_EACH: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Of every request, `[REQUESTS]`: keys a split, and splits; none where a request has several rows."""
    request = tl.arange(0, REQUESTS)
    there = request < batch
    length = tl.load(lengths + request, mask=there, other=0).to(tl.int32)
    if not ONE_EACH:
        begin = tl.load(query_starts + request, mask=there, other=0)
        after = tl.load(query_starts + request + 1, mask=there, other=0)
        length = tl.where(after - begin == 1, length, 0)
    span, _, first, count = cut(length, window, WINDOW, SPLIT, MOST_SPLITS)
    return span, count - first


@jit
def run_of(spans, counts, SPLIT: tl.constexpr, SHARES: tl.constexpr):
    """Keys that a run has at least: a part of all work, and two splits, below which sharing gains nothing."""
    work = tl.sum(counts.to(tl.int64) * spans, 0)
    return tl.maximum(tl.cdiv(work, SHARES), 2 * SPLIT).to(tl.int32)


@jit
def is_long(span, count, run):
    """Whether `count` splits of `span` keys are more than one run, which is a whole number of splits."""
    return (count - 1) * span >= run


@jit
def rank_of(request, spans, counts, run):
    """Long requests ahead of this one: where its parts lie."""
    ahead = is_long(spans, counts, run) & (tl.arange(0, spans.shape[0]) < request)
    return tl.sum(ahead.to(tl.int32), 0)


@jit
def share_of(index, spans, counts, run):
    """The request whose run number `index` of all long requests' is, and which of its runs; -1 for none."""
    runs = tl.where(is_long(spans, counts, run), tl.cdiv(counts, tl.cdiv(run, spans)), 0)
    until = tl.cumsum(runs, 0)
    mine = (index >= until - runs) & (index < until)
    request = tl.sum(tl.where(mine, tl.arange(0, spans.shape[0]) + 1, 0), 0) - 1
    return request, tl.sum(tl.where(mine, index - (until - runs), 0), 0)
