"""Who owns which block, in plain Python; knows neither what a block holds nor where it lies.

A block is free (nobody's, its content worthless), cached (nobody's, its content worth keeping for a prefix hit) or
owned (by as many as it has references). The three always add up to the pool.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockAllocator:
    """Blocks `0 .. num_blocks - 1`. Nothing here costs more than the blocks it is asked about.

    on_evict: told of a cached block that is about to be given to somebody else.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None] = lambda block: None) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references: dict[int, int] = {}
        # Least recently released first. A plain dict finds its first entry by stepping over all that left before it.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._returned: list[int] = []  # free blocks that were owned before
        self._num_fresh = 0  # blocks below this number have been handed out at least once

    @property
    def num_free(self) -> int:
        return len(self._returned) + self.num_blocks - self._num_fresh

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return len(self._references)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._returned) + self.num_blocks - self._num_fresh + len(self._cached)

    def references(self, block: int) -> int:
        """How many own this block."""
        return self._references.get(block, 0)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner each, or None if fewer are there: all or nothing.

        Free blocks go first; then the cached one that was released longest ago loses its content.
        """
        if count > self.num_available:
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each; a cached block is owned again."""
        for block in blocks:
            assert block in self._references or block in self._cached, f"block {block} is free: nothing to share"
            self._cached.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def release(self, blocks: Iterable[int], *, keep: Callable[[int], bool] = lambda block: False) -> None:
        """One owner fewer for each; the last one to go leaves it cached if `keep` says so, free if not.

        The last block of a chain goes first, so that a prefix outlives what follows it.
        """
        for block in reversed(list(blocks)):
            left = self._references.pop(block, 0) - 1
            assert left >= 0, f"block {block} is released by more than own it"
            if left:
                self._references[block] = left
            elif keep(block):
                self._cached[block] = None
            else:
                self._returned.append(block)

    def check(self) -> None:
        """Raise AssertionError, with the whole equation, unless every block is in exactly one of the three states."""
        free, cached, owned = self.num_free, self.num_cached, self.num_owned
        equation = f"free {free} + cached {cached} + owned {owned} != blocks {self.num_blocks}"
        assert free + cached + owned == self.num_blocks, equation
        known = [*self._returned, *self._cached, *self._references]
        assert len(set(known)) == len(known), f"a block is in two states: {sorted(known)}"

    def _take(self) -> int:
        if self._returned:
            return self._returned.pop()
        if self._num_fresh < self.num_blocks:
            self._num_fresh += 1
            return self._num_fresh - 1
        block, _ = self._cached.popitem(last=False)
        self._on_evict(block)
        return block
