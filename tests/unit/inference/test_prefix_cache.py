import pytest

from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.policies import build_policy
from weft.inference.prefix_cache import PrefixCache
from weft.inference.request import Request
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler
from weft.testing.conformance.desk import TOKEN, Desk


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


def desk_of(num_blocks: int) -> Desk:
    return Desk("fcfs", num_blocks=num_blocks, block_size=2, max_num_seqs=1)


def found(desk: Desk, request_id: str, prompt: list[int], **options: str) -> int:
    """Tokens that a request finds in the cache; it runs to its end."""
    desk.add(request_id, prompt, **options)
    (admission,) = desk.step().admissions
    assert not desk.scheduler.has_requests
    return admission.num_computed_tokens


def test_who_finds_a_prefix_and_goes_on_enters_what_follows_behind_it() -> None:
    desk = desk_of(16)
    assert found(desk, "a", [1, 2, 3, 4]) == 0
    assert found(desk, "b", [1, 2, 3, 4, 5, 6]) == 4
    assert found(desk, "c", [1, 2, 3, 4, 5, 6, 7]) == 6
    assert found(desk, "d", [5, 6, 7]) == 0, "as the beginning of a prompt, nobody has computed it"


def test_requests_of_another_salt_find_nothing_of_each_other() -> None:
    desk = desk_of(16)
    assert found(desk, "a", [1, 2, 3], cache_salt="x") == 0
    assert found(desk, "b", [1, 2, 3]) == 0
    assert found(desk, "c", [1, 2, 3], cache_salt="y") == 0
    assert found(desk, "d", [1, 2, 3], cache_salt="x") == 2


@pytest.mark.parametrize(
    ("num_blocks", "num_new", "num_copies"),
    [(3, 1, 1), (2, 2, 0)],
    ids=["the last block is left for a copy", "no block is left"],
)
def test_a_prompt_found_to_its_end_copies_its_last_block_or_else_computes_it(
    num_blocks: int, num_new: int, num_copies: int
) -> None:
    desk = desk_of(num_blocks)
    found(desk, "a", [1, 2, 3, 4])
    desk.add("b", [1, 2, 3, 4])
    plan = desk.step()
    assert plan.num_new_tokens == (num_new,)
    assert len(plan.block_copies) == num_copies
    desk.scheduler.check_idle()


def test_every_output_says_what_the_prompt_found() -> None:
    desk = desk_of(16)
    found(desk, "a", [1, 2, 3])
    desk.add("b", [1, 2, 3], 3)
    told = []
    for _ in range(3):
        plan = desk.scheduler.schedule()
        told += desk.scheduler.update(plan, [[TOKEN]])
    assert told[-1].finished
    assert [output.num_cached_tokens for output in told] == [2, 2, 2]


def test_without_a_cache_of_prefixes_no_block_is_kept() -> None:
    config = SchedulerConfig(policy="fcfs")
    geometry = BlockGeometry(num_blocks=8, block_size=2, shareable=True)
    scheduler = Scheduler(config, build_policy(config), geometry)  # it has to be asked for
    scheduler.add(
        Request(
            request_id="a",
            token_ids=[1, 2, 3, 4],
            num_prompt_tokens=4,
            params=SamplingParams(),
            seed=0,
            stop_token_ids=frozenset(),
            max_len=5,
        )
    )
    scheduler.update(scheduler.schedule(), [[TOKEN]])
    assert (scheduler._allocator.num_free, scheduler._allocator.num_cached) == (8, 0)
