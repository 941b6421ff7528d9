"""Laws of a block allocator, weft's `BlockAllocator` being one: who owns which block, whatever is done to it."""

import inspect
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from weft.testing.conformance.suite import (
    ConformanceReport,
    concluded,
    given,
    must,
    require,
    require_hypothesis,
    said,
    try_law,
)
from weft.testing.finding import Finding, NotJudged, Outcome

if TYPE_CHECKING:
    from hypothesis import settings as Settings  # noqa: N812 (a class, in spite of its name)

# Medians of fifty evictions late and early, in turns. A list that is searched from its start costs twenty times as much
# at its end, and an ordered one the same; no run of that has been above 2.
MOST_SLOWDOWN = 5.0


def run_allocator_conformance(
    allocator: Callable[..., Any], *, settings: "Settings | None" = None
) -> ConformanceReport:
    """Judge an allocator, a class with the methods of `weft.inference.block_allocator.BlockAllocator`.

    allocator: called with the number of blocks and `on_evict`. It may take no `on_evict` and have no `check`: what
    would be said of these is not judged then.
    settings: Hypothesis's; None is what the profile says, without a deadline.
    Returns: every law with its outcome. Raises: ConformanceError, an AssertionError that names each broken law and the
    calls that broke it; ConfigError without Hypothesis.
    """
    require(allocator, callable(allocator), "a class of allocators, or a function that makes one")
    require_hypothesis("an allocator")
    laws = (what_is_free_cannot_be_shared, an_eviction_costs_the_same_however_many_went_before)
    findings = [*_by_machine(allocator, settings), *(try_law(law, allocator) for law in laws)]
    return concluded("allocator", getattr(allocator, "__name__", repr(allocator)), findings)


def what_is_free_cannot_be_shared(allocator: Callable[..., Any]) -> str:
    must(AssertionError, lambda: allocator(2).share([0]), "block 0 of 2 new ones is free and shared")
    return "a new block is refused"


def an_eviction_costs_the_same_however_many_went_before(allocator: Callable[..., Any]) -> str:
    num_blocks, num_timed = 60_000, 50
    fresh, worn = allocator(num_blocks), allocator(num_blocks)
    with given(f"{num_blocks} cached blocks, evicted by hundreds"):
        for pool in (fresh, worn):
            pool.release(pool.allocate(num_blocks) or [], keep=lambda block: True)
            if pool.num_cached != num_blocks:
                raise NotJudged(f"{pool.num_cached} of {num_blocks} blocks are kept for the prefix")
        for _ in range(num_blocks // 100 - num_timed):
            worn.allocate(100)
        # In turns: a machine that is slower for a while is so for both.
        seconds = [(_seconds(fresh), _seconds(worn)) for _ in range(num_timed)]
        first, last = map(median, zip(*seconds, strict=True))
        words = f"{first * 1e6:.0f} us at first and {last * 1e6:.0f} us at last"
        assert last < MOST_SLOWDOWN * first, words
    return words


def _seconds(pool: Any) -> float:
    start = perf_counter()
    pool.allocate(100)
    return perf_counter() - start


def _by_machine(allocator: Callable[..., Any], given_settings: "Settings | None") -> list[Finding]:
    """The laws that a state machine judges. It ends at the first one that is broken, and says nothing of the rest."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from weft.testing.conformance import allocator_machine as machine

    tells = "on_evict" in inspect.signature(allocator).parameters
    checks = hasattr(allocator, "check")

    class Machine(machine.AllocatorAgainstSets):
        allocator_class = staticmethod(allocator)
        tells_evictions = tells
        checks_itself = checks

    profile = settings(
        given_settings,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=set((given_settings or settings()).phases)
        - {Phase.explain},  # which explains the lines of the machine, for most of the time
    )
    broken: Finding | None = None
    try:
        run_state_machine_as_test(Machine, settings=profile)
    except machine.BrokenLawError as error:
        broken = Finding(law=error.law, outcome=Outcome.BROKEN, words=said(error))
    except Exception as error:  # as it is made
        broken = Finding(law=machine.STATES, outcome=Outcome.BROKEN, words=said(error))
    if broken is not None:
        rest = (law for law in machine.LAWS if law != broken.law)
        words = "the calls end where another law is broken"
        return [broken, *(Finding(law=law, outcome=Outcome.NOT_JUDGED, words=words) for law in rest)]
    words = f"{profile.max_examples} runs of at most {profile.stateful_step_count} calls, pools of 1 to 12 blocks"
    holds = {law: Finding(law=law, outcome=Outcome.HOLDS, words=words) for law in machine.LAWS}
    if not tells:
        words += "; it tells nobody of evictions, so what it gives is all that was judged"
        holds[machine.EVICTION] = Finding(law=machine.EVICTION, outcome=Outcome.HOLDS, words=words)
    if not checks:
        holds[machine.CHECK] = Finding(law=machine.CHECK, outcome=Outcome.NOT_JUDGED, words="it has no method `check`")
    return list(holds.values())
