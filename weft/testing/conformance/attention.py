"""Laws of an attention backend, judged through its interface: what it computes, keeps, copies and says of itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.attention.interface import AttentionBackend, Cache
from weft.testing.conformance.attention_steps import (
    CPU,
    HEAD_DIM,
    LENGTH,
    NUM_LAYERS,
    PLAIN,
    Bench,
    Step,
    geometry_of,
)
from weft.testing.conformance.suite import ConformanceReport, given, require, try_laws
from weft.testing.finding import NotJudged

# In float32 against float64, of values of the order of 1. Backends of weft are off by 2e-6 at most on these cases: sums
# over 21 keys of 16 dimensions, and weights by exponentials of scores up to 20, of which a rounding is 1e-6.
TOLERANCE = 1e-5

# The ends of chunks: whole, a token at a time, across the edges of blocks of 8, and as a prefill that becomes a decode.
_CHUNKS = (
    (LENGTH,),
    tuple(range(1, LENGTH + 1)),
    (13, 20, LENGTH),
    (8, 16, LENGTH),
    (7, 9, 15, 17, LENGTH),
    (1, LENGTH),
)
_GROUPS = ((4, 2), (2, 2), (3, 1), (8, 1))
_WINDOWS = (1, 4, 7, 8, 9)


def run_attention_conformance(backend: AttentionBackend | Callable[[], AttentionBackend]) -> ConformanceReport:
    """Judge a backend, an object with the methods of `weft.attention.interface.AttentionBackend`, or what makes one.

    It is asked for small layers in float32 on the CPU. What its `supports` refuses is not judged, with its reason.
    Returns: every law with its outcome. Raises: ConformanceError, an AssertionError that names each broken law and the
    layer, the chunks or the step that broke it.
    """
    made: Any = backend() if callable(backend) else backend
    methods = [name for name in _public(AttentionBackend) if callable(getattr(made, name, None))]
    require(made, bool(methods), "an AttentionBackend, or what makes one")
    name = getattr(made, "name", type(made).__name__)
    with torch.inference_mode():
        return try_laws("attention backend", str(name), made, LAWS)


def it_has_the_methods_of_a_backend_and_its_cache_those_of_a_cache(backend: Any) -> str:
    for kind, made in ((AttentionBackend, backend), (Cache, Bench.of(backend).cache)):
        lacking = [name for name in _public(kind) if not hasattr(made, name)]
        assert not lacking, f"{type(made).__name__} has no {', '.join(lacking)}"
    return "all of them"


def what_it_cannot_serve_it_refuses_with_a_reason(backend: Any) -> str:
    specs = [PLAIN, replace(PLAIN, soft_cap=30.0), replace(PLAIN, cache_group=1), replace(PLAIN, window=4)]
    reasons = []
    for spec in specs:
        reason = backend.supports(spec, torch.float32, CPU)
        assert reason is None or (isinstance(reason, str) and reason), f"given {spec}: says {reason!r}, no reason"
        reasons += [reason] if reason else []
        if spec is PLAIN and reason:
            raise NotJudged(f"it refuses the plainest layer too: {reason}")
    return "refuses nothing" if not reasons else "; ".join(reasons)


def attention_equals_the_formula_in_float64(backend: Any) -> str:
    """Groups of heads, with and without norms, each layer, whole."""
    worst = 0.0
    for num_query_heads, num_kv_heads in _GROUPS:
        spec = replace(PLAIN, num_query_heads=num_query_heads, num_kv_heads=num_kv_heads)
        for with_norms in (True, False):
            bench = Bench.of(backend, spec, with_norms=with_norms)
            for layer in range(NUM_LAYERS):
                with given(f"{spec}, norms on heads: {with_norms}, layer {layer}, {LENGTH} tokens at once"):
                    worst = max(worst, _close(bench.chunks(1, (LENGTH,), layer), bench.truth(1, layer)))
    return f"off by {worst:.1e} at most, {TOLERANCE:g} is allowed"


def chunks_never_change_attention(backend: Any) -> str:
    for window in (None, 5):
        for ends in _CHUNKS:
            bench = Bench.of(backend, replace(PLAIN, window=window))
            with given(f"window {window}, chunks that end at {ends}"):
                _close(bench.chunks(2, ends), bench.truth(2))
    return f"{len(_CHUNKS)} ways to cut {LENGTH} tokens, with a window and without"


def a_window_counts_the_query_itself_however_the_tokens_come(backend: Any) -> str:
    """The value of token i is 1 at place i and 0 elsewhere, so that the result shows which keys were seen."""
    length = HEAD_DIM
    for window in _WINDOWS:
        for ends in ((length,), tuple(range(1, length + 1)), (5, 8, length)):
            bench = Bench.of(backend, replace(PLAIN, window=window))
            qkvs = bench.qkvs[0, :, :length].clone()
            qkvs[:, :, -PLAIN.num_kv_heads * HEAD_DIM :] = torch.eye(length, HEAD_DIM).repeat(1, PLAIN.num_kv_heads)
            with given(f"window {window}, {length} tokens in chunks that end at {ends}"):
                attended = bench.chunks(0, ends, qkvs=qkvs).unflatten(-1, (-1, HEAD_DIM))
                for position in range(length):
                    found = (attended[position] > 0).any(0).nonzero().flatten().tolist()
                    seen = list(range(max(0, position - window + 1), position + 1))
                    assert found == seen, f"the query at {position} sees the keys {found}, not {seen}"
    return f"windows of {', '.join(map(str, _WINDOWS))} keys"


def a_soft_cap_reaches_the_scores(backend: Any) -> str:
    bench = Bench.of(backend, replace(PLAIN, soft_cap=0.5))
    with given("a soft cap of 0.5, chunks that end at 13, 20 and 21"):
        _close(bench.chunks(0, (13, 20, LENGTH)), bench.truth(0))
    return "a cap of 0.5, before the mask"


def the_scale_is_the_layers_own(backend: Any) -> str:
    for scale in (1.0, 0.05):
        bench = Bench.of(backend, replace(PLAIN, scale=scale))
        with given(f"a scale of {scale}"):
            _close(bench.chunks(0, (20, LENGTH)), bench.truth(0))
    return "scales of 1 and 0.05"


def requests_and_layers_are_kept_apart(backend: Any) -> str:
    """Three requests at their own pace, prefills beside decodes, in two layers of one cache."""
    bench = Bench.of(backend)
    steps: list[Step] = [
        [(2, 0, 13), (0, 0, 1)],
        [(0, 1, 20), (1, 0, 2), (2, 13, 14)],
        [(1, 2, LENGTH), (2, 14, 20)],
        [(0, 20, LENGTH), (2, 20, LENGTH)],
    ]
    found: dict[tuple[int, int], list[Tensor]] = {}
    with given(f"steps {steps} in two layers"):
        for step in steps:
            for layer in (1, 0):
                for (request, _, _), part in zip(step, bench.run(step, layer), strict=True):
                    found.setdefault((layer, request), []).append(part)
        for (layer, request), parts in found.items():
            with given(f"request {request} in layer {layer}"):
                _close(torch.cat(parts), bench.truth(request, layer))
    return "3 requests in 2 layers, step by step beside each other"


def memory_that_nobody_wrote_is_never_read(backend: Any) -> str:
    bench = Bench.of(backend)
    for step in ([(0, 0, 3), (2, 0, LENGTH)], [(0, 3, 4)], [(0, 4, 17)]):
        with given(f"step {step} of a cache that is new"):
            for part in bench.run(step):
                assert part.isfinite().all(), "what was never written shows in the result"
    return "a new cache full of NaN, where the backend leaves its memory unset"


def what_a_window_hides_cannot_reach_a_query(backend: Any) -> str:
    """Old tokens are written again as NaN: no later query may see it."""
    for last in (15, 17):
        bench = Bench.of(backend, replace(PLAIN, window=4))
        first = 14
        bench.chunks(0, (first,))
        oldest = first - 3  # the query at `first` sees itself and the 3 before
        with given(f"window 4, NaN at positions 0 to {oldest - 1}, then positions {first} to {last - 1}"):
            bench.run([(0, 0, oldest)], qkvs=torch.full_like(bench.qkvs[0], torch.nan))
            assert bench.run([(0, first, last)])[0].isfinite().all(), "the result is not finite"
    return "a prefill and a decode behind NaN"


def requests_that_share_blocks_read_the_same(backend: Any) -> str:
    bench = Bench.of(backend)
    if not bench.geometry.shareable:
        raise NotJudged("its geometry says that blocks cannot be shared")
    size = bench.geometry.block_size
    first, second = bench.table_of(0), bench.table_of(1)
    with given(f"request 1 with the first block of request 0, of {size} tokens, and its own tokens after it"):
        qkvs = bench.qkvs[0].clone()
        qkvs[1, :size] = qkvs[0, :size]
        bench.chunks(0, (LENGTH,), qkvs=qkvs)
        shared = {1: [first[0], *second[1:]]}
        found = bench.run([(1, size, LENGTH), (0, LENGTH - 1, LENGTH)], qkvs=qkvs, tables=shared)
        _close(found[0], bench.truth(1, qkvs=qkvs)[size:])
        _close(found[1], bench.truth(0, qkvs=qkvs)[LENGTH - 1 :])
    return f"a block of {size} tokens under two requests"


def copied_blocks_are_whole_in_every_layer_and_leave_the_rest(backend: Any) -> str:
    """A request goes on from the copies of its blocks, another at its own place beside it."""
    bench = Bench.of(backend)
    source, target = bench.table_of(0), bench.table_of(2)
    pairs = list(zip(source, target, strict=True))
    last = LENGTH - 1
    with given(f"blocks copied as {pairs}, of a request of {last} tokens, beside one in {bench.table_of(1)}"):
        for layer in range(NUM_LAYERS):
            bench.run([(0, 0, last), (1, 0, last)], layer)
        bench.cache.copy_blocks(pairs)
        for layer in range(NUM_LAYERS):
            for table in (target, source):
                found = bench.run([(0, last, LENGTH), (1, last, LENGTH)], layer, tables={0: table})
                for request, part in enumerate(found):
                    with given(f"request {request} in layer {layer}, request 0 in blocks {table}"):
                        _close(part, bench.truth(request, layer)[last:])
    return f"{len(pairs)} blocks at once"


def a_slot_of_minus_one_writes_nothing(backend: Any) -> str:
    """vllm#43810: as an index it is the last slot of the last block, which here belongs to a request."""
    bench = Bench.of(backend)
    if not bench.geometry.shareable:
        raise NotJudged("its blocks cannot be shared: it may write by rows, without slots")
    size, count = bench.geometry.block_size, bench.geometry.num_blocks
    if size >= LENGTH:
        raise NotJudged(f"no sequence here fills a block of {size} tokens")
    blocks = [count - 1 - place for place in range(bench.geometry.blocks_for(LENGTH))]
    with given(f"{count} blocks of {size}, the last one full and owned, and a step of another with a slot of -1"):
        bench.run([(0, 0, LENGTH)], tables={0: blocks})
        bench.run([(1, 0, 1)], tables={1: [0] * len(blocks)}, silent=[1])
        again = bench.run([(0, LENGTH - 1, LENGTH)], tables={0: blocks})[0]
        _close(again, bench.truth(0)[LENGTH - 1 :])
    return "the last slot of the pool is what its owner wrote"


def the_bytes_of_a_block_are_those_allocated(backend: Any) -> str:
    geometry, specs = geometry_of(backend), [PLAIN] * 3
    for dtype in (torch.float32, torch.float16):
        reason = backend.supports(PLAIN, dtype, CPU)
        if reason is not None:
            raise NotJudged(reason)
        tensors = _tensors_of(backend.allocate(specs, geometry, dtype, CPU))
        if not tensors:
            raise NotJudged("its cache holds no tensor in any attribute")
        found = sum(
            {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values()
        )
        each = backend.bytes_per_block(specs, geometry, dtype)
        least, most = geometry.num_blocks * each, (geometry.num_blocks + 1) * each  # and one of scratch
        words = (
            f"given {len(specs)} layers in {dtype}: {geometry.num_blocks} blocks of {each} B, and {found} B allocated"
        )
        assert least <= found <= most, words
    return "with one block of scratch at most"


LAWS: tuple[Callable[[Any], str], ...] = (
    it_has_the_methods_of_a_backend_and_its_cache_those_of_a_cache,
    what_it_cannot_serve_it_refuses_with_a_reason,
    attention_equals_the_formula_in_float64,
    chunks_never_change_attention,
    a_window_counts_the_query_itself_however_the_tokens_come,
    a_soft_cap_reaches_the_scores,
    the_scale_is_the_layers_own,
    requests_and_layers_are_kept_apart,
    memory_that_nobody_wrote_is_never_read,
    what_a_window_hides_cannot_reach_a_query,
    requests_that_share_blocks_read_the_same,
    copied_blocks_are_whole_in_every_layer_and_leave_the_rest,
    a_slot_of_minus_one_writes_nothing,
    the_bytes_of_a_block_are_those_allocated,
)


def _close(found: Tensor, truth: Tensor) -> float:
    """The largest difference; asserts that it is within the tolerance, a NaN never being."""
    assert found.shape == truth.shape, f"the result is {tuple(found.shape)}, not {tuple(truth.shape)}"
    gaps = (found.double() - truth).abs() / truth.abs().clamp(min=1.0)
    largest = float(gaps.max())
    row = int(gaps.nan_to_num(torch.inf).amax(-1).argmax())
    assert largest <= TOLERANCE, f"off by {largest:.3g}, first and most at the query in row {row} of {len(gaps)}"
    return largest


def _public(kind: type) -> list[str]:
    names = {*vars(kind), *getattr(kind, "__annotations__", {})}
    return sorted(name for name in names if not name.startswith("_"))


def _tensors_of(cache: object) -> list[Tensor]:
    """Of its attributes, and of what is in lists, tuples and dictionaries there."""
    found: list[Tensor] = []
    todo: list[object] = [vars(cache)] if hasattr(cache, "__dict__") else []
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list | tuple):
            todo.extend(value)
    return found
