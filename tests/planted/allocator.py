"""Faults of the block allocator."""

from functools import partial

from weft.testing.planted.fault import Fault

_SETS = "tests/unit/inference/test_block_allocator.py::TestAllocatorAgainstSets"
_LAW = "tests/unit/inference/test_reported_faults.py::test_the_law_holds"
_fault = partial(Fault, file="weft/inference/block_allocator.py", tier="tests/unit", killers=(_SETS,))

FAULTS = (
    _fault(
        name="a shared block is free when the first of its owners ends",
        old="            if left:\n",
        new="            if False:\n",
        why="vllm#3347: whoever still reads it reads another's keys.",
        killers=(_SETS, f"{_LAW}[what_is_not_computed_yet_is_not_shared]"),
    ),
    _fault(
        name="the block released last is evicted first",
        old="self._cached.popitem(last=False)",
        new="self._cached.popitem()",
        why="What is used most is lost first.",
    ),
    _fault(
        name="a chain loses its beginning first",
        old="for block in reversed(list(blocks)):",
        new="for block in list(blocks):",
        why="A prefix is evicted before what follows it, which nobody can find any more.",
    ),
    _fault(
        name="an evicted block stays in the map",
        old="        self._on_evict(block)\n",
        new="",
        why="nano-vllm#163: a later prompt finds a block that holds another's keys.",
        killers=(_SETS, f"{_LAW}[what_is_evicted_is_never_hit]"),
    ),
    _fault(
        name="a block that is shared again stays cached",
        old="            self._cached.pop(block, None)\n",
        new="",
        why="It is given away while it is read.",
    ),
    _fault(
        name="a second owner is not counted",
        old="self._references[block] = self._references.get(block, 0) + 1",
        new="self._references[block] = 1",
        why="The first of two to end frees the block.",
    ),
    _fault(
        name="the last block is never given",
        old="if count > self.num_available:",
        new="if count >= self.num_available:",
        why="A request that just fits waits for ever.",
    ),
    _fault(
        name="cached blocks are not available",
        old="return len(self._returned) + self.num_blocks - self._num_fresh + len(self._cached)",
        new="return len(self._returned) + self.num_blocks - self._num_fresh",
        why="A pool full of old prefixes serves nobody.",
    ),
    _fault(
        name="what is worth keeping is thrown away",
        old="elif keep(block):",
        new="elif not keep(block):",
        why="Prefixes are forgotten, and worthless blocks are kept.",
    ),
)
