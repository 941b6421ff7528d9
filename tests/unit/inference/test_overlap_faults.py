"""What goes wrong when tokens are read one step late, planted: each has a law that holds here and fails with it."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

from tests.unit.inference.toy_bench import Bench, Fault, fault, planted
from weft.testing.toy import sequential

X, Y = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]


def stop_of(prompt: Sequence[int], place: int) -> frozenset[int]:
    """A token at which this prompt's answer stops after `place` others."""
    said = sequential(prompt, place + 1)
    assert said[-1] not in said[:-1]
    return frozenset({said[-1]})


def bench_of(module: ModuleType, num_blocks: int = 20, block_size: int = 2, **options: object) -> Bench:
    return Bench(module, num_blocks=num_blocks, block_size=block_size, overlap=True, **options)  # type: ignore[arg-type]


def a_step_is_launched_before_the_one_before_is_read(module: ModuleType) -> None:
    bench = bench_of(module)
    bench.add("a", X, 3)
    assert bench.step() == [], "the first step gives nothing"
    bench.run()
    assert bench.events == ["execute 1", "execute 2", "read 1", "execute 3", "read 2", "read 3"]


def a_row_may_be_taken_while_a_step_of_its_last_owner_is_under_way(module: ModuleType) -> None:
    bench = bench_of(module, max_num_seqs=1)
    bench.add("a", X, 9, stop_of(X, 2))
    bench.add("b", Y, 4)
    bench.run()


def an_id_may_be_taken_while_a_step_of_its_last_owner_is_under_way(module: ModuleType) -> None:
    for place in (0, 2):
        bench = bench_of(module)
        bench.add("a", X, 9, stop_of(X, place))
        while bench.scheduler.has_requests:
            bench.step()
        bench.add("a", Y, 4)
        bench.run()


def whoever_ends_by_length_computes_no_token_too_many(module: ModuleType) -> None:
    for max_tokens in range(1, 6):
        bench = bench_of(module, num_blocks=-(-(len(X) + max_tokens - 1) // 2))
        bench.add("a", X, max_tokens)
        bench.run()
        assert bench.computed["a"] == len(X) + max_tokens - 1


def nobody_is_served_twice_in_a_step(module: ModuleType) -> None:
    """Chunks that leave one token: within its plan such a prompt must not look like a stream yet."""
    bench = bench_of(module, policy="prefill_first", chunk=3)
    for name in ("a", "b"):
        bench.add(name, X[:7], 4)
    bench.run()
    assert [plan.num_new_tokens for plan in bench.plans][:3] == [(3, 3), (3, 3), (1, 1)]


def whoever_leaves_is_charged_for_every_token(module: ModuleType) -> None:
    bench = bench_of(module, policy="fair")
    bench.add("ann", [1, 2, 3], 5)
    bench.add("bob", [4], 30)
    for name, request in bench.requests.items():
        request.user = name
    served: dict[str, int] = {}
    while bench.scheduler.has_requests:
        bench.step()
        served = bench.scheduler._policy._served
        if "ann" not in bench.scheduler:
            break
    assert served["ann"] == 3 + 2 * 5
    bench.run()


def unread_tokens_count(module: ModuleType) -> None:
    bench = bench_of(module)
    bench.add("a", X, 6)
    bench.run()
    assert [plan.num_new_tokens for plan in bench.plans] == [(len(X),)] + [(1,)] * 5


def only_what_was_read_is_shared(module: ModuleType) -> None:
    for chunk in (None, 3):
        bench = bench_of(module, chunk=chunk)
        bench.add("a", X, 9)
        confirmed = 0
        while bench.scheduler.has_requests:
            bench.step()
            read = bench.events.count("read 1") and int(bench.events[-1].split()[1])
            confirmed = sum(sum(plan.num_new_tokens) for plan in bench.plans[:read])
            assert bench.requests["a"].num_published_blocks * 2 <= confirmed
            assert len(bench.scheduler._prefixes.lookup([*X, *bench.said["a"]])) * 2 <= confirmed
        bench.run()
        bench.add("again", [*X, *bench.said["a"][:-1]], 2)
        bench.run()
        assert bench.requests["again"].num_cached_tokens == (confirmed // 2) * 2 - (confirmed % 2 == 0)


def whoever_gives_way_receives_its_token_and_comes_back_with_it(module: ModuleType) -> None:
    for num_blocks in range(4, 14):
        bench = bench_of(module, num_blocks=num_blocks, block_size=3)
        for name in ("a", "b", "c", "d"):
            bench.add(name, [ord(name), 1, 2], 8)
        bench.run()
        for plan in bench.plans:
            assert not plan.preempted_ids or not plan.admissions, "somebody gave way and somebody came in"
        assert bench.preempted or num_blocks > 9


def whoever_runs_alone_waits_for_the_blocks_of_those_who_end(module: ModuleType) -> None:
    bench = bench_of(module, num_blocks=5)
    bench.add("ends", [1, 2, 3, 4], 3)
    bench.add("stays", [5, 6], 8)
    bench.run()
    assert not bench.preempted, "nothing is computed twice for want of a step's patience"


def an_abort_is_final_whatever_is_under_way(module: ModuleType) -> None:
    for steps in range(8):
        for reused in (False, True):
            bench = bench_of(module)
            bench.add("a", X, 4)
            bench.add("b", Y, 6)
            for _ in range(steps):
                bench.step()
            is_there = "a" in bench.scheduler
            assert is_there == (len(bench.said["a"]) < 4)
            output = bench.scheduler.finish("a", "abort")
            assert (output is not None) == is_there
            assert "a" not in bench.scheduler
            bench.expected["a"] = bench.said["a"]
            if reused:
                bench.add("a", Y, 3)
            bench.run()


def failing(token_ids: Sequence[int]) -> bool:
    return list(token_ids) == [*X, *sequential(X, 2)]


def whoever_fails_ends_once(module: ModuleType) -> None:
    bench = bench_of(module, fails=failing)
    bench.add("a", X, 6)
    bench.add("b", Y, 6)
    bench.expected["a"] = sequential(X, 2)
    reasons = []
    while bench.scheduler.has_requests:
        reasons += [(output.request_id, output.finish_reason) for output in bench.step() if output.finished]
    assert reasons == [("a", "error"), ("b", "length")]
    bench.run()


def whatever_raises_the_tokens_nobody_read_are_sampled_again(module: ModuleType) -> None:
    for place in range(1, 9):
        for owner, name in (("executor", "execute"), ("scheduler", "_launch"), ("scheduler", "update")):
            bench = bench_of(module, num_blocks=8, block_size=3, max_num_seqs=3)
            for request_id, max_tokens in (("a", 4), ("b", 5), ("c", 6), ("d", 3)):
                bench.add(request_id, [ord(request_id), 1, 2], max_tokens)
            part = getattr(bench, owner)
            setattr(part, name, RaisesOnce(getattr(part, name), place))
            for _ in range(60):
                try:
                    bench.step()
                except MemoryError:
                    assert not bench.scheduler.running
            bench.run()


class RaisesOnce:
    def __init__(self, function: Callable[..., object], at: int) -> None:
        self.function, self.left = function, at

    def __call__(self, *args: object) -> object:
        self.left -= 1
        if self.left == 0:
            raise MemoryError
        return self.function(*args)


LOOP = "for request, new in zip(step.requests, tokens, strict=True):\n            if request.has_ended:\n"
BY_ROW = (
    "rows = {request.row: request for request in (*self._running.values(), *self._ending.values())}\n"
    "        for row, new in zip(plan.rows, tokens, strict=True):\n"
    "            request = rows.get(row)\n"
    "            if request is None:\n"
)
BY_ID = (
    "ids = self._waiting | self._preempted | self._running | self._ending\n"
    "        for request_id, new in zip(plan.request_ids, tokens, strict=True):\n"
    "            request = ids.get(request_id)\n"
    "            if request is None:\n"
)
FAULTS = [
    fault(
        "the step before is read first",
        a_step_is_launched_before_the_one_before_is_read,
        ("pipeline", "launched, self._unread = self._unread, launched", "pass"),
    ),
    fault(
        "a late token goes to whoever has the row",
        a_row_may_be_taken_while_a_step_of_its_last_owner_is_under_way,
        ("scheduler", LOOP, BY_ROW),
    ),
    fault(
        "a late token goes to whoever has the id",
        an_id_may_be_taken_while_a_step_of_its_last_owner_is_under_way,
        ("scheduler", LOOP, BY_ID),
    ),
    fault(
        "unread tokens are not counted",
        unread_tokens_count,
        ("scheduler", "end = len(request.token_ids) + request.num_unread_tokens\n", "end = len(request.token_ids)\n"),
    ),
    fault(
        "what a plan gives counts while the plan is being made",
        nobody_is_served_twice_in_a_step,
        (
            "scheduler",
            "            left -= count\n",
            "            left -= count\n            request.num_computed_tokens = end\n",
        ),
        ("scheduler", "            request.num_computed_tokens += count\n", ""),
    ),
    fault(
        "a request that awaits its last token is served again",
        whoever_ends_by_length_computes_no_token_too_many,
        ("scheduler", "+ unread >= request.max_len", "+ unread > request.max_len"),
    ),
    fault(
        "a request is taken for ended a token early",
        whoever_ends_by_length_computes_no_token_too_many,
        ("scheduler", "+ unread >= request.max_len", "+ unread + 1 >= request.max_len"),
    ),
    fault(
        "a last token that nobody has read yet is not charged",
        whoever_leaves_is_charged_for_every_token,
        ("policies.fair", "request.num_tokens + request.num_unread_tokens", "request.num_tokens"),
    ),
    fault(
        "blocks are shared as soon as they are planned",
        only_what_was_read_is_shared,
        (
            "scheduler",
            "            # Up to the end of this step",
            "            end = request.num_computed_tokens\n            # Up to the end of",
        ),
        ("prefix_cache", '        assert len(tokens) == self._block_size, "only full blocks are shared"\n', ""),
    ),
    fault(
        "blocks are shared with the token that was just read",
        only_what_was_read_is_shared,
        (
            "scheduler",
            "token, end = new[-1], len(known)",
            "token, end = new[-1], len(known) + 1",
        ),
        ("prefix_cache", '        assert len(tokens) == self._block_size, "only full blocks are shared"\n', ""),
    ),
    fault(
        "whoever gave way comes in again in the same step",
        whoever_gives_way_receives_its_token_and_comes_back_with_it,
        ("scheduler", "open_door and not draft.is_short and self._admit", "open_door and self._admit"),
    ),
    fault(
        "whoever gave way loses its token",
        whoever_gives_way_receives_its_token_and_comes_back_with_it,
        (
            "scheduler",
            "            if request.has_ended:\n",
            "            if request.has_ended or request.row is None:\n",
        ),
    ),
    fault(
        "whoever gave way forgets that a token is to come",
        whoever_gives_way_receives_its_token_and_comes_back_with_it,
        (
            "scheduler",
            "request.num_computed_tokens = request.num_published_blocks = 0",
            "request.num_computed_tokens = request.num_published_blocks = request.num_unread_tokens = 0",
        ),
    ),
    fault(
        "whoever gave way publishes blocks it has lost",
        whoever_gives_way_receives_its_token_and_comes_back_with_it,
        ("scheduler", " and request.row is not None:", ":"),
    ),
    fault(
        "somebody gives way for blocks that are about to come back",
        whoever_runs_alone_waits_for_the_blocks_of_those_who_end,
        ("scheduler", "draft.withdraw(request) if self._ending else draft", "draft"),
    ),
    fault(
        "an aborted request receives its token all the same",
        an_abort_is_final_whatever_is_under_way,
        ("scheduler", "        request.has_ended = True\n", ""),
    ),
    fault(
        "a request that awaits its last token cannot be aborted",
        an_abort_is_final_whatever_is_under_way,
        (
            "scheduler",
            "for place in (self._running, self._waiting, self._preempted, self._ending):\n",
            "for place in (self._running, self._waiting, self._preempted):\n",
        ),
    ),
    fault(
        "a failed request ends again by the step after",
        whoever_fails_ends_once,
        ("scheduler", "        request.has_ended = True\n", "        request.has_ended = reason != 'error'\n"),
    ),
    fault(
        "a restart forgets those who await their last token",
        whatever_raises_the_tokens_nobody_read_are_sampled_again,
        ("scheduler", "held = {**self._ending, **self._running}", "held = {**self._running}"),
    ),
    fault(
        "a restart still waits for tokens",
        whatever_raises_the_tokens_nobody_read_are_sampled_again,
        ("scheduler", "            request.num_unread_tokens = 0\n", "            pass\n"),
    ),
    fault(
        "a restart keeps the steps under way",
        whatever_raises_the_tokens_nobody_read_are_sampled_again,
        ("scheduler", "        self._under_way.clear()\n", ""),
    ),
    fault(
        "the loop reads a step from before a restart",
        whatever_raises_the_tokens_nobody_read_are_sampled_again,
        ("pipeline", "        self._unread = None\n        self._scheduler", "        self._scheduler"),
    ),
]
LAWS = sorted({fault.law.__name__: fault.law for fault in FAULTS}.items())


@pytest.mark.parametrize(("name", "law"), LAWS, ids=[name for name, _ in LAWS])
def test_the_law_holds(name: str, law: Callable[[ModuleType], None]) -> None:
    with planted(()) as module:
        law(module)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.report)
def test_the_law_fails_with_the_fault(fault: Fault) -> None:
    with planted(fault.edits) as module, pytest.raises((AssertionError, KeyError, IndexError)):
        fault.law(module)
