"""Faults that other engines shipped, put into ours: each has a law that holds here and fails with the fault.

A law runs requests over the toy model. The fault is a replacement in the source of the scheduler, the allocator or the
prefix cache; one whose text is no longer there is an error.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.plan import StepPlan
from weft.inference.policies import build_policy
from weft.inference.request import Request
from weft.inference.sampling_params import SamplingParams
from weft.testing.toy import ToyExecutor, sequential


@dataclass
class Bench:
    """One scheduler (of the module given) over the toy model, and what each request has said."""

    module: ModuleType
    num_blocks: int
    block_size: int
    max_num_seqs: int = 4
    chunk: int | None = None
    prefix_caching: bool = True
    policy: str = "fcfs"
    expected: dict[str, list[int]] = field(default_factory=dict)
    said: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)  # tokens computed for each request, again after a preemption
    preempted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            policy=self.policy,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=64,
            max_chunk_tokens=self.chunk,
        )
        geometry = BlockGeometry(num_blocks=self.num_blocks, block_size=self.block_size, shareable=True)
        self.scheduler = self.module.Scheduler(
            config, build_policy(config), geometry, prefix_caching=self.prefix_caching
        )
        self.executor = ToyExecutor(self.block_size)

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        self.requests[request_id] = request = Request(
            request_id=request_id,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0),
            seed=0,
            stop_token_ids=frozenset(),
            max_len=len(prompt) + max_tokens,
        )
        self.expected[request_id] = sequential(prompt, max_tokens)
        self.said[request_id] = []
        self.scheduler.add(request)

    def step(self) -> StepPlan:
        plan: StepPlan = self.scheduler.schedule()
        assert sum(plan.num_new_tokens) > 0, "a step computes nothing"
        for request_id, count in zip(plan.request_ids, plan.num_new_tokens, strict=True):
            request = self.requests[request_id]
            assert request.num_computed_tokens + count <= request.num_tokens, "more is computed than there is"
            self.computed[request_id] = self.computed.get(request_id, 0) + count
        self.preempted += plan.preempted_ids
        for output in self.scheduler.update(plan, self.executor.execute(plan)):
            self.said[output.request_id] += output.new_token_ids
            request = self.requests[output.request_id]
            assert request.num_tokens == request.num_prompt_tokens + len(self.said[output.request_id])
        self.scheduler._allocator.check()
        return plan

    def run(self) -> "Bench":
        for _ in range(1000):
            if not self.scheduler.has_requests:
                break
            self.step()
        assert self.said == self.expected
        self.scheduler.check_idle()
        return self


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


@dataclass(frozen=True)
class Fault:
    """A report, the law that sees it, and the fault as replacements (module, what stands there, what is put there)."""

    report: str
    law: Callable[[ModuleType], None]
    edits: tuple[tuple[str, str, str], ...]


def fault(report: str, law: Callable[[ModuleType], None], *edits: tuple[str, str, str]) -> Fault:
    return Fault(report, law, edits)


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
        ("scheduler", "request.num_computed_tokens + count > len", "request.num_computed_tokens + count - 1 > len"),
    ),
    fault(
        "a new block comes one token early",
        blocks_appear_when_their_first_token_is_written,
        ("scheduler", "request.num_computed_tokens + count > len", "request.num_computed_tokens + count >= len"),
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
            "count = len(request.token_ids) - request.num_computed_tokens",
            "count = len(request.token_ids) - request.num_computed_tokens * (request not in draft.admissions)",
        ),
    ),
    fault(
        "a block can be found before it is computed",
        what_is_not_computed_yet_is_not_shared,
        (
            "scheduler",
            "        self._policy.admitted(request)\n",
            "        request.num_computed_tokens = min(request.num_tokens, len(request.blocks) * size)\n"
            "        self._publish(request)\n"
            "        request.num_computed_tokens = computed\n"
            "        self._policy.admitted(request)\n",
        ),
    ),
    fault(
        "a half-filled block is shared",
        only_full_blocks_are_shared,
        ("scheduler", "request.num_computed_tokens // size):", "-(-request.num_computed_tokens // size)):"),
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
        ("scheduler", "request.token_ids.append(token)", "request.token_ids += [token, token]"),
    ),
    fault(
        "a preempted request keeps its blocks in the plan",
        who_gives_way_leaves_the_step,
        ("scheduler", "for part in (self.admissions, self.new_blocks, self.copies):", "for part in ():"),
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


@contextmanager
def planted(edits: Sequence[tuple[str, str, str]]) -> Iterator[ModuleType]:
    """The scheduler's module with the edits made to it and to what it imports; nobody else sees them."""
    names = ("block_allocator", "prefix_cache", "scheduler")
    full = {name: f"weft.inference.{name}" for name in names}
    real = {name: import_module(full[name]) for name in names}
    try:
        for name in names:  # in this order each finds the ones before
            path = Path(str(real[name].__file__))
            source = path.read_text()
            for _, old, new in (edit for edit in edits if edit[0] == name):
                assert source.count(old) == 1, f"{path.name} holds {source.count(old)} times: {old!r}"
                source = source.replace(old, new)
            module = ModuleType(full[name])
            module.__file__ = str(path)
            sys.modules[full[name]] = module
            exec(compile(source, str(path), "exec"), module.__dict__)
        yield sys.modules[full["scheduler"]]
    finally:
        sys.modules |= {full[name]: module for name, module in real.items()}


@pytest.mark.parametrize(("name", "law"), LAWS, ids=[name for name, _ in LAWS])
def test_the_law_holds(name: str, law: Callable[[ModuleType], None]) -> None:
    with planted(()) as module:
        law(module)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.report)
def test_the_law_fails_with_the_fault(fault: Fault) -> None:
    with planted(fault.edits) as module, pytest.raises((AssertionError, KeyError)):
        fault.law(module)
