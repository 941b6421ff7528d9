"""Each policy's own promise, on a virtual clock: who goes first, who waits, and for how long at most."""

from typing import Any

import pytest

from weft.config import SchedulerConfig
from weft.errors import ConfigError
from weft.inference.policies import build_policy, known_policies
from weft.testing.conformance.desk import Desk
from weft.testing.conformance.policy import cost_of_a_full_step


def test_fcfs_an_earlier_prompt_is_never_held_up_by_a_later_one() -> None:
    desk = Desk("fcfs", max_num_seqs=4, max_num_batched_tokens=8)
    for name, prompt in {"long": 30, "b": 1, "c": 1}.items():
        desk.add(name, prompt)
    plans = [desk.step() for _ in range(4)]
    assert [plan.request_ids[0] for plan in plans] == ["long"] * 4
    assert plans[3].num_new_tokens[0] == 30 - 3 * 8, "the long prompt had every budget to itself"


def test_fcfs_who_gave_way_comes_back_in_order_before_who_came_later() -> None:
    desk = Desk("fcfs", max_num_seqs=3)
    for name in "abcd":
        desk.add(name, 2, 9)
    desk.step()
    for _ in range(2):
        desk.scheduler._preempt()
    assert [request.request_id for request in desk.scheduler.waiting] == ["b", "c", "d"]
    assert desk.step().request_ids == ("a", "b", "c")
    desk.scheduler._preempt()
    desk.scheduler.restart()
    assert [request.request_id for request in desk.scheduler.waiting] == ["a", "b", "c", "d"]
    assert desk.step().request_ids == ("a", "b", "c")


def test_its_own_blocks_found_again_after_a_preemption_are_no_cached_prompt() -> None:
    desk = Desk("fcfs", max_num_seqs=2)
    for name in "ab":
        desk.add(name, 9, 4)
    desk.step()
    request = desk.scheduler._preempt()
    assert desk.scheduler.num_cached_tokens(request) == 8
    desk.step()
    assert (request.num_computed_tokens, request.num_cached_tokens) == (10, 0)


def test_who_is_admitted_and_gives_way_in_one_step_has_been_served_nothing_from_the_cache() -> None:
    desk = Desk("prefill_first", max_num_seqs=2, num_blocks=6)
    prompt = [5] * 9
    desk.add("before", prompt)
    desk.run()  # and leaves two blocks
    desk.add("stream", 12, 12)
    desk.step()
    desk.add("late", prompt)
    plan = desk.step()
    (late,) = desk.scheduler.waiting
    assert plan.preempted_ids == ("late",), "its two blocks and a third left none for the stream"
    assert late.num_cached_tokens == 0
    while late.row is None and not late.has_ended:
        desk.step()
    assert desk.first_steps["late"] > 8, "the stream has taken all six blocks by then"
    assert late.num_cached_tokens == 0


def test_static_a_later_batch_waits_for_the_last_of_this_one() -> None:
    desk = Desk("static", max_num_seqs=2, max_num_batched_tokens=64)
    for name, output in {"a": 1, "b": 9, "c": 1}.items():
        desk.add(name, 1, output)
    desk.run()
    assert desk.first_steps == {"a": 0, "b": 0, "c": 9}


def stalled_streams(policy: str) -> int:
    """Steps in which a stream that could have gained a token did not, while long prompts are read beside it."""
    desk = Desk(policy, max_num_seqs=4, max_num_batched_tokens=8, max_chunk_tokens=4)
    desk.add("stream", 1, 30)
    desk.add("other", 1, 30)
    desk.step()
    desk.add("long", 60)
    desk.add("longer", 80)
    stalled = 0
    for _ in range(20):
        streams = {request.request_id for request in desk.scheduler.running if request.is_decoding}
        stalled += bool(streams - set(desk.step().request_ids))
    return stalled


def test_decode_first_never_stalls_a_stream_for_a_prompt() -> None:
    assert stalled_streams("decode_first") == 0
    assert stalled_streams("prefill_first") > 0, "the control: a policy without the promise stalls them"


def test_decode_first_what_streams_leave_goes_to_prompts() -> None:
    desk = Desk("decode_first", max_num_seqs=3, max_num_batched_tokens=6, max_chunk_tokens=3)
    desk.add("stream", 1, 20)
    desk.step()
    desk.add("one", 40)
    desk.add("two", 40)
    for _ in range(13):
        plan = desk.step()
        assert plan.request_ids[0] == "stream"
        assert sum(plan.num_new_tokens) == 6


def test_prefill_first_prompts_take_what_they_can_use_and_streams_the_rest() -> None:
    desk = Desk("prefill_first", max_num_seqs=4, max_num_batched_tokens=8)
    desk.add("stream", 1, 30)
    desk.step()
    desk.add("prompt", 20)
    plans = [desk.step() for _ in range(3)]
    assert [dict(zip(plan.request_ids, plan.num_new_tokens, strict=True)) for plan in plans] == [
        {"prompt": 8},
        {"prompt": 8},
        {"prompt": 4, "stream": 1},
    ]


def test_prefill_first_a_prompt_that_finds_no_room_lets_no_later_one_pass() -> None:
    desk = Desk("prefill_first", max_num_seqs=4, num_blocks=6, block_size=4, max_num_batched_tokens=64)
    desk.add("stream", 12, 8)
    desk.step()
    desk.add("large", 16)
    desk.add("small", 1)
    assert desk.step().request_ids == ("stream",)


def test_no_two_requests_of_a_desk_begin_alike() -> None:
    """What one of them computed would be found by the other, and the test would count a prompt too few."""
    desk = Desk("fcfs")
    for index in range(1100):
        desk.add(str(index), 2)
    assert len({request.token_ids[0] for request in desk.scheduler.waiting}) == 1100


@pytest.mark.parametrize("most", [1, 2, 3])
def test_prefill_first_computes_at_most_so_many_prompts_a_step(most: int) -> None:
    desk = Desk("prefill_first", max_num_seqs=8, max_num_batched_tokens=64, max_prefills_per_round=most)
    for index in range(8):
        desk.add(str(index), 5, 3)
    sizes = []
    while desk.scheduler.num_waiting:
        sizes.append(sum(count > 1 for count in desk.step().num_new_tokens))
    assert sizes == [most] * (8 // most) + ([8 % most] if 8 % most else [])


@pytest.mark.parametrize("most", [1, 2, 3])
def test_prefill_first_counts_the_prompts_that_are_not_yet_read_to_their_end(most: int) -> None:
    desk = Desk(
        "prefill_first", max_num_seqs=8, max_num_batched_tokens=64, max_chunk_tokens=4, max_prefills_per_round=most
    )
    for index in range(8):
        desk.add(str(index), 11, 3)
    while desk.scheduler.num_waiting:
        desk.step()
        assert sum(not request.is_decoding for request in desk.scheduler.running) <= most


def test_priority_a_smaller_number_goes_first_whenever_it_came() -> None:
    desk = Desk("priority", max_num_seqs=1)
    for name, priority in {"low": 5, "mid": 0, "high": -5, "same": 0}.items():
        desk.add(name, priority=priority)
    assert desk.run() == ["high", "mid", "same", "low"]


@pytest.mark.parametrize(("later_s", "order"), [(19.0, ["urgent", "patient"]), (21.0, ["patient", "urgent"])])
def test_priority_two_less_overtakes_for_twice_the_ageing_and_no_longer(later_s: float, order: list[str]) -> None:
    desk = Desk("priority", max_num_seqs=1, priority_ageing_s=10)
    desk.add("running")
    desk.step()
    desk.add("patient", priority=2)
    desk.now_s = later_s
    desk.add("urgent", priority=0)
    assert desk.run()[1:] == order


@pytest.mark.parametrize("came_first", ["high", "low"])
def test_priority_in_a_dry_pool_the_least_urgent_gives_way_whenever_it_came(came_first: str) -> None:
    desk = Desk("priority", max_num_seqs=2, num_blocks=4, block_size=2)
    preempted: list[str] = []
    for name, priority in {"high": 0, "low": 1}.items() if came_first == "high" else {"low": 1, "high": 0}.items():
        desk.add(name, 2, 6, priority=priority)
        preempted += desk.step().preempted_ids
    while desk.scheduler.has_requests:
        preempted += desk.step().preempted_ids
    assert set(preempted) == {"low"}


def test_shortest_first_of_requests_that_came_together() -> None:
    desk = Desk("shortest_first", max_num_seqs=1)
    for name, (prompt, output) in {"long": (9, 9), "short": (2, 2), "wordy": (2, 9), "middle": (5, 2)}.items():
        desk.add(name, prompt, output)
    assert desk.run() == ["short", "middle", "wordy", "long"]


@pytest.mark.parametrize(("later_s", "order"), [(0.04, ["short", "long"]), (0.06, ["long", "short"])])
def test_shortest_first_fifty_tokens_overtake_for_fifty_milliseconds(later_s: float, order: list[str]) -> None:
    desk = Desk("shortest_first", max_num_seqs=1)
    desk.add("running")
    desk.step()
    desk.add("long", 51)
    desk.now_s = later_s
    desk.add("short", 1)
    assert desk.run()[1:] == order


def test_deadline_the_first_token_that_is_due_first_comes_first() -> None:
    desk = Desk("deadline", max_num_seqs=1)
    desk.add("none")  # due in a minute
    desk.add("lax", ttft_deadline_s=30.0)
    desk.now_s = 10.0
    desk.add("tight", ttft_deadline_s=5.0)
    desk.add("very lax", ttft_deadline_s=100.0)
    assert desk.run() == ["tight", "lax", "none", "very lax"]


def test_deadline_counts_from_the_arrival() -> None:
    desk = Desk("deadline", max_num_seqs=1)
    desk.add("running")
    desk.step()
    desk.add("patient", ttft_deadline_s=30.0)
    desk.now_s = 27.0
    desk.add("hurried", ttft_deadline_s=5.0)  # due two seconds later
    assert desk.run()[1:] == ["patient", "hurried"]


def test_deadline_prompts_that_are_being_read_keep_that_order_too() -> None:
    desk = Desk("deadline", max_num_seqs=2, max_num_batched_tokens=4, max_chunk_tokens=3)
    desk.add("lax", 30, ttft_deadline_s=50.0)
    desk.add("tight", 30, ttft_deadline_s=5.0)
    desk.step()
    plan = desk.step()
    assert dict(zip(plan.request_ids, plan.num_new_tokens, strict=True)) == {"tight": 3, "lax": 1}


def test_deadline_in_a_dry_pool_the_prompt_that_is_due_last_gives_way_whenever_it_came() -> None:
    desk = Desk("deadline", max_num_seqs=2, num_blocks=8, block_size=4, max_num_batched_tokens=8, max_chunk_tokens=4)
    desk.add("lax", 30, ttft_deadline_s=50.0)
    desk.step()
    desk.add("tight", 30, ttft_deadline_s=5.0)
    preempted: list[str] = []
    while desk.scheduler.num_waiting or not all(request.is_decoding for request in desk.scheduler.running):
        preempted += desk.step().preempted_ids
        if "tight" not in desk.scheduler:
            break
    assert set(preempted) == {"lax"}


@pytest.mark.parametrize("policy", sorted(known_policies()))
def test_a_step_that_can_admit_nobody_costs_the_same_however_many_wait(policy: str) -> None:
    assert cost_of_a_full_step(policy, 50) == cost_of_a_full_step(policy, 500)


@pytest.mark.parametrize("policy", sorted(known_policies()))
def test_options_of_another_policy_are_an_error(policy: str) -> None:
    values = {"max_prefills_per_round": 2, "priority_ageing_s": 5.0}
    for name, value in values.items():
        config = SchedulerConfig(policy=policy, **{name: value})  # type: ignore[arg-type]
        if name in known_policies()[policy].options:
            build_policy(config)
        else:
            with pytest.raises(ConfigError, match=f"{name}={value!r} says nothing to policy='{policy}'"):
                build_policy(config)


@pytest.mark.parametrize(
    "options",
    [
        {"max_prefills_per_round": 0},
        *({"priority_ageing_s": seconds} for seconds in (0, -1.0, float("nan"), float("inf"), 10**400)),
        {"policy": ""},
    ],
    ids=str,
)
def test_values_that_cannot_be_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SchedulerConfig(**options)


def test_an_unknown_policy_is_an_error_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown policy='fifo'.*fcfs"):
        build_policy(SchedulerConfig(policy="fifo"))


@pytest.mark.parametrize("policy", sorted(known_policies()))
def test_a_policy_states_its_promise(policy: str) -> None:
    assert "Promise: " in (known_policies()[policy].__doc__ or "")
