"""Faults that other engines shipped, put into ours: each has a law that holds here and fails with the fault.

A law runs requests over the toy model. The fault is a replacement in the source of the scheduler, the allocator or the
prefix cache; one whose text is no longer there is an error.
"""

from collections.abc import Callable
from itertools import product
from types import ModuleType

import pytest

from tests.unit.inference.toy_bench import Bench, Fault, fault, planted

X, Y = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]


def every_block_goes_back_once(module: ModuleType) -> None:
    """A finish by length, an abort of a running and of a preempted request, and sharing, in one pool."""
    bench = Bench(module, num_blocks=6, block_size=2)
    for name in ("a", "b", "c"):
        bench.add(name, [1, 2, 3], 6)
    for _ in range(5):
        bench.step()
    for name in ("b", "c"):
        bench.scheduler.finish(name, "abort")
        bench.expected[name] = bench.said[name]
    bench.run()


def what_is_evicted_is_never_hit(module: ModuleType) -> None:
    bench = Bench(module, num_blocks=3, block_size=4, max_num_seqs=1)
    for name, prompt in (("x", X), ("y", Y), ("x again", X)):
        bench.add(name, prompt, 2)
        bench.run()


def blocks_appear_when_their_first_token_is_written(module: ModuleType) -> None:
    for length in range(1, 13):
        bench = Bench(module, num_blocks=8, block_size=4)
        bench.add("a", range(length), 9)
        while bench.scheduler.has_requests:
            request = bench.requests["a"]
            bench.step()
            held = len(request.blocks)
            assert held in (0, -(-request.num_computed_tokens // 4)), "a block too many or too few"
        bench.run()


def chunks_change_nothing(module: ModuleType) -> None:
    for size in (4, 16):
        for prompt in (k * size + off for k in (1, 2, 3) for off in (-1, 0, 1)):
            for chunk in (size - 1, size, size + 1, 2 * size):
                bench = Bench(module, num_blocks=8, block_size=size, chunk=chunk)
                bench.add("a", range(prompt), 3)
                bench.run()
                assert bench.computed["a"] == prompt + 2, "each token once"


def a_prompt_cached_to_its_end_still_computes_a_token(module: ModuleType) -> None:
    for length in range(1, 13):
        bench = Bench(module, num_blocks=12, block_size=4)
        for name in ("first", "second"):
            bench.add(name, range(length), 3)
            bench.run()
        assert bench.requests["second"].num_cached_tokens <= length - 1
        assert bench.requests["second"].num_cached_tokens == min(length // 4 * 4, length - 1)


class SameHash(int):
    def __hash__(self) -> int:
        return 7


def equal_hashes_are_no_hit(module: ModuleType) -> None:
    bench = Bench(module, num_blocks=12, block_size=4)
    bench.add("x", [SameHash(token) for token in X], 1)
    bench.run()
    bench.add("y", [SameHash(token) for token in Y], 1)
    bench.run()
    assert bench.requests["y"].num_cached_tokens == 0


def a_request_that_comes_back_finds_its_own_blocks(module: ModuleType) -> None:
    bench = Bench(module, num_blocks=7, block_size=4)
    bench.add("a", X, 8)
    bench.add("b", Y, 8)
    bench.run()
    assert bench.preempted, "the pool holds both"


def what_is_not_computed_yet_is_not_shared(module: ModuleType) -> None:
    for chunk, staggered in product((None, 3, 4), (False, True)):
        bench = Bench(module, num_blocks=30, block_size=4, chunk=chunk)
        for name in ("a", "b", "c"):
            bench.add(name, X, 3)
            if staggered:
                bench.step()
        bench.run()


def only_full_blocks_are_shared(module: ModuleType) -> None:
    bench = Bench(module, num_blocks=12, block_size=2)
    bench.add("a", [1, 2, 3], 3)
    bench.run()
    continued = [1, 2, 3, *bench.said["a"][:2]]  # five tokens: two full blocks and a half
    for name in ("b", "c"):
        bench.add(name, continued, 4)
    bench.step()
    b, c = bench.requests["b"].blocks, bench.requests["c"].blocks
    assert b[:2] == c[:2]
    assert b[2] != c[2]
    bench.run()


def tiny_pools_never_stop(module: ModuleType) -> None:
    for num_blocks in (1, 2, 3, 4):
        bench = Bench(module, num_blocks=num_blocks, block_size=2)
        for name in ("a", "b", "c"):
            bench.add(name, [1], 2 * num_blocks)
        bench.run()


def who_comes_back_computes_prompt_and_output_again(module: ModuleType) -> None:
    bench = Bench(module, num_blocks=8, block_size=4, prefix_caching=False)
    bench.add("stays", [9], 12)
    bench.add("a", X, 6)
    for _ in range(4):
        bench.step()
    before = bench.computed["a"]
    assert bench.scheduler._preempt() is bench.requests["a"]
    known = bench.requests["a"].num_tokens
    bench.step()
    assert bench.computed["a"] - before == known == len(X) + 4
    bench.run()


def the_pool_says_nothing_about_the_output(module: ModuleType) -> None:
    for num_blocks in range(4, 14):
        bench = Bench(module, num_blocks=num_blocks, block_size=3)
        for name in ("a", "b", "c", "d"):
            bench.add(name, [ord(name), 1, 2], 8)
        bench.run()


def who_gives_way_leaves_the_step(module: ModuleType) -> None:
    """Prompts before streams: a prompt just admitted gives way to a stream in the same step."""
    for num_blocks in range(4, 14):
        bench = Bench(module, num_blocks=num_blocks, block_size=3, policy="prefill_first")
        for name in ("a", "b", "c", "d", "e", "f"):
            bench.add(name, [ord(name), 1, 2], 8)
            bench.step()
        bench.run()


FAULTS = [
    fault(
        "a block is released twice",
        every_block_goes_back_once,
        ("scheduler", "self._release(request.blocks)", "self._release([*request.blocks, request.blocks[0]])"),
    ),
    fault(
        "an ended request keeps a block",
        every_block_goes_back_once,
        ("scheduler", "self._release(request.blocks)", "self._release(request.blocks[1:])"),
    ),
    fault(
        "an abort forgets the row",
        every_block_goes_back_once,
        ("scheduler", "        self._free_rows.append(_row(request))\n", ""),
    ),
    fault(
        "an evicted block stays in the map",
        what_is_evicted_is_never_hit,
        ("block_allocator", "        self._on_evict(block)\n", ""),
    ),
    fault(
        "a new block comes one token late",
        blocks_appear_when_their_first_token_is_written,
        ("scheduler", "end > len(request.blocks) * size", "end - 1 > len(request.blocks) * size"),
    ),
    fault(
        "a new block comes one token early",
        blocks_appear_when_their_first_token_is_written,
        ("scheduler", "end > len(request.blocks) * size", "end >= len(request.blocks) * size"),
        ("scheduler", "allocate(self._geometry.blocks_for(end) - held)", "allocate(1)"),
    ),
    fault(
        "the last chunk is taken for one that stops short",
        chunks_change_nothing,
        ("scheduler", "count > min(chunk, left):", "count >= min(chunk, left):"),
    ),
    fault(
        "a prompt that is cached to its end leaves nothing to compute",
        a_prompt_cached_to_its_end_still_computes_a_token,
        ("scheduler", "min(len(hits) * size, request.num_tokens - 1)", "len(hits) * size"),
    ),
    fault(
        "a token is computed into a block that others read",
        a_prompt_cached_to_its_end_still_computes_a_token,
        ("scheduler", "is_copied = len(hits) * size == request.num_tokens", "is_copied = False"),
    ),
    fault(
        "blocks are found by their hash alone",
        equal_hashes_are_no_hit,
        ("prefix_cache", "key = (parent, tuple(tokens))", "key = hash((parent, tuple(tokens)))"),
        (
            "prefix_cache",
            "get((parent, tuple(token_ids[start : start + size])))",
            "get(hash((parent, tuple(token_ids[start : start + size]))))",
        ),
    ),
    fault(
        "what to compute is counted before the hits are",
        a_request_that_comes_back_finds_its_own_blocks,
        (
            "scheduler",
            "count = end - request.num_computed_tokens\n",
            "count = end - request.num_computed_tokens * (request not in draft.admissions)\n",
        ),
    ),
    fault(
        "a block can be found before it is computed",
        what_is_not_computed_yet_is_not_shared,
        (
            "scheduler",
            "        self._policy.admitted(request)\n",
            "        self._publish(request, min(request.num_tokens, len(request.blocks) * size))\n"
            "        self._policy.admitted(request)\n",
        ),
    ),
    fault(
        "a half-filled block is shared",
        only_full_blocks_are_shared,
        ("scheduler", "request.num_published_blocks, end // size):", "request.num_published_blocks, -(-end // size)):"),
        ("scheduler", "and end // size > request.num_pub", "and -(-end // size) > request.num_pub"),
        ("prefix_cache", '        assert len(tokens) == self._block_size, "only full blocks are shared"\n', ""),
    ),
    fault(
        "the last one that runs preempts itself",
        tiny_pools_never_stop,
        ("scheduler", "blocks_for(end) - held)", "blocks_for(end + 2) - held)"),
    ),
    fault(
        "who comes back brings its prompt only",
        who_comes_back_computes_prompt_and_output_again,
        ("scheduler", "tuple(request.token_ids),", "tuple(request.token_ids[: request.num_prompt_tokens]),"),
    ),
    fault(
        "a token is appended twice",
        the_pool_says_nothing_about_the_output,
        ("scheduler", "known.append(token)", "known += [token, token]"),
    ),
    fault(
        "a preempted request keeps its blocks in the plan",
        who_gives_way_leaves_the_step,
        ("draft", "for part in (self.admissions, self.new_blocks, self.copies):", "for part in ():"),
    ),
    fault(
        "a shared block is free when the first of its owners ends",
        what_is_not_computed_yet_is_not_shared,
        ("block_allocator", "            if left:\n", "            if False:\n"),
    ),
    fault(
        "a hit is not owned before room is sought",
        the_pool_says_nothing_about_the_output,
        ("scheduler", "        self._allocator.share(hits)  # first, so that what follows cannot evict them\n", ""),
    ),
]
LAWS = sorted({fault.law.__name__: fault.law for fault in FAULTS}.items())


@pytest.mark.parametrize(("name", "law"), LAWS, ids=[name for name, _ in LAWS])
def test_the_law_holds(name: str, law: Callable[[ModuleType], None]) -> None:
    with planted(()) as module:
        law(module)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.report)
def test_the_law_fails_with_the_fault(fault: Fault) -> None:
    with planted(fault.edits) as module, pytest.raises((AssertionError, KeyError)):
        fault.law(module)
