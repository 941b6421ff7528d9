"""A block allocator beside a model of sets, under whatever Hypothesis does to it. Imports Hypothesis: import it late.

class MineAgainstSets(AllocatorAgainstSets):
    allocator_class = Mine

TestMine = MineAgainstSets.TestCase
"""

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.testing.conformance.suite import said

ALL_OR_NOTHING = "an allocation is all or nothing"
OTHERS = "what is allocated belongs to nobody else"
EVICTION = "free blocks go first, then the cached ones in the order of their release"
RELEASE = "a block is released by its owners alone"
SHARE = "what is free cannot be shared"
REFERENCES = "references are owners"
STATES = "every block is free, cached or owned"
CHECK = "a sound pool passes its own check"
LAWS = (ALL_OR_NOTHING, OTHERS, EVICTION, RELEASE, SHARE, REFERENCES, STATES, CHECK)


class BrokenLawError(AssertionError):
    """One law of `LAWS` is broken."""

    def __init__(self, law: str, words: str) -> None:
        self.law = law
        super().__init__(words)


class AllocatorAgainstSets(RuleBasedStateMachine):
    """Owners as a multiset, the cached in order of release; everything else is free.

    tells_evictions, checks_itself: what an allocator may lack; the laws about it are left out then.
    """

    allocator_class: ClassVar[Callable[..., Any]]
    tells_evictions: ClassVar[bool] = True
    checks_itself: ClassVar[bool] = True

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        told = {"on_evict": self.evicted.append} if self.tells_evictions else {}
        self.num_blocks = num_blocks
        self.allocator = type(self).allocator_class(num_blocks, **told)
        self.owners: list[list[int]] = []
        self.cached: list[int] = []

    def owned(self) -> set[int]:
        return {block for blocks in self.owners for block in blocks}

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        free = self.num_blocks - len(self.owned()) - len(self.cached)
        self.evicted.clear()
        blocks = _attempt(ALL_OR_NOTHING, lambda: self.allocator.allocate(count))
        there = f"{count} blocks of {free} free and {len(self.cached)} cached ones"
        if count > free + len(self.cached):
            _hold(ALL_OR_NOTHING, blocks is None, f"{there}: {blocks} instead of None")
            _hold(ALL_OR_NOTHING, not self.evicted, f"{there}: nothing is given, and {self.evicted} are evicted")
            return
        _hold(ALL_OR_NOTHING, blocks is not None, f"{there}: None, though they are there")
        _hold(ALL_OR_NOTHING, len(blocks) == count, f"{there}: {blocks}")
        _hold(OTHERS, len(set(blocks)) == count, f"{there}: {blocks}, one of them twice")
        inside = set(range(self.num_blocks))
        _hold(OTHERS, set(blocks) <= inside, f"{there}: {blocks}, not all among the {self.num_blocks} of the pool")
        taken = sorted(set(blocks) & self.owned())
        _hold(OTHERS, not taken, f"{there}: {blocks}, and {taken} have an owner")
        expected = self.cached[: max(0, count - free)]
        if self.tells_evictions:
            _hold(EVICTION, self.evicted == expected, f"{there}: evicts {self.evicted}, not {expected}")
        lost = [block for block in self.cached if block in blocks]
        _hold(EVICTION, lost == expected, f"{there}: gives the cached {lost}, not {expected}")
        del self.cached[: len(expected)]
        self.owners.append(blocks)

    @rule(beyond=st.integers(-2, 1))
    def allocate_about_all_there_is(self, beyond: int) -> None:
        """What a pool at its end does, which a count drawn by chance rarely shows."""
        self.allocate(max(0, self.num_blocks - len(self.owned()) + beyond))

    @precondition(lambda self: self.owned() or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.owned() | set(self.cached))), min_size=1, unique=True))
        _attempt(SHARE, lambda: self.allocator.share(blocks))
        self.cached = [block for block in self.cached if block not in blocks]
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        _attempt(RELEASE, lambda: self.allocator.release(blocks, keep=lambda block: keep))
        if keep:
            self.cached += [block for block in reversed(blocks) if block not in self.owned()]

    @rule(data=st.data())
    def releasing_what_nobody_owns_asserts(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(range(self.num_blocks)) - self.owned()) or [-1]))
        _refuse(RELEASE, lambda: self.allocator.release([block]), f"block {block} is nobody's and is released")

    @invariant()
    def references_are_owners_and_states_add_up(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for block in range(self.num_blocks):
            count = sum(block in blocks for blocks in self.owners)
            found = _attempt(REFERENCES, lambda block=block: self.allocator.references(block))  # type: ignore[misc]
            _hold(REFERENCES, found == count, f"block {block} has {count} owners, and {found} references")
        counts = {"owned": len(self.owned()), "cached": len(self.cached)}
        counts["free"] = self.num_blocks - sum(counts.values())
        counts["available"] = counts["free"] + counts["cached"]
        for name, count in counts.items():
            found = _attempt(STATES, lambda name=name: getattr(self.allocator, f"num_{name}"))  # type: ignore[misc]
            _hold(STATES, found == count, f"num_{name} is {found}, and {count} of {self.num_blocks} blocks are")
        if self.checks_itself:
            _attempt(CHECK, self.allocator.check)


def _hold(law: str, holds: bool, words: str) -> None:
    if not holds:
        raise BrokenLawError(law, words)


def _attempt(law: str, attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except Exception as error:
        raise BrokenLawError(law, said(error)) from error


def _refuse(law: str, attempt: Callable[[], object], words: str) -> None:
    try:
        attempt()
    except AssertionError:
        return
    raise BrokenLawError(law, f"{words}, and no AssertionError says so")
