"""The promises of the policies that remember something of earlier steps: who was overtaken, who was served how much."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from weft.inference.policies import fair
from weft.inference.policies.prefix_first import MAX_OVERTAKEN, WINDOW, PrefixFirst
from weft.inference.request import Request
from weft.testing.conformance.desk import Desk


def test_prefix_first_takes_the_longest_cached_prefix() -> None:
    desk = Desk("prefix_first", max_num_seqs=1)
    known = list(range(100, 112))
    desk.add("warm", known)
    desk.run()
    desk.add("cold", list(range(200, 212)))
    desk.add("two blocks", [*known[:8], 7, 7, 7])
    desk.add("three blocks", [*known, 7])
    assert desk.run() == ["warm", "three blocks", "two blocks", "cold"]


def test_prefix_first_lets_nobody_wait_for_more_than_so_many_others() -> None:
    desk = Desk("prefix_first", max_num_seqs=1)
    known = list(range(100, 112))
    desk.add("warm", known)
    desk.run()
    desk.add("cold", list(range(200, 212)))
    for index in range(40):
        desk.add(f"hot {index}", [*known, index])
    order = desk.run()
    assert order.index("cold") == 1 + MAX_OVERTAKEN


@dataclass
class Line:
    """Requests that wait, the last of which finds most in the cache."""

    waiting: tuple[Request, ...]
    running: tuple[Request, ...] = ()

    def num_cached_tokens(self, request: Request) -> int:
        return int(request is self.waiting[-1])


def test_prefix_first_looks_no_further_than_its_window() -> None:
    desk = Desk("prefix_first", max_num_seqs=1)
    known = list(range(100, 112))
    desk.add("warm", known)
    desk.run()
    for index in range(WINDOW):
        desk.add(f"cold {index}")
    desk.add("hot", [*known, 7])
    assert desk.run()[1:3] == ["cold 0", "hot"]


def test_prefix_first_only_who_came_earlier_is_overtaken() -> None:
    desk = Desk("prefix_first", max_num_seqs=1)
    for index in range(4):
        desk.add(str(index))
    desk.step()
    policy = desk.scheduler._policy
    assert isinstance(policy, PrefixFirst)
    assert set(policy._overtaken.values()) == {0}
    first, second, third = desk.scheduler.waiting
    assert next(policy.candidates(Line((first, second)))) is second
    policy._window.append(third)
    policy._overtaken[third] = 0
    policy.admitted(second)
    assert policy._overtaken == {first: 1, third: 0}


def test_prefix_first_counts_on_for_a_request_that_preempted_ones_push_out_of_the_window() -> None:
    desk = Desk("prefix_first", max_num_seqs=1)
    for index in range(WINDOW + 4):
        desk.add(str(index))
    *early, one, other, third, fourth, fifth = desk.scheduler.waiting
    policy = desk.scheduler._policy
    assert isinstance(policy, PrefixFirst)
    for later in (one, other):
        assert next(policy.candidates(Line((*early, later)))) is later
        policy.admitted(later)
        next(policy.candidates(Line((third, fourth, *early, fifth))))  # the two are back, for a step
    assert {policy._overtaken[request] for request in early} == {2}
    next(policy.candidates(Line((third,))))
    assert policy._overtaken.keys() == {third}, "who is gone is forgotten"


def served_cost(desk: Desk, requests: Sequence[Request]) -> dict[str | None, int]:
    """Tokens read once and tokens written twice, by user, of requests that have been admitted."""
    cost: dict[str | None, int] = {}
    for request in requests:
        if request.request_id in desk.first_steps:
            written = request.num_tokens - request.num_prompt_tokens
            cost[request.user] = cost.get(request.user, 0) + request.num_prompt_tokens + 2 * written
    return cost


def largest_difference(policy: str) -> int:
    """Of what two users were served, both wanting more all the time, one of them four times as much as the other."""
    desk = Desk(policy, max_num_seqs=4, max_num_batched_tokens=16)
    for index in range(40):
        for user, name in (("ann", f"a{index}"), *(("bob", f"b{index}.{copy}") for copy in range(4))):
            desk.add(name, 6, 6, user=user)
    requests = desk.scheduler.waiting
    largest = 0
    while {"ann", "bob"} <= {request.user for request in desk.scheduler.waiting}:
        desk.step()
        cost = served_cost(desk, requests)
        largest = max(largest, abs(cost.get("ann", 0) - cost.get("bob", 0)))
    return largest


def test_fair_how_many_requests_a_user_sends_says_nothing() -> None:
    bound = 4 * (6 + 2 * 6)  # four running requests of one user
    assert largest_difference("fair") <= bound
    assert largest_difference("fcfs") > 4 * bound, "the control: in order of arrival the crowd wins"


def test_fair_a_user_who_comes_late_is_served_next_and_has_saved_up_nothing() -> None:
    desk = Desk("fair", max_num_seqs=1)
    for index in range(20):
        desk.add(f"a{index}", 4, 4, user="ann")
    for _ in range(30):
        desk.step()
    for index in range(20):
        desk.add(f"b{index}", 4, 4, user="bob")
    order = [name[0] for name in desk.run()]
    late = order[order.index("b") :]
    assert late[:20] in (["b", "a"] * 10, ["b", "b", *["a", "b"] * 9])


def test_fair_of_users_served_alike_the_one_whose_request_came_first_goes_first() -> None:
    desk = Desk("fair", max_num_seqs=1)
    for index in range(6):
        desk.add(str(index), 2, 2, user=str(index))
    assert desk.run() == [str(index) for index in range(6)], "each is new, and nobody overtakes who waits"


def test_fair_a_preempted_request_is_not_charged_twice() -> None:
    desk = Desk("fair", max_num_seqs=2, num_blocks=4, block_size=2)
    desk.add("a", 2, 6, user="ann")
    desk.add("b", 2, 6, user="bob")
    preempted: list[str] = []
    while desk.scheduler.has_requests:
        preempted += desk.step().preempted_ids
    assert preempted, "the pool is too small for both"
    assert set(desk.scheduler._policy._served.values()) <= {2 + 2 * 6, 2 + 2 * 5}  # type: ignore[attr-defined]


def test_fair_a_user_who_leaves_and_comes_back_has_not_shed_what_it_was_served() -> None:
    desk = Desk("fair", max_num_seqs=2)
    desk.add("b0", 4, 60, user="bob")
    desk.add("a0", 40, 10, user="ann")
    while "a0" in desk.scheduler:
        desk.step()
    desk.step()  # ann is away and bob goes on, with less so far
    desk.add("b1", 4, 4, user="bob")
    desk.add("a1", 4, 4, user="ann")
    assert desk.run()[2:] == ["b1", "a1"]


def test_fair_remembers_no_more_than_so_many_of_those_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "MAX_ABSENT", 10)
    desk = Desk("fair", max_num_seqs=1)
    for index in range(300):  # a new user with each request, and always somebody who waits
        desk.add(str(index), 3, user=str(index))
        if index > 2:
            desk.step()
            policy = desk.scheduler._policy
            assert isinstance(policy, fair.Fair)
            assert len(policy._served) <= 10 + desk.scheduler.num_waiting + 2
            assert len(policy._charged) <= desk.scheduler.num_waiting + 2


def test_fair_of_those_who_left_it_forgets_those_who_had_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "MAX_ABSENT", 10)
    desk = Desk("fair", max_num_seqs=64, max_num_batched_tokens=4096)
    for index in range(11):
        desk.add(str(index), 10 + index, user=str(index))
    desk.add("stays", 1, 50, user="stays")
    desk.step()
    desk.add("next", 1, 1, user="next")
    desk.step()
    policy = desk.scheduler._policy
    assert isinstance(policy, fair.Fair)
    assert policy._served.keys() - {"stays", "next"} == {str(index) for index in range(6, 11)}
