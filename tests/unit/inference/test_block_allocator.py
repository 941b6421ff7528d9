"""The allocator before the laws of `weft.testing.conformance`: those of sets, by its own name, and the others."""

from itertools import accumulate, count
from typing import Any

import pytest

from weft.inference.block_allocator import BlockAllocator
from weft.testing.conformance.allocator import (
    an_eviction_costs_the_same_however_many_went_before,
    what_is_free_cannot_be_shared,
)
from weft.testing.conformance.allocator_machine import AllocatorAgainstSets


class OfBlocks(AllocatorAgainstSets):
    allocator_class = BlockAllocator


TestAllocatorAgainstSets = OfBlocks.TestCase


def test_sharing_a_free_block_asserts() -> None:
    what_is_free_cannot_be_shared(BlockAllocator)


def test_an_eviction_costs_the_same_however_many_went_before() -> None:
    an_eviction_costs_the_same_however_many_went_before(BlockAllocator)


def test_a_machine_that_grows_slower_is_no_fault_of_an_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which whatever is done takes longer than what was done before it."""
    clock = accumulate(1.05**reading for reading in count())
    monkeypatch.setattr("weft.testing.conformance.allocator.perf_counter", lambda: next(clock))
    an_eviction_costs_the_same_however_many_went_before(BlockAllocator)


class FromTheStart(dict[int, None]):
    """Finds its first entry by stepping over all that left before it."""

    def popitem(self, last: bool = True) -> tuple[int, None]:
        block = next(iter(self))
        return block, self.pop(block)


def test_an_eviction_that_costs_more_the_later_it_comes_is_seen() -> None:
    def searching(num_blocks: int) -> Any:
        allocator: Any = BlockAllocator(num_blocks)
        allocator._cached = FromTheStart()
        return allocator

    with pytest.raises(AssertionError, match=r"us at first and .* us at last"):
        an_eviction_costs_the_same_however_many_went_before(searching)


def test_a_lost_and_a_doubled_block_are_told_with_all_three_states() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    allocator.check()
    allocator._returned.append(1)
    with pytest.raises(AssertionError, match=r"free 2 \+ cached 0 \+ owned 2 != blocks 3"):
        allocator.check()
    del allocator._references[0]
    with pytest.raises(AssertionError, match=r"a block is in two states: \[1, 1\]"):
        allocator.check()
