"""The allocator against a model of sets: every block has one owner or is free, whatever the order of calls."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.inference.block_allocator import BlockAllocator


class AllocatorAgainstSets(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.all = set(range(num_blocks))
        self.owned: list[list[int]] = []

    @property
    def used(self) -> set[int]:
        return {block for blocks in self.owned for block in blocks}

    @rule(count=st.integers(0, 13))
    def allocate_all_or_nothing(self, count: int) -> None:
        free = self.all - self.used
        blocks = self.allocator.allocate(count)
        if count > len(free):
            assert blocks is None
        else:
            assert blocks is not None
            assert len(blocks) == len(set(blocks)) == count
            assert set(blocks) <= free
            self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.allocator.free(data.draw(st.permutations(blocks)))

    @precondition(lambda self: self.all - self.used)
    @rule(data=st.data())
    def freeing_a_free_block_asserts(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.all - self.used)))
        with pytest.raises(AssertionError, match="twice"):
            self.allocator.free([block])

    @invariant()
    def free_and_used_blocks_are_all_blocks(self) -> None:
        assert self.allocator.num_free + len(self.used) == self.allocator.num_blocks == len(self.all)

    def teardown(self) -> None:
        for blocks in self.owned:
            self.allocator.free(blocks)
        assert set(self.allocator.allocate(len(self.all)) or ()) == self.all


TestAllocatorAgainstSets = AllocatorAgainstSets.TestCase


@pytest.mark.parametrize("blocks", [[-1], [3], [1, 1]], ids=["below", "beyond", "one twice in a call"])
def test_freeing_what_is_no_used_block_asserts(blocks: list[int]) -> None:
    allocator = BlockAllocator(3)
    assert allocator.allocate(3) is not None
    with pytest.raises(AssertionError):
        allocator.free(blocks)


def test_what_is_freed_first_is_reused_first() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    allocator.free([2, 0])
    allocator.free([3])
    assert allocator.allocate(3) == [2, 0, 3]
