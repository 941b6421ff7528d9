"""The allocator before the laws of `weft.testing.conformance`: those of sets, by its own name, and the others."""

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
