from statistics import median
from time import perf_counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.inference.block_allocator import BlockAllocator


class AllocatorAgainstSets(RuleBasedStateMachine):
    """Owners as a multiset, the cached in order of release; everything else is free."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        self.allocator = BlockAllocator(num_blocks, on_evict=self.evicted.append)
        self.owners: list[list[int]] = []
        self.cached: list[int] = []

    def owned(self) -> set[int]:
        return {block for blocks in self.owners for block in blocks}

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_blocks - len(self.owned()) - len(self.cached)
        self.evicted.clear()
        blocks = self.allocator.allocate(count)
        if count > free + len(self.cached):
            assert blocks is None
            assert not self.evicted
            return
        assert blocks is not None
        assert len(set(blocks)) == len(blocks) == count
        assert not set(blocks) & self.owned()
        expected = self.cached[: max(0, count - free)]
        assert self.evicted == expected, "free blocks go first, then the least recently released"
        del self.cached[: len(expected)]
        self.owners.append(blocks)

    @precondition(lambda self: self.owned() or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.owned() | set(self.cached))), min_size=1, unique=True))
        self.allocator.share(blocks)
        self.cached = [block for block in self.cached if block not in blocks]
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.allocator.release(blocks, keep=lambda block: keep)
        if keep:
            self.cached += [block for block in reversed(blocks) if block not in self.owned()]

    @rule(data=st.data())
    def releasing_what_nobody_owns_asserts(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(range(self.allocator.num_blocks)) - self.owned()) or [-1]))
        with pytest.raises(AssertionError):
            self.allocator.release([block])

    @invariant()
    def references_are_owners_and_states_add_up(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for block in range(self.allocator.num_blocks):
            assert self.allocator.references(block) == sum(block in blocks for blocks in self.owners)
        assert self.allocator.num_owned == len(self.owned())
        assert self.allocator.num_cached == len(self.cached)
        self.allocator.check()


TestAllocatorAgainstSets = AllocatorAgainstSets.TestCase


def test_sharing_a_free_block_asserts() -> None:
    with pytest.raises(AssertionError, match="free"):
        BlockAllocator(2).share([0])


def test_an_eviction_costs_the_same_however_many_went_before() -> None:
    allocator = BlockAllocator(60_000)
    allocator.release(allocator.allocate(60_000) or [], keep=lambda block: True)
    seconds = []
    for _ in range(600):
        start = perf_counter()
        allocator.allocate(100)
        seconds.append(perf_counter() - start)
    # A list that is searched from its start costs twenty times as much at its end.
    assert median(seconds[-50:]) < 5 * median(seconds[:50])
