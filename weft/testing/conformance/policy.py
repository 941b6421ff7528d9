"""Laws of a scheduling policy: whom it may name, that everybody ends, that nobody waits for ever, what a look costs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.inference.policies.interface import Policy
from weft.inference.request import Request
from weft.testing.conformance import policy_worlds as worlds
from weft.testing.conformance.desk import Desk
from weft.testing.conformance.suite import ConformanceReport, require, try_laws

# Of requests that could not be less urgent, the least urgent of weft's policies lets one wait for 60 s and those who
# came in these, two a second, before it.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class _Judged:
    kind: type[Policy]
    patience_s: float

    @cached_property
    def wrong(self) -> dict[str, str]:
        """What went wrong first in which world, by law."""
        found: dict[str, str] = {}
        for seed in range(worlds.NUM_WORLDS):
            world = worlds.world_of(seed)
            shown = str(world)  # before a policy can change what is in it
            for law, words in worlds.judge_world(self.kind, world).items():
                found.setdefault(law, f"given {shown}: {words}")
        return found


def run_policy_conformance(policy: type[Policy], *, patience_s: float = PATIENCE_S) -> ConformanceReport:
    """Judge a policy, a class with the methods of `weft.inference.policies.interface.Policy`.

    patience_s: how long a request may wait while others that are shorter, more urgent or half cached keep coming.
    Returns: every law with its outcome. Raises: ConformanceError, an AssertionError that names each broken law and the
    requests that it was broken with.
    """
    require(policy, isinstance(policy, type), "a class of policies")
    return try_laws("policy", policy.__name__, _Judged(policy, patience_s), LAWS)


def every_request_ends_and_says_what_it_says_alone(judged: _Judged) -> str:
    return _in_all_worlds(judged, worlds.ENDS)


def somebody_can_run_whenever_a_request_is_left(judged: _Judged) -> str:
    return _in_all_worlds(judged, worlds.PROGRESS)


def a_step_names_each_request_once(judged: _Judged) -> str:
    return _in_all_worlds(judged, worlds.ONCE)


def a_step_names_nobody_but_those_who_run_or_wait(judged: _Judged) -> str:
    return _in_all_worlds(judged, worlds.PRESENT)


def requests_are_left_as_they_are(judged: _Judged) -> str:
    return _in_all_worlds(judged, worlds.UNTOUCHED)


def who_gives_way_is_one_of_those_who_run(judged: _Judged) -> str:
    return _in_all_worlds(judged, worlds.VICTIM)


def nobody_waits_for_ever(judged: _Judged) -> str:
    """One request that nothing speaks for, while three others come every second, more than can be served."""
    desk = Desk(judged.kind, max_num_seqs=2, max_num_batched_tokens=8)
    shared = [5] * 4
    desk.add("patient", 6, 20, priority=5, user="patient")
    while "patient" in desk.scheduler:
        name = f"{desk.now_s:.0f}"
        desk.add(f"short {name}", 1, 1, user=f"user {name}", ttft_deadline_s=1.0)
        desk.add(f"cached {name}", [*shared, len(name)], 1, user=f"other {name}", ttft_deadline_s=1.0)
        desk.add(f"urgent {name}", 2, 2, priority=-1, ttft_deadline_s=0.5)
        desk.step()
        desk.now_s += 1.0
        words = "a prompt of 6 tokens, of priority 5 and without a deadline, that came first, beside three a second"
        assert desk.now_s <= judged.patience_s, f"given {words}: it has not ended after {judged.patience_s:.0f} s"
    return f"ends after {desk.now_s:.0f} s beside three more a second"


def a_step_that_can_admit_nobody_costs_the_same_however_many_wait(judged: _Judged) -> str:
    costs = {waiting: cost_of_a_full_step(judged.kind, waiting) for waiting in (50, 500)}
    few, many = costs.values()
    assert few == many, f"given 4 rows, all taken: asks {few} times for something of 50 who wait, {many} of 500"
    return f"asks {many} times for something of those who wait, be they 50 or 500"


def cost_of_a_full_step(policy: str | type[Policy], num_waiting: int) -> int:
    """How often a step that can admit nobody asks for something of any of those who wait."""
    count = 0

    class Touched(Request):
        def __getattribute__(self, name: str) -> Any:
            nonlocal count
            count += 1
            return super().__getattribute__(name)

        def __hash__(self) -> int:
            nonlocal count
            count += 1
            return super().__hash__()

    desk = Desk(policy, max_num_seqs=4)
    for index in range(4):
        desk.add(str(index), 3, 50)
    desk.step()
    desk.step()
    desk.request = Touched
    for index in range(num_waiting):
        desk.add(f"waiting {index}", 3)
    count = 0
    desk.step()
    return count


LAWS: tuple[Callable[[_Judged], str], ...] = (
    every_request_ends_and_says_what_it_says_alone,
    somebody_can_run_whenever_a_request_is_left,
    a_step_names_each_request_once,
    a_step_names_nobody_but_those_who_run_or_wait,
    requests_are_left_as_they_are,
    who_gives_way_is_one_of_those_who_run,
    nobody_waits_for_ever,
    a_step_that_can_admit_nobody_costs_the_same_however_many_wait,
)


def _in_all_worlds(judged: _Judged, law: str) -> str:
    wrong = judged.wrong.get(law)
    assert wrong is None, wrong
    return f"in {worlds.NUM_WORLDS} worlds of 2 to 8 requests"
