"""Faults of the prefix cache."""

from functools import partial

from weft.testing.planted.fault import Fault

_TESTS = "tests/unit/inference/test_prefix_cache.py"
_fault = partial(Fault, file="weft/inference/prefix_cache.py", tier="tests/unit")

FAULTS = (
    _fault(
        name="a block is found whatever precedes it",
        old="key = (parent, tuple(tokens))",
        new="key = (None, tuple(tokens))",
        why="The keys of a block depend on all before it.",
        killers=(f"{_TESTS}::test_the_same_tokens_after_another_prefix_are_another_block",),
    ),
    _fault(
        name="a prompt of whole blocks does not find its last",
        old="range(0, len(token_ids) - size + 1, size)",
        new="range(0, len(token_ids) - size, size)",
        why="One block of every hit is computed again.",
        killers=(f"{_TESTS}::test_a_hit_is_the_longest_prefix_of_whole_blocks",),
    ),
    _fault(
        name="a forgotten block can still be found",
        old="        del self._blocks[self._keys.pop(block)]\n",
        new="        self._keys.pop(block)\n",
        why="nano-vllm#163: the map keeps the entry of a block that is given to somebody else.",
        killers=(f"{_TESTS}::test_a_forgotten_block_is_never_hit_again_though_its_number_is_reused",),
    ),
    _fault(
        name="entries are named by their block",
        old="next(self._numbers)",
        new="block",
        why="A chain broken by eviction is joined again when the block's number comes back.",
        killers=(f"{_TESTS}::test_a_forgotten_block_is_never_hit_again_though_its_number_is_reused",),
    ),
    _fault(
        name="a salt is not looked at",
        old="parent: Parent = salt",
        new="parent: Parent = None",
        why="Requests of different salts must not see each other, and those of one must.",
        killers=(f"{_TESTS}::test_salts_share_nothing",),
    ),
    _fault(
        name="a search goes on behind a gap",
        old="            if block is None:\n                break\n",
        new="            if block is None:\n                continue\n",
        why="A later block of the same beginning is taken for the next one.",
        killers=(f"{_TESTS}::test_a_hit_is_the_longest_prefix_of_whole_blocks",),
    ),
    _fault(
        name="the second of two equal blocks takes the first one's place",
        old="holder = self._blocks.setdefault(key, block)",
        new="self._blocks[key] = holder = block",
        why="The first can never be forgotten without the second.",
        killers=(f"{_TESTS}::test_of_two_blocks_with_one_content_the_first_is_found_and_the_second_stays_private",),
    ),
)
