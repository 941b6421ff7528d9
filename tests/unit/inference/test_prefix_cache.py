import pytest

from weft.inference.prefix_cache import PrefixCache


class SameHash(int):
    """Integers that all hash alike: a cache that trusted a hash would take them for each other."""

    def __hash__(self) -> int:
        return 7


def filled(*chains: list[int], size: int = 2) -> PrefixCache:
    cache = PrefixCache(size)
    block = 0
    for chain in chains:
        parent = None
        for start in range(0, len(chain), size):
            parent = cache.publish(block, parent, chain[start : start + size])
            block += 1
    return cache


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        ([1, 2, 3, 4, 5], [0, 1]),
        ([1, 2, 3, 4], [0, 1]),
        ([1, 2, 9, 4], [0]),
        ([9, 9, 1, 2, 3, 4], []),
        ([1], []),
        ([3, 4], []),
        ([], []),
    ],
)
def test_a_hit_is_the_longest_prefix_of_whole_blocks(tokens: list[int], blocks: list[int]) -> None:
    assert filled([1, 2, 3, 4]).lookup(tokens) == blocks


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    cache = filled([1, 2, 5, 6], [3, 4, 5, 6])
    assert cache.lookup([3, 4, 5, 6]) == [2, 3]
    assert cache.lookup([1, 2, 5, 6]) == [0, 1]


def test_a_forgotten_block_is_never_hit_again_though_its_number_is_reused() -> None:
    cache = filled([1, 2, 3, 4])
    cache.forget(0)
    cache.publish(0, None, [8, 9])
    assert cache.lookup([1, 2, 3, 4]) == []
    assert cache.lookup([8, 9, 3, 4]) == [0], "what followed the old block does not follow the new one"


def test_equal_hashes_never_make_a_hit() -> None:
    cache = PrefixCache(2)
    cache.publish(0, None, [SameHash(1), SameHash(2)])
    assert cache.lookup([SameHash(3), SameHash(4)]) == []
    assert cache.lookup([SameHash(1), SameHash(2)]) == [0]


def test_salts_share_nothing() -> None:
    cache = PrefixCache(2)
    cache.publish(0, "a", [1, 2])
    assert (cache.lookup([1, 2], "a"), cache.lookup([1, 2], "b"), cache.lookup([1, 2])) == ([0], [], [])


def test_of_two_blocks_with_one_content_the_first_is_found_and_the_second_stays_private() -> None:
    cache = filled([1, 2])
    entry = cache.publish(5, None, [1, 2])
    assert entry == cache.entry_of(0)
    assert 5 not in cache
    assert cache.lookup([1, 2]) == [0]


def test_a_block_that_is_not_full_is_never_published() -> None:
    with pytest.raises(AssertionError, match="full"):
        PrefixCache(2).publish(0, None, [1])
