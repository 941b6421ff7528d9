"""Who owns which block. Plain Python; knows neither what a block holds nor where it lies."""

from itertools import islice


class BlockAllocator:
    """A free list over blocks `0 .. num_blocks - 1`; what is freed first is reused first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = dict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None if fewer are free: all or nothing."""
        if count > len(self._free):
            return None
        blocks = list(islice(self._free, count))
        for block in blocks:
            del self._free[block]
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back; giving back a free one is a defect of the caller."""
        for block in blocks:
            assert 0 <= block < self.num_blocks, f"block {block} is not one of {self.num_blocks}"
            assert block not in self._free, f"block {block} is freed twice"
            self._free[block] = None
