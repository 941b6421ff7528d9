"""Which full blocks of tokens have their keys and values somewhere in the pool. Plain Python; owns no block.

A block is found by what precedes it and by its tokens: `(parent, tokens)`, where the parent is the entry of the block
before, or the salt at the start. The key holds the tokens themselves, so a hit compares them and no two prompts can be
taken for each other, whatever their hashes.
"""

from collections.abc import Sequence
from itertools import count

# An entry is named by a number that is never used again, so that a chain broken by eviction stays broken.
Parent = int | str | None


class PrefixCache:
    """Entries for blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[tuple[Parent, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[Parent, tuple[int, ...]]] = {}
        self._entries: dict[int, int] = {}
        self._numbers = count()

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def lookup(self, token_ids: Sequence[int], salt: str | None = None) -> list[int]:
        """Blocks that hold the longest cached prefix of whole blocks, in order.

        Block size 2, cached [1 2] [3 4]: tokens 1 2 3 4 5 find both, 1 2 9 4 the first, 1 none.
        """
        blocks: list[int] = []
        parent: Parent = salt
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size):
            block = self._blocks.get((parent, tuple(token_ids[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            parent = self._entries[block]
        return blocks

    def publish(self, block: int, parent: Parent, tokens: Sequence[int]) -> int:
        """Enter a full block whose keys and values are computed; the entry, to be the parent of the next.

        If another block holds the same already, that one stays and this one remains private.
        """
        assert len(tokens) == self._block_size, "only full blocks are shared"
        assert block not in self._keys, f"block {block} is published twice"
        key = (parent, tuple(tokens))
        holder = self._blocks.setdefault(key, block)
        if holder != block:
            return self._entries[holder]
        self._keys[block] = key
        entry = self._entries[block] = next(self._numbers)
        return entry

    def entry_of(self, block: int) -> int:
        """The entry of a published block."""
        return self._entries[block]

    def forget(self, block: int) -> None:
        """Drop a block that is given to somebody else. What followed it can no longer be reached."""
        del self._blocks[self._keys.pop(block)]
        del self._entries[block]
