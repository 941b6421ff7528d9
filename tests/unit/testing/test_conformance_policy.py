"""Somebody else's policy before the laws: the sound one is acquitted, each faulty one is convicted by its law."""

from collections.abc import Iterator, Sequence

import pytest

from weft.config import SchedulerConfig
from weft.inference.policies import known_policies
from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request
from weft.testing import run_policy_conformance
from weft.testing.conformance.suite import ConformanceError
from weft.testing.finding import Outcome

# As another project runs them: a check of every call's annotations takes ten times as long as the laws.
pytestmark = pytest.mark.usefixtures("as_users_run_it")


class OddUsersLast(Policy):
    """A foreign policy: users of an even number of letters first, by turns with the others; age wins in the end."""

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from view.running
        yield from sorted(view.waiting, key=lambda one: one.arrival_s + 5 * (len(one.user or "") % 2))


class LastComeFirstServed(OddUsersLast):
    """vllm#39734 by another way: who has waited longest waits on."""

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from view.running
        yield from reversed(view.waiting)


class ForgetsThePreempted(OddUsersLast):
    """nano-vllm#144: who has said something is taken to be decoding, and after a preemption nobody is left to run."""

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from view.running
        yield from (one for one in view.waiting if one.num_tokens == one.num_prompt_tokens)


class NamesTheFirstTwice(OddUsersLast):
    """So that it gets the budget of two."""

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from view.running[:1]
        yield from super().candidates(view)


class RemembersTheEnded(OddUsersLast):
    """A late token of a finished request: its row is somebody else's by now."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.seen: dict[Request, None] = {}

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        self.seen |= dict.fromkeys((*view.running, *view.waiting))
        yield from self.seen


class Ages(OddUsersLast):
    """Ageing by writing to the request, which others read as well."""

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        for request in view.waiting:
            request.priority -= 1
        yield from super().candidates(view)


class LetsAStrangerGiveWay(OddUsersLast):
    def __init__(self, config: SchedulerConfig) -> None:
        self.last: list[Request] = []

    def admitted(self, request: Request) -> None:
        self.last.append(request)

    def victim(self, running: Sequence[Request]) -> Request:
        return self.last[0]


class LooksAtAll(OddUsersLast):
    """Every step costs as much as there are requests that wait."""

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        waiting = sorted(view.waiting, key=lambda one: one.arrival_s)
        yield from view.running
        yield from waiting


FAULTS = {
    "nobody waits for ever": LastComeFirstServed,
    "somebody can run whenever a request is left": ForgetsThePreempted,
    "a step names each request once": NamesTheFirstTwice,
    "a step names nobody but those who run or wait": RemembersTheEnded,
    "requests are left as they are": Ages,
    "who gives way is one of those who run": LetsAStrangerGiveWay,
    "a step that can admit nobody costs the same however many wait": LooksAtAll,
}


@pytest.mark.parametrize("name", sorted(known_policies()))
def test_wefts_own_are_acquitted_by_every_law(name: str) -> None:
    assert not run_policy_conformance(known_policies()[name]).not_judged


def test_a_foreign_one_is_acquitted() -> None:
    assert len(run_policy_conformance(OddUsersLast).laws(Outcome.HOLDS)) == 8


@pytest.mark.parametrize("law", FAULTS)
def test_a_faulty_one_is_convicted_by_its_law(law: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        run_policy_conformance(FAULTS[law], patience_s=200.0)
    broken = caught.value.report.laws(Outcome.BROKEN)
    assert law in broken
    assert "given " in broken[law], "the input that broke it"
    assert f"broken: {law}: given" in str(caught.value)


def test_a_policy_that_cannot_be_made_is_convicted() -> None:
    class Unmade(OddUsersLast):
        def __init__(self, config: SchedulerConfig) -> None:
            raise RuntimeError("not today")

    with pytest.raises(ConformanceError, match="every request ends and says what it says alone: given world 0"):
        run_policy_conformance(Unmade)
