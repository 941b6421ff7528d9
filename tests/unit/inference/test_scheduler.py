"""The scheduler case by case: how a request comes in, is cut into steps, gives way and ends. No device."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from weft import SamplingParams
from weft.config import BlockGeometry, SchedulerConfig
from weft.inference import failures
from weft.inference.plan import Admission, StepPlan
from weft.inference.policies import build_policy
from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request
from weft.inference.scheduler import Scheduler
from weft.inference.step_output import StepOutput
from weft.testing.conformance.desk import Desk

S_MAX = 32
STOP, PLAIN, NOT_FINITE = 1, 2, -1


def scheduler_of(max_num_seqs: int, budget: int = 64, chunk: int | None = None) -> Scheduler:
    config = SchedulerConfig(
        policy="static", max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_chunk_tokens=chunk
    )
    return Scheduler(
        config, build_policy(config), BlockGeometry(num_blocks=max_num_seqs, block_size=S_MAX, shareable=False)
    )


def request_of(request_id: str, prompt: int = 1, max_tokens: int = 1) -> Request:
    return Request(
        request_id=request_id,
        token_ids=[PLAIN] * prompt,
        num_prompt_tokens=prompt,
        params=SamplingParams(),
        seed=0,
        stop_token_ids=frozenset({STOP}),
        max_len=prompt + max_tokens,
    )


def run(scheduler: Scheduler, plan: StepPlan, token: int = PLAIN) -> list[StepOutput]:
    return scheduler.update(plan, [[token] * rows for rows in plan.num_logit_rows])


@pytest.mark.parametrize("steps", [0, 1, 2, 9], ids=["waiting", "in its prompt", "decoding", "ended"])
def test_finish_is_idempotent_in_every_state(steps: int) -> None:
    scheduler = scheduler_of(2, chunk=2)
    scheduler.add(request_of("a", prompt=3, max_tokens=4))
    for _ in range(steps):
        if scheduler.has_requests:
            run(scheduler, scheduler.schedule())
    for _ in range(2):
        scheduler.finish("a", "abort")
        scheduler.finish("never here", "abort")
        assert not scheduler.has_requests
    scheduler.add(request_of("a"))
    assert run(scheduler, scheduler.schedule())[0].finished


def test_a_row_that_is_not_finite_ends_only_its_request() -> None:
    scheduler = scheduler_of(3)
    for name in "abc":
        scheduler.add(request_of(name, max_tokens=2))
    outputs = scheduler.update(scheduler.schedule(), [[PLAIN], [NOT_FINITE], [PLAIN]])
    assert [output.finish_reason for output in outputs] == [None, "error", None]
    assert outputs[1].new_token_ids == ()
    assert [output.error for output in outputs] == [None, "the logits hold NaN or infinity", None]
    assert scheduler.schedule().request_ids == ("a", "c")


def test_who_ends_by_a_stop_token_says_by_which() -> None:
    scheduler = scheduler_of(1)
    scheduler.add(request_of("a", max_tokens=3))
    (output,) = run(scheduler, scheduler.schedule(), STOP)
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ((STOP,), "stop", STOP)


@pytest.mark.parametrize("asked", [{"bad_words": [[5]]}, {"min_tokens": 1}], ids=list)
def test_who_rules_out_tokens_is_told_that_it_may_have_been_all_of_them(asked: dict[str, Any]) -> None:
    assert failures.reason(failures.NOTHING_TO_DRAW, SamplingParams(**asked)).endswith("rules out is every token")
    assert "raised" in failures.reason(failures.SAMPLING_RAISED, SamplingParams(**asked))


def test_a_late_token_of_a_finished_request_is_dropped() -> None:
    scheduler = scheduler_of(1)
    scheduler.add(request_of("a", max_tokens=5))
    plan = scheduler.schedule()
    scheduler.finish("a", "abort")
    assert run(scheduler, plan) == []


def test_an_id_that_comes_back_does_not_overtake_those_who_waited() -> None:
    scheduler = scheduler_of(1)
    scheduler.add(request_of("a"))
    run(scheduler, scheduler.schedule())
    scheduler.add(request_of("b"))
    scheduler.add(request_of("a"))
    assert scheduler.schedule().request_ids == ("b",)


@pytest.mark.parametrize(
    ("prompt", "budget", "chunk", "counts"),
    [
        (10, 64, None, [10]),
        (10, 64, 4, [4, 4, 2]),
        (8, 64, 4, [4, 4]),
        (10, 3, None, [3, 3, 3, 1]),
        (5, 2, 9, [2, 2, 1]),
        (3, 1, None, [1, 1, 1]),
    ],
)
def test_a_prompt_is_cut_by_chunk_and_budget_and_samples_once(
    prompt: int, budget: int, chunk: int | None, counts: list[int]
) -> None:
    scheduler = scheduler_of(1, budget, chunk)
    scheduler.add(request_of("a", prompt))
    plans = []
    for _ in counts:
        plans.append(scheduler.schedule())
        run(scheduler, plans[-1])
    assert not scheduler.has_requests
    assert [plan.num_new_tokens[0] for plan in plans] == counts
    assert [plan.num_logit_rows[0] for plan in plans] == [0] * (len(counts) - 1) + [1]


def test_an_admission_carries_what_the_device_needs_of_a_request() -> None:
    scheduler = scheduler_of(1)
    params = SamplingParams(temperature=0.5, min_tokens=2)
    scheduler.add(
        Request(
            request_id="a",
            token_ids=[7, 8, 9],
            num_prompt_tokens=2,
            params=params,
            seed=11,
            stop_token_ids=frozenset({4}),
            max_len=9,
        )
    )
    (admission,) = scheduler.schedule().admissions
    assert admission == Admission(
        row=0,
        token_ids=(7, 8, 9),
        num_computed_tokens=0,
        params=params,
        seed=11,
        num_prompt_tokens=2,
        stop_token_ids=frozenset({4}),
    )


def test_the_tokens_that_wait_are_those_of_requests_that_have_not_started() -> None:
    scheduler = scheduler_of(1)
    counts = [scheduler.num_waiting_tokens]
    for name, prompt in (("a", 3), ("b", 4), ("c", 5)):
        scheduler.add(request_of(name, prompt, max_tokens=9))
        counts.append(scheduler.num_waiting_tokens)
    assert counts == [0, 3, 7, 12]
    run(scheduler, scheduler.schedule())
    assert scheduler.num_waiting_tokens == 9
    scheduler.finish("b", "abort")
    assert scheduler.num_waiting_tokens == 5
    scheduler.restart()
    assert scheduler.num_waiting_tokens == 5, "who has started and waits again is not among them"


def test_a_step_that_gives_fewer_rows_than_its_plan_has_is_refused() -> None:
    scheduler = scheduler_of(2)
    for name in "ab":
        scheduler.add(request_of(name, max_tokens=2))
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="shorter"):
        scheduler.update(plan, [[PLAIN]])


def test_an_idle_scheduler_plans_nothing_and_a_busy_one_is_not_idle() -> None:
    scheduler = scheduler_of(2)
    assert scheduler.schedule().request_ids == ()
    scheduler.check_idle()
    scheduler.add(request_of("a", max_tokens=2))
    run(scheduler, scheduler.schedule())
    with pytest.raises(AssertionError, match=r"free 1 \+ cached 0 \+ owned 1, blocks 2; free rows 1 of 2"):
        scheduler.check_idle()


class Nobody(Policy):
    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from ()


def test_a_policy_that_names_nobody_while_requests_wait_asserts() -> None:
    desk = Desk(Nobody)
    desk.add("a")
    with pytest.raises(AssertionError, match="requests wait"):
        desk.step()


def test_a_request_that_finds_no_room_though_it_is_alone_asserts() -> None:
    desk = Desk("fcfs", num_blocks=1, block_size=2)
    desk.add("a", 2, 2)
    desk.step()
    with pytest.raises(AssertionError, match="a request alone always finds its blocks"):
        desk.step()


@pytest.mark.parametrize("way", ["preempted", "restarted"])
def test_who_gave_way_holds_nothing_and_has_computed_nothing(way: str) -> None:
    desk = Desk("fcfs", block_size=2)
    for name in "ab":
        desk.add(name, 4, 9)
    desk.step()
    request = desk.scheduler.running[-1]
    assert (request.num_computed_tokens, request.num_published_blocks) == (4, 2)
    desk.scheduler._preempt() if way == "preempted" else desk.scheduler.restart()
    assert desk.scheduler.waiting[0 if way == "preempted" else 1] is request
    assert (request.row, request.blocks, request.num_computed_tokens, request.num_published_blocks) == (None, [], 0, 0)


class ByName(Policy):
    """Serves those who run in the order of `names`, then those who wait; "c" gives way first."""

    names = "abc"

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from sorted(view.running, key=lambda request: self.names.index(request.request_id))
        yield from view.waiting

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda request: request.request_id)


@pytest.mark.parametrize("names", ["cba", "bac"], ids=["served before", "not served yet"])
def test_the_tokens_of_whoever_gives_way_go_to_others_and_no_more(names: str) -> None:
    desk = Desk(
        type("Policy", (ByName,), {"names": names}),
        num_blocks=10,
        block_size=2,
        max_num_seqs=3,
        max_num_batched_tokens=6,
    )
    desk.add("c", [30] * 15, 5)
    for _ in range(2):
        desk.step()
    desk.add("b", [20] * 2, 5)
    desk.add("a", [10] * 12, 5)
    assert desk.step().num_new_tokens == (3, 2, 1)
    plan = desk.step()
    assert plan.preempted_ids == ("c",)
    assert (plan.request_ids, plan.num_new_tokens) == (("b", "a"), (1, 5)), "the whole budget of 6"


class WaitingFirst(ByName):
    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        yield from view.waiting
        yield from view.running


def test_who_is_admitted_again_and_gives_way_in_the_same_step_keeps_what_its_prompt_found() -> None:
    desk = Desk(WaitingFirst, num_blocks=3, block_size=2, max_num_seqs=2)
    desk.add("w", [1, 2])
    desk.step()
    desk.add("b", [5, 6], 3)
    desk.add("c", [1, 2, 9], 3)
    desk.step()
    request = desk.scheduler._preempt()
    assert (request.request_id, request.num_cached_tokens) == ("c", 2)
    assert desk.step().preempted_ids == ("c",)
    assert request.num_cached_tokens == 2
