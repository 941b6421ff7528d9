"""Somebody else's allocator before the laws: the sound one is acquitted, each faulty one is convicted by its law."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings

from weft.errors import ConfigError
from weft.inference.block_allocator import BlockAllocator
from weft.testing import run_allocator_conformance
from weft.testing.conformance.suite import ConformanceError
from weft.testing.finding import Outcome

# As another project runs them: a check of every call's annotations takes ten times as long as the laws.
pytestmark = pytest.mark.usefixtures("as_users_run_it")

FEW = settings(settings.get_profile("planted"), max_examples=20)  # the sound; weft's own has many under its own name
PLANTED = settings.get_profile("planted")


class Ledger:
    """A foreign allocator in a page: a list of owners a block, kept blocks in order of release."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self.counts = [0] * num_blocks
        self.kept: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_owned - self.num_cached

    @property
    def num_cached(self) -> int:
        return len(self.kept)

    @property
    def num_owned(self) -> int:
        return sum(count > 0 for count in self.counts)

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    def references(self, block: int) -> int:
        return self.counts[block]

    def allocate(self, count: int) -> list[int] | None:
        if count > self.num_available:
            return None
        free = [block for block in range(self.num_blocks) if not self.counts[block] and block not in self.kept]
        blocks = free[:count]
        for block in list(self.kept)[: count - len(blocks)]:
            self.evict(block)
            blocks.append(block)
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def evict(self, block: int) -> None:
        del self.kept[block]
        self.on_evict(block)

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self.counts[block] or block in self.kept, f"block {block} is free"
            self.kept.pop(block, None)
            self.counts[block] += 1

    def release(self, blocks: Iterable[int], *, keep: Callable[[int], bool] = lambda block: False) -> None:
        for block in reversed(list(blocks)):
            assert block >= 0, f"there is no block {block}"
            assert self.counts[block], f"block {block} is nobody's"
            self.counts[block] -= 1
            if not self.counts[block] and keep(block):
                self.kept[block] = None


class Small(Ledger):
    """Of as many blocks as the machine has; its evictions take longer the later they come, as it walks over all."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        super().__init__(min(num_blocks, 12), on_evict)


class ForgetsOwners(Small):
    """vllm#3347: whoever shares a block is not counted, so the first to go frees it for all."""

    def share(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().share([block for block in blocks if not self.counts[block]])


class FreesTwice(Small):
    """sglang#12224: two paths free the same block, and the second is taken as well."""

    def release(self, blocks: Iterable[int], *, keep: Callable[[int], bool] = lambda block: False) -> None:
        super().release([block for block in blocks if self.counts[block]], keep=keep)


class KeepsQuiet(Small):
    """nano-vllm#163: nobody is told that a cached block now belongs to somebody else."""

    def evict(self, block: int) -> None:
        del self.kept[block]


class GivesWhatItHas(Small):
    """Fewer blocks than were asked for."""

    def allocate(self, count: int) -> list[int] | None:
        return super().allocate(min(count, self.num_available))


class EvictsTheNewest(Small):
    def allocate(self, count: int) -> list[int] | None:
        self.kept = dict.fromkeys(reversed(self.kept))
        blocks = super().allocate(count)
        self.kept = dict.fromkeys(reversed(self.kept))
        return blocks


class SharesAnything(Small):
    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.kept.pop(block, None)
            self.counts[block] += 1


SHARED = "what is free cannot be shared"
FAULTS: dict[str, type[Ledger]] = {
    "references are owners": ForgetsOwners,
    "a block is released by its owners alone": FreesTwice,
    "free blocks go first, then the cached ones in the order of their release": KeepsQuiet,
    "an allocation is all or nothing": GivesWhatItHas,
    SHARED: SharesAnything,
}


def test_wefts_own_is_acquitted_by_every_law() -> None:
    assert not run_allocator_conformance(BlockAllocator, settings=FEW).not_judged


def test_a_foreign_one_is_acquitted_and_what_it_lacks_is_said() -> None:
    report = run_allocator_conformance(Small, settings=FEW)
    assert "it has no method `check`" in report.not_judged["a sound pool passes its own check"]
    assert "0 of 60000" in report.not_judged["an eviction costs the same however many went before"]
    assert "not judged: a sound pool passes its own check: it has no method" in str(report)


@pytest.mark.parametrize("law", FAULTS)
def test_a_faulty_one_is_convicted_by_its_law_and_the_calls_are_shown(law: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        run_allocator_conformance(FAULTS[law], settings=FEW if law == SHARED else PLANTED)
    broken = caught.value.report.laws(Outcome.BROKEN)
    assert law in broken
    assert f"broken: {law}: " in str(caught.value)
    if law != SHARED:
        assert "state.start(num_blocks=" in broken[law], "the calls that Hypothesis made"


def test_the_order_of_evictions_is_judged_without_being_told() -> None:
    def quiet(num_blocks: int) -> EvictsTheNewest:
        return EvictsTheNewest(num_blocks)

    with pytest.raises(ConformanceError, match="free blocks go first"):
        run_allocator_conformance(quiet, settings=PLANTED)


def test_an_allocator_that_cannot_be_made_breaks_a_law_too() -> None:
    def never(num_blocks: int) -> Any:
        raise RuntimeError(f"no {num_blocks} blocks today")

    with pytest.raises(ConformanceError, match="every block is free, cached or owned: fails by RuntimeError: no"):
        run_allocator_conformance(never)


def test_without_hypothesis_the_error_is_typed_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ConfigError, match=r"hypothesis is not installed\nhint: pip install hypothesis"):
        run_allocator_conformance(BlockAllocator)


def test_asking_for_the_suites_imports_neither_torch_nor_hypothesis() -> None:
    program = "import sys, weft.testing; weft.testing.run_allocator_conformance; weft.testing.run_policy_conformance;"
    program += "assert not {'torch', 'hypothesis', 'triton'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
